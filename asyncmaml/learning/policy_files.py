"""Policies in files: class, arguments and parameters, as plain data that loads without pickle."""

import os
import pickle
from collections.abc import Callable

import torch

from asyncmaml.errors import ConfigurationError
from asyncmaml.learning.mlp import NONLINEARITIES, MLPPolicy
from asyncmaml.learning.policies import (
    CategoricalMLPPolicy,
    MultiCategoricalMLPPolicy,
    NormalMLPPolicy,
)

_POLICIES: dict[str, Callable[..., MLPPolicy]] = {
    policy.__name__: policy
    for policy in (CategoricalMLPPolicy, NormalMLPPolicy, MultiCategoricalMLPPolicy)
}


def save_policy(policy: MLPPolicy, path: str | os.PathLike[str]) -> None:
    """Write the policy into a file; the same as `policy.save(path)`.

    Raises:
        ConfigurationError: A file has no name for its nonlinearity or its class.
    """
    name = type(policy).__name__
    if policy.nonlinearity_name is None or _POLICIES.get(name) is not type(policy):
        message = (
            f"cannot save {name} with nonlinearity {policy.nonlinearity!r}: a file can only name "
            f"{sorted(_POLICIES)} and {sorted(NONLINEARITIES)}; save its state_dict() instead"
        )
        raise ConfigurationError(message)
    content = {"policy": name, "arguments": policy.arguments(), "state": dict(policy.state_dict())}
    with open(path, "wb") as file:  # for an OSError that names it; torch would raise another
        torch.save(content, file)


def load_policy(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> MLPPolicy:
    """Return the policy that `MLPPolicy.save` wrote, on `device`.

    Raises:
        ConfigurationError: The file holds something else.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        policy = _POLICIES[content["policy"]](**content["arguments"])
        policy.load_state_dict(content["state"], assign=True)  # and so keeps its dtype
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError) as error:
        message = f"{os.fspath(path)} holds no policy that save() wrote: {error}"
        raise ConfigurationError(message) from error
    return policy.to(device)
