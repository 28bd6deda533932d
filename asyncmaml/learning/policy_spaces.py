"""Which policy fits an environment's spaces."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F  # noqa: N812 - what every torch user calls it
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space

from asyncmaml.errors import UnsupportedSpaceError
from asyncmaml.learning.mlp import MLPPolicy, Nonlinearity
from asyncmaml.learning.policies import (
    CategoricalMLPPolicy,
    MultiCategoricalMLPPolicy,
    NormalMLPPolicy,
)


def policy_for_spaces(
    observation_space: "Space[Any]",
    action_space: "Space[Any]",
    hidden_sizes: Sequence[int] = (100, 100),
    nonlinearity: Nonlinearity | str = F.relu,
    *,
    init_std: float = 1.0,
) -> MLPPolicy:
    """Return the policy that fits: from Box or Discrete to Box, Discrete or MultiDiscrete.

    Its actions from a Discrete space count from 0: the sampler adds the space's `start` on their
    way to the environment. `init_std` is the first standard deviation of a normal policy; the
    others have none.

    Raises:
        UnsupportedSpaceError: There is none for these spaces.
    """
    start = 0
    if isinstance(observation_space, Box) and observation_space.shape:
        input_size, ndim = math.prod(observation_space.shape), len(observation_space.shape)
    elif isinstance(observation_space, Discrete):
        input_size, ndim, start = int(observation_space.n), 0, int(observation_space.start)
    else:
        message = (
            f"no policy for observations of {observation_space}: they must be a Box with at "
            "least one axis or a Discrete; wrap the environment"
        )
        raise UnsupportedSpaceError(message)
    policy: Callable[..., MLPPolicy] | None = None
    size: Any = None
    match action_space:
        case Box(shape=(size,), dtype=dtype) if dtype is not None and dtype.kind == "f":
            policy = partial(NormalMLPPolicy, init_std=init_std)
        case Discrete(n=size):
            policy = CategoricalMLPPolicy
        case MultiDiscrete(nvec=size, start=first) if size.ndim == 1 and not first.any():
            policy = MultiCategoricalMLPPolicy
    if policy is None:
        message = (
            f"no policy for actions of {action_space}: they must be a Box of floats with one "
            "axis, a Discrete, or a one-axis MultiDiscrete that starts at 0; wrap the environment"
        )
        raise UnsupportedSpaceError(message)
    return policy(
        input_size,
        size,
        hidden_sizes,
        nonlinearity,
        observation_ndim=ndim,
        observation_start=start,
    )
