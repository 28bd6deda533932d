"""2D navigation: walk from the origin to a goal that the observation does not show.

Source: Finn et al. (2017), section 5.3, https://arxiv.org/abs/1703.03400, and its code,
https://github.com/cbfinn/maml_rl. One function, `move`, holds the dynamics for both forms of
the environment, so that they agree bit for bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import ArrayLike, NDArray

from asyncmaml.envs.rows import RowVectorEnv
from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import Real

FloatArray = NDArray[np.float32]

LONGEST_MOVE = 0.1  # per axis and step; section 5.3
GOAL_TOLERANCE = 0.01  # on each axis: a box, as in the code; section 5.3 only says "within"


def move(
    positions: FloatArray, goals: FloatArray, actions: FloatArray, action_scale: float
) -> tuple[FloatArray, FloatArray, NDArray[np.bool_]]:
    """Move every point by its action and reward how near it then is.

    The reward is minus the Euclidean distance after the move.

    Args:
        positions: Shape `(R, 2)`; not written to.
        goals: Shape `(R, 2)`.
        actions: Shape `(R, 2)`.
        action_scale: Multiplies the actions before they are clipped.

    Returns:
        New positions `(R, 2)`, rewards `(R,)`, terminated `(R,)`.
    """
    # Arithmetic and square root only: IEEE 754 rounds them alike for 1 row and for 400, which
    # np.hypot or a BLAS norm would not promise.
    moved = actions * action_scale
    np.minimum(moved, LONGEST_MOVE, out=moved)
    np.maximum(moved, -LONGEST_MOVE, out=moved)
    moved += positions
    offsets = moved - goals
    squares = offsets * offsets
    rewards = squares[:, 0] + squares[:, 1]
    np.sqrt(rewards, out=rewards)
    np.negative(rewards, out=rewards)
    np.abs(offsets, out=offsets)
    inside = offsets < GOAL_TOLERANCE
    return moved, rewards, inside[:, 0] & inside[:, 1]


class Navigation2DEnv(gymnasium.Env[FloatArray, FloatArray]):
    """A point walks from the origin to the task's goal; registered with 100 steps.

    An episode terminates when the point is within 0.01 of the goal on both axes.

    - Observation: the position, float32, shape `(2,)`, unbounded. Never the goal.
    - Action: the move, float32, shape `(2,)`, in ±0.1 / `action_scale`; beyond it is clipped.
    - Reward: minus the Euclidean distance to the goal after the move. Finn et al. write of the
      squared distance and compute the plain one in their code; we follow the code.
    - Task: `{"goal": array of shape (2,)}`, uniform in `[low, high]` on each axis.

    Without a task the goal is the corner `(high, high)`. The origin, which the seed project takes,
    will not do: the point starts there, and the best policy would be to stand still.

    Args:
        low: Least coordinate of a sampled goal.
        high: Greatest coordinate of a sampled goal.
        action_scale: A factor: multiplies the action before it is clipped. With 0.1 actions lie in
            ±1, as in Finn et al.'s code, which scales a normalised action to ±0.1. The
            `action_scale` of the MuJoCo families is no factor but the bound of their actions.
        task: The first task; None: the goal `(high, high)`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        low: float = -0.5,
        high: float = 0.5,
        action_scale: float = 1.0,
        task: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        _check_settings(low, high, action_scale)
        self._low = low
        self._high = high
        self._action_scale = float(action_scale)
        self.observation_space, self.action_space = _spaces(action_scale)
        self._position: FloatArray = np.zeros((1, 2), np.float32)
        self._goal: FloatArray = np.full((1, 2), high, np.float32)
        if task is not None:
            self.reset_task(task)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Put the point back to the origin; the task stays."""
        super().reset(seed=seed, options=options)
        self._position = np.zeros((1, 2), np.float32)
        return self._position[0].copy(), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Move the point by the action."""
        actions = np.asarray(action, np.float32).reshape(1, 2)
        self._position, rewards, terminated = move(
            self._position, self._goal, actions, self._action_scale
        )
        return self._position[0].copy(), rewards.item(), terminated.item(), False, {}

    def sample_tasks(self, num_tasks: int) -> list[dict[str, FloatArray]]:
        """Draw goals with the generator that `reset(seed=...)` seeded."""
        goals = self.np_random.uniform(self._low, self._high, size=(num_tasks, 2))
        return [{"goal": goal} for goal in goals.astype(np.float32)]

    def reset_task(self, task: Mapping[str, ArrayLike]) -> None:
        """Walk to this task's goal from now on; the point stays where it is.

        Raises:
            ConfigurationError: The task has no goal of two finite numbers.
        """
        self._goal = _goal_of(task).reshape(1, 2)


class Navigation2DVectorEnv(RowVectorEnv):
    """`Navigation2DEnv` by rows; takes the same keywords and returns the same numbers.

    Nothing is drawn at a reset, so the rows need no generators and seeds are not looked at.
    Rewards are float32. The arrays returned are the caller's own.
    """

    def __init__(
        self,
        num_envs: int,
        max_episode_steps: int | None = 100,
        low: float = -0.5,
        high: float = 0.5,
        action_scale: float = 1.0,
        task: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        _check_settings(low, high, action_scale)
        super().__init__(num_envs, *_spaces(action_scale), max_episode_steps)
        self._action_scale = float(action_scale)
        self._positions: FloatArray = np.zeros((num_envs, 2), np.float32)
        self._goals: FloatArray = np.full((num_envs, 2), high, np.float32)
        self._elapsed_steps = np.zeros(num_envs, np.int64)
        if task is not None:
            self.reset_task(task)
        self._initial_goal = self._goals[0].copy()

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Put the masked rows back to the origin; their tasks stay."""
        mask = None if options is None else options.get("reset_mask")
        rows = slice(None) if mask is None else mask
        self._positions[rows] = 0.0
        self._elapsed_steps[rows] = 0
        return self._positions.copy(), {}

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[FloatArray, FloatArray, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Move every point by its action."""
        self._positions, rewards, terminated = move(
            self._positions, self._goals, np.asarray(actions, np.float32), self._action_scale
        )
        self._elapsed_steps += 1
        if self.max_episode_steps is None:
            truncated = np.zeros(self.num_envs, np.bool_)
        else:
            truncated = self._elapsed_steps >= self.max_episode_steps
        return self._positions.copy(), rewards, terminated, truncated, {}

    def reset_task(
        self, task: Mapping[str, ArrayLike], mask: NDArray[np.bool_] | None = None
    ) -> None:
        """Give the masked rows (None: all) this task's goal; the points stay where they are.

        Raises:
            ConfigurationError: The task has no goal of two finite numbers.
        """
        self._goals[slice(None) if mask is None else mask] = _goal_of(task)

    def restore_task(self, mask: NDArray[np.bool_]) -> None:
        """Give the masked rows the goal that they had at first."""
        self._goals[mask] = self._initial_goal


def _spaces(action_scale: float) -> tuple[Space[FloatArray], Space[FloatArray]]:
    """Return the spaces of one observation and of one action."""
    reach = LONGEST_MOVE / action_scale
    return Box(-np.inf, np.inf, (2,), np.float32), Box(-reach, reach, (2,), np.float32)


def _check_settings(low: float, high: float, action_scale: float) -> None:
    for name, value in (("low", low), ("high", high)):
        Real().check(f"{name} of Navigation2D's goals", value)
    if low > high:
        message = (
            f"Navigation2D draws goals from [low, high]: low={low!r} is above "
            f"high={high!r}; pass low <= high"
        )
        raise ConfigurationError(message)
    Real(0, above=True).check("action_scale of Navigation2D, the factor of actions,", action_scale)


def _goal_of(task: Mapping[str, ArrayLike]) -> FloatArray:
    """Return the task's goal, a copy of shape `(2,)`."""
    try:
        goal = np.array(task["goal"], np.float32)
    except (TypeError, KeyError, ValueError, IndexError):
        goal = None
    if goal is None or goal.shape != (2,) or not np.isfinite(goal).all():
        message = (
            f"Navigation2D cannot set the task {task!r}: a task is a dict whose 'goal' is two "
            "finite numbers; take one from sample_tasks(), or pass {'goal': (0.3, -0.2)}"
        )
        raise ConfigurationError(message)
    return goal
