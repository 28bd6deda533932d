"""What the MuJoCo families share: their tasks, scaled actions, and a quiet construction.

`TaskLocomotion` stands before one of Gymnasium's v5 environments in a class's bases and replaces
its forward reward by the task's. The physics, the costs and the termination are Gymnasium's.
This module imports no MuJoCo.

Where the seed project and Gymnasium's physics differ from rllab's, with which Finn et al. (2017)
have measured, returns are not comparable; `frame_skip=1` comes nearest.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, NDArray

from asyncmaml.envs.mujoco_log import quiet_mujoco
from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import Real, Whole

FloatArray = NDArray[np.float64]
Task = Mapping[str, ArrayLike]

_REPLACED = {
    "exclude_current_positions_from_observation": "the position never is in the observation",
    "forward_reward_weight": "the task's reward takes the forward reward's place",
}


class TaskKind(ABC):
    """How the tasks of a family are drawn, checked and rewarded; a task has one key.

    Attributes:
        key: The task's key.
        default: The value without a task.
    """

    key: str
    default: ArrayLike

    @abstractmethod
    def sample(self, generator: np.random.Generator, num_tasks: int) -> list[Any]:
        """Draw the values of `num_tasks` tasks."""

    @abstractmethod
    def reward(self, value: Any, info: Mapping[str, np.float64]) -> np.float64:
        """Return the task's part of a step's reward, from Gymnasium's info of the step."""

    @property
    @abstractmethod
    def wanted(self) -> str:
        """What a value must be, in words."""

    def is_good(self, value: FloatArray) -> bool:
        """Tell whether a task may have this value."""
        return value.shape == np.shape(self.default) and bool(np.isfinite(value).all())

    def value_of(self, task: Task, family: str) -> Any:
        """Return a task's value, a copy: a float or an array.

        Raises:
            ConfigurationError: The task has none, or it is out of its range.
        """
        try:
            value = np.array(task[self.key], np.float64)
        except (TypeError, KeyError, ValueError, IndexError):
            value = np.full(0, np.nan)
        if not self.is_good(value):
            message = (
                f"{family} cannot set the task {task!r}: a task is a dict whose {self.key!r} is "
                f"{self.wanted}; take one from sample_tasks()"
            )
            raise ConfigurationError(message)
        return value if value.shape else value.item()


class Directions(TaskKind):
    """Run forward (1) or backward (-1), either with probability 0.5: the velocity is rewarded."""

    key = "direction"
    default = 1.0
    wanted = "1 (forward) or -1 (backward)"

    def sample(self, generator: np.random.Generator, num_tasks: int) -> list[float]:
        """Draw directions."""
        return [float(2 * each - 1) for each in generator.integers(0, 2, num_tasks)]

    def reward(self, value: float, info: Mapping[str, np.float64]) -> np.float64:
        """Return the velocity in the task's direction."""
        return value * info["x_velocity"]

    def is_good(self, value: FloatArray) -> bool:
        """Tell whether it is 1 or -1."""
        return value.shape == () and abs(value.item()) == 1.0


class Velocities(TaskKind):
    """Run at a velocity, uniform in [low, high]: what is off it is paid for.

    Args:
        family: For messages.
        low: Least velocity of a sampled task.
        high: Greatest velocity of a sampled task.
        bonus: Added to each step's reward.
    """

    key = "velocity"
    wanted = "a finite number"

    def __init__(self, family: str, low: float, high: float, bonus: float = 0.0) -> None:
        _check_range(family, "velocities", low, high, bonus)
        self._low, self._high, self._bonus = low, high, bonus
        self.default = float(high)

    def sample(self, generator: np.random.Generator, num_tasks: int) -> list[float]:
        """Draw velocities."""
        return [float(each) for each in generator.uniform(self._low, self._high, num_tasks)]

    def reward(self, value: float, info: Mapping[str, np.float64]) -> np.float64:
        """Return minus the distance of the velocities, and the bonus."""
        return self._bonus - abs(info["x_velocity"] - value)


class Positions(TaskKind):
    """Walk to a position, uniform in the square [low, high]^2: the L1 distance is paid for.

    Args:
        family: For messages.
        low: Least coordinate of a sampled goal.
        high: Greatest coordinate of a sampled goal.
        bonus: Added to each step's reward.
    """

    key = "goal"
    wanted = "two finite numbers"

    def __init__(self, family: str, low: float, high: float, bonus: float) -> None:
        _check_range(family, "goals", low, high, bonus)
        self._low, self._high, self._bonus = low, high, bonus
        self.default = np.full(2, high)

    def sample(self, generator: np.random.Generator, num_tasks: int) -> list[FloatArray]:
        """Draw goals."""
        return list(generator.uniform(self._low, self._high, (num_tasks, 2)))

    def reward(self, value: FloatArray, info: Mapping[str, np.float64]) -> np.float64:
        """Return minus the distance to the goal, and the bonus."""
        x, y = value.tolist()
        distance: np.float64 = abs(info["x_position"] - x) + abs(info["y_position"] - y)
        return np.float64(self._bonus - distance)


class TaskLocomotion(gymnasium.Env[FloatArray, NDArray[np.float32]]):
    """Gives a MuJoCo environment of Gymnasium tasks and scaled actions.

    A step's `info` has the parts of its reward, which add up to it: `reward_forward` (the task's)
    and Gymnasium's `reward_ctrl`, and with the ant `reward_contact` and `reward_survive`.

    Args:
        kind: The tasks.
        action_scale: A bound: actions lie in ±`action_scale`, s. Beyond it they are clipped, and
            ±s is mapped to the actuators' range: NormalizedActionWrapper of the source. With 10,
            the sources' presets, a policy whose standard deviation is 1 uses a tenth of the range.
            The `action_scale` of Navigation2D is no bound but a factor of the action: a larger one
            makes longer steps there, and gentler ones here.
        frame_skip: Physics steps of 0.01 s in one step.
        task: The first task; None: the kind's default.
        **mujoco: For Gymnasium's environment.
    """

    model: Any  # MuJoCo's, of Gymnasium's environment
    _settings: dict[str, Any]

    def __new__(cls, **settings: Any) -> Self:
        """Keep the settings: Gymnasium's environments pickle as a call of their constructor."""
        env = super().__new__(cls)
        env._settings = settings
        return env

    def __init__(
        self, kind: TaskKind, action_scale: float, frame_skip: int, task: Task | None, **mujoco: Any
    ) -> None:
        family = type(self).__name__.removesuffix("Env")
        for name in _REPLACED.keys() & mujoco.keys():
            message = f"{family} does not take {name}: {_REPLACED[name]}; leave it out"
            raise ConfigurationError(message)
        Real(0, above=True).check(f"action_scale of {family}, the bound of actions,", action_scale)
        Whole(1).check(f"frame_skip of {family}, physics steps in one step,", frame_skip)
        self._family = family
        self._kind = kind
        value = kind.default if task is None else kind.value_of(task, family)
        with quiet_mujoco():
            super().__init__(frame_skip=int(frame_skip), **mujoco)  # type: ignore[call-arg]
        self._low, self._high = self.model.actuator_ctrlrange.T.copy()
        self._middle, self._half = (self._high + self._low) / 2.0, (self._high - self._low) / 2.0
        self._action_scale = float(action_scale)
        reach = np.full(self._low.shape, action_scale, np.float32)
        self.action_space = Box(-reach, reach, dtype=np.float32)
        self._value = value

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[FloatArray, np.float64, bool, bool, dict[str, np.float64]]:
        """Simulate one step, and reward what the task wants."""
        observation, _, terminated, truncated, info = super().step(self._controls(action))
        reward = self._kind.reward(self._value, info)
        info["reward_forward"] = reward
        reward = reward + info["reward_ctrl"]
        if "reward_contact" in info:
            reward = reward + info["reward_contact"] + info["reward_survive"]
        return observation, reward, bool(terminated), truncated, info

    def _controls(self, action: NDArray[np.float32]) -> Any:
        """Return what the actuators get: ±`action_scale` mapped to their range, and clipped."""
        controls = np.array(action, np.float64)
        if controls.shape != self._low.shape:
            message = (
                f"{self._family} cannot step: an action has shape {self._low.shape}, got "
                f"{controls.shape}"
            )
            raise ConfigurationError(message)
        # In place, and without np.clip, which costs as much as all of this.
        np.minimum(controls, self._action_scale, out=controls)
        np.maximum(controls, -self._action_scale, out=controls)
        controls /= self._action_scale
        controls *= self._half
        controls += self._middle
        # The range comes last: rounding may carry the sum past one of its ends.
        np.minimum(controls, self._high, out=controls)
        np.maximum(controls, self._low, out=controls)
        return controls

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        """Draw tasks with the generator that `reset(seed=...)` seeded."""
        return [{self._kind.key: each} for each in self._kind.sample(self.np_random, num_tasks)]

    def reset_task(self, task: Task) -> None:
        """Reward this task from now on; the simulation goes on.

        Raises:
            ConfigurationError: The task is none of this family.
        """
        self._value = self._kind.value_of(task, self._family)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make a copy with the same settings and task, in its initial state."""
        task = {self._kind.key: self._value}
        return functools.partial(type(self), **self._settings | {"task": task}), ()


def _check_range(family: str, what: str, low: float, high: float, bonus: float) -> None:
    for name, value in (("low", low), ("high", high)):
        Real().check(f"{name} of {family}'s {what}", value)
    if low > high:
        message = (
            f"{family} draws {what} from [low, high]: low={low!r} is above "
            f"high={high!r}; pass low <= high"
        )
        raise ConfigurationError(message)
    Real().check(f"bonus of {family}, added to each reward,", bonus)
