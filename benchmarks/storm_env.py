"""The environment of the storm (`chaos.py`); its task says what happens in it. No torch here."""

import ctypes
import os
import resource
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

LONGEST = 30


def _segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _hang() -> None:
    time.sleep(3600)


def _raise() -> None:
    message = "refused"
    raise ArithmeticError(message)


_DEEDS = {"segfault": _segfault, "exit": lambda: os._exit(3), "hang": _hang, "raise": _raise}


class StormEnv(gymnasium.Env[NDArray[np.float32], Any]):
    """Episodes of 1 to 30 steps that observe the step, what their seed drew, and their task.

    A task is `number`, which is observed, and what changes nothing in the episodes: `deed`, done
    in step `at`, once in all if there is a file `marker` to note it in; `slow`, seconds to sleep
    in each step.
    """

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self._task: dict[str, Any] = {"number": 0.0}
        self._steps = self._limit = 0
        self._drawn = 0.0

    def _observation(self) -> NDArray[np.float32]:
        return np.array([self._steps, self._drawn, self._task["number"]], np.float32)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode of a drawn length."""
        super().reset(seed=seed)
        self._steps = 0
        self._drawn = float(self.np_random.random())
        self._limit = int(self.np_random.integers(1, LONGEST + 1))
        if self._task.get("at") == "reset":
            self._do()
        return self._observation(), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Go on, and do what the task says."""
        if self._task.get("at") == self._steps:
            self._do()
        if "slow" in self._task:
            time.sleep(self._task["slow"])
        self._steps += 1
        self._drawn = float(self.np_random.random())
        reward = self._drawn * (1.0 + float(action))
        return self._observation(), reward, self._steps >= self._limit, False, {}

    def reset_task(self, task: dict[str, Any]) -> None:
        """Take a task."""
        self._task = task

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        """Draw numbers."""
        return [{"number": float(self.np_random.random())} for _ in range(num_tasks)]

    def _do(self) -> None:
        marker = self._task.get("marker")
        if marker is not None:
            if Path(marker).exists():
                return
            Path(marker).touch()
        _DEEDS[self._task["deed"]]()
