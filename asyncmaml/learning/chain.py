"""The inner updates of one task, or of several stacked, and products with their derivative.

With theta_(k+1) = theta_k - alpha_k grad L_k(theta_k), the derivative of theta_K by theta is the
product of I - alpha_k H_k, H_k the symmetric Hessian of L_k at theta_k. Products with it and with
its transpose need no graph through all the updates, only H_k times a vector.
"""

from collections.abc import Sequence

import torch
from torch import nn

from asyncmaml.learning.curvature import hessian_of
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.objectives import Objective, find_objective
from asyncmaml.learning.phases import Phase
from asyncmaml.learning.products import Hessian, Loss, Tensors


class AdaptationChain:
    """K inner updates from given parameters.

    Args:
        policy: Only its form is used.
        params: theta; stacked if the phases are.
        phases: K, one for each update.
        step_sizes: K, alpha of each update.
        objective: A name in `OBJECTIVES`.
        first_order: Take the derivative as the identity.

    Attributes:
        points: theta_0 to theta_K, without a graph.
    """

    def __init__(
        self,
        policy: nn.Module,
        params: Params,
        phases: Sequence[Phase],
        step_sizes: Sequence[float],
        *,
        objective: str,
        first_order: bool,
    ) -> None:
        loss_of = find_objective(objective)
        names = [name for name, own in policy.named_parameters() if own.requires_grad]
        self.points = [{name: parameter.detach() for name, parameter in params.items()}]
        self._updates: list[tuple[float, Hessian]] = []
        for phase, step_size in zip(phases, step_sizes, strict=True):
            hessian = hessian_of(
                policy, self.points[-1], phase.observations, _loss_on(loss_of, phase)
            )
            updated = dict(self.points[-1])
            for name, gradient in zip(names, hessian.gradient, strict=True):
                updated[name] = updated[name] - step_size * gradient
            self.points.append(updated)
            if not first_order:
                self._updates.append((step_size, hessian))

    def push(self, vector: Tensors) -> Tensors:
        """Return how theta_K moves when theta moves along a vector."""
        for step_size, hessian in self._updates:
            vector = _minus(vector, step_size, hessian.times(vector))
        return vector

    def pull(self, vector: Tensors, onto: Sequence[Tensors | None] = ()) -> Tensors:
        """Return the gradient by theta of what has `vector` as its gradient by theta_K.

        Args:
            vector: The gradient by theta_K.
            onto: For theta_0 to theta_(K-1), a gradient of what depends on it directly; or nothing.
        """
        for index in reversed(range(max(len(self._updates), len(onto)))):
            if self._updates:
                step_size, hessian = self._updates[index]
                vector = _minus(vector, step_size, hessian.times(vector))
            if onto and (direct := onto[index]) is not None:
                vector = tuple(one + other for one, other in zip(vector, direct, strict=True))
        return vector


def _loss_on(loss_of: Objective, phase: Phase) -> Loss:
    return lambda distribution: loss_of(distribution, phase)


def _minus(vector: Tensors, step_size: float, product: Tensors) -> Tensors:
    return tuple(
        torch.sub(one, other, alpha=step_size) for one, other in zip(vector, product, strict=True)
    )
