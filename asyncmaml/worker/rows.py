"""R rows of environments, stepped one command at a time.

Runs in a worker process, or in the sampler thread where there are no workers.

A row is in an episode or idle. On a command each row does its order; a row whose episode ends
takes the next offered episode at once, and its true last observation is kept apart from the
first one of the episode that follows.
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.rows import RowVectorEnv
from asyncmaml.envs.tasks import has_tasks, reset_task
from asyncmaml.worker.layout import Arrays
from asyncmaml.worker.protocol import NO_TASK, Order, Outcome, RowFailure

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]

_NO_LIMIT = -1  # counts down and away from 0
_STEP, _START = int(Order.STEP), int(Order.START)
_TERMINATED, _TRUNCATED = int(Outcome.TERMINATED), int(Outcome.TRUNCATED)
_NEXT, _FAILED = int(Outcome.NEXT), int(Outcome.FAILED)


@dataclass(frozen=True)
class UnreadableTask:
    """Stands for a task that could not be unpickled here; episodes that need it fail."""

    error: Exception


class Rows(ABC):
    """One group of rows: what the coordinator's orders are carried out on.

    Args:
        num_rows: Rows, R.
        tasks: The tasks that starts and offers may name, by number.
    """

    def __init__(self, num_rows: int, tasks: Mapping[int, Any]) -> None:
        self.num_rows = num_rows
        self._tasks = tasks
        self._failures: list[RowFailure] = []
        self._phase = ""

    def attach(self, arrays: Arrays) -> None:
        """Work on these arrays from now on."""
        self._arrays = arrays
        self._floating = np.issubdtype(arrays.observations.dtype, np.floating)

    def step(self) -> list[RowFailure]:
        """Do every row's order; return the rows that failed, and why."""
        began = time.perf_counter()
        arrays = self._arrays
        arrays.outcomes.fill(0)
        self._failures = []
        self._step()
        self._refuse_not_finite()
        arrays.busy_seconds[0] += time.perf_counter() - began
        return self._failures

    def _task(self, number: int) -> Any:
        task = self._tasks[number]
        if isinstance(task, UnreadableTask):
            raise task.error
        return task

    @abstractmethod
    def _step(self) -> None:
        """Do every row's order."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""

    def _fail(self, row: int, error: BaseException, *, of_next: bool = False) -> None:
        text = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip()
        self._failures.append(RowFailure(row, self._phase, summary, text, of_next=of_next))
        self._arrays.outcomes[row] |= _FAILED
        if not of_next:
            self._arrays.rewards[row] = 0  # it may be a NaN that the environment gave first

    def _refuse_not_finite(self) -> None:
        """Fail the rows with a NaN or an infinity where an episode would record it."""
        arrays = self._arrays
        if np.isfinite(arrays.rewards).all() and (
            not self._floating
            or (
                np.isfinite(arrays.observations).all()
                and (not arrays.outcomes.any() or np.isfinite(arrays.last_observations).all())
            )
        ):
            return
        for row in np.flatnonzero(arrays.orders).tolist():
            outcome = int(arrays.outcomes[row])
            if outcome & _FAILED:
                continue
            if arrays.orders[row] == _STEP:
                ended = outcome & (_TERMINATED | _TRUNCATED)
                seen = (arrays.last_observations if ended else arrays.observations)[row]
                reward = arrays.rewards[row]
                if not (np.isfinite(seen).all() and np.isfinite(reward)):
                    self._fail_not_finite(row, f"observation {seen} and reward {reward}")
            if arrays.orders[row] == _START or outcome & _NEXT:
                first = arrays.observations[row]
                if not np.isfinite(first).all():
                    text = f"first observation {first}"
                    self._fail_not_finite(row, text, of_next=bool(outcome & _NEXT))

    def _fail_not_finite(self, row: int, what: str, *, of_next: bool = False) -> None:
        arrays = self._arrays
        phase = "reset" if of_next or arrays.orders[row] == _START else "step"
        text = f"the environment returned {what}"
        self._failures.append(RowFailure(row, phase, text, "", not_finite=True, of_next=of_next))
        arrays.outcomes[row] |= _FAILED
        # Left in place they would send every later command through the slow test.
        arrays.rewards[row] = 0
        if of_next or not arrays.outcomes[row] & _NEXT:
            arrays.observations[row] = 0
        if not of_next:
            arrays.last_observations[row] = 0


class SingleRows(Rows):
    """Rows of one Gymnasium environment each, made when a row is first used."""

    def __init__(
        self, maker: EnvMaker, num_rows: int, tasks: Mapping[int, Any], first: AnyEnv | None
    ) -> None:
        super().__init__(num_rows, tasks)
        self._maker = maker
        self._envs: list[AnyEnv | None] = [None] * num_rows
        self._steps: list[Callable[[Any], Any]] = [_step_before_start] * num_rows
        self._task_numbers = [NO_TASK] * num_rows
        self._limits = [_NO_LIMIT] * num_rows
        self._steps_left = [_NO_LIMIT] * num_rows
        if first is not None:
            self._put(0, first)

    def _put(self, row: int, env: AnyEnv) -> AnyEnv:
        self._limits[row] = _NO_LIMIT
        if type(env) is TimeLimit:  # counting here costs a fifth of a wrapper's call
            self._limits[row] = env._max_episode_steps
            env = env.env
        self._envs[row] = env
        self._steps[row] = env.step
        self._task_numbers[row] = NO_TASK
        return env

    def _discard(self, row: int) -> None:
        env, self._envs[row] = self._envs[row], None
        if env is not None:
            env.close()

    def _begin(self, row: int, seed: int, task_number: int) -> None:
        env = self._envs[row]
        # An environment's initial task is known to its constructor alone.
        if env is None or (task_number == NO_TASK != self._task_numbers[row]):
            self._phase = "constructor"
            self._discard(row)
            env = self._put(row, self._maker.make())
        if task_number != self._task_numbers[row]:
            self._phase = "reset_task"
            reset_task(env, self._task(task_number))
            self._task_numbers[row] = task_number
        self._phase = "reset"
        self._steps_left[row] = self._limits[row]
        observation, _ = env.reset(seed=seed)
        self._write(self._arrays.observations, row, observation)

    def _write(self, target: NDArray[Any], row: int, observation: Any) -> None:
        # Assignment would broadcast a smaller shape without a word.
        observation = np.asarray(observation)
        if observation.shape != target.shape[1:]:
            message = (
                f"an observation has shape {observation.shape}, the environment's "
                f"observation space says {target.shape[1:]}"
            )
            raise ValueError(message)
        target[row] = observation

    def _step(self) -> None:
        arrays = self._arrays
        observations, rewards, outcomes = arrays.observations, arrays.rewards, arrays.outcomes
        shape = observations.shape[1:]
        # Copied once, since an environment may keep its action and the coordinator writes the next
        # one here. What Discrete gets is what Discrete.sample() gives: numpy's int64.
        actions: list[Any] = list(arrays.actions.copy())
        steps, steps_left = self._steps, self._steps_left
        next_offer, end_of_offers = arrays.offers.tolist()
        for row, order in enumerate(arrays.orders.tolist()):
            if order == _STEP:
                outcome = 0
                try:
                    self._phase = "step"
                    observation, reward, terminated, truncated, _ = steps[row](actions[row])
                    rewards[row] = reward
                    steps_left[row] -= 1
                    if not steps_left[row]:
                        truncated = True
                    if terminated or truncated:
                        outcome = _TERMINATED * bool(terminated) | _TRUNCATED * bool(truncated)
                        # Before the reset: an environment may reuse its observation's memory.
                        self._write(arrays.last_observations, row, observation)
                    elif observation.__class__ is np.ndarray and observation.shape == shape:
                        observations[row] = observation
                        continue
                    else:
                        self._write(observations, row, observation)
                        continue
                    outcomes[row] = outcome
                    if next_offer < end_of_offers:
                        outcomes[row] |= _NEXT
                        seed = int(arrays.offer_seed[next_offer])
                        task_number = int(arrays.offer_task[next_offer])
                        next_offer += 1
                        self._begin(row, seed, task_number)
                except (Exception, SystemExit) as error:
                    self._fail(row, error, of_next=bool(outcomes[row] & _NEXT))
                    self._abandon(row)
            elif order == _START:
                try:
                    self._begin(row, int(arrays.start_seed[row]), int(arrays.start_task[row]))
                except (Exception, SystemExit) as error:
                    self._fail(row, error)
                    self._abandon(row)

    def _abandon(self, row: int) -> None:
        """Drop an environment that raised: what state it is in, nobody knows."""
        with suppress(Exception):
            self._discard(row)
        self._envs[row] = None

    def close(self) -> None:
        """Close the environments."""
        for row in range(self.num_rows):
            self._abandon(row)


def _step_before_start(action: Any) -> Any:
    message = "a row was stepped before its first episode was started"
    raise AssertionError(message)


_NOBODYS_TASK = NO_TASK - 1
"""Of a row whose task was refused: what it has now, nobody knows."""


class VectorRows(Rows):
    """All rows in one natively vectorised environment."""

    def __init__(self, env: RowVectorEnv, tasks: Mapping[int, Any]) -> None:
        super().__init__(env.num_envs, tasks)
        self._env = env
        self._task_numbers = np.full(self.num_rows, NO_TASK)

    def _begin(
        self,
        rows: NDArray[np.intp],
        seeds: NDArray[np.int64],
        task_numbers: NDArray[np.int64],
        *,
        of_next: bool = False,
    ) -> None:
        """Begin an episode in each of these rows; those whose task is refused fail alone."""
        is_good = np.ones(len(rows), np.bool_)
        self._phase = "reset_task"
        changed = self._task_numbers[rows] != task_numbers
        for number in np.unique(task_numbers[changed]).tolist():
            takers = changed & (task_numbers == number)
            mask = np.zeros(self.num_rows, np.bool_)
            mask[rows[takers]] = True
            try:
                if number == NO_TASK:
                    self._env.restore_task(mask)
                else:
                    self._env.reset_task(self._task(number), mask)
            except (Exception, SystemExit) as error:
                self._task_numbers[mask] = _NOBODYS_TASK
                is_good &= ~takers
                self._fail_all(rows[takers], error, of_next=of_next)
            else:
                self._task_numbers[mask] = number
        rows, seeds = rows[is_good], seeds[is_good]
        if not rows.size:
            return
        self._phase = "reset"
        mask = np.zeros(self.num_rows, np.bool_)
        mask[rows] = True
        all_seeds: list[int | None] = [None] * self.num_rows
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            all_seeds[row] = seed
        try:
            observations, _ = self._env.reset(seed=all_seeds, options={"reset_mask": mask})
            self._arrays.observations[rows] = observations[rows]
        except (Exception, SystemExit) as error:
            self._fail_all(rows, error, of_next=of_next)

    def _step(self) -> None:
        arrays = self._arrays
        stepping = arrays.orders == _STEP
        starting = np.flatnonzero(arrays.orders == _START)
        try:
            if stepping.any():
                self._step_rows(stepping)
        except (Exception, SystemExit) as error:
            self._fail_all(np.flatnonzero(stepping), error)
        if starting.size:
            self._begin(starting, arrays.start_seed[starting], arrays.start_task[starting])

    def _step_rows(self, stepping: NDArray[np.bool_]) -> None:
        arrays = self._arrays
        self._phase = "step"
        observations, rewards, terminated, truncated, _ = self._env.step(arrays.actions)
        if stepping.all():
            arrays.observations[:] = observations
            arrays.rewards[:] = rewards
        else:
            arrays.observations[stepping] = observations[stepping]
            arrays.rewards[stepping] = rewards[stepping]
        ended = np.flatnonzero((terminated | truncated) & stepping)
        if not ended.size:
            return
        arrays.last_observations[ended] = observations[ended]
        arrays.outcomes[ended] = _TERMINATED * terminated[ended] | _TRUNCATED * truncated[ended]
        next_offer, end_of_offers = arrays.offers.tolist()
        takers = ended[: end_of_offers - next_offer]
        if takers.size:
            offers = slice(next_offer, next_offer + takers.size)
            seeds, tasks = arrays.offer_seed[offers], arrays.offer_task[offers]
            self._begin(takers, seeds, tasks, of_next=True)
            arrays.outcomes[takers] |= _NEXT

    def _fail_all(
        self, rows: NDArray[np.intp], error: BaseException, *, of_next: bool = False
    ) -> None:
        # The exception of a vectorised environment tells nothing of the row.
        for row in rows.tolist():
            self._fail(row, error, of_next=of_next)

    def close(self) -> None:
        """Close the environment."""
        with suppress(Exception):
            self._env.close()


DEFAULT_ROWS = 128
"""Rows of a worker of single environments where the user names no number."""
DEFAULT_VECTOR_ROWS = 256
"""The same for a natively vectorised environment."""


@dataclass(frozen=True)
class Fleet:
    """All rows of one worker, and what is known of their environments."""

    groups: list[Rows]
    tasks: dict[int, Any]
    """Known to all groups; kept and forgotten as the coordinator says."""
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    has_tasks: bool
    is_vectorized: bool

    @classmethod
    def make(cls, maker: EnvMaker, num_rows: int | None, num_groups: int | None) -> Self:
        """Make the rows of one worker, vectorised where the environment offers it.

        Args:
            maker: Makes the environments.
            num_rows: In all groups together; None: the default.
            num_groups: None: two, so that the worker has work while the coordinator computes;
                one for vectorised environments, whose steps are cheaper than a second message.
        """
        tasks: dict[int, Any] = {}
        sizes = _shares(num_rows or DEFAULT_VECTOR_ROWS, num_groups or 1)
        vector_env = maker.make_rows(sizes[0])
        if vector_env is not None:
            groups: list[Rows] = [VectorRows(vector_env, tasks)]
            for size in sizes[1:]:
                more = maker.make_rows(size)
                assert more is not None
                groups.append(VectorRows(more, tasks))
            own = getattr(type(vector_env), "reset_task", RowVectorEnv.reset_task)
            takes_tasks = own is not RowVectorEnv.reset_task
            spaces = vector_env.single_observation_space, vector_env.single_action_space
            return cls(groups, tasks, *spaces, takes_tasks, True)
        first = maker.make()
        groups = []
        for size in _shares(num_rows or DEFAULT_ROWS, num_groups or 2):
            groups.append(SingleRows(maker, size, tasks, None if groups else first))
        spaces = first.observation_space, first.action_space
        return cls(groups, tasks, *spaces, has_tasks(first), False)

    def close(self) -> None:
        """Close the environments."""
        for group in self.groups:
            group.close()


def _shares(num_rows: int, num_groups: int) -> list[int]:
    """Divide rows among groups, of which none is empty."""
    num_groups = min(num_groups, num_rows)
    return [(num_rows + index) // num_groups for index in reversed(range(num_groups))]
