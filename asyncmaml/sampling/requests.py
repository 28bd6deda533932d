"""Requests: what a call asks for, and how far it is. Plain state: no input or output, no await."""

import asyncio
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, Literal, Self, get_args

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import ConfigurationError, EpisodeError
from asyncmaml.sampling.mailbox import Mailbox
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.statistics import SamplingRecord, Statistics
from asyncmaml.sampling.streams import EpisodeStreams
from asyncmaml.worker.protocol import Outcome

Deliver = Callable[["BatchEpisodes | BaseException"], None]
"""Takes a request's result to whoever awaits it; called once, in the sampler thread."""

_SEEDS_AT_ONCE = 256
_PLAIN = frozenset((bool, int, float, str, NoneType))


@dataclass(frozen=True)
class Task:
    """A task as it was when the request was made."""

    payload: bytes
    """Pickled, for the workers; what identifies it."""
    value: Any
    """For error messages."""

    @classmethod
    def of(cls, task: Any) -> Self | None:
        """Return a copy of the task; None for None.

        Raises:
            ConfigurationError: It cannot be pickled.
        """
        if task is None:
            return None
        try:
            # The same but for what plain data never holds, in a quarter of the time.
            pickler = pickle if _is_plain(task) else cloudpickle
            payload: bytes = pickler.dumps(task, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            message = f"the task {task!r} cannot be sent to a worker: {error}; use plain data"
            raise ConfigurationError(message) from error
        return cls(payload, pickle.loads(payload))


def deliver_to(future: "asyncio.Future[BatchEpisodes]", mailbox: Mailbox) -> Deliver:
    """Return what sets the result of a caller's future from the sampler thread.

    Args:
        future: The caller's.
        mailbox: Of the caller's loop.
    """

    def set_result(result: BatchEpisodes | BaseException) -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def deliver(result: BatchEpisodes | BaseException) -> None:
        # A caller whose loop has ended awaits nothing any more.
        with suppress(RuntimeError):
            mailbox.post(set_result, result)

    return deliver


def _is_plain(task: Any) -> bool:
    """Whether a task is a dict of numbers, texts and arrays of numbers."""
    return type(task) is dict and all(
        type(key) is str
        and (type(value) in _PLAIN or (type(value) is np.ndarray and not value.dtype.hasobject))
        for key, value in task.items()
    )


OnError = Literal["raise", "retry", "drop"]
"""What becomes of an episode whose environment, or worker, has failed."""
ON_ERROR: tuple[OnError, ...] = get_args(OnError)


@dataclass(frozen=True)
class Terms:
    """What a call asks for, beside the policy and the task."""

    batch_size: int
    gamma: float
    device: str
    first: int
    """Episodes after which the rest is dropped, at most `batch_size`."""
    on_error: OnError


class Request:
    """One call of `sample()`: B episodes, of which some are not yet handed out, under way, or in.

    One that waits for its turn holds the copy of its parameters and nothing that grows with B;
    requests that have begun are as many as there are rows, at most.

    Args:
        policy: Snapshot of the policy and its parameters.
        streams: Where the episodes' seeds and noise come from.
        task: None for the environment's own, initial task.
        terms: See `Terms`.
        deliver: Takes the result.
    """

    def __init__(
        self,
        policy: PolicySnapshot,
        streams: EpisodeStreams,
        task: Task | None,
        terms: Terms,
        deliver: Deliver,
    ) -> None:
        self.policy = policy
        self.streams = streams
        self.task = task
        self.terms = terms
        self.deliver = deliver
        self.slot = -1  # given by the coordinator
        self.task_number = -1  # likewise
        self.is_done = False
        """Whether it is delivered or cancelled: nothing of it is to be begun any more."""
        self.called_at = time.perf_counter()
        self.begun_at: float | None = None
        self.statistics: Statistics | None = None
        """The sampler's when the request was taken up."""
        self.num_retries = 0
        self.failures: list[EpisodeError] = []
        """Of the episodes that were dropped."""
        self._attempts: dict[int, int] = {}  # by batch id, where a try has failed
        self._num_ended = 0
        self._next = 0
        self._given_back: list[range] = []
        self._seeds = np.empty(0, np.int64)

    @cached_property
    def episodes(self) -> BatchEpisodes:
        """Where the transitions go."""
        terms = self.terms
        return BatchEpisodes(
            terms.batch_size,
            gamma=terms.gamma,
            device=terms.device,
            first_batch_id=self.streams.first,
        )

    @cached_property
    def _ends(self) -> "_Ends":
        return _Ends(self.terms.batch_size)

    @property
    def num_unassigned(self) -> int:
        """Episodes that no row has."""
        return self.terms.batch_size - self._next + sum(map(len, self._given_back))

    @property
    def is_complete(self) -> bool:
        """Whether all episodes that it waits for are in, or have failed."""
        num_settled = self._num_ended + len(self.failures)
        return self._num_ended >= self.terms.first or num_settled == self.terms.batch_size

    @property
    def may_have_rows(self) -> bool:
        """Whether an episode of it may be queued or under way."""
        return self._num_ended < self.terms.batch_size

    def take(self, count: int) -> range:
        """Hand out up to `count` episodes with consecutive batch ids, at least one."""
        if self._given_back:
            ids = self._given_back.pop()
            if len(ids) > count:
                self._given_back.append(ids[count:])
            return ids[:count]
        start = self._next
        self._next = min(start + count, self.terms.batch_size)
        return range(start, self._next)

    def give_back(self, ids: range) -> None:
        """Take back episodes that were handed out and not begun, or lost."""
        if ids.stop == self._next:
            self._next = ids.start
        elif ids:
            self._given_back.append(ids)

    def seeds(self, ids: range) -> NDArray[np.int64]:
        """Return what the environments of these episodes are reset with."""
        known = len(self._seeds)
        if ids.stop > known:
            stop = min(self.terms.batch_size, max(ids.stop, known + _SEEDS_AT_ONCE))
            self._seeds = np.concatenate((self._seeds, self.streams.reset_seeds(known, stop)))
        return self._seeds[ids.start : ids.stop]

    def may_retry(self, batch_id: int, max_attempts: int) -> bool:
        """Note that a try of an episode has failed; return whether there may be another."""
        attempts = self._attempts[batch_id] = self._attempts.get(batch_id, 0) + 1
        if attempts > max_attempts:
            return False
        self.num_retries += 1
        return True

    def end_episodes(
        self,
        batch_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        outcomes: NDArray[np.uint8],
        last: NDArray[Any],
    ) -> int:
        """Note how episodes ended; return how many of them are wanted."""
        wanted = min(len(batch_ids), self.terms.first - self._num_ended)
        ids = batch_ids[:wanted]
        self._ends.enter(ids, lengths[:wanted], outcomes[:wanted], last[:wanted])
        self._num_ended += wanted
        return wanted

    def finished(self, statistics: Statistics) -> BatchEpisodes | EpisodeError:
        """Return the result, once all transitions are stored.

        Args:
            statistics: The sampler's, now.
        """
        if not self._num_ended:
            return self.failures[-1]  # all were dropped
        ends = self._ends
        ids = np.flatnonzero(ends.is_in)
        episodes = self.episodes
        episodes.finish(
            ids, ends.last[ids], ends.terminated[ids], ends.truncated[ids], ends.lengths[ids]
        )
        if len(ids) < self.terms.batch_size:
            episodes = episodes.select(ids)
        episodes.task = self.task.value if self.task is not None else None
        now = time.perf_counter()
        assert self.statistics is not None
        assert self.begun_at is not None
        episodes.record = SamplingRecord(
            queued_seconds=self.begun_at - self.called_at,
            seconds=now - self.called_at,
            before=self.statistics,
            after=statistics,
            num_dropped=self.terms.batch_size - len(ids),
            num_retries=self.num_retries,
            failures=tuple(self.failures),
        )
        return episodes

    def where(self, batch_id: int, step: int | None) -> dict[str, Any]:
        """Return what an `EpisodeError` says of an episode."""
        seed = int(self.seeds(range(batch_id, batch_id + 1))[0])
        task = self.task.value if self.task is not None else None
        shown_id = self.streams.first + batch_id
        return {"task": task, "seed": seed, "batch_id": shown_id, "step": step}


class _Ends:
    """How each of B episodes ended."""

    def __init__(self, batch_size: int) -> None:
        self.is_in = np.zeros(batch_size, np.bool_)
        self.lengths = np.zeros(batch_size, np.int64)
        self.terminated = np.zeros(batch_size, np.bool_)
        self.truncated = np.zeros(batch_size, np.bool_)
        self.last: NDArray[Any] = np.zeros(0)

    def enter(
        self,
        ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        outcomes: NDArray[np.uint8],
        last: NDArray[Any],
    ) -> None:
        """Note lengths, outcomes and last observations of these episodes."""
        if not self.last.size:
            self.last = np.zeros((len(self.is_in), *last.shape[1:]), last.dtype)
        self.is_in[ids] = True
        self.lengths[ids] = lengths
        self.terminated[ids] = outcomes & Outcome.TERMINATED
        self.truncated[ids] = outcomes & Outcome.TRUNCATED
        self.last[ids] = last
