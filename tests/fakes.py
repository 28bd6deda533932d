"""Small environments that misbehave on request; a worker imports this, so there is no torch here.

What one of them is to do comes with its task where the sampler's other episodes shall go on
undisturbed, and with its keywords otherwise.
"""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from asyncmaml.envs.navigation import Navigation2DEnv
from asyncmaml.envs.rows import RowVectorEnv

Step = tuple[Any, float, bool, bool, dict[str, Any]]


def without_mujoco(**_: Any) -> gymnasium.Env[Any, Any]:
    message = "MuJoCo is not installed, run `pip install gymnasium[mujoco]`"
    raise gymnasium.error.DependencyNotInstalled(message)


class NavigationThatRaises(Navigation2DEnv):
    """Cannot be stepped."""

    def step(self, action: Any) -> Any:
        message = "out of order"
        raise OSError(message)


def that_raises(**keywords: Any) -> gymnasium.Env[Any, Any]:
    return NavigationThatRaises(**keywords)


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observes `[step, a number of its seed, number of its task]`; lasts `length` steps.

    `length=None`: 1 to 9 steps, drawn at the reset. The reward is the number of the step taken.
    """

    def __init__(self, length: int | None = 5, offset: float = 0.0) -> None:
        self.observation_space: Space[Any] = Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space: Space[Any] = Discrete(2)
        self.length = length
        self.offset = offset
        self.task: Any = {"number": 0.0}
        self.steps = 0
        self.drawn = 0.0
        self.limit = 0

    def observation(self) -> Any:
        number = self.task.get("number", 0.0) + self.offset
        return np.array([self.steps, self.drawn, number], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.drawn = float(self.np_random.random())
        self.limit = self.length or int(self.np_random.integers(1, 10))
        return self.observation(), {}

    def step(self, action: Any) -> Step:
        self.steps += 1
        return self.observation(), float(self.steps), self.steps >= self.limit, False, {}

    def sample_tasks(self, num_tasks: int) -> list[dict[str, float]]:
        return [{"number": float(self.np_random.random())} for _ in range(num_tasks)]

    def reset_task(self, task: Any) -> None:
        self.task = task


class EnvWithoutTasks(gymnasium.Env[Any, Any]):
    """One step, one number."""

    observation_space: Space[Any] = Box(-1, 1, (1,), np.float32)
    action_space: Space[Any] = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Step:
        return np.zeros(1, np.float32), 1.0, True, False, {}


class TwoArgumentsError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


class UnpicklableError(Exception):
    """Cannot even be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.function = lambda: None


class RaisingEnv(CountingEnv):
    """Raises where its task says: `{"phase": "step", "at": 3}`; `at` counts the steps from 0."""

    def __init__(self, phase: str = "", length: int | None = 5) -> None:
        super().__init__(length)
        self.task = {"phase": phase}
        self.fail("constructor")

    def fail(self, phase: str) -> None:
        if self.task.get("phase") != phase:
            return
        match self.task.get("error"):
            case "two arguments":
                what, why = "no contact", "the wheel is off"
                raise TwoArgumentsError(what, why)
            case "unpicklable":
                raise UnpicklableError
            case "exit":
                raise SystemExit(3)
        message = f"refused in {phase}"
        raise ArithmeticError(message)

    def reset_task(self, task: Any) -> None:
        self.task = task
        self.fail("reset_task")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.fail("reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Step:
        if self.steps == self.task.get("at", 0):
            self.fail("step")
        return super().step(action)


class FlakyEnv(CountingEnv):
    """Raises in step 2 of the first tries of an episode; its task says how often, and for whom.

    `{"failures": 2, "above": 0.5}`: twice, for episodes whose drawn number is above that.
    """

    tries: ClassVar[Counter[int | None]] = Counter()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.tries[seed] += 1
        self.seed = seed
        return super().reset(seed=seed)

    def step(self, action: Any) -> Step:
        fails = self.tries[self.seed] <= self.task.get("failures", 0)
        if self.steps == 2 and fails and self.drawn > self.task.get("above", -1.0):
            message = "lost contact"
            raise ConnectionError(message)
        return super().step(action)


class NotFiniteEnv(CountingEnv):
    """Returns `value` in a place that its task names: `reset`, `step`, `last` or `reward`."""

    def step(self, action: Any) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        place, value = self.task.get("place"), self.task.get("value", np.nan)
        if (place, self.steps) == ("step", 2) or (place == "last" and terminated):
            observation[1] = value
        if (place, self.steps) == ("reward", 2):
            reward = value
        return observation, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        if self.task.get("place") == "reset":
            observation[1] = self.task.get("value", np.nan)
        return observation, info


class NotFiniteThenRaisingEnv(CountingEnv):
    """Ends with a NaN as its reward where its task says so; cannot be reset where it says so."""

    def step(self, action: Any) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated and self.task.get("ends with"):
            reward = self.task["ends with"]
        if self.task.get("shape") and self.steps == 2:
            return observation[:2], np.nan, terminated, truncated, info
        return observation, reward, terminated, truncated, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.task.get("phase") == "reset":
            message = "refused in reset"
            raise ArithmeticError(message)
        return super().reset(seed=seed)


class SettableEnv(EnvWithoutTasks):
    """Takes a task under the name of `set_task`, and gives it as its reward."""

    def __init__(self, number: float = 0.5) -> None:
        self.number = number

    def step(self, action: Any) -> Step:
        return np.zeros(1, np.float32), self.number, True, False, {}

    def set_task(self, task: float) -> None:
        self.number = task


class ReusingEnv(CountingEnv):
    """Returns one and the same array from every reset and step."""

    def __init__(self, length: int | None = 5) -> None:
        super().__init__(length)
        self.buffer = np.zeros(3, np.float32)

    def observation(self) -> Any:
        self.buffer[:] = super().observation()
        return self.buffer


class WaitingEnv(CountingEnv):
    """In step `at` says into the FIFO `arrived` that it waits, until the FIFO `gate` lets it go."""

    def __init__(self, arrived: Path, gate: Path, at: int = 1, length: int = 3) -> None:
        super().__init__(length)
        self.arrived, self.gate, self.at = arrived, gate, at

    def step(self, action: Any) -> Step:
        if self.steps == self.at:
            self.arrived.write_bytes(b".")
            self.gate.read_bytes()
        return super().step(action)


class HighWaitsEnv(WaitingEnv):
    """Waits only in episodes whose drawn number is above 0.5."""

    def step(self, action: Any) -> Step:
        return super().step(action) if self.drawn > 0.5 else CountingEnv.step(self, action)


class SecondWaitsEnv(WaitingEnv):
    """Waits only where it is the second one of its process."""

    num_made = 0

    def __init__(self, arrived: Path, gate: Path, at: int = 1, length: int = 3) -> None:
        super().__init__(arrived, gate, at, length)
        cls = SecondWaitsEnv
        cls.num_made += 1
        if cls.num_made != 2:
            self.at = -1


class DeadlyEnv(CountingEnv):
    """Kills its process at step `at` unless the file `marker` tells that it has done so before."""

    def __init__(self, marker: str | None = None, at: int = 3, length: int = 8) -> None:
        super().__init__(length)
        self.marker, self.at = marker, at

    def step(self, action: Any) -> Step:
        if self.steps == self.at and (self.marker is None or not Path(self.marker).exists()):
            if self.marker is not None:
                Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class ActionEnv(CountingEnv):
    """Observes the action that it was given last, and 0 at first."""

    def __init__(self, action_space: Space[Any], length: int = 5) -> None:
        super().__init__(length)
        self.action_space = action_space
        self.size = int(np.prod(action_space.shape or (1,)))
        self.observation_space = Box(-np.inf, np.inf, (self.size,), np.float32)
        self.action: Any = 0

    def observation(self) -> Any:
        return np.full(self.size, self.action, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.action = 0
        return super().reset(seed=seed)

    def step(self, action: Any) -> Step:
        assert action in self.action_space or isinstance(self.action_space, Box), action
        self.action = action
        return super().step(action)


class DiscreteObservationEnv(CountingEnv):
    """Observes the number of the step as an integer."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)
        self.observation_space = Discrete(10)

    def observation(self) -> Any:
        return self.steps


class ImageEnv(CountingEnv):
    """Images of `size` x `size` pixels whose bytes are 100 times the step, modulo 256."""

    def __init__(self, size: int = 4, length: int = 5) -> None:
        super().__init__(length)
        self.size = size
        self.observation_space = Box(0, 255, (size, size, 3), np.uint8)

    def observation(self) -> Any:
        return np.full((self.size, self.size, 3), self.steps * 100 % 256, np.uint8)


class DictEnv(CountingEnv):
    """Observations that the sampler cannot carry."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Dict({"position": Box(-1, 1, (2,))})


class EnvWithSpaces(CountingEnv):
    """Says that its spaces are others than they are."""

    def __init__(self, observation_space: Any = None, action_space: Any = None) -> None:
        super().__init__()
        self.observation_space = observation_space or self.observation_space
        self.action_space = action_space or self.action_space


class OddShapeEnv(CountingEnv):
    """Observes fewer numbers than its space says."""

    def observation(self) -> Any:
        return np.zeros(2, np.float32)


class ReadableHere:
    """Can be pickled, and unpickled in the same process alone."""

    def __reduce__(self) -> Any:
        return _read_in, (os.getpid(),)


def _read_in(pid: int) -> None:
    if os.getpid() != pid:
        message = "cannot be read"
        raise OSError(message)


class PidEnv(CountingEnv):
    """Observes the number of the process that it is in, low and high half."""

    def observation(self) -> Any:
        low, high = os.getpid() % 4096, os.getpid() // 4096
        return np.array([low, high, self.steps], np.float32)


class InnerEnv(CountingEnv):
    """Makes another environment by its id and observes through it."""

    def __init__(self, env_id: str) -> None:
        super().__init__()
        self.inner = gymnasium.make(env_id)
        self.observation_space = self.inner.observation_space

    def observation(self) -> Any:
        return self.inner.reset(seed=0)[0]

    def close(self) -> None:
        self.inner.close()


class CountingRowsEnv(RowVectorEnv):
    """The natively vectorised form of `CountingEnv`; a task may make a step or itself fail."""

    def __init__(
        self, num_envs: int, max_episode_steps: int | None = None, length: int = 5
    ) -> None:
        single = CountingEnv()
        super().__init__(num_envs, single.observation_space, single.action_space, max_episode_steps)
        self.length = length
        self.steps = np.zeros(num_envs, np.int64)
        self.drawn = np.zeros(num_envs, np.float32)
        self.tasks: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    def _observations(self) -> NDArray[Any]:
        numbers = [task.get("number", 0.0) for task in self.tasks]
        return np.stack([self.steps, self.drawn, numbers], axis=1).astype(np.float32)

    def reset(
        self, *, seed: Any = None, options: Any = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        mask = np.ones(self.num_envs, np.bool_) if options is None else options["reset_mask"]
        for row in np.flatnonzero(mask):
            self.steps[row] = 0
            self.drawn[row] = np.random.default_rng(seed[row]).random()
        return self._observations(), {}

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        for row, task in enumerate(self.tasks):
            if task.get("phase") == "step" and self.steps[row] == task["at"]:
                self.tasks[row] = {}  # the row is stepped along after its failure, and keeps still
                if task.get("error") == "exit":
                    raise SystemExit(3)
                message = "refused in step"
                raise ArithmeticError(message)
        self.steps += 1
        ended = self.steps >= self.length
        rewards = self.steps.astype(np.float32)
        return self._observations(), rewards, ended, np.zeros_like(ended), {}

    def reset_task(self, task: Any, mask: NDArray[np.bool_] | None = None) -> None:
        if task.get("phase") == "reset_task":
            if task.get("error") == "exit":
                raise SystemExit(3)
            message = "refused in reset_task"
            raise ArithmeticError(message)
        for row in range(self.num_envs):
            if mask is None or mask[row]:
                self.tasks[row] = task


class ForeignRowsEnv(VectorEnv[Any, Any, Any]):
    """Keeps the protocol of rows and says so, but does not derive from our class; has no tasks."""

    metadata = RowVectorEnv.metadata

    def __init__(self, num_envs: int, max_episode_steps: int | None = None) -> None:
        self.rows = CountingRowsEnv(num_envs)
        self.num_envs = num_envs
        self.single_observation_space = self.rows.single_observation_space
        self.single_action_space = self.rows.single_action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.rows.reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self.rows.step(actions)


assert CountingRowsEnv.metadata["autoreset_mode"] is AutoresetMode.DISABLED
