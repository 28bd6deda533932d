"""The same seed gives the same episodes, bit for bit, whoever samples them."""

import asyncio
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from oracle import are_same, assert_same, lockstep, policy_of
from torch import Tensor, nn
from torch.distributions import Distribution

import asyncmaml.envs
from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.envs.making import quiet_mujoco
from asyncmaml.intraop import ROW_BLOCK, one_intraop_thread
from asyncmaml.learning.mlp import NONLINEARITIES
from asyncmaml.learning.policies import MLPPolicy
from asyncmaml.sampling import row_places
from asyncmaml.sampling.row_places import RowLayout
from asyncmaml.sampling.snapshot import PolicySnapshot

NAVIGATION = "asyncmaml/Navigation2D-v0"
WORKERS = (0, 1, 2, 4)
ROWS = (1, 3, 8)


@dataclass(frozen=True)
class Family:
    """An environment, how long its episodes may last and how many are sampled of it."""

    env: str
    max_episode_steps: int
    batch_size: int

    @property
    def settings(self) -> dict[str, Any]:
        return {"max_episode_steps": self.max_episode_steps, "seed": 17}


FAMILIES = {
    "CartPole": Family("CartPole-v1", 500, 6),
    "Pendulum": Family("Pendulum-v1", 50, 3),
    "Navigation2D": Family(NAVIGATION, 40, 4),
    "HalfCheetah": Family("HalfCheetah-v5", 40, 3),
}


@cache
def policies(name: str) -> tuple[MLPPolicy, MLPPolicy]:
    """Return two policies of different size for the family."""
    with quiet_mujoco():
        env = gymnasium.make(FAMILIES[name].env)
    try:
        return policy_of(env), policy_of(env, hidden_sizes=(7,), seed=1)
    finally:
        env.close()


def calls_of(name: str) -> tuple[list[MLPPolicy], list[dict[str, Any]]]:
    """Return what the test calls in this order: twice alone, then two that overlap."""
    first, second = policies(name)
    size = FAMILIES[name].batch_size
    params = {key: value + 0.1 for key, value in first.named_parameters()}
    calls: list[dict[str, Any]] = [
        {"batch_size": size},
        {"batch_size": size, "seed": 5},
        {"batch_size": size + 2, "params": params},
        {"batch_size": size - 1},
    ]
    if name == "Navigation2D":
        calls[2]["task"], calls[3]["task"] = {"goal": (0.3, -0.2)}, {"goal": (-0.1, 0.4)}
    return [first, first, first, second], calls


@cache
def expected(name: str) -> list[BatchEpisodes]:
    """Return the lock-step sampler's episodes of the same calls; the sampler is our oracle."""
    family = FAMILIES[name]
    used, calls = calls_of(name)
    results = []
    # One sampler for each policy; a call's number is then set by the calls made before it.
    for index, (policy, call) in enumerate(zip(used, calls, strict=True)):
        before = [{"batch_size": 1} for earlier in calls[:index] if "seed" not in earlier]
        results += lockstep(family.env, policy, [*before, call], **family.settings)[-1:]
    return results


def grid() -> list[Any]:
    """Return every number of workers and rows, of every family.

    A spawned worker takes many times as long to start as one that a fork server makes, and what
    it does afterwards is the same; so few of the default suite are spawned.
    """
    cases: list[Any] = []
    for name, num_workers, num_rows in itertools.product(FAMILIES, WORKERS, ROWS):
        if num_workers:
            marks = () if (num_workers, num_rows) == (2, 3) else (pytest.mark.slow,)
            cases.append(pytest.param(name, num_workers, num_rows, "spawn", marks=marks))
        cases.append(pytest.param(name, num_workers, num_rows, "forkserver"))
    return cases


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize(("name", "num_workers", "num_rows", "start_method"), grid())
async def test_episodes_are_those_of_the_lock_step_sampler(
    name: str, num_workers: int, num_rows: int, start_method: Any
) -> None:
    """Alone, with a seed of the call, and two overlapping; started once, since that costs most."""
    family = FAMILIES[name]
    (first, _, _, second), calls = calls_of(name)
    async with AsyncSampler(
        family.env,
        num_workers=num_workers,
        envs_per_worker=num_rows,
        start_method=start_method,
        **family.settings,
    ) as sampler:
        alone = await sampler.sample(first, **calls[0])
        seeded = await sampler.sample(first, **calls[1])
        overlapping = await asyncio.gather(
            sampler.sample(first, **calls[2]), sampler.sample(second, **calls[3])
        )
    for found, wanted in zip([alone, seeded, *overlapping], expected(name), strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_the_policys_of_the_recorded_actions(name: str) -> None:
    policy = policies(name)[0]
    episodes = expected(name)[0]
    with torch.no_grad():
        wanted = policy(episodes.observations).log_prob(episodes.actions) * episodes.mask
    torch.testing.assert_close(episodes.log_probs, wanted, atol=1e-4, rtol=0)


async def test_single_and_vectorised_navigation_give_the_same_episodes() -> None:
    policy = policies("Navigation2D")[0]
    results = []
    for vectorized in (True, False):
        async with AsyncSampler(
            NAVIGATION, num_workers=0, envs_per_worker=4, seed=3, vectorized=vectorized
        ) as sampler:
            task = sampler.sample_tasks(1)[0]
            results.append(await sampler.sample(policy, task=task, batch_size=9))
    assert_same(*results)


async def test_a_small_batch_is_the_beginning_of_a_large_one() -> None:
    policy = policies("CartPole")[0]
    async with AsyncSampler("CartPole-v1", num_workers=0, seed=3) as sampler:
        small = await sampler.sample(policy, batch_size=3, seed=1)
        large = await sampler.sample(policy, batch_size=40, seed=1)
    length = len(small)
    assert torch.equal(large.lengths[:3], small.lengths)
    assert torch.equal(large.observations[:length, :3], small.observations)
    assert torch.equal(large.actions[:length, :3], small.actions)


async def test_episodes_of_one_call_differ_from_each_other() -> None:
    async with AsyncSampler("Pendulum-v1", num_workers=0, seed=0, max_episode_steps=9) as sampler:
        episodes = await sampler.sample(policies("Pendulum")[0], batch_size=30)
    starts = {tuple(start) for start in episodes.observations[0].tolist()}
    noise = {tuple(actions) for actions in episodes.actions[:, :, 0].T.tolist()}
    assert len(starts) == len(noise) == 30


async def test_calls_differ_from_each_other() -> None:
    policy = policies("CartPole")[0]
    async with AsyncSampler("CartPole-v1", num_workers=0, seed=0, batch_size=4) as sampler:
        first, second = await sampler.sample(policy), await sampler.sample(policy)
        named = await sampler.sample(policy, seed=0)
    assert not are_same(first, second)
    assert not are_same(first, named)
    assert not are_same(second, named)


@pytest.mark.parametrize(("first_seed", "second_seed"), [(0, 1), (None, None)])
async def test_samplers_of_different_seeds_differ(
    first_seed: int | None, second_seed: int | None
) -> None:
    results = []
    for seed in (first_seed, second_seed):
        async with AsyncSampler("CartPole-v1", num_workers=0, seed=seed) as sampler:
            results.append(await sampler.sample(policies("CartPole")[0], batch_size=4))
    assert not are_same(*results)


async def test_seed_of_a_call_does_not_shift_the_following_calls() -> None:
    policy = policies("CartPole")[0]
    async with AsyncSampler("CartPole-v1", num_workers=0, seed=0, batch_size=4) as sampler:
        seeded = await sampler.sample(policy, seed=7)
        first = await sampler.sample(policy)
        again = await sampler.sample(policy, seed=7)
        second = await sampler.sample(policy)
    wanted = lockstep("CartPole-v1", policy, [{}, {}], seed=0, batch_size=4)
    assert_same(first, wanted[0])
    assert_same(second, wanted[1])
    assert_same(seeded, again)


async def test_call_that_was_refused_does_not_shift_the_following_calls() -> None:
    """The lock-step sampler does not count it either."""
    policy = policies("CartPole")[0]
    async with AsyncSampler("CartPole-v1", num_workers=0, seed=0, batch_size=4) as sampler:
        with pytest.raises(ValueError, match="lack"):
            await sampler.sample(policy, params={})
        with pytest.raises(ValueError, match="plain data"):
            await sampler.sample(policy, task=(number for number in range(3)))
        found = await sampler.sample(policy)
    assert_same(found, lockstep("CartPole-v1", policy, seed=0, batch_size=4)[0])


async def test_seed_of_a_call_alone_decides_where_the_sampler_has_none() -> None:
    results = []
    for _ in range(2):
        async with AsyncSampler("CartPole-v1", num_workers=0) as sampler:
            results.append(await sampler.sample(policies("CartPole")[0], batch_size=4, seed=7))
    assert_same(*results)
    wanted = lockstep("CartPole-v1", policies("CartPole")[0], [{"seed": 7}], batch_size=4)[0]
    assert_same(results[0], wanted)


async def test_many_overlapping_requests_are_as_if_alone() -> None:
    policy = policies("CartPole")[0]
    calls: list[dict[str, Any]] = [{"batch_size": 1 + index % 5} for index in range(12)]
    async with AsyncSampler("CartPole-v1", num_workers=0, envs_per_worker=8, seed=2) as sampler:
        found = await asyncio.gather(*(sampler.sample(policy, **call) for call in calls))
    wanted = lockstep("CartPole-v1", policy, calls, seed=2)
    for left, right in zip(found, wanted, strict=True):
        assert_same(left, right)


# --- a row's result does not depend on who shares its forward


def outputs(policy: MLPPolicy, observations: Tensor) -> Tensor:
    distribution: Any = policy(observations)
    return distribution.logits if hasattr(distribution, "logits") else distribution.mean  # type: ignore[no-any-return]


@pytest.mark.parametrize("hidden_sizes", [(), (7,), (100, 100)])
@pytest.mark.parametrize("width", range(1, 11))
def test_row_is_bitwise_the_same_in_every_whole_number_of_blocks(
    width: int, hidden_sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(width)
    normal = asyncmaml.NormalMLPPolicy(width, width, hidden_sizes)
    categorical = asyncmaml.CategoricalMLPPolicy(11 - width, width, hidden_sizes)
    largest = 12 * ROW_BLOCK
    with one_intraop_thread() as block, torch.inference_mode():
        assert block % ROW_BLOCK == 0
        for policy in (normal, categorical):
            observations = torch.randn(largest, policy.input_size)
            wanted = outputs(policy, observations)
            for count in range(block, largest, block):
                found = outputs(policy, observations[:count])
                assert torch.equal(found, wanted[:count]), (type(policy).__name__, count)


class PlainLinear(nn.Module):
    """Says nothing of itself."""

    def __init__(self, policy: MLPPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observations: Tensor) -> Distribution:
        distribution: Distribution = self.policy(observations)
        return distribution


SHAPES = [(17, 6), (7, 3), (65, 10), (33, 2, 5), (2, 100, 2), (5, 8, 8), (3, 9, 4), (17, 100, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_plain", [False, True])
def test_row_is_bitwise_the_same_wherever_it_lies(
    shape: tuple[int, ...], is_plain: bool, dtype: torch.dtype
) -> None:
    """MKL's products of few outputs may depend on a row's address, as on AMD's processors."""
    torch.manual_seed(0)
    observed, *hidden, actions = shape
    policy = asyncmaml.NormalMLPPolicy(observed, actions, hidden).to(dtype)
    used: nn.Module = PlainLinear(policy) if is_plain else policy
    snapshot = PolicySnapshot(used, None, torch.device("cpu"))
    observations = torch.randn(200, observed, dtype=dtype)
    chance = np.random.default_rng(0)
    with one_intraop_thread() as block, torch.inference_mode():
        laid_out = RowLayout(snapshot, block)
        batch, places = laid_out(observations, np.arange(200))
        wanted = snapshot(batch).mean[places]
        for count in chance.integers(1, 200, 40):
            ids = chance.permutation(200)[:count]
            batch, places = laid_out(observations[ids], ids)
            assert torch.equal(snapshot(batch).mean[places], wanted[ids]), count


@pytest.mark.parametrize("matter", [False, True])
def test_row_lies_where_its_episodes_number_says(
    matter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_places, "places_matter", lambda: matter)
    ids = np.array([8, 3, 7, 4, 0])
    for hidden, needed in ((7, matter), (8, False)):
        policy = asyncmaml.CategoricalMLPPolicy(4, 2, (hidden,))
        snapshot = PolicySnapshot(policy, None, torch.device("cpu"))
        laid_out = RowLayout(snapshot, 16)
        assert laid_out.needs_places == needed
        batch, places = laid_out(torch.arange(1.0, 6.0)[:, None], ids)
        assert batch.shape == (16, 1)
        assert batch[places].flatten().tolist() == [1, 2, 3, 4, 5]
        assert batch.sum() == 15
        found = places if isinstance(places, slice) else places.tolist()
        assert found == ([0, 3, 7, 4, 8] if needed else slice(0, 5))


async def test_rows_in_places_of_their_kind_give_the_episodes_of_the_lock_step_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine where places matter, whatever the one at hand is like."""
    monkeypatch.setattr(row_places, "places_matter", lambda: True)
    policy = asyncmaml.CategoricalMLPPolicy(4, 2, (7,))
    (wanted,) = lockstep("CartPole-v1", policy, [{"batch_size": 9}], seed=1)
    async with AsyncSampler("CartPole-v1", num_workers=0, envs_per_worker=5, seed=1) as sampler:
        assert_same(await sampler.sample(policy, batch_size=9), wanted)


@pytest.mark.parametrize("width", [7, 33, 64, 100])
@pytest.mark.parametrize("nonlinearity", [*NONLINEARITIES, torch.sin])
def test_row_is_bitwise_the_same_behind_every_nonlinearity(nonlinearity: Any, width: int) -> None:
    """Of a sigmoid of 16 x 33 numbers, torch computes the last 16 by another routine."""
    torch.manual_seed(width)
    policy = asyncmaml.NormalMLPPolicy(5, 3, (width,), nonlinearity)
    with one_intraop_thread() as block, torch.inference_mode():
        block = RowLayout(PolicySnapshot(policy, None, torch.device("cpu")), block).block
        for _ in range(20):
            observations = torch.randn(4 * block, 5)
            wanted = outputs(policy, observations)
            for count in range(block, 4 * block, block):
                assert torch.equal(outputs(policy, observations[:count]), wanted[:count]), count


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
async def test_number_of_rows_changes_nothing_behind_any_nonlinearity(nonlinearity: str) -> None:
    torch.manual_seed(0)
    policy = asyncmaml.NormalMLPPolicy(2, 2, (33,), nonlinearity)
    settings: dict[str, Any] = {"seed": 1, "max_episode_steps": 10}
    (wanted,) = lockstep(NAVIGATION, policy, [{"batch_size": 48}], num_envs=16, **settings)
    for num_rows in (16, 32, 48):
        async with AsyncSampler(
            NAVIGATION, num_workers=0, envs_per_worker=num_rows, **settings
        ) as sampler:
            assert_same(await sampler.sample(policy, batch_size=48), wanted)


def test_limit_on_threads_ends_with_its_block() -> None:
    before = torch.get_num_threads()
    with one_intraop_thread():
        pass
    assert torch.get_num_threads() == before


async def test_open_sampler_leaves_the_caller_its_intraop_threads() -> None:
    before = torch.get_num_threads()
    async with AsyncSampler("CartPole-v1", num_workers=0) as sampler:
        await sampler.sample(policies("CartPole")[0], batch_size=2)
        assert torch.get_num_threads() == before
