"""The products of `products` for an `MLPPolicy`, written out layer by layer.

Pearlmutter's R operator (1994, https://doi.org/10.1162/neco.1994.6.1.147): R x is the derivative of
x when the parameters move along a vector v, and the product with a Hessian is R of the gradient.
The network is differentiated by hand, and what stands behind its last layer (the distribution and
the loss, of few numbers) by autograd. The same numbers as autograd's up to rounding at less than
half its time: nothing is computed twice, and masks are multiplied as numbers, not chosen by.

With W, b of a layer, x its input, z = x W^T + b, h = phi(z), and d = the loss's gradient by z:

    forward     R z = x V^T + R x W^T + v        R h = phi'(z) R z
    backward    R (d^T x) = R d^T x + d^T R x    R (d W) = R d W + d V
                R d_below = R (d W) phi'(z) + d W phi''(z) R z
"""

import torch
from torch import Tensor, nn

from asyncmaml.learning.distributions import detached, mean_kl
from asyncmaml.learning.mlp import MLPPolicy, Nonlinearity, Params
from asyncmaml.learning.phases import Phase
from asyncmaml.learning.products import CurvatureProduct, Hessian, Loss, Tensors, pulled_back


def is_plain_mlp(policy: nn.Module) -> bool:
    """Whether the policy is one whose network is known here; a subclass may have another."""
    return (
        isinstance(policy, MLPPolicy)
        and type(policy).forward is MLPPolicy.forward
        and type(policy)._outputs is MLPPolicy._outputs
        and policy.nonlinearity_name is not None  # another may not work number by number
        and all(parameter.requires_grad for parameter in policy.parameters())
    )


class _Pass:
    """One forward through the layers, with what derivatives need of it.

    Letters as above; rows are `(N, ...)`, or `(M, N, ...)` with stacked parameters. `bends` are
    phi''(z), if they are asked for.
    """

    def __init__(
        self, policy: MLPPolicy, params: Params, observations: Tensor, *, with_bends: bool = False
    ) -> None:
        self.names = list(dict(policy.named_parameters()))
        self.layers = policy._layer_names
        self.weights = [params[weight].detach() for weight, _ in self.layers]
        self.inputs: list[Tensor] = []
        self.slopes: list[Tensor] = []
        self.bends: list[Tensor | None] = []
        rows = policy._vectors(observations, self.weights[0].dtype)
        self._batch_shape = rows.shape[:-1]
        axes = self._batch_shape[:1] if self.weights[0].ndim == 3 else ()
        rows = rows.reshape(*axes, -1, rows.shape[-1])
        for index, ((_, bias), weight) in enumerate(zip(self.layers, self.weights, strict=True)):
            if index:
                rows, slope, bend = _activated(
                    policy.nonlinearity_name, policy.nonlinearity, rows, with_bend=with_bends
                )
                self.slopes.append(slope)
                self.bends.append(bend)
            self.inputs.append(rows)
            rows = torch.matmul(rows, weight.mT).add_(params[bias].detach().unsqueeze(-2))
        self.outputs = rows.reshape(*self._batch_shape, -1)

    def push(self, vector: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return R z of every layer, and R h of every layer but the last."""
        moved, moved_inputs = [], list[Tensor]()
        for index, (weight, bias) in enumerate(self.layers):
            rows = torch.matmul(self.inputs[index], vector[weight].mT)
            rows.add_(vector[bias].unsqueeze(-2))
            if index:
                _add_product(rows, moved_inputs[-1], self.weights[index].mT)
            moved.append(rows)
            if index + 1 < len(self.layers):
                moved_inputs.append(rows * self.slopes[index])
        return moved, moved_inputs

    def pull(self, cotangent: Tensor) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        """Return gradients for a cotangent of the outputs; d of every layer, and d W."""
        gradient: dict[str, Tensor] = {}
        rows = cotangent.reshape(*self.inputs[0].shape[:-1], -1)
        deltas, carried = [rows], list[Tensor]()
        for index in reversed(range(len(self.layers))):
            weight, bias = self.layers[index]
            gradient[weight] = torch.matmul(rows.mT, self.inputs[index])
            gradient[bias] = rows.sum(-2)
            if index:
                carried.insert(0, torch.matmul(rows, self.weights[index]))
                rows = carried[0] * self.slopes[index - 1]
                deltas.insert(0, rows)
        return gradient, deltas, carried

    def as_outputs(self, rows: Tensor) -> Tensor:
        """Rows of outputs, in the shape in which the policy gives them."""
        return rows.reshape(*self._batch_shape, -1)


class _Head:
    """What stands behind the outputs: a scalar of them and of parameters outside of layers."""

    def __init__(self, policy: MLPPolicy, params: Params, network: _Pass, loss_of: Loss) -> None:
        in_layers = {name for layer in network.layers for name in layer}
        self.names = [name for name in network.names if name not in in_layers]
        outputs = network.outputs.detach().requires_grad_()
        own = {name: params[name].detach().requires_grad_() for name in self.names}
        self._leaves = (outputs, *own.values())
        loss = loss_of(policy._distribution(outputs, {**params, **own}))
        self._gradient = torch.autograd.grad(
            loss, self._leaves, create_graph=True, materialize_grads=True
        )
        self.gradient = tuple(part.detach() for part in self._gradient)

    def times(self, outputs: Tensor, vector: dict[str, Tensor]) -> Tensors:
        """Return the Hessian's product with a tangent of the outputs and of its parameters."""
        tangent = (outputs, *(vector[name] for name in self.names))
        return pulled_back(self._gradient, self._leaves, tangent)


class MLPHessian(Hessian):
    """See `products.Hessian`."""

    def __init__(
        self, policy: nn.Module, params: Params, observations: Tensor, loss_of: Loss
    ) -> None:
        assert isinstance(policy, MLPPolicy)
        self._network = network = _Pass(policy, params, observations, with_bends=True)
        self._head = head = _Head(policy, params, network, loss_of)
        gradient, self._deltas, carried = network.pull(head.gradient[0])
        # d W phi''(z) is the same in every product: it takes the place of both.
        self._bent = [
            None if bend is None else rows.mul_(bend)
            for rows, bend in zip(carried, network.bends, strict=True)
        ]
        network.bends.clear()
        gradient.update(zip(head.names, head.gradient[1:], strict=True))
        self.gradient = tuple(gradient[name] for name in network.names)

    def times(self, vector: Tensors) -> Tensors:
        """Return the product with a vector."""
        network = self._network
        along = dict(zip(network.names, vector, strict=True))
        moved, moved_inputs = network.push(along)
        moved_delta, *own = self._head.times(network.as_outputs(moved[-1]), along)
        product = dict(zip(self._head.names, own, strict=True))
        rows = moved_delta.reshape(*moved[-1].shape)
        for index in reversed(range(len(network.layers))):
            weight, bias = network.layers[index]
            product[weight] = torch.matmul(rows.mT, network.inputs[index])
            product[bias] = rows.sum(-2)
            if not index:
                break
            delta = self._deltas[index]
            _add_product(product[weight], delta.mT, moved_inputs[index - 1])
            rows = torch.matmul(rows, network.weights[index])
            _add_product(rows, delta, along[weight])
            rows.mul_(network.slopes[index - 1])
            bent = self._bent[index - 1]
            if bent is not None:
                rows.addcmul_(bent, moved[index - 1])
        return tuple(product[name] for name in network.names)


class MLPFisher(CurvatureProduct):
    """See `products.AutogradFisher`; the numbers of the distribution are the outputs here."""

    def __init__(self, policy: nn.Module, params: Params, phase: Phase) -> None:
        assert isinstance(policy, MLPPolicy)
        self._network = network = _Pass(policy, params, phase.observations)
        old = detached(policy._distribution(network.outputs, params))
        self._head = _Head(policy, params, network, lambda new: mean_kl(old, new, phase.mask).sum())

    def times(self, vector: Tensors) -> Tensors:
        """Return the product with a vector."""
        network = self._network
        along = dict(zip(network.names, vector, strict=True))
        moved, _ = network.push(along)
        cotangent, *own = self._head.times(network.as_outputs(moved[-1]), along)
        product, _, _ = network.pull(cotangent)
        product.update(zip(self._head.names, own, strict=True))
        return tuple(product[name] for name in network.names)


def _activated(
    name: str | None, nonlinearity: Nonlinearity, before: Tensor, *, with_bend: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return phi(z), phi'(z) and phi''(z), the last as None unasked or where it is 0 everywhere."""
    if name == "relu":
        after = before.relu_()
        return after, (after > 0).to(after.dtype), None
    with torch.enable_grad():
        leaf = before.requires_grad_()
        after = nonlinearity(leaf)
        (slope,) = torch.autograd.grad(after.sum(), leaf, create_graph=with_bend)
        if not slope.requires_grad:
            return after.detach(), slope, None
        (bend,) = torch.autograd.grad(slope.sum(), leaf, materialize_grads=True)
    return after.detach(), slope.detach(), bend if bend.any() else None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices, or of stacks of them, in place."""
    if total.ndim == 2:
        total.addmm_(left, right)
    else:
        total.baddbmm_(left, right)
