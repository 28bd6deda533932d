"""R rows of environments, stepped one command at a time: what both kinds have in common.

Runs in a worker process, or in the sampler thread where there are no workers.

A row is in an episode or idle. On a command each row does its order; a row whose episode ends
takes the next offered episode at once, and its true last observation is kept apart from the
first one of the episode that follows.
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncmaml.worker.layout import Arrays
from asyncmaml.worker.protocol import Order, Outcome, RowFailure

# As plain numbers, since they are compared and combined once for every row and step.
STEP, START = int(Order.STEP), int(Order.START)
TERMINATED, TRUNCATED = int(Outcome.TERMINATED), int(Outcome.TRUNCATED)
NEXT, FAILED = int(Outcome.NEXT), int(Outcome.FAILED)


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
        ended = time.perf_counter()
        arrays.busy_seconds[0] += ended - began
        # One clock for all processes of a machine: these can be compared with the sampler's.
        arrays.step_times[:] = began, ended
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
        self._arrays.outcomes[row] |= FAILED
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
        failed = {(failure.row, failure.of_next) for failure in self._failures}
        for row in np.flatnonzero(arrays.orders).tolist():
            outcome = int(arrays.outcomes[row])
            if arrays.orders[row] == STEP and (row, False) not in failed:
                ended = outcome & (TERMINATED | TRUNCATED)
                seen = (arrays.last_observations if ended else arrays.observations)[row]
                reward = arrays.rewards[row]
                if not (np.isfinite(seen).all() and np.isfinite(reward)):
                    self._fail_not_finite(row, f"observation {seen} and reward {reward}")
            of_next = bool(outcome & NEXT)
            if (arrays.orders[row] == START or of_next) and (row, of_next) not in failed:
                first = arrays.observations[row]
                if not np.isfinite(first).all():
                    text = f"first observation {first}"
                    self._fail_not_finite(row, text, of_next=of_next)

    def _fail_not_finite(self, row: int, what: str, *, of_next: bool = False) -> None:
        arrays = self._arrays
        phase = "reset" if of_next or arrays.orders[row] == START else "step"
        text = f"the environment returned {what}"
        self._failures.append(RowFailure(row, phase, text, "", not_finite=True, of_next=of_next))
        arrays.outcomes[row] |= FAILED
        # Left in place they would send every later command through the slow test.
        arrays.rewards[row] = 0
        if of_next or not arrays.outcomes[row] & NEXT:
            arrays.observations[row] = 0
        if not of_next:
            arrays.last_observations[row] = 0
