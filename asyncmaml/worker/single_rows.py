"""Rows of one Gymnasium environment each."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.tasks import reset_task
from asyncmaml.worker.protocol import NO_TASK
from asyncmaml.worker.rows import NEXT, START, STEP, TERMINATED, TRUNCATED, Rows, refuse_misfit

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]

_NO_LIMIT = -1  # counts down and away from 0


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
        observation = np.asarray(observation)
        place = target[row, ...]
        refuse_misfit(observation, place)
        place[...] = observation

    def _step(self) -> None:
        arrays = self._arrays
        observations, rewards, outcomes = arrays.observations, arrays.rewards, arrays.outcomes
        shape, dtype, floating = observations.shape[1:], observations.dtype, self._floating
        # Copied once, since an environment may keep its action and the coordinator writes the next
        # one here. What Discrete gets is what Discrete.sample() gives: numpy's int64.
        actions: list[Any] = list(arrays.actions.copy())
        steps, steps_left = self._steps, self._steps_left
        next_offer, end_of_offers = arrays.offers.tolist()
        at_work = arrays.at_work.data  # 25 ns a row cheaper than the array
        for row, order in enumerate(arrays.orders.tolist()):
            if order == STEP:
                at_work[0] = row
                outcome = 0
                try:
                    self._phase = "step"
                    observation, reward, terminated, truncated, _ = steps[row](actions[row])
                    rewards[row] = reward
                    steps_left[row] -= 1
                    if not steps_left[row]:
                        truncated = True
                    if terminated or truncated:
                        outcome = TERMINATED * bool(terminated) | TRUNCATED * bool(truncated)
                        # Before the reset: an environment may reuse its observation's memory.
                        self._write(arrays.last_observations, row, observation)
                    elif (
                        observation.__class__ is np.ndarray
                        and observation.shape == shape
                        and (floating or observation.dtype == dtype)
                    ):
                        observations[row] = observation
                        continue
                    else:
                        self._write(observations, row, observation)
                        continue
                    outcomes[row] = outcome
                    if next_offer < end_of_offers:
                        outcomes[row] |= NEXT
                        at_work[0] = self.num_rows + next_offer
                        seed = int(arrays.offer_seed[next_offer])
                        task_number = int(arrays.offer_task[next_offer])
                        next_offer += 1
                        self._begin(row, seed, task_number)
                except (Exception, SystemExit) as error:
                    self._fail(row, error, of_next=bool(outcomes[row] & NEXT))
                    self._abandon(row)
            elif order == START:
                at_work[0] = row
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
