"""A policy as it was when a request was made.

What the learner does to its parameters afterwards does not reach the episodes under way.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call

from asyncmaml.errors import ParameterError, PolicyError
from asyncmaml.intraop import one_intraop_thread
from asyncmaml.sampling.actions import ActionPlan

Policy = Callable[..., Distribution]
"""`policy(observations, params=None)`, or an `nn.Module` that takes observations only."""


_STATE = frozenset(("_parameters", "_buffers", "_modules"))
_LEAST_SPLIT = 1 << 15
"""Numbers from which torch spreads the copy of a tensor over threads: its grain size."""
_methods_with_params: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


class PolicySnapshot:
    """A policy, its parameters and buffers, at one moment, on the sampler's device.

    Args:
        policy: See `Policy`.
        params: Replace the policy's own, by name; None: its own.
        device: Where the forward runs.

    Raises:
        ParameterError: Names are missing or unknown, a shape differs, or a value is no tensor.
        PolicyError: The policy cannot be called, or not be copied.
    """

    def __init__(
        self, policy: Policy, params: Mapping[str, Tensor] | None, device: torch.device
    ) -> None:
        if not callable(policy):
            message = (
                f"the policy is {policy!r}; wanted a callable "
                "policy(observations, params=None) -> torch.distributions.Distribution"
            )
            raise PolicyError(message)
        self.is_functional = _takes_params(policy)
        if params is not None:
            _check_params(policy, params, self.is_functional)
        self.policy = policy
        if isinstance(policy, nn.Module):
            if self.is_functional and params is None:
                params = dict(policy.named_parameters())
            if not self.is_functional or any(True for _ in policy.buffers()):
                # functional_call swaps a module's tensors in place while it runs, and the
                # learner may use the module at that moment: the sampler has its own copy.
                self.policy = _copy(policy, device)
        self.origin = policy
        """What was given to `sample()`."""
        self._params = None if params is None else _snapshot(params, device)
        self.plan: ActionPlan | None = None
        """How its actions are drawn; found by the sampler at the first forward."""
        self.variant: object = None if self.policy is policy else object()
        """Differs between copies of one module whose attributes may differ."""
        self._dtypes = tuple(tensor.dtype for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that the forward runs with."""
        tensors: dict[str, Tensor] = {}
        if isinstance(self.policy, nn.Module) and not self.is_functional:
            tensors |= {name: value.detach() for name, value in self.policy.named_parameters()}
            tensors |= dict(self.policy.named_buffers())
        return tensors | (self._params or {})

    @property
    def is_single_precision(self) -> bool:
        """Whether all that it computes with are float32, as what policies vouch for is."""
        return all(dtype is torch.float32 for dtype in self._dtypes)

    @property
    def architecture(self) -> tuple[object, ...]:
        """What snapshots have in common that can share a forward, stacked or not."""
        return id(self.origin), id(self.variant), self._dtypes

    @property
    def can_be_stacked(self) -> bool:
        """Whether it has parameters of its own to be stacked with others'."""
        is_module = isinstance(self.policy, nn.Module)
        has_hidden_state = self.is_functional and self.policy is not self.origin
        return is_module and not has_hidden_state

    def is_current(self) -> bool:
        """Whether the policy's own parameters are still what they were."""
        if self.policy is not self.origin or not isinstance(self.policy, nn.Module):
            return False
        assert self._params is not None
        own = dict(self.policy.named_parameters())
        if own.keys() != self._params.keys():
            return False
        with _one_thread_for(own.values()):
            return all(_is_same(own[name], value) for name, value in self._params.items())

    def __call__(self, observations: Tensor) -> Distribution:
        """Return the distribution of the actions that answer the observations."""
        if self.is_functional:
            return self.policy(observations, self._params)
        if self._params is None:
            return self.policy(observations)
        assert isinstance(self.policy, nn.Module)
        result: Distribution = functional_call(self.policy, self._params, (observations,))
        return result


def _are_alike(left: PolicySnapshot, right: PolicySnapshot) -> bool:
    """Whether two copies of a module are the same but for parameters and buffers."""
    assert isinstance(left.policy, nn.Module)
    assert isinstance(right.policy, nn.Module)
    try:
        return _attributes(left.policy) == _attributes(right.policy)
    except Exception:  # attributes that cannot be compared
        return False


def _attributes(module: nn.Module) -> list[tuple[str, type, dict[str, Any]]]:
    return [
        (
            name,
            type(part),
            {key: value for key, value in vars(part).items() if key not in _STATE},
        )
        for name, part in module.named_modules()
    ]


def _is_same(parameter: Tensor, value: Tensor) -> bool:
    if parameter.shape != value.shape or parameter.dtype != value.dtype:
        return False
    if parameter.device != value.device:
        parameter = parameter.detach().to(value.device)
    return torch.equal(parameter, value)


def _one_thread_for(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a block in which these are copied or compared by the calling thread alone.

    This is the caller's thread. A copy of a large tensor would make a team of OpenMP there, and
    beside a second team libgomp lets each wait asleep: the learner's work on 2,000 rows of 100
    took 81 us for 12.
    """
    is_any_large = any(tensor.numel() >= _LEAST_SPLIT for tensor in tensors)
    return one_intraop_thread() if is_any_large else nullcontext()


def _takes_params(policy: Policy) -> bool:
    call: Any = policy.forward if isinstance(policy, nn.Module) else policy
    function = getattr(call, "__func__", None)
    if function is None:
        return _has_params(call)
    # Of a method, once for all objects: to find it out took a fifth of a call of `sample()`.
    known = _methods_with_params.get(function)
    if known is None:
        known = _methods_with_params[function] = _has_params(call)
    return known


def _has_params(call: Callable[..., Any]) -> bool:
    try:
        return "params" in inspect.signature(call).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _snapshot(params: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    with _one_thread_for(params.values()), torch.no_grad():
        copies = {name: value.clone() for name, value in params.items()}
        return {
            name: value if value.device == device else value.to(device)
            for name, value in copies.items()
        }


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    try:
        with one_intraop_thread():
            own = copy.deepcopy(module)
    except Exception as error:
        message = (
            f"{type(module).__name__} could not be copied ({error}); the sampler needs a copy of "
            "a module that takes observations only: remove tensors that are part of a graph from "
            "its attributes, or give forward a second argument params=None"
        )
        raise PolicyError(message) from error
    return own.to(device)


def _check_params(policy: Policy, params: Mapping[str, Tensor], is_functional: bool) -> None:
    if not isinstance(params, Mapping):
        message = (
            f"params is a {type(params).__name__}; wanted a dict of parameter name to Tensor, "
            "such as dict(policy.named_parameters())"
        )
        raise ParameterError(message)
    for name, value in params.items():
        if not isinstance(value, Tensor):
            message = f"params[{name!r}] is a {type(value).__name__}; wanted a torch.Tensor"
            raise ParameterError(message)
    if not isinstance(policy, nn.Module):
        if not is_functional:
            message = (
                f"{policy!r} takes no params and is no nn.Module, so the params given could not "
                "reach it; give it a second argument params=None"
            )
            raise ParameterError(message)
        return
    own = dict(policy.named_parameters())
    if own.keys() != params.keys():
        missing, extra = sorted(own.keys() - params.keys()), sorted(params.keys() - own.keys())
        message = (
            f"the params given for {type(policy).__name__} lack {missing or 'nothing'} and have "
            f"{extra or 'nothing'} too many; wanted exactly the names of its named_parameters()"
        )
        raise ParameterError(message)
    for name, value in params.items():
        if value.shape != own[name].shape:
            message = (
                f"params[{name!r}] has shape {tuple(value.shape)}; "
                f"{type(policy).__name__} wants {tuple(own[name].shape)}"
            )
            raise ParameterError(message)


class Snapshots:
    """Makes snapshots; the last one again for a policy that has not changed.

    Requests that share a snapshot share a forward without stacking.

    Args:
        device: Where the forwards run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: PolicySnapshot | None = None
        self._last_copy: PolicySnapshot | None = None

    def of(self, policy: Policy, params: Mapping[str, Tensor] | None) -> PolicySnapshot:
        """Return the policy as it is now; see `PolicySnapshot`."""
        if params is not None or not _takes_params(policy):
            snapshot = PolicySnapshot(policy, params, self._device)
            if snapshot.variant is not None:
                last, self._last_copy = self._last_copy, snapshot
                if last is not None and last.origin is policy and _are_alike(last, snapshot):
                    snapshot.variant = last.variant
            return snapshot
        if self._last is None or self._last.origin is not policy or not self._last.is_current():
            self._last = PolicySnapshot(policy, None, self._device)
        return self._last
