"""Many sets of parameters of one policy in one forward: stacked on a leading axis M.

By the policy itself where it says so (`accepts_stacked_params`: one `baddbmm` a layer), else by
`torch.func.vmap`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.func import functional_call, vmap

from asyncmaml.sampling.snapshot import PolicySnapshot

_MAX_BYTES = 256 << 20
_LEAST_TRANSPOSED = 16
"""Outputs of a layer whose weights lie transposed in a stack."""

Params = dict[str, Tensor]


class StackedPolicies:
    """Forwards under stacked parameters; keeps the stacks of policies that act together.

    The same requests act together tick after tick, and to stack their parameters costs as much
    as a forward.
    """

    def __init__(self) -> None:
        self._stacks: OrderedDict[tuple[PolicySnapshot, ...], Params] = OrderedDict()
        self._num_bytes = 0

    def __call__(self, policies: Sequence[PolicySnapshot], observations: Tensor) -> Distribution:
        """Return the distributions of M policies of one architecture.

        Args:
            policies: M of them.
            observations: Shape `(M, P, *O)`.

        Returns:
            One distribution of batch shape `(M, P, ...)`.

        Raises:
            TypeError: The distribution is of a kind that `vmap` cannot carry.
        """
        params = self._stacked(policies)
        first = policies[0]
        if _stacks_itself(first):
            return first.policy(observations, params)
        return _vmapped(first, params, observations)

    def _stacked(self, policies: Sequence[PolicySnapshot]) -> Params:
        key = tuple(policies)
        if key in self._stacks:
            self._stacks.move_to_end(key)
            return self._stacks[key]
        sets = [policy.tensors() for policy in policies]
        stack = _stack_of_matrices if _stacks_itself(policies[0]) else torch.stack
        params = {name: stack([each[name] for each in sets]) for name in sets[0]}
        self._stacks[key] = params
        self._num_bytes += _num_bytes(params)
        while self._num_bytes > _MAX_BYTES and len(self._stacks) > 1:
            self._num_bytes -= _num_bytes(self._stacks.popitem(last=False)[1])
        return params

    def forget(self, policy: PolicySnapshot) -> None:
        """Drop the stacks that a policy is part of."""
        for key in [key for key in self._stacks if policy in key]:
            self._num_bytes -= _num_bytes(self._stacks.pop(key))


def _stacks_itself(policy: PolicySnapshot) -> bool:
    return bool(getattr(policy.policy, "accepts_stacked_params", False))


def _stack_of_matrices(values: list[Tensor]) -> Tensor:
    """Stack; matrices lie transposed in memory, as a product with their transpose reads them.

    The product is up to twice as fast for it, and the same for more numbers of rows as each
    matrix alone gives it. Not so where a matrix has few outputs: on AMD's processors MKL then
    takes another kernel, which is slower and differs in the last bits (up to 12 of them, in
    8,232 stacks measured).
    """
    if values[0].ndim != 2 or len(values[0]) < _LEAST_TRANSPOSED:
        return torch.stack(values)
    return torch.stack([value.T for value in values]).transpose(1, 2)


def _num_bytes(params: Params) -> int:
    return sum(value.numel() * value.element_size() for value in params.values())


def _vmapped(policy: PolicySnapshot, params: Params, observations: Tensor) -> Distribution:
    rebuild: list[Callable[..., Distribution]] = []

    def parts(params: Params, observations: Tensor) -> tuple[Tensor, ...]:
        if policy.is_functional:
            distribution = policy.policy(observations, params)
        else:
            assert isinstance(policy.policy, nn.Module)
            distribution = functional_call(policy.policy, params, (observations,))
        tensors, build = _taken_apart(distribution)
        rebuild.append(build)
        return tensors

    tensors = vmap(parts)(params, observations)
    return rebuild[0](*tensors)


def _categorical(logits: Tensor) -> Categorical:
    distribution = Categorical(logits=logits, validate_args=False)
    # They are normalised; once more could change their last bits.
    distribution.logits = logits
    return distribution


def _taken_apart(
    distribution: Distribution,
) -> tuple[tuple[Tensor, ...], Callable[..., Distribution]]:
    """Return a distribution's tensors, and what makes it of them again."""
    if isinstance(distribution, Categorical):
        return (distribution.logits,), _categorical
    if isinstance(distribution, Normal):
        return (distribution.loc, distribution.scale), lambda loc, scale: Normal(
            loc, scale, validate_args=False
        )
    if isinstance(distribution, Independent):
        tensors, build = _taken_apart(distribution.base_dist)
        axes = distribution.reinterpreted_batch_ndims
        return tensors, lambda *parts: Independent(build(*parts), axes, validate_args=False)
    message = f"{type(distribution).__name__} cannot be carried through vmap"
    raise TypeError(message)
