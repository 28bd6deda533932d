"""What went wrong with a row, a policy or a worker, as the error that `sample()` raises."""

import errno
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmaml.errors import (
    AsyncMAMLError,
    EnvironmentFailedError,
    EpisodeError,
    NotFiniteError,
    OutOfSpaceError,
    PolicyError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)
from asyncmaml.sampling.actor import NotFiniteActionError
from asyncmaml.sampling.process import WorkerProcess, describe_exit
from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.transitions import TransitionLog
from asyncmaml.worker.protocol import RowFailure

EXIT_SECONDS = 0.5
"""That we wait for a process which is about to end, so as to tell how it did."""


def row_error(request: Request, batch_id: int, step: int, failure: RowFailure) -> EpisodeError:
    """Return the error for an environment that raised, or returned what it must not.

    Args:
        request: Owns the episode.
        batch_id: Of the episode.
        step: The environment step that failed; not told where none was under way.
        failure: What the rows said.
    """
    where = request.where(batch_id, step if failure.phase == "step" else None)
    message = f"{failure.phase} failed: {failure.error}{_in_words(where)}"
    if failure.not_finite:
        return NotFiniteError(message, **where)
    if failure.out_of_space:
        return OutOfSpaceError(message, **where)
    return EnvironmentFailedError(message, remote_traceback=failure.remote_traceback, **where)


def policy_error(
    request: Request,
    log: TransitionLog,
    entries: slice | NDArray[np.intp],
    error: BaseException,
) -> AsyncMAMLError:
    """Return the error for a policy that raised, does not fit, or drew a NaN or an infinity."""
    if isinstance(error, NotFiniteActionError):
        batch_id = int(log.batch_ids[entries][error.index])
        where = request.where(batch_id, int(log.steps[entries][error.index]))
        return NotFiniteError(f"the policy drew {error}{_in_words(where)}", **where)
    if isinstance(error, PolicyError):
        return error
    failure = PolicyError(f"the policy raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def start_failure(
    name: str, answer: list[RowFailure] | None, process: WorkerProcess
) -> AsyncMAMLError:
    """Return the error for a worker that could not make its first environment, or ended over it."""
    if answer:
        message = f"{name} could not be made in a worker: {answer[0].error}"
        return EnvironmentFailedError(message, remote_traceback=answer[0].remote_traceback)
    message = f"a worker {_ended(process)} before it had made {name}"
    return WorkerStartError(message, stderr_tail=process.output.stderr_tail())


def start_refused(error: OSError) -> WorkerStartError:
    """Return the error for a worker that this machine gives no process or descriptor for."""
    message = f"a worker could not be started: {error}"
    if error.errno == errno.EMFILE:
        message += "; raise the limit on open files (ulimit -n), each worker takes 9 of them, or "
        message += "lower num_workers"
    return WorkerStartError(message)


def start_late(name: str, seconds: float, process: WorkerProcess) -> WorkerStartError:
    """Return the error for a worker that did not make its first environment in time."""
    message = (
        f"a worker did not make {name} within {seconds} s and was killed; raise start_timeout if "
        "its constructor may take longer"
    )
    return WorkerStartError(message, stderr_tail=process.output.stderr_tail())


def worker_died(worker: int, process: WorkerProcess) -> WorkerDiedError:
    """Return what is to be told of a worker that has closed its end of the pipe."""
    message = f"worker {worker} {_ended(process)}"
    return WorkerDiedError(message, stderr_tail=process.output.stderr_tail())


def _ended(process: WorkerProcess) -> str:
    process.wait_for_exit(EXIT_SECONDS)  # it has closed its pipe: it ends
    return describe_exit(process.exitcode)


def in_episode(
    error: WorkerError, request: Request, batch_id: int, step: int | None, times: int
) -> WorkerError:
    """Return the error of a lost worker for an episode that has lost `times` of them."""
    where = request.where(batch_id, step)
    message = f"{error}; {times} times over this episode{_in_words(where)}"
    return type(error)(message, stderr_tail=error.stderr_tail, **where)


def _in_words(where: dict[str, Any]) -> str:
    told = ("batch_id", "step", "seed", "task")
    named = [f"{name} {where[name]}" for name in told if where[name] is not None]
    return f" (in the episode with {', '.join(named)})"
