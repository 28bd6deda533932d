"""Small random Markov decision processes (MDPs), given by two tables.

Source: Duan et al. (2016), section 3.1, https://arxiv.org/abs/1611.02779: 10 states, 5 actions,
10 steps. `MDPFamily.move` is the dynamics of both forms of the environment.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import ArrayLike, NDArray

from asyncmaml.envs.row_streams import RowStreams, standard_normals
from asyncmaml.envs.rows import RowVectorEnv, checked_choices
from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import Real, Whole

FloatArray = NDArray[np.float64]
Observation = NDArray[np.float32]

_SUM_TOLERANCE = 1e-6  # tasks that were kept as float32 add up to 1 within it


@dataclass(frozen=True)
class MDPFamily:
    """The MDPs of one size; see `TabularMDPEnv` for the settings.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    num_states: int
    num_actions: int
    reward_std: float

    def __post_init__(self) -> None:
        Whole(1).check("num_states of TabularMDP", self.num_states)
        Whole(1).check("num_actions of TabularMDP", self.num_actions)
        Real(0).check("reward_std of TabularMDP", self.reward_std)

    def spaces(self) -> tuple[Space[Observation], Discrete]:
        """Return the spaces of one observation and of one action."""
        return Box(0.0, 1.0, (self.num_states,), np.float32), Discrete(int(self.num_actions))

    def sample_tasks(self, generator: np.random.Generator, num_tasks: int) -> list[dict[str, Any]]:
        """Draw tasks: flat Dirichlet transitions, mean rewards normal around 1 with deviation 1."""
        shape = (num_tasks, self.num_states, self.num_actions)
        transitions = generator.dirichlet(np.ones(self.num_states), shape)
        rewards = generator.normal(1.0, 1.0, shape)
        return [
            {"transitions": probabilities, "rewards_mean": means}
            for probabilities, means in zip(transitions, rewards, strict=True)
        ]

    def first_tables(self, task: Mapping[str, ArrayLike] | None) -> tuple[FloatArray, FloatArray]:
        """Return the tables of a constructor's task; None: all states equally likely, means 0."""
        if task is not None:
            return self.tables_of(task)
        shape = (self.num_states, self.num_actions)
        equal = np.full((*shape, self.num_states), 1.0 / self.num_states)
        return _cumulative(equal), np.zeros(shape)

    def tables_of(self, task: Mapping[str, ArrayLike]) -> tuple[FloatArray, FloatArray]:
        """Return the task's cumulative transition probabilities and its mean rewards.

        Returns:
            Shapes `(S, A, S)`, the last of each line 1, and `(S, A)`; the caller's own.

        Raises:
            ConfigurationError: A table is missing, of the wrong shape, or no probabilities.
        """
        shape = (self.num_states, self.num_actions)
        transitions: FloatArray = np.zeros(0)
        rewards: FloatArray = np.zeros(0)
        with suppress(TypeError, KeyError, ValueError, IndexError):
            transitions = np.array(task["transitions"], np.float64)
            rewards = np.array(task["rewards_mean"], np.float64)
        if not (
            transitions.shape == (*shape, self.num_states)
            and (transitions >= 0).all()
            and (np.abs(transitions.sum(axis=2) - 1.0) <= _SUM_TOLERANCE).all()
            and rewards.shape == shape
            and np.isfinite(rewards).all()
        ):
            keys = list(task) if isinstance(task, Mapping) else task
            message = (
                f"TabularMDP cannot set the task with {keys!r}: a task is a dict of 'transitions', "
                f"probabilities of shape {(*shape, self.num_states)} of which each line adds up "
                f"to 1, and 'rewards_mean', finite numbers of shape {shape}; found the shapes "
                f"{transitions.shape} and {rewards.shape}; take one from sample_tasks()"
            )
            raise ConfigurationError(message)
        return _cumulative(transitions), rewards

    def move(
        self,
        tables: tuple[FloatArray, FloatArray],
        states: NDArray[np.int64],
        actions: ArrayLike,
        streams: RowStreams,
        is_running: NDArray[np.bool_],
    ) -> tuple[NDArray[np.int64], FloatArray]:
        """Take one action in every row.

        Args:
            tables: Of `tables_of`, stacked: `(R, S, A, S)` and `(R, S, A)`.
            states: Shape `(R,)`; not written to.
            actions: Shape `(R,)`.
            streams: Of the rows; those that run draw 3 numbers.
            is_running: Rows whose action is looked at and whose stream goes on, shape `(R,)`.

        Returns:
            Next states and rewards, shape `(R,)`.

        Raises:
            ConfigurationError: A running row's action is out of range.
        """
        choices = checked_choices("TabularMDP", actions, int(self.num_actions), is_running)
        where = np.arange(len(choices)), states, choices
        cumulative, means = tables
        uniforms, radii, angles = streams.uniforms(3, is_running)
        rewards = means[where] + float(self.reward_std) * standard_normals(radii, angles)
        # State s is next if cumulative[s - 1] <= uniform < cumulative[s]; the last of them is 1.
        return (cumulative[where] <= uniforms[:, None]).sum(axis=1), rewards

    def observations(self, states: NDArray[np.int64]) -> Observation:
        """Return the states as lines of zeros with a one, shape `(R, S)`."""
        observations = np.zeros((len(states), self.num_states), np.float32)
        observations[np.arange(len(states)), states] = 1.0
        return observations


class TabularMDPEnv(gymnasium.Env[Observation, np.int64]):
    """An MDP of a few states; registered with 10 steps.

    An episode begins in state 0 and never terminates by itself.

    - Observation: the state as a line of zeros with a one, float32, shape `(num_states,)`.
    - Action: `Discrete(num_actions)`.
    - Reward: normal around the mean of the state and the action, with `reward_std`.
    - Task: `{"transitions": (S, A, S), "rewards_mean": (S, A)}`; the probabilities of the next
      state are Dirichlet(1, ..., 1), the means normal with mean 1 and standard deviation 1.

    `asyncmaml.envs.oracles` has the best return of a task, by value iteration, and that of the
    random policy. Without a task all next states are equally likely and the means 0.

    Constants: https://github.com/dragen1860/MAML-Pytorch-RL, `maml_rl/envs/mdp.py`, whose
    constructor raises; repaired in https://github.com/tristandeleu/pytorch-maml-rl.

    Args:
        num_states: States, S.
        num_actions: Actions, A.
        reward_std: Standard deviation of a reward around its mean.
        task: The first task; None: see above.

    Raises:
        ConfigurationError: A setting or the task is out of its range.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        num_states: int = 10,
        num_actions: int = 5,
        reward_std: float = 1.0,
        task: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        self._family = MDPFamily(num_states, num_actions, reward_std)
        self.observation_space, self.action_space = self._family.spaces()
        self._streams = RowStreams(1)
        self._state = np.zeros(1, np.int64)
        self._set_tables(self._family.first_tables(task))

    def _set_tables(self, tables: tuple[FloatArray, FloatArray]) -> None:
        self._tables = tables[0][None], tables[1][None]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Go to state 0; the task stays."""
        super().reset(seed=seed, options=options)
        self._streams.reseed(seed)
        self._state = np.zeros(1, np.int64)
        return self._family.observations(self._state)[0], {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take the action."""
        self._state, rewards = self._family.move(
            self._tables, self._state, [action], self._streams, np.ones(1, np.bool_)
        )
        return self._family.observations(self._state)[0], rewards.item(), False, False, {}

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        """Draw tasks with the generator that `reset(seed=...)` seeded."""
        return self._family.sample_tasks(self.np_random, num_tasks)

    def reset_task(self, task: Mapping[str, ArrayLike]) -> None:
        """Follow this task's tables from now on; the state stays.

        Raises:
            ConfigurationError: The task's tables are missing, of the wrong shape, or no
                probabilities.
        """
        self._set_tables(self._family.tables_of(task))


class TabularMDPVectorEnv(RowVectorEnv):
    """`TabularMDPEnv` by rows; takes the same keywords and returns the same numbers."""

    def __init__(
        self,
        num_envs: int,
        max_episode_steps: int | None = 10,
        num_states: int = 10,
        num_actions: int = 5,
        reward_std: float = 1.0,
        task: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        self._family = MDPFamily(num_states, num_actions, reward_std)
        super().__init__(num_envs, *self._family.spaces(), max_episode_steps)
        self._initial_tables = self._family.first_tables(task)
        cumulative, rewards = self._initial_tables
        self._tables = np.stack([cumulative] * num_envs), np.stack([rewards] * num_envs)
        self._streams = RowStreams(num_envs)
        self._states = np.zeros(num_envs, np.int64)
        self._is_running = np.zeros(num_envs, np.bool_)
        self._elapsed_steps = np.zeros(num_envs, np.int64)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, dict[str, Any]]:
        """Put the masked rows to state 0; their tasks stay."""
        mask = None if options is None else options.get("reset_mask")
        self._streams.reseed(seed, mask)
        rows = slice(None) if mask is None else mask
        self._states[rows] = 0
        self._elapsed_steps[rows] = 0
        self._is_running[rows] = True
        return self._family.observations(self._states), {}

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Observation, FloatArray, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Take an action in every row."""
        self._states, rewards = self._family.move(
            self._tables, self._states, actions, self._streams, self._is_running
        )
        self._elapsed_steps += 1
        if self.max_episode_steps is None:
            truncated = np.zeros(self.num_envs, np.bool_)
        else:
            truncated = self._elapsed_steps >= self.max_episode_steps
            self._is_running &= ~truncated
        observations = self._family.observations(self._states)
        return observations, rewards, np.zeros(self.num_envs, np.bool_), truncated, {}

    def reset_task(
        self, task: Mapping[str, ArrayLike], mask: NDArray[np.bool_] | None = None
    ) -> None:
        """Give the masked rows (None: all) this task's tables; their states stay.

        Raises:
            ConfigurationError: The task's tables are missing, of the wrong shape, or no
                probabilities.
        """
        self._put(self._family.tables_of(task), mask)

    def restore_task(self, mask: NDArray[np.bool_]) -> None:
        """Give the masked rows the task that they had at first."""
        self._put(self._initial_tables, mask)

    def _put(self, tables: tuple[FloatArray, FloatArray], mask: NDArray[np.bool_] | None) -> None:
        for of_rows, table in zip(self._tables, tables, strict=True):
            of_rows[slice(None) if mask is None else mask] = table


def _cumulative(transitions: FloatArray) -> FloatArray:
    """Return cumulative probabilities of which the last is exactly 1."""
    cumulative = np.cumsum(transitions, axis=2)
    cumulative /= cumulative[..., -1:].copy()
    return cumulative
