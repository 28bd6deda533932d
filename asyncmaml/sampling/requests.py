"""Requests and the queue of their episodes. Plain state: no input or output, no await."""

import asyncio
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import ConfigurationError
from asyncmaml.sampling.actions import ActionPlan
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.streams import EpisodeStreams
from asyncmaml.worker.protocol import Outcome

Deliver = Callable[["BatchEpisodes | BaseException"], None]
"""Takes a request's result to whoever awaits it; called once, in the sampler thread."""

_SEEDS_AT_ONCE = 256


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
            payload: bytes = cloudpickle.dumps(task)
        except Exception as error:
            message = f"the task {task!r} cannot be sent to a worker: {error}; use plain data"
            raise ConfigurationError(message) from error
        return cls(payload, pickle.loads(payload))


def deliver_to(future: "asyncio.Future[BatchEpisodes]") -> Deliver:
    """Return what sets the result of a caller's future from the sampler thread."""
    loop = future.get_loop()

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
            loop.call_soon_threadsafe(set_result, result)

    return deliver


class Request:
    """One call of `sample()`: B episodes, of which some are not yet handed out, under way, or in.

    Args:
        policy: Snapshot of the policy and its parameters.
        streams: Where the episodes' seeds and noise come from.
        task: None for the environment's own, initial task.
        batch_size: Episodes, B.
        gamma: For the `BatchEpisodes`.
        device: For the `BatchEpisodes`.
        deliver: Takes the result.
    """

    def __init__(
        self,
        policy: PolicySnapshot,
        streams: EpisodeStreams,
        task: Task | None,
        batch_size: int,
        gamma: float,
        device: str,
        deliver: Deliver,
    ) -> None:
        self.policy = policy
        self.streams = streams
        self.task = task
        self.batch_size = batch_size
        self.episodes = BatchEpisodes(batch_size, gamma=gamma, device=device)
        self.deliver = deliver
        self.slot = -1  # given by the coordinator
        self.task_number = -1  # likewise
        self.num_unfinished = batch_size
        self.attempts: dict[int, int] = {}  # by batch id, where a worker was lost
        self._next = 0
        self._given_back: list[range] = []
        self._seeds = np.empty(0, np.int64)
        self._lengths = np.zeros(batch_size, np.int64)
        self._ends = np.zeros((2, batch_size), np.bool_)
        self._last_observations: NDArray[Any] | None = None

    @property
    def plan(self) -> ActionPlan | None:
        """How the policy's actions are drawn; known after its first forward."""
        return self.policy.plan

    @property
    def num_unassigned(self) -> int:
        """Episodes that no row has."""
        return self.batch_size - self._next + sum(map(len, self._given_back))

    def take(self, count: int) -> range:
        """Hand out up to `count` episodes with consecutive batch ids, at least one."""
        if self._given_back:
            ids = self._given_back.pop()
            if len(ids) > count:
                self._given_back.append(ids[count:])
            return ids[:count]
        start = self._next
        self._next = min(start + count, self.batch_size)
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
            stop = min(self.batch_size, max(ids.stop, known + _SEEDS_AT_ONCE))
            self._seeds = np.concatenate((self._seeds, self.streams.reset_seeds(known, stop)))
        return self._seeds[ids.start : ids.stop]

    def end_episodes(
        self,
        batch_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        outcomes: NDArray[np.uint8],
        last: NDArray[Any],
    ) -> None:
        """Note how episodes ended: their lengths, outcomes and last observations."""
        if self._last_observations is None:
            self._last_observations = np.zeros((self.batch_size, *last.shape[1:]), last.dtype)
        self._lengths[batch_ids] = lengths
        self._ends[0, batch_ids] = outcomes & Outcome.TERMINATED
        self._ends[1, batch_ids] = outcomes & Outcome.TRUNCATED
        self._last_observations[batch_ids] = last
        self.num_unfinished -= len(batch_ids)

    def finish(self) -> None:
        """Complete the `BatchEpisodes`, whose transitions are all stored."""
        assert self._last_observations is not None
        ids = np.arange(self.batch_size)
        terminated, truncated = self._ends
        self.episodes.finish(ids, self._last_observations, terminated, truncated, self._lengths)
        self.episodes.task = self.task.value if self.task is not None else None
        self.episodes.first_batch_id = self.streams.first

    def where(self, batch_id: int, step: int | None) -> dict[str, Any]:
        """Return what an `EpisodeError` says of an episode."""
        seed = int(self.seeds(range(batch_id, batch_id + 1))[0])
        task = self.task.value if self.task is not None else None
        shown_id = self.streams.first + batch_id
        return {"task": task, "seed": seed, "batch_id": shown_id, "step": step}


class EpisodeQueue:
    """The episodes that no row has, of all requests: first come, first served.

    A request that came earlier is handed out whole before a later one, and a row never waits
    while any request has an episode left.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._num_unassigned = 0

    def __len__(self) -> int:
        return self._num_unassigned

    def add(self, request: Request) -> None:
        """Append a request that has episodes left."""
        self._requests.append(request)
        self._num_unassigned += request.num_unassigned

    def remove(self, request: Request) -> None:
        """Drop a request, if it is queued."""
        if request in self._requests:
            self._requests.remove(request)
            self._num_unassigned -= request.num_unassigned

    def take(self, count: int) -> list[tuple[Request, range]]:
        """Hand out up to `count` episodes."""
        taken: list[tuple[Request, range]] = []
        while count and self._requests:
            request = self._requests[0]
            ids = request.take(count)
            taken.append((request, ids))
            count -= len(ids)
            self._num_unassigned -= len(ids)
            if not request.num_unassigned:
                self._requests.popleft()
        return taken

    def give_back(self, request: Request, ids: range) -> None:
        """Take episodes back; their request keeps its place at the head."""
        if not ids:
            return
        if request not in self._requests:
            self._requests.appendleft(request)
        request.give_back(ids)
        self._num_unassigned += len(ids)
