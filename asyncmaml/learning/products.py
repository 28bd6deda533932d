"""Products of a vector with second derivatives of a policy's losses, graph built once.

Two kinds of matrix are met in an outer step, each about the parameters of one task or of several
stacked: the Hessian of an inner loss, and the Fisher information of the policy, which is the
Hessian of KL(old || new) where both are equal. Here by autograd, for any policy; for an `MLPPolicy`
by hand in `mlp_products`. `curvature` chooses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from asyncmaml.learning.adaptation import distribution_of, trainable_names
from asyncmaml.learning.distributions import detached, mean_kl, numbers_of, with_numbers
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.phases import Phase

Tensors: TypeAlias = tuple[Tensor, ...]
"""One for each trainable parameter, in their order, shaped as they are."""
Loss: TypeAlias = Callable[[Distribution], Tensor]


class CurvatureProduct(ABC):
    """A symmetric matrix that is known by its products; stacked tasks: one block for each."""

    @abstractmethod
    def times(self, vector: Tensors) -> Tensors:
        """Return the product with a vector."""


class Hessian(CurvatureProduct):
    """Of a loss with respect to the parameters.

    Attributes:
        gradient: Of the loss, without a graph.
    """

    gradient: Tensors


class AutogradHessian(Hessian):
    """For any policy: the gradient's graph, differentiated again for each product."""

    def __init__(
        self, policy: nn.Module, params: Params, observations: Tensor, loss_of: Loss
    ) -> None:
        self._leaves = leaves_of(policy, params)
        loss = loss_of(distribution_of(policy, observations, {**params, **self._leaves}))
        self._gradient = _grad(loss, tuple(self._leaves.values()))
        self.gradient = tuple(part.detach() for part in self._gradient)

    def times(self, vector: Tensors) -> Tensors:
        """Return the product with a vector."""
        return pulled_back(self._gradient, tuple(self._leaves.values()), vector)


class AutogradFisher(CurvatureProduct):
    """For any policy: J^T F J, with J the derivative of the distribution's numbers.

    Their KL divergence has gradient 0 where old and new are equal, so that the second derivative
    of the network does not enter.
    """

    def __init__(self, policy: nn.Module, params: Params, phase: Phase) -> None:
        leaves = leaves_of(policy, params)
        self._leaves = tuple(leaves.values())
        distribution = distribution_of(policy, phase.observations, {**params, **leaves})
        self._numbers = numbers_of(distribution)
        self._inner = tuple(number.detach().requires_grad_() for number in self._numbers)
        new = with_numbers(distribution, self._inner)
        kl = mean_kl(detached(distribution), new, phase.mask).sum()
        self._kl_gradient = _grad(kl, self._inner)
        # J^T u is linear in u: its derivative with respect to u gives products with J.
        self._dummy = tuple(torch.zeros_like(n, requires_grad=True) for n in self._numbers)
        self._transposed = pulled_back(self._numbers, self._leaves, self._dummy, create_graph=True)

    def times(self, vector: Tensors) -> Tensors:
        """Return the product with a vector."""
        tangents = pulled_back(self._transposed, self._dummy, vector)
        weighed = pulled_back(self._kl_gradient, self._inner, tangents)
        return pulled_back(self._numbers, self._leaves, weighed)


def leaves_of(policy: nn.Module, params: Params) -> dict[str, Tensor]:
    """Return constant copies of the trainable parameters, to differentiate by."""
    return {name: params[name].detach().requires_grad_() for name in trainable_names(policy)}


def pulled_back(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> Tensors:
    """Return cotangents times the derivative of outputs by inputs; 0 where nothing depends."""
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if output.requires_grad
    ]
    if not pairs:
        return tuple(torch.zeros_like(entry) for entry in inputs)
    return torch.autograd.grad(
        [output for output, _ in pairs],
        list(inputs),
        [cotangent for _, cotangent in pairs],
        retain_graph=True,
        create_graph=create_graph,
        materialize_grads=True,
    )


def _grad(loss: Tensor, inputs: Sequence[Tensor]) -> Tensors:
    return torch.autograd.grad(loss, list(inputs), create_graph=True, materialize_grads=True)
