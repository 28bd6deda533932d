"""`Phase`: what a learner needs of one task's episodes between two updates.

Made once, when the episodes are in; nothing in it changes afterwards. Letters: M tasks, B episodes,
T steps. Stacked phases have a leading axis M on every tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import LearningError
from asyncmaml.learning.baseline import LinearFeatureBaseline

# Below this share of the largest return, what a baseline leaves over is rounding, and dividing by
# its standard deviation would make a signal of it.
LEAST_RELATIVE_STD = 1e-6


@dataclass(frozen=True)
class Phase:
    """One task's episodes under one set of parameters, padded, with their advantages.

    Attributes:
        observations: Shape `(T, B, *O)`, or `(M, T, B, *O)` when stacked; so are all others.
        actions: Shape `(T, B, *A)`.
        mask: 1 for steps that were taken, 0 for padding, shape `(T, B)`.
        advantages: Normalised over the steps that were taken; 0 in the padding.
        rewards: 0 in the padding.
        log_probs: Of the actions under the policy that drew them, as the sampler recorded them.
        mean_return: Of the episodes, not discounted; when stacked, the mean over the tasks.
    """

    observations: Tensor
    actions: Tensor
    mask: Tensor
    advantages: Tensor
    rewards: Tensor
    log_probs: Tensor
    mean_return: float

    @property
    def num_rows(self) -> int:
        """Steps with padding, of all tasks."""
        return self.mask.numel()

    @property
    def num_transitions(self) -> int:
        """Steps that were taken, of all tasks."""
        return int(self.mask.sum())

    def problem(self) -> str:
        """Why nothing can be learned from it; "" if something can."""
        if not self.mask.any():
            return "no step was taken"
        for name in ("advantages", "rewards", "log_probs", "observations", "actions"):
            numbers: Tensor = getattr(self, name)
            if numbers.dtype.is_floating_point and not numbers.isfinite().all():
                return f"{name} are not finite"
        return ""


def make_phase(
    episodes: BatchEpisodes,
    baseline: LinearFeatureBaseline,
    *,
    gae_lambda: float = 1.0,
    bootstrap_truncated: bool = False,
    normalize: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Phase:
    """Fit the baseline, estimate the advantages and put all of it together.

    Advantages are normalised as in rllab: (A - mean) / (std + 1e-8) over the steps that were taken.
    They are 0 when nothing tells one action from another: every reward is the same and every
    episode is as long as the others, or what is left is rounding.

    Args:
        episodes: With `log_probs`; their `gamma` is the discount.
        baseline: Fitted on these episodes alone.
        gae_lambda: 0 is one-step TD, 1 is Monte Carlo.
        bootstrap_truncated: Whether the baseline stands for what an episode that was cut off
            did not see. By default nothing follows: the finite-horizon return, which a baseline
            that knows the time can predict.
        normalize: Whether to normalise.
        dtype: Of all floating numbers: that of the policy's parameters.

    Raises:
        LearningError: A reward, observation or log-probability is not finite.
        EpisodesError: There is no transition, or no log-probabilities were recorded.
    """
    mask, rewards = episodes.mask, episodes.rewards
    for name, numbers in (("rewards", rewards), ("log_probs", episodes.log_probs)):
        if not torch.where(mask > 0, numbers, 0.0).isfinite().all():
            step, episode = (~numbers.isfinite() & (mask > 0)).nonzero()[0].tolist()
            message = (
                f"{name} of {episodes!r} are not finite, first at step {step} of episode "
                f"{episode}; correct the environment, or leave these episodes out"
            )
            raise LearningError(message)
    values, last_values = baseline.values_and_last(episodes)
    device = episodes.device
    advantages = episodes.gae(
        values.to(device), gae_lambda, last_values.to(device) if bootstrap_truncated else None
    ).to(dtype)
    mask = mask.to(dtype)
    if _tells_nothing(episodes):
        advantages = torch.zeros_like(advantages)
    elif normalize:
        advantages = normalized(advantages, mask, float(episodes.returns.abs().max()))
    taken = episodes.lengths > 0
    observations, actions = episodes.observations, episodes.actions
    return Phase(
        observations.to(dtype) if observations.dtype.is_floating_point else observations,
        actions.to(dtype) if actions.dtype.is_floating_point else actions,
        mask,
        advantages,
        torch.where(mask > 0, rewards, 0.0).to(dtype),
        torch.where(mask > 0, episodes.log_probs, 0.0).to(dtype),
        float(episodes.episode_returns[taken].mean()),
    )


def normalized(advantages: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return `(T, B)` advantages with mean 0 and s.d. 1 over the steps that were taken.

    All 0 if their s.d. is rounding beside `scale`, the size of what they were computed from.
    """
    mean = masked_mean(advantages, mask)
    centred = torch.where(mask > 0, advantages - mean, 0.0)
    std = masked_mean(centred**2, mask).sqrt()
    if std <= LEAST_RELATIVE_STD * scale:
        return torch.zeros_like(centred)
    return centred / (std + 1e-8)


def masked_mean(numbers: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the steps that were taken, of each task: `(T, B)` to `()`.

    Every step weighs the same, however long its episode. Stacked, `(M, T, B)` to `(M,)`. What
    stands in the padding does not matter, nor does its gradient; without a step the mean is 0.
    """
    total = torch.where(mask > 0, numbers, 0.0).sum(dim=(-2, -1))
    return total / mask.sum(dim=(-2, -1)).clamp(min=1)


def stack_phases(phases: Sequence[Phase]) -> Phase:
    """Put M phases on a leading axis, padded to the longest and to the most episodes."""
    num_steps = max(phase.mask.shape[0] for phase in phases)
    batch_size = max(phase.mask.shape[1] for phase in phases)

    def stacked(name: str) -> Tensor:
        first: Tensor = getattr(phases[0], name)
        shape = (len(phases), num_steps, batch_size, *first.shape[2:])
        padded = first.new_zeros(shape)
        for row, phase in zip(padded, phases, strict=True):
            numbers: Tensor = getattr(phase, name)
            row[: numbers.shape[0], : numbers.shape[1]] = numbers
        return padded

    return Phase(
        stacked("observations"),
        stacked("actions"),
        stacked("mask"),
        stacked("advantages"),
        stacked("rewards"),
        stacked("log_probs"),
        sum(phase.mean_return for phase in phases) / len(phases),
    )


def _tells_nothing(episodes: BatchEpisodes) -> bool:
    """Whether every reward is the same and every episode as long as the others."""
    rewards = episodes.rewards[episodes.mask > 0]
    lengths = episodes.lengths
    return bool((rewards == rewards[0]).all() and (lengths == lengths[0]).all())
