"""Rows in one natively vectorised environment."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmaml.envs.rows import RowVectorEnv
from asyncmaml.worker.protocol import NO_TASK
from asyncmaml.worker.rows import NEXT, START, STEP, TERMINATED, TRUNCATED, Rows, refuse_misfit

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
        for number in sorted(set(task_numbers[changed].tolist())):
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
            refuse_misfit(observations, self._arrays.observations)
            self._arrays.observations[rows] = observations[rows]
        except (Exception, SystemExit) as error:
            self._fail_all(rows, error, of_next=of_next)

    def _step(self) -> None:
        arrays = self._arrays
        stepping = arrays.orders == STEP
        starting = (arrays.orders == START).nonzero()[0]
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
        refuse_misfit(observations, arrays.observations)
        if stepping.all():
            arrays.observations[:] = observations
            arrays.rewards[:] = rewards
        else:
            arrays.observations[stepping] = observations[stepping]
            arrays.rewards[stepping] = rewards[stepping]
        ended = ((terminated | truncated) & stepping).nonzero()[0]
        if not ended.size:
            return
        arrays.last_observations[ended] = observations[ended]
        arrays.outcomes[ended] = TERMINATED * terminated[ended] | TRUNCATED * truncated[ended]
        next_offer, end_of_offers = arrays.offers.tolist()
        takers = ended[: end_of_offers - next_offer]
        if takers.size:
            offers = slice(next_offer, next_offer + takers.size)
            seeds, tasks = arrays.offer_seed[offers], arrays.offer_task[offers]
            self._begin(takers, seeds, tasks, of_next=True)
            arrays.outcomes[takers] |= NEXT

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
