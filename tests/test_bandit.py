"""Bandits by hand and by count, and the rows' own streams of random numbers."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncmaml.envs.bandit import BanditEnv, BanditVectorEnv
from asyncmaml.envs.oracles import reference_returns
from asyncmaml.envs.row_streams import RowStreams, standard_normals
from asyncmaml.errors import ConfigurationError

MEANS = np.array([0.0, 0.25, 1.0])
ALL = np.ones(1, np.bool_)


def pulled(arm: int, **settings: Any) -> NDArray[np.float64]:
    """Return the rewards of 4000 rows that pull one arm."""
    rows = BanditVectorEnv(4000, k=3, task={"mean": MEANS}, **settings)
    rows.reset(seed=0)
    rewards: NDArray[np.float64] = rows.step(np.full(4000, arm))[1]
    return rewards


def test_bernoulli_arms_pay_as_often_as_their_means_say() -> None:
    assert not pulled(0).any()
    assert pulled(2).all()
    assert set(pulled(1).tolist()) == {0.0, 1.0}
    assert abs(pulled(1).mean() - 0.25) < 3 * math.sqrt(0.25 * 0.75 / 4000)


@pytest.mark.parametrize("arm", [0, 1, 2])
def test_gaussian_arms_pay_around_their_means(arm: int) -> None:
    rewards = pulled(arm, distribution="gaussian", std=0.5)
    assert abs(rewards.mean() - MEANS[arm]) < 3 * 0.5 / math.sqrt(4000)
    assert abs(rewards.std() - 0.5) < 3 * 0.5 / math.sqrt(2 * 4000)


def test_gaussian_arms_without_deviation_pay_their_means() -> None:
    np.testing.assert_array_equal(pulled(1, distribution="gaussian", std=0.0), np.full(4000, 0.25))


def test_episode_is_one_pull_and_shows_nothing() -> None:
    env = BanditEnv(k=2)
    assert env.reset(seed=0)[0].tolist() == [0.0]
    observation, reward, terminated, truncated, info = env.step(np.int64(1))
    assert (observation.tolist(), terminated, truncated, info) == ([0.0], True, False, {})
    assert type(reward) is float
    assert env.action_space.n == 2  # type: ignore[attr-defined]


def test_without_a_task_every_arm_pays_half_the_time() -> None:
    rows = BanditVectorEnv(4000)
    rows.reset(seed=0)
    rewards = rows.step(np.arange(4000) % 10)[1]
    assert abs(rewards.mean() - 0.5) < 3 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize(
    "settings",
    [
        {"k": 0},
        {"k": 2.0},
        {"k": True},
        {"k": "2"},
        {"distribution": "poisson"},
        {"std": -1.0},
        {"std": math.nan},
        {"std": "1"},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    wanted = f"{next(iter(settings))} of Bandit.* is .*; wanted"
    with pytest.raises(ConfigurationError, match=wanted):
        BanditEnv(**settings)
    with pytest.raises(ConfigurationError, match=wanted):
        BanditVectorEnv(2, **settings)


def test_means_of_bernoulli_arms_are_probabilities_those_of_gaussian_ones_any_numbers() -> None:
    with pytest.raises(ConfigurationError, match="3 probabilities"):
        BanditEnv(k=3, task={"mean": [0.5, 1.5, 0.0]})
    BanditEnv(k=3, distribution="gaussian", task={"mean": [0.5, 1.5, -2.0]})


@pytest.mark.parametrize("action", [-1, 3])
def test_action_out_of_range_is_refused_but_in_an_idle_row(action: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"action {action} is not in 0 to 2"):
        BanditEnv(k=3).step(np.int64(action))
    rows = BanditVectorEnv(2, k=3)
    rows.reset(options={"reset_mask": np.array([True, False])})
    rows.step(np.array([0, action]))
    rows.reset()
    with pytest.raises(ConfigurationError, match=rf"action {action} is not in 0 to 2"):
        rows.step(np.array([0, action]))


def test_reference_returns_are_the_means_mean_and_maximum() -> None:
    reference = reference_returns({"mean": [0.2, 0.9, 0.4]})
    assert reference.random == pytest.approx(0.5)
    assert reference.optimal == 0.9
    assert reference.score(0.7) == pytest.approx(0.5)
    assert math.isnan(reference_returns({"mean": [0.5, 0.5]}).score(0.5))


# --- Streams by row.


def test_streams_are_splitmix64() -> None:
    """Against the well-known first outputs of the reference for the state 1234567."""
    streams = RowStreams(1)
    streams._states[:] = 1234567
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert streams.uniforms(3, ALL)[:, 0].tolist() == [(word >> 11) / 2**53 for word in wanted]
    assert streams.uniforms(1, ALL).item() == (4593380528125082431 >> 11) / 2**53


def test_stream_is_the_same_drawn_at_once_or_one_by_one_alone_or_among_others() -> None:
    together, alone = RowStreams(5), RowStreams(1)
    together.reseed([3, 1, 4, 1, 2**70 + 5])
    at_once = together.uniforms(6, np.ones(5, np.bool_))
    alone.reseed(4)
    one_by_one = [alone.uniforms(1, ALL).item() for _ in range(6)]
    assert at_once[:, 2].tolist() == one_by_one
    np.testing.assert_array_equal(at_once[:, 1], at_once[:, 3])


def test_only_masked_rows_with_a_seed_are_reseeded_and_only_running_rows_advance() -> None:
    streams = RowStreams(3)
    streams.reseed(7)  # 7, 8 and 9
    first = streams.uniforms(1, np.array([True, True, False]))[0]
    streams.reseed([7, None, None], np.array([True, True, False]))
    second = streams.uniforms(1, np.ones(3, np.bool_))[0]
    assert (first == second).tolist() == [True, False, True]
    eight = RowStreams(1)
    eight.reseed(8)
    assert eight.uniforms(2, ALL)[:, 0].tolist() == [first[1], second[1]]


def test_unseeded_streams_differ() -> None:
    streams = RowStreams(50)
    assert len(set(streams.uniforms(1, np.ones(50, np.bool_))[0].tolist())) == 50
    assert RowStreams(1).uniforms(1, ALL) != RowStreams(1).uniforms(1, ALL)


def test_numbers_of_neighbouring_seeds_are_uniform_and_independent() -> None:
    streams = RowStreams(2000)
    streams.reseed(0)
    numbers = streams.uniforms(4, np.ones(2000, np.bool_))
    for line in numbers:
        steps = np.arange(2001) / 2000
        assert np.abs(np.sort(line) - steps[1:]).max() < 1.95 / math.sqrt(2000)
    neighbours = np.stack([*numbers, numbers[0, np.r_[1:2000, 0]]])
    correlations = np.corrcoef(neighbours) - np.eye(5)
    assert np.abs(correlations).max() < 4 / math.sqrt(2000)


def test_normals_match_their_formula_and_moments() -> None:
    # sqrt(-2 log(1 - radius)): 2 for a radius of 1 - exp(-2); a quarter turn has the cosine 0.
    radius = 1 - math.exp(-2)
    found = standard_normals(np.array([radius, radius, radius, 0.0]), np.array([0, 0.5, 0.25, 0]))
    np.testing.assert_allclose(found, [2, -2, 0, 0], atol=1e-15)
    streams = RowStreams(20000)
    streams.reseed(0)
    normals = standard_normals(*streams.uniforms(2, np.ones(20000, np.bool_)))
    for power, wanted, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((normals**power).mean() - wanted) < 3 * math.sqrt(variance / 20000)
