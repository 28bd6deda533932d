"""R rows of environments, stepped one command at a time: what both kinds have in common.

Runs in a worker process, or in the sampler thread where there are no workers.

A row is in an episode or idle. On a command each row does its order; a row whose episode ends
takes the next offered episode at once, and its true last observation is kept apart from the
first one of the episode that follows.
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from asyncmaml.worker.layout import Arrays
from asyncmaml.worker.protocol import Order, Outcome, RowFailure

# As plain numbers, since they are compared and combined once for every row and step.
STEP, START = int(Order.STEP), int(Order.START)
TERMINATED, TRUNCATED = int(Outcome.TERMINATED), int(Outcome.TRUNCATED)
NOWHERE = -1
NEXT, FAILED = int(Outcome.NEXT), int(Outcome.FAILED)


AnySpace: TypeAlias = gymnasium.Space[Any]
Fault: TypeAlias = Callable[[Any, Any, Any], str]
"""Of an observation, a reward and an action, where these are, says what is wrong with them."""


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

    def attach(self, arrays: Arrays, spaces: tuple[AnySpace, AnySpace] | None = None) -> None:
        """Work on these arrays from now on; check against the spaces, where there are any."""
        self._arrays = arrays
        self._spaces = spaces
        arrays.at_work[0] = NOWHERE
        self._floating = np.issubdtype(arrays.observations.dtype, np.floating)

    def step(self) -> list[RowFailure]:
        """Do every row's order; return the rows that failed, and why."""
        began = time.perf_counter()
        arrays = self._arrays
        arrays.outcomes.fill(0)
        self._failures = []
        self._step()
        arrays.at_work[0] = NOWHERE
        if not self._is_all_finite():
            self._refuse(_not_finite, not_finite=True)
        if self._spaces is not None:
            self._refuse(self._outside, out_of_space=True)
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

    def _is_all_finite(self) -> bool:
        """Whether no NaN or infinity stands where an episode would record it."""
        arrays = self._arrays
        return bool(np.isfinite(arrays.rewards).all()) and (
            not self._floating
            or bool(
                np.isfinite(arrays.observations).all()
                and (not arrays.outcomes.any() or np.isfinite(arrays.last_observations).all())
            )
        )

    def _refuse(self, fault: Fault, **kind: bool) -> None:
        """Fail the rows where something is wrong with the data.

        Args:
            fault: Says what, if anything.
            kind: A field of `RowFailure` for such a fault.
        """
        arrays = self._arrays
        failed = {(failure.row, failure.of_next) for failure in self._failures}
        for row in np.flatnonzero(arrays.orders).tolist():
            outcome = int(arrays.outcomes[row])
            if arrays.orders[row] == STEP and (row, False) not in failed:
                ended = outcome & (TERMINATED | TRUNCATED)
                seen = (arrays.last_observations if ended else arrays.observations)[row]
                text = fault(seen, arrays.rewards[row], arrays.actions[row])
                if text:
                    self._fail_data(row, text, **kind)
            of_next = bool(outcome & NEXT)
            begins = arrays.orders[row] == START or of_next
            if begins and (row, of_next) not in failed:
                text = fault(arrays.observations[row], None, None)
                if text:
                    self._fail_data(row, text, of_next=of_next, **kind)

    def _fail_data(self, row: int, text: str, *, of_next: bool = False, **kind: bool) -> None:
        arrays = self._arrays
        phase = "reset" if of_next or arrays.orders[row] == START else "step"
        self._failures.append(RowFailure(row, phase, text, "", of_next=of_next, **kind))
        arrays.outcomes[row] |= FAILED
        # Left in place they would send every later command through the slow test.
        arrays.rewards[row] = 0
        if of_next or not arrays.outcomes[row] & NEXT:
            arrays.observations[row] = 0
        if not of_next:
            arrays.last_observations[row] = 0

    def _outside(self, seen: Any, reward: Any, action: Any) -> str:
        assert self._spaces is not None
        observation_space, action_space = self._spaces
        if not observation_space.contains(np.asarray(seen, observation_space.dtype)):
            return f"the environment's observation {seen} lies outside of {observation_space}"
        if action is not None and not action_space.contains(np.asarray(action, action_space.dtype)):
            return f"the action {action} lies outside of {action_space}"
        return ""


def _not_finite(seen: Any, reward: Any, action: Any) -> str:
    if np.isfinite(seen).all() and (reward is None or np.isfinite(reward)):
        return ""
    if reward is None:
        return f"the environment returned first observation {seen}"
    return f"the environment returned observation {seen} and reward {reward}"


def refuse_misfit(observations: NDArray[Any], target: NDArray[Any]) -> None:
    """Refuse observations that assignment would broadcast, wrap or cut without a word.

    Args:
        observations: What the environment returned.
        target: Where they are to be written, of the shape and dtype that its space says.

    Raises:
        ValueError: The shape is another, or an integer dtype cannot hold the values.
    """
    if observations.shape != target.shape:
        message = (
            f"an observation has shape {observations.shape}, the environment's "
            f"observation space says {target.shape}"
        )
        raise ValueError(message)
    if observations.dtype == target.dtype or np.issubdtype(target.dtype, np.floating):
        return
    with np.errstate(invalid="ignore"):
        is_held = (observations.astype(target.dtype) == observations).all()
    if not is_held:
        message = (
            f"an observation is of dtype {observations.dtype}, and as {target.dtype}, which the "
            "environment's observation space says, its values would be others"
        )
        raise ValueError(message)
