"""What the engine is held against: the lock-step sampler's episodes, bit for bit."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from asyncmaml import BatchEpisodes, BatchSampler, policy_for_spaces
from asyncmaml.learning.policies import MLPPolicy

TENSORS = (
    "observations",
    "actions",
    "rewards",
    "log_probs",
    "mask",
    "lengths",
    "terminated",
    "truncated",
    "last_observations",
)

PENDULUM: dict[str, Any] = {"env": "Pendulum-v1", "max_episode_steps": 200, "seed": 0}
"""A sampler's arguments, for tests that need episodes which take a while."""


def assert_same(found: BatchEpisodes, wanted: BatchEpisodes) -> None:
    """Check that every tensor of the episodes is the same, type, shape and bits."""
    for name in TENSORS:
        left, right = getattr(found, name), getattr(wanted, name)
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name


def are_same(left: BatchEpisodes, right: BatchEpisodes) -> bool:
    """Tell whether the episodes are the same in every tensor."""
    return len(left) == len(right) and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in TENSORS
    )


def lockstep(
    env: Any, policy: Any, calls: Sequence[dict[str, Any]] = ({},), **settings: Any
) -> list[BatchEpisodes]:
    """Return the episodes of the same calls of a `BatchSampler`, each with a task of its own."""
    results = []
    with BatchSampler(env, num_workers=0, **settings) as sampler:
        for call in calls:
            arguments = dict(call)
            if "task" in arguments:
                sampler.reset_task(arguments.pop("task"))
            results.append(sampler.sample(policy, **arguments))
    return results


def policy_of(env: Any, hidden_sizes: tuple[int, ...] = (16, 16), seed: int = 0) -> MLPPolicy:
    """Return a policy of ours for the spaces of an environment, the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return policy_for_spaces(env.observation_space, env.action_space, hidden_sizes)


def uniform(observations: Tensor) -> Distribution:
    """A policy for two actions that looks at nothing."""
    return Categorical(logits=torch.zeros(len(observations), 2), validate_args=False)


def counting_policy(observations: Tensor) -> Distribution:
    """For `CountingEnv`: depends on the observation's second number alone."""
    first = observations[:, 1]
    return Categorical(logits=torch.stack((first, -first), dim=1), validate_args=False)
