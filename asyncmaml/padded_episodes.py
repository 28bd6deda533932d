"""`PaddedEpisodes`: what learners read of the episodes, as tensors, time first.

Tensors are computed once and kept until something is added. On the CPU they lie on the storage
itself where they can; it is copied before it is next written.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from asyncmaml.checked_rows import Array, as_numbers, check_range, fail
from asyncmaml.discounting import discounted_returns, generalized_advantages, is_taken
from asyncmaml.storage import EpisodeStorage

if TYPE_CHECKING:
    from asyncmaml.sampling.statistics import SamplingRecord


class PaddedEpisodes:
    """The reading side of `BatchEpisodes`.

    Attributes:
        task: The task that the episodes come from, if the filler of the buffer tells it.
        params_version: How often a stream's parameters had been updated when it began.
        record: How the sampler came by them; None for episodes of another origin.

    Args:
        storage: What to read.
        gamma: Discount per step, in [0, 1].
        device: Where the tensors lie, with its number.

    Raises:
        ConfigurationError: `gamma` is out of its range.
    """

    def __init__(self, storage: EpisodeStorage, gamma: float, device: torch.device) -> None:
        check_range("gamma", gamma, 0, 1)
        self.task: Any = None
        self.params_version = 0
        self.record: SamplingRecord | None = None
        self._storage = storage
        self._gamma = float(gamma)
        self._device = device
        self._cache: dict[str, Tensor] = {}

    @property
    def batch_size(self) -> int:
        """B, the number of episodes."""
        return len(self._storage.lengths)

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
        return bool(self._storage.finished.all())

    @property
    def num_transitions(self) -> int:
        """Steps of all episodes together, without padding."""
        return int(self._storage.lengths.sum())

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
        if self._storage.columns and "log_probs" not in self._storage.columns:
            fail("no log_probs were recorded; give them to append() or store()")
        return self._padded("log_probs")

    @property
    def mask(self) -> Tensor:
        """1 for steps that were taken, 0 for padding, shape `(T, B)`, float32."""
        self._num_steps()
        if "mask" not in self._cache:
            self._cache["mask"] = self._tensor(is_taken(self._storage.lengths).astype(np.float32))
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
    def batch_ids(self) -> Tensor:
        """Of each episode within its request, shape `(B,)`, int64.

        These are 0 to B - 1, but in a stream and where episodes were selected or dropped.
        """
        if "batch_ids" not in self._cache:
            self._cache["batch_ids"] = self._tensor(self._storage.batch_ids.copy())
        return self._cache["batch_ids"]

    @property
    def lengths(self) -> Tensor:
        """Steps of each episode, shape `(B,)`, int64."""
        return self._per_episode("lengths")

    @property
    def terminated(self) -> Tensor:
        """Whether the task itself ended the episode, shape `(B,)`, bool."""
        return self._per_episode("terminated")

    @property
    def truncated(self) -> Tensor:
        """Whether the episode was cut off, shape `(B,)`, bool."""
        return self._per_episode("truncated")

    @property
    def last_observations(self) -> Tensor:
        """What the last action led to, shape `(B, *O)`; 0 for unfinished episodes."""
        return self._per_episode("last_observations")

    def __len__(self) -> int:
        """T, the length of the longest episode."""
        return int(self._storage.lengths.max())

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.batch_size} episodes, {len(self)} steps, "
            f"{self.num_transitions:,} transitions, {int(self._storage.finished.sum())} finished>"
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
        sums = discounted_returns(
            self._taken_rewards(),
            self._storage.lengths,
            self._values_after_the_end(last_values),
            self._gamma,
        )
        return self._tensor(sums.astype(np.float32))

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
        check_range("tau", tau, 0, 1)
        shape = self._num_steps(), self.batch_size
        if isinstance(values, Tensor) and values.shape == (*shape, 1):
            values = values.squeeze(-1)
        advantages = generalized_advantages(
            self._taken_rewards(),
            as_numbers("values", values, shape, self._device),
            self._storage.lengths,
            self._values_after_the_end(last_values),
            discount=self._gamma,
            gae_lambda=tau,
        )
        return self._tensor(advantages.astype(np.float32))

    def _num_steps(self) -> int:
        if not (num_steps := len(self)):
            fail("there is no transition yet; read after the first append() or finish()")
        return num_steps

    def _padded(self, name: str) -> Tensor:
        num_steps = self._num_steps()
        if name not in self._cache:
            self._cache[name] = self._tensor(self._storage.lend(name, num_steps))
        return self._cache[name]

    def _per_episode(self, name: str) -> Tensor:
        self._num_steps()
        if name not in self._cache:
            self._cache[name] = self._tensor(getattr(self._storage, name).copy())
        return self._cache[name]

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _taken_rewards(self) -> Array:
        """A float64 copy of the rewards, 0 for padding."""
        num_steps = self._num_steps()
        rewards = self._storage.columns["rewards"][:num_steps]
        return np.where(is_taken(self._storage.lengths), rewards, 0.0).astype(np.float64)

    def _values_after_the_end(self, last_values: Tensor | None) -> Array:
        """What to add for the time after each episode, shape `(B,)`; 0 where it terminated."""
        if last_values is None:
            return np.zeros(self.batch_size)
        numbers = as_numbers("last_values", last_values, (self.batch_size,), self._device)
        state = self._storage
        is_open = state.truncated | ~state.finished
        return np.where(~state.terminated & is_open & (state.lengths > 0), numbers, 0.0)
