"""`BatchEpisodes`: the buffer that transitions stream into and learners read from.

Written as numpy arrays, time first: one array per quantity, shape `(capacity, B, ...)`, so that
the transitions of a tick are one scatter per quantity. Read as torch tensors.

The one rule: what was handed out never changes. On the CPU a tensor may lie on the storage
itself; whoever writes next copies that storage first.
"""

import copy
import os
import zipfile
from collections.abc import Sequence
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncmaml.errors import ConfigurationError, EpisodesError

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = npt.ArrayLike | Tensor
"""One line per transition or episode: an array, a tensor or a sequence."""

_FIRST_CAPACITY = 64  # steps; most episodes of the field have 20 to 200
_FILE_FORMAT = 1
_STATE = ("_ends", "_lengths", "_finished", "_terminated", "_truncated", "_last_observations")


class BatchEpisodes:
    """B episodes, filled transition by transition, read as padded tensors.

    Letters: B episodes, T steps (the longest episode), N rows of one call. Floating numbers are
    kept as float32, all others (uint8 images, int64 actions) as they came first. Padding is 0.
    Tensors are computed once and kept until something is added; do not write into them.

    Attributes:
        task: The task that the episodes come from, if the filler of the buffer tells it.

    Args:
        batch_size: B.
        gamma: Discount per step, in [0, 1].
        device: Where the tensors lie; the storage itself is in main memory.
        capacity_hint: Steps to make room for at first; the buffer grows by doubling.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    def __init__(
        self,
        batch_size: int,
        gamma: float = 0.95,
        device: torch.device | str = "cpu",
        *,
        capacity_hint: int | None = None,
    ) -> None:
        _check_range("batch_size", batch_size, 1)
        _check_range("gamma", gamma, 0, 1)
        self.task: Any = None
        self._batch_size = int(batch_size)
        self._gamma = float(gamma)
        self._device = _resolve(device)
        self._capacity = _FIRST_CAPACITY if capacity_hint is None else int(capacity_hint)
        _check_range("capacity_hint", self._capacity, 1)
        self._fields: dict[str, Array] = {}  # (capacity, B, ...) each; empty until the first rows
        self._records: dict[str, Array] = {}  # the same memory, shape (capacity * B,)
        self._lengths = np.zeros(batch_size, np.int64)
        self._ends = np.zeros(batch_size, np.int64)  # one past the last step ever stored
        self._finished = np.zeros(batch_size, np.bool_)
        self._terminated = np.zeros(batch_size, np.bool_)
        self._truncated = np.zeros(batch_size, np.bool_)
        self._last_observations: Array = np.zeros(batch_size, np.float32)
        self._cache: dict[str, Tensor] = {}
        self._handed_out: set[str] = set()  # fields that a tensor outside lies on

    # ---- writing ----

    def append(
        self,
        observations: Rows,
        actions: Rows,
        rewards: Rows,
        batch_ids: Rows | Sequence[int | None],
        log_probs: Rows | None = None,
    ) -> None:
        """Add one transition to each of N different episodes.

        Args:
            observations: What the actions were chosen on, shape `(N, *O)`.
            actions: Shape `(N, *A)`.
            rewards: Shape `(N,)`.
            batch_ids: Which episode each row belongs to; a row whose id is None is skipped.
            log_probs: Of the actions when they were drawn, shape `(N,)`; always or never.

        Raises:
            EpisodesError: The rows do not fit; nothing was added.
        """
        found = _as_array("batch_ids", batch_ids)
        if found.dtype == np.object_ and found.ndim == 1:
            busy = np.array([batch_id is not None for batch_id in found])
            observations, actions, rewards = (
                _select(rows, busy) for rows in (observations, actions, rewards)
            )
            log_probs = None if log_probs is None else _select(log_probs, busy)
            found = np.array(found[busy].tolist())
        ids = self._checked_ids(found)
        counts = self._count(ids)
        if self._finished[ids].any():
            _fail(f"append: episodes {_some(ids[self._finished[ids]])} are finished already")
        self._place(self._lengths[ids], ids, observations, actions, rewards, log_probs)
        self._lengths += counts

    def store(
        self,
        steps: Rows,
        batch_ids: Rows,
        observations: Rows,
        actions: Rows,
        rewards: Rows,
        log_probs: Rows | None = None,
    ) -> None:
        """Put N transitions at given places, in any order, many of one episode if need be.

        `steps`, shape `(N,)`, tells each row's step within its episode; the rest is as in
        `append`. For a caller who counts by itself: a place is overwritten without a question,
        and an episode counts as empty until `finish` is told its length.

        Raises:
            EpisodesError: The rows do not fit; nothing was stored.
        """
        ids = self._checked_ids(_as_array("batch_ids", batch_ids))
        places = _as_array("steps", steps)
        _check_rows("steps", places, ids.shape, "iu")
        if ids.size and places.min() < 0:
            _fail(f"steps must be 0 or more, got {_some(places[places < 0])}")
        places = places.astype(np.int64, copy=False)
        self._place(places, ids, observations, actions, rewards, log_probs)

    def finish(
        self,
        batch_ids: Rows,
        last_observations: Rows,
        terminated: Rows,
        truncated: Rows,
        lengths: Rows | None = None,
    ) -> None:
        """Mark N different episodes as ended.

        Args:
            batch_ids: Which episodes, shape `(N,)`.
            last_observations: What each one's last action led to, shape `(N, *O)`.
            terminated: Whether the task itself ended it, shape `(N,)`.
            truncated: Whether it was cut off, shape `(N,)`; both may be true.
            lengths: Number of steps, shape `(N,)`, for who filled by `store`; None: as appended.
                What was stored at and after it (by an earlier, longer try) becomes padding.

        Raises:
            EpisodesError: The rows do not fit, or an episode is empty, finished already or
                shorter than its length; nothing was changed.
        """
        ids = self._checked_ids(_as_array("batch_ids", batch_ids))
        self._count(ids)
        counted = self._lengths[ids] if lengths is None else _as_array("lengths", lengths)
        last = _as_array("last_observations", last_observations)
        is_terminated = _as_array("terminated", terminated)
        is_truncated = _as_array("truncated", truncated)
        _check_rows("lengths", counted, ids.shape, "iu")
        _check_rows("terminated", is_terminated, ids.shape, "biu")
        _check_rows("truncated", is_truncated, ids.shape, "biu")
        if not ids.size:
            return
        stored = self._ends[ids]
        if self._finished[ids].any():
            _fail(f"finish: episodes {_some(ids[self._finished[ids]])} are finished already")
        if counted.min() < 1 or (counted > stored).any():
            _fail(
                f"finish: the lengths of episodes {_some(ids)} must lie between 1 and the "
                f"number of steps stored, {_some(stored)}, got {_some(counted)}; store first"
            )
        _check_rows("last_observations", last, ids.shape + self._last_observations.shape[1:])
        _check_type("last_observations", last.dtype, self._last_observations.dtype)
        if (counted < stored).any():
            self._erase(ids, counted, stored)
        self._lengths[ids] = self._ends[ids] = counted
        self._terminated[ids] = is_terminated
        self._truncated[ids] = is_truncated
        self._last_observations[ids] = last
        self._finished[ids] = True
        self._cache.clear()

    def _checked_ids(self, ids: Array) -> Array:
        """The batch ids as int64, each in range."""
        _check_rows("batch_ids", ids, (ids.size,), "iu")
        if ids.size and (ids.min() < 0 or ids.max() >= self._batch_size):
            wrong = ids[(ids < 0) | (ids >= self._batch_size)]
            _fail(f"batch_ids must lie in 0..{self._batch_size - 1}, got {_some(wrong)}")
        return ids.astype(np.int64, copy=False)

    def _count(self, ids: Array) -> Array:
        """How often each episode occurs, shape `(B,)`; more than once is an error."""
        counts = np.bincount(ids, minlength=self._batch_size)
        if counts.max() > 1:
            twice = _some(np.flatnonzero(counts > 1))
            _fail(f"batch_ids of one call must differ, got {twice} more than once")
        return counts

    def _place(
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
        values = {
            "observations": _as_array("observations", observations),
            "actions": _as_array("actions", actions),
            "rewards": _as_array("rewards", rewards),
        }
        if log_probs is not None:
            values["log_probs"] = _as_array("log_probs", log_probs)
        fields = self._fields or self._new_fields(values)
        if len(values) != len(fields):
            found = "left out" if log_probs is None else "given"
            _fail(f"log_probs must come in every call or in none, but are {found} this time")
        for name, array in values.items():
            field = fields[name]
            if array.shape != (wanted := ids.shape + field.shape[2:]):
                _check_rows(name, array, wanted)
            if array.dtype != field.dtype:
                _check_type(name, array.dtype, field.dtype)
        self._make_writable(fields, int(steps.max()) + 1)
        index = steps * self._batch_size + ids
        for name, array in values.items():
            records, dtype = self._records[name], fields[name].dtype
            if array.dtype != dtype or not array.flags.c_contiguous:
                array = np.ascontiguousarray(array, dtype)
            if array.size:
                records[index] = np.ndarray(ids.shape, records.dtype, array)
        np.maximum.at(self._ends, ids, steps + 1)
        self._cache.clear()

    def _new_fields(self, values: dict[str, Array]) -> dict[str, Array]:
        """Empty storage of the types and shapes of the first rows."""
        fields = {}
        for name, array in values.items():
            if array.dtype.kind not in "fiub":
                _fail(f"{name} must be numbers, got type {array.dtype}")
            is_float = array.dtype.kind == "f" or name in ("rewards", "log_probs")
            shape = () if name in ("rewards", "log_probs") else array.shape[1:]
            dtype = np.dtype(np.float32) if is_float else array.dtype.newbyteorder("=")
            fields[name] = np.zeros((0, self._batch_size, *shape), dtype)
        return fields

    def _make_writable(self, fields: dict[str, Array], num_steps: int) -> None:
        """Make room for `num_steps`, and let no field share memory with a tensor outside."""
        first = not self._fields
        if first or num_steps > self._capacity:
            capacity = self._capacity
            while capacity < num_steps:
                capacity *= 2
            self._fields = {name: _resized(field, capacity) for name, field in fields.items()}
            self._capacity = capacity
        else:
            if not self._handed_out:
                return
            self._fields |= {name: fields[name].copy() for name in self._handed_out}
        self._records = {name: _as_records(field) for name, field in self._fields.items()}
        self._handed_out.clear()
        if first:
            observations = self._fields["observations"]
            self._last_observations = np.zeros(observations.shape[1:], observations.dtype)

    def _erase(self, ids: Array, lengths: Array, ends: Array) -> None:
        """Set the steps from `lengths` to `ends` of these episodes to zero."""
        self._make_writable(self._fields, 0)
        steps = np.arange(ends.max())[:, None]
        step, row = np.nonzero((steps >= lengths) & (steps < ends))
        for field in self._fields.values():
            field[step, ids[row]] = 0

    # ---- reading ----

    @property
    def batch_size(self) -> int:
        """B, the number of episodes."""
        return self._batch_size

    @property
    def gamma(self) -> float:
        """Discount per step."""
        return self._gamma

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self._device

    @property
    def is_complete(self) -> bool:
        """Whether every episode is finished."""
        return bool(self._finished.all())

    @property
    def num_transitions(self) -> int:
        """Steps of all episodes together, without padding."""
        return int(self._lengths.sum())

    @property
    def observations(self) -> Tensor:
        """What the actions were chosen on, shape `(T, B, *O)`."""
        return self._padded("observations")

    @property
    def actions(self) -> Tensor:
        """Shape `(T, B, *A)`."""
        return self._padded("actions")

    @property
    def rewards(self) -> Tensor:
        """Shape `(T, B)`, float32."""
        return self._padded("rewards")

    @property
    def log_probs(self) -> Tensor:
        """Log probability of each action when it was drawn, shape `(T, B)`."""
        if self._fields and "log_probs" not in self._fields:
            _fail("no log_probs were recorded; give them to append() or store()")
        return self._padded("log_probs")

    @property
    def mask(self) -> Tensor:
        """1 for steps that were taken, 0 for padding, shape `(T, B)`, float32."""
        if "mask" not in self._cache:
            self._cache["mask"] = self._tensor(self._is_taken().astype(np.float32))
        return self._cache["mask"]

    @property
    def returns(self) -> Tensor:
        """Discounted sum of the rewards from each step on, shape `(T, B)`; 0 for padding."""
        if "returns" not in self._cache:
            self._cache["returns"] = self.discounted_returns()
        return self._cache["returns"]

    @property
    def episode_returns(self) -> Tensor:
        """Sum of the rewards of each episode, not discounted, shape `(B,)`."""
        if "episode_returns" not in self._cache:
            sums = self._taken_rewards().sum(axis=0).astype(np.float32)
            self._cache["episode_returns"] = self._tensor(sums)
        return self._cache["episode_returns"]

    @property
    def lengths(self) -> Tensor:
        """Steps of each episode, shape `(B,)`, int64."""
        return self._per_episode("_lengths")

    @property
    def terminated(self) -> Tensor:
        """Whether the task itself ended the episode, shape `(B,)`, bool."""
        return self._per_episode("_terminated")

    @property
    def truncated(self) -> Tensor:
        """Whether the episode was cut off, shape `(B,)`, bool."""
        return self._per_episode("_truncated")

    @property
    def last_observations(self) -> Tensor:
        """What the last action led to, shape `(B, *O)`; 0 for unfinished episodes."""
        return self._per_episode("_last_observations")

    def __len__(self) -> int:
        """T, the length of the longest episode."""
        return int(self._lengths.max())

    def __repr__(self) -> str:
        return (
            f"<BatchEpisodes {self._batch_size} episodes, {len(self)} steps, "
            f"{self.num_transitions:,} transitions, {int(self._finished.sum())} finished>"
        )

    def discounted_returns(self, last_values: Tensor | None = None) -> Tensor:
        """Return the discounted sum of rewards from each step on.

        Args:
            last_values: The value of `last_observations`, shape `(B,)`, which stands for the
                rewards after an episode that was truncated or is unfinished, and did not
                terminate. None: nothing comes after the end of any episode.

        Returns:
            Shape `(T, B)`, float32; 0 where `mask` is 0.

        Raises:
            EpisodesError: There is no transition, or `last_values` does not fit.
        """
        rewards = self._taken_rewards()
        last_step = (np.maximum(self._lengths, 1) - 1, np.arange(self._batch_size))
        rewards[last_step] += self._gamma * self._values_after_the_end(last_values)
        return self._tensor(_discounted_sums(rewards, self._gamma).astype(np.float32))

    def gae(self, values: Tensor, tau: float = 1.0, last_values: Tensor | None = None) -> Tensor:
        """Estimate advantages by the exponentially weighted sum of TD errors.

        Source: Schulman et al. (2016), eq. 16, https://arxiv.org/abs/1506.02438. Unlike there,
        the value after the last step is 0 even for a truncated episode unless `last_values`
        says otherwise: the finite-horizon return, for baselines that know the time.

        Args:
            values: Baseline prediction for each step, shape `(T, B)` or `(T, B, 1)`; whatever
                stands in the padding is ignored. No gradient flows back into it.
            tau: The source's lambda: 0 is one-step TD, 1 is Monte Carlo.
            last_values: As in `discounted_returns`.

        Returns:
            Shape `(T, B)`, float32; 0 where `mask` is 0. Not normalised.

        Raises:
            ConfigurationError: `tau` is not in [0, 1].
            EpisodesError: There is no transition, or `values` does not fit.
        """
        _check_range("tau", tau, 0, 1)
        rewards, taken = self._taken_rewards(), self._is_taken()
        if isinstance(values, Tensor) and values.shape == (*taken.shape, 1):
            values = values.squeeze(-1)
        now = np.where(taken, self._numbers("values", values, taken.shape), 0.0)
        after = np.zeros_like(now)
        after[:-1] = now[1:]
        last_step = (np.maximum(self._lengths, 1) - 1, np.arange(self._batch_size))
        after[last_step] = self._values_after_the_end(last_values)
        errors = np.where(taken, rewards + self._gamma * after - now, 0.0)
        return self._tensor(_discounted_sums(errors, self._gamma * tau).astype(np.float32))

    def _num_steps(self) -> int:
        if not (num_steps := len(self)):
            _fail("there is no transition yet; read after the first append() or finish()")
        return num_steps

    def _padded(self, name: str) -> Tensor:
        num_steps = self._num_steps()
        if name not in self._cache:
            self._cache[name] = self._tensor(self._fields[name][:num_steps])
            self._handed_out.add(name)
        return self._cache[name]

    def _per_episode(self, name: str) -> Tensor:
        self._num_steps()
        if name not in self._cache:
            self._cache[name] = self._tensor(getattr(self, name).copy())
        return self._cache[name]

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _is_taken(self) -> Array:
        """The mask as booleans."""
        return np.less.outer(np.arange(self._num_steps()), self._lengths)

    def _taken_rewards(self) -> Array:
        """A float64 copy of the rewards, 0 for padding."""
        taken = self._is_taken()
        return np.where(taken, self._fields["rewards"][: len(taken)], 0.0).astype(np.float64)

    def _values_after_the_end(self, last_values: Tensor | None) -> Array:
        """What to add for the time after each episode, shape `(B,)`; 0 where it terminated."""
        if last_values is None:
            return np.zeros(self._batch_size)
        numbers = self._numbers("last_values", last_values, (self._batch_size,))
        goes_on = ~self._terminated & (self._truncated | ~self._finished) & (self._lengths > 0)
        return np.where(goes_on, numbers, 0.0)

    def _numbers(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Array:
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            _fail(f"{name} must be a tensor of shape {shape}, got {_described(tensor)}")
        if tensor.device != self._device:
            _fail(
                f"{name} lie on {tensor.device} but the episodes on {self._device}; "
                "move one of them by to()"
            )
        numbers: Array = tensor.detach().cpu().double().numpy()
        return numbers

    # ---- moving and keeping ----

    def to(self, device: torch.device | str) -> Self:
        """Return these episodes with their tensors on `device`; itself if they lie there."""
        if _resolve(device) == self._device:
            return self
        moved = copy.copy(self)
        moved._device = _resolve(device)
        moved._cache = {}
        for name in _STATE:
            setattr(moved, name, getattr(self, name).copy())
        # Both use one storage from now on, so whichever writes first makes its own copy.
        moved._fields = dict(self._fields)
        moved._records = dict(self._records)
        moved._handed_out, self._handed_out = set(self._fields), set(self._fields)
        return moved

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything but `task` into one .npz file that holds no pickle."""
        num_steps = self._num_steps()
        arrays = {name: field[:num_steps] for name, field in self._fields.items()}
        arrays |= {name: getattr(self, name) for name in _STATE}
        with open(path, "wb") as file:  # a name would be given the ending .npz
            np.savez(file, format=_FILE_FORMAT, gamma=self._gamma, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Self:
        """Read what `save` wrote.

        Raises:
            EpisodesError: The file holds something else.
        """
        try:
            # numpy would leave a file that it cannot read open.
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = dict(file)
            if arrays.pop("format") != _FILE_FORMAT:
                _fail(f"{os.fspath(path)} was written in a format that this version cannot read")
            gamma = float(arrays.pop("gamma"))
            state = {name: arrays.pop(name) for name in _STATE}
            capacity, batch_size = arrays["rewards"].shape
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, EpisodesError):
                raise
            message = f"{os.fspath(path)} holds no episodes that BatchEpisodes.save() wrote"
            raise EpisodesError(message) from error
        episodes = cls(batch_size, gamma, device, capacity_hint=capacity)
        episodes._fields = arrays
        episodes._records = {name: _as_records(field) for name, field in arrays.items()}
        for name, array in state.items():
            setattr(episodes, name, array)
        return episodes


def _discounted_sums(numbers: Array, discount: float) -> Array:
    """Add to each step (axis 0) `discount` times the sum of the next; works in place."""
    for step in range(len(numbers) - 2, -1, -1):
        numbers[step] += discount * numbers[step + 1]
    return numbers


def _resized(field: Array, capacity: int) -> Array:
    larger: Array = np.zeros((capacity, *field.shape[1:]), field.dtype)
    larger[: len(field)] = field
    return larger


def _as_records(field: Array) -> Array:
    """One entry per row of the same memory: a scatter of records is five times as fast."""
    flat = field.reshape(-1)
    if field.ndim == 2 or not field.size:
        return flat
    return flat.view(np.dtype((np.void, field[0, 0].nbytes)))


def _as_array(name: str, values: Any) -> Array:
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Tensor):
        values = values.detach()
        # numpy has no bfloat16.
        values = values.float() if values.is_floating_point() else values
        array: Array = values.numpy(force=True)
        return array
    try:
        return np.asarray(values)
    except ValueError as error:
        message = f"{name} must be rows of one shape: {error}"
        raise EpisodesError(message) from None


def _check_rows(name: str, array: Array, shape: tuple[int, ...], kinds: str = "fiub") -> None:
    if array.shape != shape:
        _fail(
            f"{name} must have shape {shape}: a row for each batch id, each shaped as in the "
            f"first call; got {array.shape}"
        )
    if array.dtype.kind not in kinds and array.size:
        wanted = {"iu": "integers", "biu": "booleans"}.get(kinds, "numbers")
        _fail(f"{name} must be {wanted}, got type {array.dtype}")


def _select(rows: Rows, busy: Array) -> Array:
    """The rows that have a batch id."""
    array = _as_array("rows", rows)
    if array.shape[:1] != busy.shape:
        _fail(f"there are {len(busy)} batch_ids for rows of shape {array.shape}")
    chosen: Array = array[busy]
    return chosen


def _check_type(name: str, found: np.dtype[Any], kept: np.dtype[Any]) -> None:
    if found.kind not in "fiub" or not (kept.kind == "f" or np.can_cast(found, kept)):
        _fail(f"{name} were {kept} in the first call and are {found} now; convert them before")


def _check_range(name: str, number: float, low: int, high: float = float("inf")) -> None:
    if not low <= number <= high:
        message = f"{name} must lie in [{low}, {high}], got {number!r}"
        raise ConfigurationError(message)


def _resolve(device: torch.device | str) -> torch.device:
    """The device with its number, so that "cuda" equals "cuda:0"."""
    return torch.empty(0, device=device).device


def _described(thing: Any) -> str:
    return str(tuple(thing.shape)) if isinstance(thing, Tensor) else type(thing).__name__


def _some(array: Array) -> str:
    """The first few entries, for a message."""
    return f"{array.tolist()[:5]}" + (" and more" if array.size > 5 else "")


def _fail(message: str) -> NoReturn:
    raise EpisodesError(message)
