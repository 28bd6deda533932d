"""The log that every tick appends its rows to, whichever requests they belong to.

A tick costs the same few array operations for one request as for forty: its rows go in as one
block, together with the request, batch id and step of each. From time to time the log is emptied
into the requests' `BatchEpisodes`, again in a few array operations for each request.

An entry is made when its action is drawn and becomes whole when the reward arrives; entries of
rows whose step is under way stay in the log.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.row_places import Places, rows_at

NOBODY = -1
_ENTRIES = 8192
_TICKS = 64
"""Of all rows that fit at least, so that emptying it for many requests costs little of each."""
_MAX_BYTES = 64 << 20


@dataclass
class Pending:
    """A lane's entries `start:stop` of the log that wait for their rewards."""

    start: int
    stop: int


class TransitionLog:
    """A block of transitions on their way to their requests.

    Args:
        num_rows: Rows that can have an entry pending, N.
        observation: Shape and dtype of one observation.
        action: Shape and dtype of one action.
    """

    def __init__(
        self,
        num_rows: int,
        observation: tuple[tuple[int, ...], np.dtype[Any]],
        action: tuple[tuple[int, ...], np.dtype[Any]],
    ) -> None:
        entry_bytes = int(np.prod(observation[0], dtype=np.int64)) * observation[1].itemsize
        fitting = min(max(_ENTRIES, _TICKS * num_rows), _MAX_BYTES // max(1, entry_bytes))
        size = max(fitting, 2 * num_rows)
        self.observations = np.zeros((size, *observation[0]), observation[1])
        self.actions = np.zeros((size, *action[0]), action[1])
        self.rewards = np.zeros(size, np.float32)
        self.log_probs = np.zeros(size, np.float32)
        self.owners = np.full(size, NOBODY, np.int32)
        self.batch_ids = np.zeros(size, np.int64)
        self.steps = np.zeros(size, np.int64)
        self._is_whole = np.zeros(size, np.bool_)
        self._size = size
        self._end = 0

    def _fields(self) -> Iterator[NDArray[Any]]:
        yield from (self.observations, self.actions, self.rewards, self.log_probs)
        yield from (self.owners, self.batch_ids, self.steps, self._is_whole)

    def has_room(self, count: int) -> bool:
        """Whether `count` more entries fit."""
        return self._end + count <= self._size

    def append(self, owners: NDArray[Any], batch_ids: NDArray[Any], steps: NDArray[Any]) -> int:
        """Make one entry for each row and return the first's place.

        Observations, actions and log-probabilities are written by the caller.
        """
        start, self._end = self._end, self._end + len(owners)
        entries = slice(start, self._end)
        self.owners[entries] = owners
        self.batch_ids[entries] = batch_ids
        self.steps[entries] = steps
        self._is_whole[entries] = False
        return start

    def complete(self, pending: Pending, rewards: NDArray[np.float32]) -> None:
        """Add the rewards, which make these entries whole."""
        self.rewards[pending.start : pending.stop] = rewards
        self._is_whole[pending.start : pending.stop] = True

    def drop(self, pending: Pending) -> None:
        """Disown entries whose rewards will never come."""
        self.owners[pending.start : pending.stop] = NOBODY

    def forget(self, request: Request) -> None:
        """Disown a request's entries."""
        owners = self.owners[: self._end]
        owners[owners == request.slot] = NOBODY

    def empty_one(self, request: Request) -> None:
        """Move a request's whole entries into its `BatchEpisodes`."""
        end = self._end
        mine = (self.owners[:end] == request.slot) & self._is_whole[:end]
        self._move(request, slice(0, end) if mine.all() else np.flatnonzero(mine))

    def _move(self, request: Request, entries: Places) -> None:
        request.episodes.store(
            rows_at(self.steps, entries),
            rows_at(self.batch_ids, entries),
            rows_at(self.observations, entries),
            rows_at(self.actions, entries),
            rows_at(self.rewards, entries),
            rows_at(self.log_probs, entries),
        )
        self.owners[entries] = NOBODY

    def empty(self, requests: Mapping[int, Request], pending: Iterable[Pending]) -> None:
        """Move all whole entries into their `BatchEpisodes`, and the pending ones to the front.

        Args:
            requests: By slot.
            pending: All that there are.
        """
        whole = np.flatnonzero(self._is_whole[: self._end] & (self.owners[: self._end] != NOBODY))
        # Sorted once, rather than looked through for each request.
        whole = whole[np.argsort(self.owners[whole], kind="stable")]
        owners = self.owners[whole]
        begins = np.flatnonzero(np.diff(owners, prepend=NOBODY))
        for begin, end in pairwise([*begins.tolist(), len(whole)]):
            self._move(requests[int(owners[begin])], whole[begin:end])
        end = 0
        for entries in sorted(pending, key=lambda entries: entries.start):
            count = entries.stop - entries.start
            for field in self._fields():
                # To the left, and numpy copies as if there were no overlap.
                field[end : end + count] = field[entries.start : entries.stop]
            entries.start, entries.stop = end, end + count
            end += count
        self._end = end
