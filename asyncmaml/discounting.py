"""Discounted returns and advantages of padded episodes, as numpy arrays, time first.

Letters: B episodes, T steps (the longest episode). Whatever is discounted is float64 here and
rounded once, at the end, by the caller.
"""

import numpy as np

from asyncmaml.checked_rows import Array


def discounted_returns(
    rewards: Array, lengths: Array, values_after: Array, discount: float
) -> Array:
    """Return the discounted sum of the rewards from each step on.

    Args:
        rewards: Shape `(T, B)`, float64; 0 in the padding. Overwritten.
        lengths: Steps of each episode, shape `(B,)`.
        values_after: Stands for the rewards after an episode's last step, shape `(B,)`.
        discount: Per step, in [0, 1].

    Returns:
        Shape `(T, B)`; 0 in the padding.
    """
    rewards[_last_steps(lengths)] += discount * values_after
    return _discounted_sums(rewards, discount)


def generalized_advantages(
    rewards: Array,
    values: Array,
    lengths: Array,
    values_after: Array,
    *,
    discount: float,
    gae_lambda: float,
) -> Array:
    """Estimate advantages by the exponentially weighted sum of TD errors.

    Source: Schulman et al. (2016), eq. 16, https://arxiv.org/abs/1506.02438.

    Args:
        rewards: Shape `(T, B)`.
        values: Baseline prediction for each step, shape `(T, B)`.
        lengths: Steps of each episode, shape `(B,)`.
        values_after: The value after each episode's last step, shape `(B,)`.
        discount: Per step, in [0, 1].
        gae_lambda: 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Shape `(T, B)`; 0 in the padding, whatever stands there in `rewards` and `values`.
    """
    taken = is_taken(lengths)
    now = np.where(taken, values, 0.0)
    after = np.zeros_like(now)
    after[:-1] = now[1:]
    after[_last_steps(lengths)] = values_after
    errors = np.where(taken, rewards + discount * after - now, 0.0)
    return _discounted_sums(errors, discount * gae_lambda)


def is_taken(lengths: Array) -> Array:
    """Tell steps that were taken from padding: booleans of shape `(T, B)`."""
    taken: Array = np.less.outer(np.arange(lengths.max()), lengths)
    return taken


def _last_steps(lengths: Array) -> tuple[Array, Array]:
    """Where the last step of each episode stands; step 0 of an episode without any."""
    return np.maximum(lengths, 1) - 1, np.arange(len(lengths))


def _discounted_sums(numbers: Array, discount: float) -> Array:
    """Add to each step (axis 0) `discount` times the sum of the next; works in place."""
    for step in range(len(numbers) - 2, -1, -1):
        numbers[step] += discount * numbers[step + 1]
    return numbers
