"""Tasks put together for batched products, where that is faster.

With few rows a task, a hundred small products cost their overhead and one stacked product does not;
with many rows the products are large already. Products with the curvature of 20 tasks, stacked, as
many times as fast (2 x 100 MLP, one thread): 4.4 at 20 rows, 2.0 at 200, 1.4 at 400, 1.1 at 800 and
1.0 at 2,000.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncmaml.learning.adaptation import trainable_names
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.phases import Phase, stack_phases
from asyncmaml.learning.products import Tensors

STACK_BELOW_ROWS = 1000
MOST_STACKED_ROWS = 16_000  # of one group: what its tensors take of the memory


@dataclass(frozen=True)
class TaskGroup:
    """Tasks whose products are made together.

    Attributes:
        phases: K + 1; stacked if `is_stacked`.
        num_tasks: How many tasks; 1 if not stacked.
        is_stacked: Whether there is a leading axis M.
        mean_returns: Of each task's last phase, shape `(M,)`, or `()` if not stacked.
    """

    phases: tuple[Phase, ...]
    num_tasks: int
    is_stacked: bool
    mean_returns: Tensor

    def spread(self, params: Params) -> dict[str, Tensor]:
        """Return the parameters for each task, of one for all."""
        if not self.is_stacked:
            return dict(params)
        return {
            name: parameter.expand(self.num_tasks, *parameter.shape)
            for name, parameter in params.items()
        }

    def spread_vector(self, vector: Tensors) -> Tensors:
        """Return a vector for each task, of one for all."""
        if not self.is_stacked:
            return vector
        return tuple(part.expand(self.num_tasks, *part.shape) for part in vector)

    def summed(self, vector: Tensors) -> Tensors:
        """Return the sum over the tasks."""
        return tuple(part.sum(0) for part in vector) if self.is_stacked else vector


def group_tasks(
    tasks: Sequence[Sequence[Phase]], *, stack_below_rows: int = STACK_BELOW_ROWS
) -> list[TaskGroup]:
    """Stack neighbouring tasks with few rows each; leave the others alone. Keeps the order."""
    groups: list[TaskGroup] = []
    waiting: list[Sequence[Phase]] = []

    def stack_waiting() -> None:
        if waiting:
            groups.append(_stacked(waiting) if len(waiting) > 1 else _single(waiting[0]))
            waiting.clear()

    for phases in tasks:
        rows = _rows([phases])
        if rows >= stack_below_rows:
            stack_waiting()
            groups.append(_single(phases))
            continue
        if waiting and (len(waiting) + 1) * _rows([*waiting, phases]) > MOST_STACKED_ROWS:
            stack_waiting()
        waiting.append(phases)
    stack_waiting()
    return groups


def _rows(tasks: Sequence[Sequence[Phase]]) -> int:
    """Of one task, in the largest phase, padded as it would be in a stack of these."""
    shapes = [phase.mask.shape for phases in tasks for phase in phases]
    return max(shape[0] for shape in shapes) * max(shape[1] for shape in shapes)


def _single(phases: Sequence[Phase]) -> TaskGroup:
    last = phases[-1]
    return TaskGroup(tuple(phases), 1, False, last.mask.new_tensor(last.mean_return))


def _stacked(tasks: Sequence[Sequence[Phase]]) -> TaskGroup:
    phases = tuple(stack_phases(same) for same in zip(*tasks, strict=True))
    returns = phases[-1].mask.new_tensor([task[-1].mean_return for task in tasks])
    return TaskGroup(phases, len(tasks), True, returns)


class ParameterLayout:
    """How a policy's trainable parameters lie in one flat vector `(P,)`."""

    def __init__(self, policy: nn.Module) -> None:
        own = dict(policy.named_parameters())
        self.names = trainable_names(policy)
        self._shapes = [own[name].shape for name in self.names]
        self._sizes = [own[name].numel() for name in self.names]

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return them as one vector."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def tensors(self, flat: Tensor) -> Tensors:
        """Return views of a flat vector."""
        parts = torch.split(flat, self._sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))

    def moved(self, params: Params, step: Tensor) -> dict[str, Tensor]:
        """Return the parameters after a step, as new tensors."""
        moved = dict(params)
        for name, part in zip(self.names, self.tensors(step), strict=True):
            moved[name] = params[name].detach() + part
        return moved
