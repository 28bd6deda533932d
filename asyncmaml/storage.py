"""The memory of a `BatchEpisodes`: growing numpy columns, and how each episode ended.

One column per quantity, time first, shape `(capacity, B, ...)`, so that the transitions of a tick
are one scatter per quantity. Letters: B episodes, T steps, N rows of one call.

The one rule: what was lent never changes. A tensor outside may lie on a column itself; whoever
writes next copies that column first.
"""

import copy
import os
import zipfile
from typing import Any, Self

import numpy as np

from asyncmaml.checked_rows import Array, Rows, as_array, check_rows, check_type, fail, some
from asyncmaml.errors import EpisodesError

FIRST_CAPACITY = 64  # steps; most episodes of the field have 20 to 200
_FILE_FORMAT = 1
_SCALARS = ("rewards", "log_probs")  # one float per row, whatever type they come in
_PER_EPISODE = (
    "batch_ids",
    "ends",
    "lengths",
    "finished",
    "terminated",
    "truncated",
    "last_observations",
)


class EpisodeStorage:
    """B episodes as arrays.

    Floating numbers are kept as float32, all others as they came first. Padding is 0.

    Attributes:
        columns: By name, shape `(capacity, B, ...)` each; empty until the first rows.
        batch_ids: Of each episode within its request, shape `(B,)`, like all that follow.
        lengths: Steps of each episode.
        finished: Whether the episode has ended.
        terminated: Whether the task itself ended it.
        truncated: Whether it was cut off.
        last_observations: What the last action led to, shape `(B, *O)`.

    Args:
        batch_size: B.
        capacity: Steps to make room for at first; it grows by doubling.
        first_batch_id: Of the first episode.
    """

    def __init__(
        self, batch_size: int, capacity: int = FIRST_CAPACITY, first_batch_id: int = 0
    ) -> None:
        self.columns: dict[str, Array] = {}
        self.batch_ids = np.arange(first_batch_id, first_batch_id + batch_size)
        self.lengths = np.zeros(batch_size, np.int64)
        self.finished = np.zeros(batch_size, np.bool_)
        self.terminated = np.zeros(batch_size, np.bool_)
        self.truncated = np.zeros(batch_size, np.bool_)
        self.last_observations: Array = np.zeros(batch_size, np.float32)
        self.ends = np.zeros(batch_size, np.int64)  # one past the last step ever stored
        self._batch_size = batch_size
        self._capacity = capacity
        self._records: dict[str, Array] = {}  # the columns' memory, shape (capacity * B,)
        self._lent: set[str] = set()  # columns that a tensor outside lies on

    # ---- writing: either everything fits and is written, or nothing is ----

    def append(
        self,
        batch_ids: Array,
        observations: Rows,
        actions: Rows,
        rewards: Rows,
        log_probs: Rows | None,
    ) -> None:
        """Put a row behind the steps of each of N different episodes; see `store`."""
        ids = self._checked_ids(batch_ids)
        counts = self._count(ids)
        if self.finished[ids].any():
            fail(f"append: episodes {some(ids[self.finished[ids]])} are finished already")
        self._write(self.lengths[ids], ids, observations, actions, rewards, log_probs)
        self.lengths += counts

    def store(
        self,
        steps: Array,
        batch_ids: Array,
        observations: Rows,
        actions: Rows,
        rewards: Rows,
        log_probs: Rows | None,
    ) -> None:
        """Put N rows at given steps of given episodes; `log_probs` come always or never.

        Raises:
            EpisodesError: The rows do not fit.
        """
        ids = self._checked_ids(batch_ids)
        check_rows("steps", steps, ids.shape, "iu")
        if ids.size and steps.min() < 0:
            fail(f"steps must be 0 or more, got {some(steps[steps < 0])}")
        steps = steps.astype(np.int64, copy=False)
        self._write(steps, ids, observations, actions, rewards, log_probs)

    def finish(
        self,
        batch_ids: Array,
        last_observations: Array,
        terminated: Array,
        truncated: Array,
        lengths: Array | None,
    ) -> None:
        """Mark N different episodes as ended; what lies behind `lengths` becomes padding.

        Raises:
            EpisodesError: The rows do not fit, or an episode is empty, finished already or
                shorter than its length.
        """
        ids = self._checked_ids(batch_ids)
        self._count(ids)
        counted = self.lengths[ids] if lengths is None else lengths
        check_rows("lengths", counted, ids.shape, "iu")
        check_rows("terminated", terminated, ids.shape, "biu")
        check_rows("truncated", truncated, ids.shape, "biu")
        if not ids.size:
            return
        stored = self.ends[ids]
        if self.finished[ids].any():
            fail(f"finish: episodes {some(ids[self.finished[ids]])} are finished already")
        if counted.min() < 1 or (counted > stored).any():
            fail(
                f"finish: the lengths of episodes {some(ids)} must lie between 1 and the "
                f"number of steps stored, {some(stored)}, got {some(counted)}; store first"
            )
        kept = self.last_observations
        check_rows("last_observations", last_observations, ids.shape + kept.shape[1:])
        check_type("last_observations", last_observations.dtype, kept.dtype)
        if (counted < stored).any():
            self._erase(ids, counted, stored)
        self.lengths[ids] = self.ends[ids] = counted
        self.terminated[ids] = terminated
        self.truncated[ids] = truncated
        self.last_observations[ids] = last_observations
        self.finished[ids] = True

    def _checked_ids(self, ids: Array) -> Array:
        """The batch ids as int64, each in range."""
        check_rows("batch_ids", ids, (ids.size,), "iu")
        if ids.size and (ids.min() < 0 or ids.max() >= self._batch_size):
            wrong = ids[(ids < 0) | (ids >= self._batch_size)]
            fail(f"batch_ids must lie in 0..{self._batch_size - 1}, got {some(wrong)}")
        return ids.astype(np.int64, copy=False)

    def _count(self, ids: Array) -> Array:
        """How often each episode occurs, shape `(B,)`; more than once is an error."""
        counts = np.bincount(ids, minlength=self._batch_size)
        if counts.max() > 1:
            twice = some(np.flatnonzero(counts > 1))
            fail(f"batch_ids of one call must differ, got {twice} more than once")
        return counts

    def _write(
        self,
        steps: Array,
        ids: Array,
        observations: Rows,
        actions: Rows,
        rewards: Rows,
        log_probs: Rows | None,
    ) -> None:
        """Check everything, then write: the common part of `append` and `store`."""
        if not ids.size:
            return
        arrays = {
            "observations": as_array("observations", observations),
            "actions": as_array("actions", actions),
            "rewards": as_array("rewards", rewards),
        }
        if log_probs is not None:
            arrays["log_probs"] = as_array("log_probs", log_probs)
        columns = self.columns or self._new_columns(arrays)
        if len(arrays) != len(columns):
            found = "left out" if log_probs is None else "given"
            fail(f"log_probs must come in every call or in none, but are {found} this time")
        for name, array in arrays.items():
            column = columns[name]
            if array.shape != (wanted := ids.shape + column.shape[2:]):
                check_rows(name, array, wanted)
            if array.dtype != column.dtype:
                check_type(name, array.dtype, column.dtype)
        self._make_writable(columns, int(steps.max()) + 1)
        index = steps * self._batch_size + ids
        for name, array in arrays.items():
            records, dtype = self._records[name], columns[name].dtype
            if array.dtype != dtype or not array.flags.c_contiguous:
                array = np.ascontiguousarray(array, dtype)
            if array.size:
                records[index] = np.ndarray(ids.shape, records.dtype, array)
        np.maximum.at(self.ends, ids, steps + 1)

    def _new_columns(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Empty columns of the types and shapes of the first rows."""
        columns = {}
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub":
                fail(f"{name} must be numbers, got type {array.dtype}")
            is_float = array.dtype.kind == "f" or name in _SCALARS
            shape = () if name in _SCALARS else array.shape[1:]
            dtype = np.dtype(np.float32) if is_float else array.dtype.newbyteorder("=")
            columns[name] = np.zeros((0, self._batch_size, *shape), dtype)
        return columns

    def _make_writable(self, columns: dict[str, Array], num_steps: int) -> None:
        """Make room for `num_steps`, and let no column share memory with a tensor outside."""
        first = not self.columns
        if first or num_steps > self._capacity:
            capacity = self._capacity
            while capacity < num_steps:
                capacity *= 2
            self.columns = {name: _resized(column, capacity) for name, column in columns.items()}
            self._capacity = capacity
        else:
            if not self._lent:
                return
            self.columns |= {name: columns[name].copy() for name in self._lent}
        self._records = {name: _as_records(column) for name, column in self.columns.items()}
        self._lent.clear()
        if first:
            observations = self.columns["observations"]
            self.last_observations = np.zeros(observations.shape[1:], observations.dtype)

    def _erase(self, ids: Array, lengths: Array, ends: Array) -> None:
        """Set the steps from `lengths` to `ends` of these episodes to zero."""
        self._make_writable(self.columns, 0)
        steps = np.arange(ends.max())[:, None]
        step, row = np.nonzero((steps >= lengths) & (steps < ends))
        for column in self.columns.values():
            column[step, ids[row]] = 0

    # ---- reading ----

    def lend(self, name: str, num_steps: int) -> Array:
        """Return the first steps of a column for others to keep: they will never change."""
        self._lent.add(name)
        return self.columns[name][:num_steps]

    def twin(self) -> Self:
        """Return a storage of the same content; the next write of either does not reach the other.

        They share the columns until then.
        """
        other = copy.copy(self)
        for name in _PER_EPISODE:
            setattr(other, name, getattr(self, name).copy())
        other.columns, other._records = dict(self.columns), dict(self._records)
        other._lent, self._lent = set(self.columns), set(self.columns)
        return other

    def selected(self, indices: Array) -> Self:
        """Return a storage of some of the episodes, in the order given; it owns its memory.

        Raises:
            EpisodesError: An index is out of range or there twice, or there is none.
        """
        indices = self._checked_ids(indices)
        self._count(indices)
        if not indices.size:
            fail("select needs at least one episode, got none")
        other = type(self)(indices.size, self._capacity)
        other.columns = {
            name: column.take(indices, axis=1) for name, column in self.columns.items()
        }
        other._records = {name: _as_records(column) for name, column in other.columns.items()}
        for name in _PER_EPISODE:
            setattr(other, name, getattr(self, name)[indices])
        return other

    # ---- files ----

    def save(self, path: str | os.PathLike[str], num_steps: int, gamma: float) -> None:
        """Write the first steps of all columns and the rest into one .npz file without pickles."""
        # Transitions of unfinished episodes may lie beyond what can be read yet.
        num_steps = max(num_steps, int(self.ends.max(initial=0)))
        arrays = {name: column[:num_steps] for name, column in self.columns.items()}
        arrays |= {name: getattr(self, name) for name in _PER_EPISODE}
        with open(path, "wb") as file:  # a name would be given the ending .npz
            np.savez(file, format=_FILE_FORMAT, gamma=gamma, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> tuple[Self, float]:
        """Return the storage and the discount that `save` wrote.

        Raises:
            EpisodesError: The file holds something else.
        """
        try:
            # numpy would leave a file that it cannot read open.
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays: dict[str, Any] = dict(file)
            if arrays.pop("format") != _FILE_FORMAT:
                fail(f"{os.fspath(path)} was written in a format that this version cannot read")
            gamma = float(arrays.pop("gamma"))
            per_episode = {name: arrays.pop(name) for name in _PER_EPISODE}
            capacity, batch_size = arrays["rewards"].shape
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, EpisodesError):
                raise
            message = f"{os.fspath(path)} holds no episodes that BatchEpisodes.save() wrote"
            raise EpisodesError(message) from error
        storage = cls(batch_size, capacity)
        storage.columns = arrays
        storage._records = {name: _as_records(column) for name, column in arrays.items()}
        for name, array in per_episode.items():
            setattr(storage, name, array)
        return storage, gamma


def _resized(column: Array, capacity: int) -> Array:
    larger: Array = np.zeros((capacity, *column.shape[1:]), column.dtype)
    larger[: len(column)] = column
    return larger


def _as_records(column: Array) -> Array:
    """One entry per row of the same memory: a scatter of records is five times as fast."""
    flat = column.reshape(-1)
    if column.ndim == 2 or not column.size:
        return flat
    return flat.view(np.dtype((np.void, column[0, 0].nbytes)))
