"""The baseline against numpy's least squares, and what it makes of odd observations.

Fault 14 (one shared fit) and fault 15 (float32 normal equations, no clipping) of the list in
MAMLRL.md 3.3 fail here when put back.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import ConfigurationError, LearningError
from asyncmaml.learning.baseline import LinearFeatureBaseline


def episodes_of(
    observations: NDArray[np.generic], rewards: NDArray[np.generic], gamma: float = 0.9
) -> BatchEpisodes:
    """Episodes `(T, B, *O)` of one length, all truncated; the last observation is the first's."""
    num_steps, batch_size = rewards.shape
    episodes = BatchEpisodes(batch_size, gamma)
    ids = np.arange(batch_size)
    for step in range(num_steps):
        episodes.append(
            observations[step],
            np.zeros(batch_size, np.int64),
            rewards[step].astype(np.float32),
            ids,
            np.zeros(batch_size, np.float32),
        )
    episodes.finish(ids, observations[0], np.zeros(batch_size, bool), np.ones(batch_size, bool))
    return episodes


def features_by_hand(observations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of `(T, B, O)`: clipped, squared, time, its square and cube, 1; `(T B, F)`."""
    num_steps, batch_size = observations.shape[:2]
    clipped = np.clip(observations, -10, 10)
    time = np.repeat(np.arange(num_steps) / 100, batch_size).reshape(num_steps, batch_size, 1)
    columns = [clipped, clipped**2, time, time**2, time**3, np.ones_like(time)]
    return np.concatenate(columns, axis=-1).reshape(num_steps * batch_size, -1)


def explained(values: Tensor, targets: Tensor) -> float:
    values, targets = values.double(), targets.double()
    return 1 - float((values - targets).square().sum() / (targets - targets.mean()).square().sum())


def test_values_are_those_of_numpys_least_squares_on_the_regularised_rows() -> None:
    rng = np.random.default_rng(0)
    observations = rng.normal(scale=8, size=(7, 5, 3))  # some beyond the clip
    episodes = episodes_of(observations.astype(np.float32), rng.normal(size=(7, 5)))
    seen = episodes.observations.numpy().astype(np.float64)
    features = features_by_hand(seen)
    rows = np.concatenate([features, 1e-5**0.5 * np.eye(features.shape[1])])
    targets = np.concatenate([episodes.returns.numpy().ravel(), np.zeros(features.shape[1])])
    coefficients = np.linalg.lstsq(rows, targets, rcond=None)[0]
    expected = (features @ coefficients).reshape(7, 5)
    values = LinearFeatureBaseline().values(episodes)
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-8)


def test_ill_conditioned_features_are_fitted_as_well_as_least_squares_can() -> None:
    """Fault 15: in float32 these normal equations explain nothing."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(100, 20, 1))
    # Speeds that all but agree, as those of a cheetah's joints, and one large position.
    near = base + 1e-3 * rng.normal(size=(100, 20, 8))
    observations = np.concatenate([near, 8 + 1e-2 * base], axis=-1).astype(np.float32)
    rewards = (near @ rng.normal(size=8) * 30 * (rng.random((100, 20)) < 0.5)).astype(np.float32)
    episodes = episodes_of(observations, rewards, gamma=0.0)
    features = features_by_hand(observations.astype(np.float64))
    targets = episodes.returns.numpy().ravel().astype(np.float64)
    best = features @ np.linalg.lstsq(features, targets, rcond=None)[0]
    best_explained = explained(torch.from_numpy(best), torch.from_numpy(targets))
    values = LinearFeatureBaseline().values(episodes)
    assert explained(values.ravel(), episodes.returns.ravel()) > best_explained - 5e-3


def test_a_large_observation_is_clipped_before_it_is_squared() -> None:
    observations = np.full((2, 3, 1), 1e4, np.float32)
    observations[0] = 10.0
    rewards = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    with_outlier = LinearFeatureBaseline().values(episodes_of(observations, rewards))
    clipped = LinearFeatureBaseline().values(episodes_of(observations.clip(-10, 10), rewards))
    assert torch.equal(with_outlier, clipped)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1)])
def test_constant_features_and_single_steps_have_values_near_the_returns(
    shape: tuple[int, int],
) -> None:
    episodes = episodes_of(np.zeros((*shape, 2), np.float32), np.full(shape, 2.0))
    values = LinearFeatureBaseline(1e-9).values(episodes)
    torch.testing.assert_close(values.float(), episodes.returns, atol=2e-2, rtol=0)


def test_singular_equations_are_solved_with_more_regularization() -> None:
    features = torch.full((3, 4), 1e8)  # beside 1e17, 1e-5 is nothing in float64
    targets = torch.full((3,), 5.0)
    coefficients = LinearFeatureBaseline().fit(features, targets)
    torch.testing.assert_close(
        features.double() @ coefficients, targets.double(), rtol=1e-3, atol=0
    )


def test_padding_does_not_enter_the_fit_and_has_value_0() -> None:
    rng = np.random.default_rng(1)
    observations = rng.normal(size=(4, 2, 2)).astype(np.float32)
    ragged = BatchEpisodes(2, 0.9)
    for step in range(4):
        ids = np.array([0, 1]) if step < 2 else np.array([0])
        rewards = np.ones(len(ids), np.float32)
        ragged.append(observations[step, ids], np.zeros(len(ids), np.int64), rewards, ids, rewards)
    done = np.array([True, True])
    ragged.finish(np.array([0, 1]), observations[0], done, ~done)
    baseline = LinearFeatureBaseline()
    values = baseline.values(ragged)
    features = torch.from_numpy(features_by_hand(observations.astype(np.float64)))
    taken = ragged.mask.bool()
    coefficients = baseline.fit(features[taken.ravel()], ragged.returns[taken])
    expected = torch.where(taken, (features @ coefficients).reshape(4, 2), 0.0)
    torch.testing.assert_close(values, expected)


def test_a_discrete_observation_gets_a_value_of_its_own() -> None:
    """As a number, 0, 3 and 1 could not have the values 5, 0 and 1 at one and the same step."""
    observations = np.array([[0, 3, 1, 2, 0, 3]])
    rewards = np.array([[5.0, 0.0, 1.0, 0.0, 5.0, 0.0]])
    values = LinearFeatureBaseline().values(episodes_of(observations, rewards))
    torch.testing.assert_close(values.ravel(), torch.tensor(rewards.ravel()), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("num_kinds", "is_one_hot"), [(256, True), (257, False)])
def test_a_discrete_observation_is_one_number_beyond_256_kinds(
    num_kinds: int, is_one_hot: bool
) -> None:
    rng = np.random.default_rng(4)
    observations = rng.permutation(num_kinds)[np.newaxis]
    rewards = rng.normal(size=observations.shape)
    values = LinearFeatureBaseline().values(episodes_of(observations, rewards))
    if is_one_hot:
        torch.testing.assert_close(values.ravel(), torch.tensor(rewards.ravel()), atol=1e-3, rtol=0)
    else:
        numbers = observations[..., np.newaxis].astype(np.float32)
        expected = LinearFeatureBaseline().values(episodes_of(numbers, rewards))
        assert torch.equal(values, expected)


def test_an_image_is_scaled_and_made_small_enough_to_fit() -> None:
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, size=(3, 4, 20, 20, 1), dtype=np.uint8)
    images[:, :2] //= 4  # dark
    rewards = np.tile([0.0, 0.0, 1.0, 1.0], (3, 1))
    episodes = episodes_of(images, rewards, gamma=0.0)
    assert explained(LinearFeatureBaseline().values(episodes), episodes.returns) > 0.99


def test_one_tasks_values_do_not_depend_on_what_was_fitted_before() -> None:
    """Fault 14."""
    rng = np.random.default_rng(3)
    first, second = (
        episodes_of(rng.normal(size=(5, 3, 2)).astype(np.float32), rng.normal(size=(5, 3)))
        for _ in range(2)
    )
    shared = LinearFeatureBaseline()
    one_way = shared.values(first), shared.values(second)
    other_way = shared.values(second), shared.values(first)
    assert torch.equal(one_way[0], other_way[1])
    assert torch.equal(one_way[1], other_way[0])
    assert torch.equal(one_way[0], LinearFeatureBaseline().values(first))
    assert torch.equal(one_way[1], LinearFeatureBaseline().values(second))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_by_name(bad: float) -> None:
    rewards, observations = np.ones((2, 2)), np.zeros((2, 2, 1), np.float32)
    rewards[1, 1] = bad
    with pytest.raises(LearningError, match="returns that are not finite"):
        LinearFeatureBaseline().values(episodes_of(observations, rewards))
    observations[1, 1] = np.nan
    with pytest.raises(LearningError, match="observations that are not finite"):
        LinearFeatureBaseline().values(episodes_of(observations, np.ones((2, 2))))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_regularization_is_a_positive_number(bad: float) -> None:
    with pytest.raises(ConfigurationError, match=r"regularization is .*; wanted .* above 0"):
        LinearFeatureBaseline(bad)
