"""The environments that are sampled. Light to import: workers and raw-stepping processes do it.

Three of them are made for this benchmark: one whose steps take very different times, one whose
steps all sleep for the same time, and one whose steps cost nothing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray

import asyncmaml.envs  # noqa: F401 - registers Navigation2D
from asyncmaml.config import TrainConfig
from asyncmaml.envs.making import quiet_mujoco
from asyncmaml.envs.rows import RowVectorEnv

FloatArray = NDArray[np.float32]

NULL_STEPS = 200
NULL_OBSERVATION_SIZE = 4


class StragglerEnv(gymnasium.Env[FloatArray, int]):
    """Sleeps in each step, for an exponentially distributed time; 20 to 200 steps an episode."""

    mean_step_seconds = 0.002
    shortest, longest = 20, 200

    def __init__(self) -> None:
        self.observation_space = Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = Discrete(2)  # type: ignore[assignment]  # np.int64 against int
        self._observation = np.zeros(4, np.float32)
        self._steps_left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Draw the episode's length."""
        super().reset(seed=seed, options=options)
        self._steps_left = int(self.np_random.integers(self.shortest, self.longest, endpoint=True))
        return self._observation.copy(), {}

    def step(self, action: int) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        time.sleep(self.np_random.exponential(self.mean_step_seconds))
        self._steps_left -= 1
        return self._observation.copy(), 0.0, self._steps_left <= 0, False, {}


def _null_spaces(continuous: bool) -> tuple[Space[FloatArray], Space[Any]]:
    observations = Box(-np.inf, np.inf, (NULL_OBSERVATION_SIZE,), np.float32)
    return observations, Box(-1, 1, (2,), np.float32) if continuous else Discrete(2)


class NullEnv(gymnasium.Env[FloatArray, Any]):
    """The single form of `NullVectorEnv`, which Gymnasium wants to have registered."""

    def __init__(self, continuous: bool = False) -> None:
        self.observation_space, self.action_space = _null_spaces(continuous)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        return np.zeros(NULL_OBSERVATION_SIZE, np.float32), {}

    def step(self, action: Any) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Do nothing."""
        return np.zeros(NULL_OBSERVATION_SIZE, np.float32), 0.0, False, False, {}


class NullVectorEnv(RowVectorEnv):
    """Rows whose steps cost next to nothing: what is left of a tick is the sampler's own."""

    def __init__(
        self, num_envs: int, max_episode_steps: int | None = NULL_STEPS, continuous: bool = False
    ) -> None:
        super().__init__(num_envs, *_null_spaces(continuous), max_episode_steps)
        self._observations = np.zeros((num_envs, NULL_OBSERVATION_SIZE), np.float32)
        self._rewards = np.zeros(num_envs, np.float32)
        self._never = np.zeros(num_envs, np.bool_)
        self._elapsed_steps = np.zeros(num_envs, np.int64)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin an episode in the masked rows."""
        mask = None if options is None else options.get("reset_mask")
        self._elapsed_steps[slice(None) if mask is None else mask] = 0
        return self._observations, {}

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[FloatArray, FloatArray, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Count the step; the arrays returned are the same each time and never change."""
        self._elapsed_steps += 1
        limit = self.max_episode_steps
        truncated = self._never if limit is None else self._elapsed_steps >= limit
        return self._observations, self._rewards, self._never, truncated, {}


def _register(env_id: str, entry_point: str, **settings: Any) -> None:
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, entry_point, **settings)


for _name, _continuous in (("Null", False), ("NullBox", True)):
    _register(
        f"benchmarks/{_name}-v0",
        "workloads:NullEnv",
        vector_entry_point="workloads:NullVectorEnv",
        max_episode_steps=NULL_STEPS,
        kwargs={"continuous": _continuous},
    )


class SleepingEnv(NullEnv):
    """A simulator whose steps take time and no core: each of them sleeps, episodes of 200 steps."""

    def __init__(self, step_seconds: float = 0.001) -> None:
        super().__init__(continuous=True)
        self._step_seconds = step_seconds

    def step(self, action: Any) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        time.sleep(self._step_seconds)
        return super().step(action)


_register("benchmarks/Sleeping-v0", "workloads:SleepingEnv", max_episode_steps=NULL_STEPS)


@dataclass(frozen=True)
class Source:
    """Which environment a workload samples, and how to make one as Gymnasium's users do."""

    env: str | Callable[..., gymnasium.Env[Any, Any]]
    max_episode_steps: int | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_preset(cls, name: str) -> Self:
        """Return what training by a preset samples."""
        config = TrainConfig.preset(name)
        return cls(config.env_id, config.max_episode_steps, config.env_kwargs)

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make one environment, without Gymnasium's checker: it would double CartPole's step."""
        if not isinstance(self.env, str):
            return self.env(**self.env_kwargs)
        with quiet_mujoco():
            return gymnasium.make(
                self.env,
                max_episode_steps=self.max_episode_steps,
                disable_env_checker=True,
                **self.env_kwargs,
            )


SOURCES = {
    "CartPole": Source("CartPole-v1"),
    "HalfCheetah": Source("HalfCheetah-v5", max_episode_steps=200),
    "HalfCheetahDir": Source.of_preset("halfcheetah-dir"),
    "Navigation2D": Source("asyncmaml/Navigation2D-v0"),
    "Straggler": Source(StragglerEnv),
    "Null": Source("benchmarks/Null-v0"),
    "NullBox": Source("benchmarks/NullBox-v0"),
    "Sleeping": Source("benchmarks/Sleeping-v0"),
}
