"""`BatchEpisodes`: the buffer that transitions stream into and learners read from.

Four modules lie below it: `checked_rows` (what a caller hands in), `storage` (the arrays and
their file), `padded_episodes` (what is read, as tensors) and `discounting` (its maths). The one
rule: what was handed out never changes.
"""

import copy
import functools
import os
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from asyncmaml.checked_rows import Rows, as_array, check_range, without_idle_rows
from asyncmaml.padded_episodes import PaddedEpisodes
from asyncmaml.storage import FIRST_CAPACITY, EpisodeStorage


class BatchEpisodes(PaddedEpisodes):
    """B episodes, filled transition by transition, read as padded tensors.

    Letters: B episodes, T steps (the longest episode), N rows of one call. Floating numbers are
    kept as float32, all others (uint8 images, int64 actions) as they came first. Padding is 0.
    Tensors are computed once and kept until something is added; do not write into them.

    Attributes:
        task: The task that the episodes come from, if the filler of the buffer tells it.
        params_version: How often a stream's parameters had been updated when it began.
        record: How the sampler came by them; None for episodes of another origin.

    Args:
        batch_size: B.
        gamma: Discount per step, in [0, 1].
        device: Where the tensors lie; the storage itself is in main memory.
        capacity_hint: Steps to make room for at first; the buffer grows by doubling.
        first_batch_id: What `batch_ids` begin with, for a part of a request. The methods that
            write count from 0 nevertheless.

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
        first_batch_id: int = 0,
    ) -> None:
        check_range("batch_size", batch_size, 1)
        capacity = FIRST_CAPACITY if capacity_hint is None else int(capacity_hint)
        check_range("capacity_hint", capacity, 1)
        storage = EpisodeStorage(int(batch_size), capacity, int(first_batch_id))
        super().__init__(storage, gamma, _resolve(device))

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
        ids = as_array("batch_ids", batch_ids)
        if ids.dtype == np.object_ and ids.ndim == 1:
            ids, observations, actions, rewards, log_probs = without_idle_rows(
                ids, observations, actions, rewards, log_probs
            )
        self._storage.append(ids, observations, actions, rewards, log_probs)
        self._cache.clear()

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
        self._storage.store(
            as_array("steps", steps),
            as_array("batch_ids", batch_ids),
            observations,
            actions,
            rewards,
            log_probs,
        )
        self._cache.clear()

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
        self._storage.finish(
            as_array("batch_ids", batch_ids),
            as_array("last_observations", last_observations),
            as_array("terminated", terminated),
            as_array("truncated", truncated),
            None if lengths is None else as_array("lengths", lengths),
        )
        self._cache.clear()

    # ---- moving and keeping ----

    def to(self, device: torch.device | str) -> Self:
        """Return these episodes with their tensors on `device`; itself if they lie there."""
        if _resolve(device) == self._device:
            return self
        moved = copy.copy(self)
        moved._device = _resolve(device)
        moved._storage = self._storage.twin()
        moved._cache = {}
        return moved

    def select(self, indices: Rows) -> Self:
        """Return some of these episodes, in the order given, with the batch ids that they have.

        Args:
            indices: Which ones, by their place in the batch, shape `(N,)`, N from 1 on.

        Raises:
            EpisodesError: An index is out of range or there twice, or there is none.
        """
        selected = copy.copy(self)
        selected._storage = self._storage.selected(as_array("indices", indices))
        selected._cache = {}
        return selected

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything but the attributes above into one .npz file that holds no pickle."""
        self._storage.save(path, self._num_steps(), self._gamma)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Self:
        """Read what `save` wrote.

        Raises:
            EpisodesError: The file holds something else.
        """
        storage, gamma = EpisodeStorage.load(path)
        episodes = cls(len(storage.lengths), gamma, device)
        episodes._storage = storage
        return episodes


@functools.cache
def _resolve(device: torch.device | str) -> torch.device:
    """The device with its number, so that "cuda" equals "cuda:0"."""
    return torch.empty(0, device=device).device
