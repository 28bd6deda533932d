"""What the best and the random policy get of a task: the ends of a normalised score.

For the families whose tasks are tables, bandits and tabular MDPs. Numpy alone; nothing is sampled.
Letters: S states, A actions, H steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import Real, Whole

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceReturns:
    """Expected returns of one task.

    Attributes:
        random: Of the policy that takes every action equally often.
        optimal: Of the best policy that knows the task.
    """

    random: float
    optimal: float

    def score(self, mean_return: float) -> float:
        """Return 0 for the random policy's return, 1 for the best one's; NaN if they are equal."""
        span = self.optimal - self.random
        return (mean_return - self.random) / span if span > 0 else float("nan")


def reference_returns(
    task: Mapping[str, ArrayLike], *, horizon: int = 10, discount: float = 1.0
) -> ReferenceReturns:
    """Return what the random and the best policy get of a task of Bandit or TabularMDP.

    Args:
        task: Of `sample_tasks`.
        horizon: Steps of an episode of an MDP; a bandit's has one step.
        discount: Per step, in [0, 1].

    Raises:
        ConfigurationError: The task is of another family, or an argument is out of its range.
    """
    if isinstance(task, Mapping) and "mean" in task:
        means = np.asarray(task["mean"], np.float64)
        return ReferenceReturns(float(means.mean()), float(means.max()))
    if not (isinstance(task, Mapping) and "transitions" in task and "rewards_mean" in task):
        message = (
            f"no reference returns are known of the task {task!r}; pass a task of Bandit, with "
            "'mean', or of TabularMDP, with 'transitions' and 'rewards_mean'"
        )
        raise ConfigurationError(message)
    transitions, rewards = task["transitions"], task["rewards_mean"]
    best, _ = finite_horizon_value_iteration(transitions, rewards, horizon, discount)
    num_states, num_actions = np.shape(rewards)
    uniform = np.full((num_states, num_actions), 1.0 / num_actions)
    random = policy_values(transitions, rewards, uniform, horizon, discount)
    return ReferenceReturns(float(random[0, 0]), float(best[0, 0]))


def finite_horizon_value_iteration(
    transitions: ArrayLike, rewards: ArrayLike, horizon: int, discount: float = 1.0
) -> tuple[FloatArray, NDArray[np.intp]]:
    """Solve an MDP of `horizon` steps by backward induction.

    Source: Puterman (1994), section 4.5, https://doi.org/10.1002/9780470316887.

    Args:
        transitions: Probability of the next state, shape `(S, A, S)`.
        rewards: Mean rewards, shape `(S, A)`.
        horizon: Steps, H.
        discount: Per step, in [0, 1].

    Returns:
        Values with step t the first to be taken, shape `(H + 1, S)`, the last line 0; and the best
        actions, the first of equals, shape `(H, S)`. TabularMDP's episodes are worth `[0, 0]`.

    Raises:
        ConfigurationError: The tables do not fit together, or an argument is out of its range.
    """
    transitions, rewards = _tables(transitions, rewards)
    _check(horizon, discount)
    values = np.zeros((horizon + 1, len(rewards)))
    actions = np.zeros((horizon, len(rewards)), np.intp)
    for step in reversed(range(horizon)):
        of_actions = rewards + discount * transitions @ values[step + 1]
        values[step] = of_actions.max(axis=1)
        actions[step] = of_actions.argmax(axis=1)
    return values, actions


def value_iteration(
    transitions: ArrayLike, rewards: ArrayLike, discount: float = 0.95, tolerance: float = 1e-5
) -> tuple[FloatArray, NDArray[np.intp]]:
    """Solve an MDP without an end.

    Source: Puterman (1994), section 6.3, https://doi.org/10.1002/9780470316887: iterated until two
    sweeps differ by less than `tolerance * (1 - discount) / (2 discount)`, after which no value is
    off by more than half of `tolerance`.

    Args:
        transitions: Probability of the next state, shape `(S, A, S)`.
        rewards: Mean rewards, shape `(S, A)`.
        discount: Per step, in [0, 1).
        tolerance: Twice the greatest error of a value.

    Returns:
        Values and best actions, shape `(S,)`.

    Raises:
        ConfigurationError: The tables do not fit together, or an argument is out of its range.
    """
    transitions, rewards = _tables(transitions, rewards)
    if not (0.0 <= discount < 1.0 and tolerance > 0.0):
        message = (
            "values without an end exist for a discount in [0, 1) and are found within a tolerance "
            f"above 0, got discount={discount!r}, tolerance={tolerance!r}; use "
            "finite_horizon_value_iteration() for a discount of 1"
        )
        raise ConfigurationError(message)
    values = np.zeros(len(rewards))
    while True:
        of_actions = rewards + discount * transitions @ values
        change = np.abs(of_actions.max(axis=1) - values).max()
        values = of_actions.max(axis=1)
        if 2.0 * discount * change <= tolerance * (1.0 - discount):
            return values, of_actions.argmax(axis=1)


def policy_values(
    transitions: ArrayLike,
    rewards: ArrayLike,
    probabilities: ArrayLike,
    horizon: int,
    discount: float = 1.0,
) -> FloatArray:
    """Return the values of a given policy in an MDP of `horizon` steps.

    Args:
        transitions: Probability of the next state, shape `(S, A, S)`.
        rewards: Mean rewards, shape `(S, A)`.
        probabilities: Of the actions, shape `(S, A)`.
        horizon: Steps, H.
        discount: Per step, in [0, 1].

    Returns:
        As of `finite_horizon_value_iteration`, shape `(H + 1, S)`.

    Raises:
        ConfigurationError: The tables do not fit together, or an argument is out of its range.
    """
    transitions, rewards = _tables(transitions, rewards)
    _check(horizon, discount)
    policy = np.asarray(probabilities, np.float64)
    if policy.shape != rewards.shape:
        message = (
            f"a policy's probabilities and the mean rewards must share one shape (S, A), got "
            f"{policy.shape} and {rewards.shape}"
        )
        raise ConfigurationError(message)
    values = np.zeros((horizon + 1, len(rewards)))
    for step in reversed(range(horizon)):
        values[step] = (policy * (rewards + discount * transitions @ values[step + 1])).sum(axis=1)
    return values


def _tables(transitions: ArrayLike, rewards: ArrayLike) -> tuple[FloatArray, FloatArray]:
    probabilities, means = np.asarray(transitions, np.float64), np.asarray(rewards, np.float64)
    if means.ndim != 2 or probabilities.shape != (*means.shape, len(means)):
        message = (
            "an MDP has transitions of shape (S, A, S) and mean rewards of shape (S, A), got "
            f"{probabilities.shape} and {means.shape}"
        )
        raise ConfigurationError(message)
    return probabilities, means


def _check(horizon: int, discount: float) -> None:
    Whole(1).check("horizon of an MDP", horizon)
    Real(0, 1).check("discount of an MDP", discount)
