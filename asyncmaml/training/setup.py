"""What a run works with, made from its configuration: sampler, policy and learner."""

import os

import torch

from asyncmaml.config import TrainConfig, options
from asyncmaml.envs.making import EnvMaker
from asyncmaml.learning.learner import MetaLearner
from asyncmaml.learning.learners import make_learner
from asyncmaml.learning.mlp import MLPPolicy
from asyncmaml.learning.policy_spaces import policy_for_spaces
from asyncmaml.sampling.sampler import AsyncSampler


def make_sampler(
    config: TrainConfig, seed: int | None = None, trace: str | os.PathLike[str] | None = None
) -> AsyncSampler:
    """Return the sampler, not started yet.

    Args:
        config: Its environment and its workers.
        seed: The sampler's root seed; None: the configuration's.
        trace: See `AsyncSampler`.

    Raises:
        ConfigurationError: The environment or the device is unknown.
    """
    return AsyncSampler(
        config.env_id,
        config.env_kwargs,
        batch_size=config.episodes_per_task,
        num_workers=_num_workers(config),
        envs_per_worker=config.envs_per_worker,
        seed=config.seed if seed is None else seed,
        device=config.device,
        max_episode_steps=config.max_episode_steps,
        step_timeout=config.step_timeout,
        trace=trace,
    )


def make_policy(config: TrainConfig, sampler: AsyncSampler) -> MLPPolicy:
    """Return a fresh policy, drawn with the configuration's seed.

    Raises:
        UnsupportedSpaceError: There is no policy for the environment's spaces.
    """
    # The process's own random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = policy_for_spaces(
            sampler.observation_space,
            sampler.action_space,
            config.hidden_sizes,
            config.nonlinearity,
            init_std=config.init_std,
        )
    return policy.to(config.device)


def learner_for(config: TrainConfig, policy: MLPPolicy) -> MetaLearner:
    """Return the configuration's learner for a policy.

    Raises:
        ConfigurationError: The learner refuses an option.
    """
    chosen = {
        option.name: getattr(config, option.name)
        for option in options()
        if config.learner in option.learners and option.name not in ("learner", "objective")
    }
    if config.objective is not None:
        chosen["objective"] = config.objective
    return make_learner(config.learner, policy, **chosen)


def _num_workers(config: TrainConfig) -> int | None:
    """Natively vectorised environments run best in this process: a step is one call."""
    if config.num_workers is not None:
        return config.num_workers
    return 0 if EnvMaker.resolve(config.env_id, config.env_kwargs).has_rows else None
