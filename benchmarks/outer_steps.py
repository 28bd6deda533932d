"""The outer step of MAML-TRPO as it is usually written, to compare `asyncmaml.learning` with.

One task after the other, the adaptation inside the graph, and products with the curvature by
differentiating the gradient of the KL divergence: its graph built once and kept, as in
tristandeleu/pytorch-maml-rl, or again for every product, as in dragen1860/MAML-Pytorch-RL (which
also fits every baseline again; that is not counted here). Both make one more product than the
iterations of conjugate gradients, for the length of the step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asyncmaml.learning.adaptation import adapt
from asyncmaml.learning.conjugate_gradient import conjugate_gradient
from asyncmaml.learning.distributions import detached, mean_kl
from asyncmaml.learning.mlp import MLPPolicy, Params
from asyncmaml.learning.objectives import likelihood_ratio_loss
from asyncmaml.learning.phases import Phase

Tasks = Sequence[Sequence[Phase]]


class PlainOuterStep:
    """One update of the policy, in place, with one inner update a task.

    Args:
        policy: Whose parameters move.
        step_size: Of the inner update.
        keeps_graph: Whether the graph of KL's gradient is built once for all products.
    """

    max_kl, damping, iterations, tries, shrink = 0.01, 1e-5, 10, 15, 0.8

    def __init__(self, policy: MLPPolicy, step_size: float, *, keeps_graph: bool) -> None:
        self._policy = policy
        self._step_size = step_size
        self._keeps_graph = keeps_graph

    def update(self, tasks: Tasks) -> None:
        """Move the policy by tasks of two phases each."""
        theta = dict(self._policy.named_parameters())
        own = list(theta.values())
        loss, _ = self._outer(theta, tasks, second_order=True)
        gradient = _flat(torch.autograd.grad(loss, own))
        times = self._products(theta, tasks)
        solution = conjugate_gradient(
            times, gradient, iterations=self.iterations, damping=self.damping
        )
        x = solution.x
        length = float(x @ (times(x) + self.damping * x))
        step = x * (2 * self.max_kl / length) ** 0.5
        old = self._old(theta, tasks)
        for tries in range(self.tries):
            moved = _moved(theta, step * -(self.shrink**tries))
            new_loss, kl = self._outer(moved, tasks, second_order=False, old=old)
            if new_loss < loss and kl <= self.max_kl:
                with torch.no_grad():
                    for name, parameter in theta.items():
                        parameter.copy_(moved[name])
                return

    def _products(self, theta: Params, tasks: Tasks) -> Callable[[Tensor], Tensor]:
        own = list(theta.values())

        def kl_gradient() -> Tensor:
            _, kl = self._outer(theta, tasks, second_order=True)
            return _flat(torch.autograd.grad(kl, own, create_graph=True))

        kept = kl_gradient() if self._keeps_graph else None

        def times(vector: Tensor) -> Tensor:
            gradient = kl_gradient() if kept is None else kept
            retain = kept is not None
            return _flat(torch.autograd.grad(gradient @ vector, own, retain_graph=retain))

        return times

    def _outer(
        self,
        theta: Params,
        tasks: Tasks,
        *,
        second_order: bool,
        old: Sequence[torch.distributions.Distribution] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean surrogate loss and KL; without `old`, from where the policy is."""
        losses, divergences = [], []
        for index, (pre, post) in enumerate(tasks):
            params = adapt(
                self._policy, theta, pre, step_size=self._step_size, first_order=not second_order
            )
            new = self._policy(post.observations, params)
            losses.append(likelihood_ratio_loss(new, post))
            divergences.append(mean_kl(old[index] if old else detached(new), new, post.mask))
        return torch.stack(losses).mean(), torch.stack(divergences).mean()

    def _old(self, theta: Params, tasks: Tasks) -> list[torch.distributions.Distribution]:
        old = []
        for pre, post in tasks:
            params = adapt(self._policy, theta, pre, step_size=self._step_size, first_order=True)
            old.append(detached(self._policy(post.observations, params)))
        return old


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _moved(theta: Params, step: Tensor) -> dict[str, Tensor]:
    parts = torch.split(step, [parameter.numel() for parameter in theta.values()])
    return {
        name: parameter.detach() + part.view_as(parameter)
        for (name, parameter), part in zip(theta.items(), parts, strict=True)
    }
