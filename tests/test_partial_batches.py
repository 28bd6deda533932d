"""Batches of which some episodes are not waited for, or fail: `first` and `on_error`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import CountingEnv, DeadlyEnv, FlakyEnv, HighWaitsEnv, NotFiniteEnv
from oracle import assert_same, counting_policy, lockstep
from processes import waiting_gates

from asyncmaml import AsyncSampler
from asyncmaml.errors import ConfigurationError, EnvironmentFailedError, WorkerDiedError

pytestmark = pytest.mark.usefixtures("quick_workers")


@pytest.fixture(autouse=True)
def no_episode_was_tried_before() -> None:
    FlakyEnv.tries.clear()


# --- first


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_first_episodes_are_those_of_the_whole_batch(num_workers: int) -> None:
    env = lambda: CountingEnv(length=None)  # noqa: E731
    whole = lockstep(env, counting_policy, [{"batch_size": 20, "seed": 4}], seed=0)[0]
    async with AsyncSampler(env, num_workers=num_workers, envs_per_worker=20, seed=0) as sampler:
        found = await sampler.sample(counting_policy, batch_size=20, first=6, seed=4)
    assert found.batch_size == 6
    assert found.is_complete
    assert_same(found, whole.select(found.batch_ids))
    assert found.record is not None
    assert found.record.num_dropped == 14


async def test_first_does_not_wait_for_an_episode_that_hangs(tmp_path: Path) -> None:
    arrived, gate = waiting_gates(tmp_path)
    calls = [{"batch_size": 2, "seed": seed} for seed in range(20)]
    drawn = [
        episodes.observations[0, :, 1].tolist()
        for episodes in lockstep(CountingEnv, counting_policy, calls, seed=0)
    ]
    seed = next(seed for seed in range(20) if drawn[seed][0] > 0.5 > drawn[seed][1])
    async with AsyncSampler(
        lambda: HighWaitsEnv(arrived, gate), num_workers=2, envs_per_worker=1, seed=0
    ) as sampler:
        found = await sampler.sample(counting_policy, batch_size=2, first=1, seed=seed)
        assert found.batch_ids.tolist() == [1]
        await asyncio.to_thread(arrived.read_bytes)
        await asyncio.to_thread(gate.write_bytes, b".")


async def test_rows_of_dropped_episodes_serve_the_next_call() -> None:
    env = lambda: CountingEnv(length=None)  # noqa: E731
    wanted = lockstep(env, counting_policy, [{"batch_size": 30, "seed": 5}], seed=0)[0]
    async with AsyncSampler(env, num_workers=0, envs_per_worker=8, seed=0) as sampler:
        await sampler.sample(counting_policy, batch_size=100, first=1)
        assert_same(await sampler.sample(counting_policy, batch_size=30, seed=5), wanted)


async def test_first_of_all_is_the_whole_batch() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0, seed=0) as sampler:
        found = await sampler.sample(counting_policy, batch_size=5, first=5, seed=1)
        assert_same(found, await sampler.sample(counting_policy, batch_size=5, seed=1))
        assert found.batch_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("first", [0, 6, 1.5])
async def test_first_out_of_its_range_is_refused(first: Any) -> None:
    async with AsyncSampler(CountingEnv, num_workers=0) as sampler:
        with pytest.raises(ConfigurationError, match="first is"):
            await sampler.sample(counting_policy, batch_size=5, first=first)


# --- on_error


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_retried_episodes_are_what_they_would_have_been(num_workers: int) -> None:
    calls: list[dict[str, Any]] = [{"batch_size": 9, "seed": 1}]
    wanted = lockstep(FlakyEnv, counting_policy, calls, seed=0)[0]
    FlakyEnv.tries.clear()
    async with AsyncSampler(
        FlakyEnv, num_workers=num_workers, envs_per_worker=4, seed=0
    ) as sampler:
        task = {"failures": 2, "above": 0.5}
        found = await sampler.sample(
            counting_policy, batch_size=9, seed=1, task=task, on_error="retry"
        )
    assert_same(found, wanted)
    num_flaky = int((found.observations[0, :, 1] > 0.5).sum())
    assert 0 < num_flaky < 9
    assert found.record is not None
    assert found.record.num_retries == 2 * num_flaky


async def test_episode_that_fails_at_every_try_is_raised() -> None:
    async with AsyncSampler(FlakyEnv, num_workers=0, max_restarts=2) as sampler:
        with pytest.raises(EnvironmentFailedError, match="lost contact") as caught:
            await sampler.sample(
                counting_policy, batch_size=1, task={"failures": 3}, on_error="retry"
            )
        assert caught.value.step == 2
        assert list(FlakyEnv.tries.values()) == [3]


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_dropped_episodes_leave_the_others_as_they_are(num_workers: int) -> None:
    calls: list[dict[str, Any]] = [{"batch_size": 9, "seed": 1}]
    wanted = lockstep(FlakyEnv, counting_policy, calls, seed=0)[0]
    sound = torch.nonzero(wanted.observations[0, :, 1] <= 0.5).flatten()
    FlakyEnv.tries.clear()
    async with AsyncSampler(
        FlakyEnv, num_workers=num_workers, envs_per_worker=4, seed=0
    ) as sampler:
        task = {"failures": 99, "above": 0.5}
        found = await sampler.sample(
            counting_policy, batch_size=9, seed=1, task=task, on_error="drop"
        )
    assert found.batch_ids.tolist() == sound.tolist()
    assert_same(found, wanted.select(sound))
    record = found.record
    assert record is not None
    assert record.num_dropped == len(record.failures) == 9 - len(sound)
    assert {failure.batch_id for failure in record.failures} == set(range(9)) - set(sound.tolist())
    assert all("lost contact" in str(failure) for failure in record.failures)


async def test_batch_without_a_sound_episode_raises() -> None:
    async with AsyncSampler(FlakyEnv, num_workers=0) as sampler:
        with pytest.raises(EnvironmentFailedError, match="lost contact"):
            await sampler.sample(
                counting_policy, batch_size=3, task={"failures": 99}, on_error="drop"
            )
        assert (await sampler.sample(counting_policy, batch_size=2)).batch_size == 2


@pytest.mark.parametrize("place", ["reset", "step", "last", "reward"])
async def test_episodes_with_a_nan_can_be_dropped(place: str) -> None:
    async with AsyncSampler(NotFiniteEnv, num_workers=0, envs_per_worker=2, seed=0) as sampler:
        bad = {"place": place}
        with pytest.raises(ArithmeticError):
            await sampler.sample(counting_policy, batch_size=5, task=bad, on_error="drop")
        found = await sampler.sample(counting_policy, batch_size=5, seed=3)
    assert_same(
        found, lockstep(NotFiniteEnv, counting_policy, [{"batch_size": 5, "seed": 3}], seed=0)[0]
    )


async def test_first_counts_what_is_in_and_not_what_was_dropped() -> None:
    async with AsyncSampler(FlakyEnv, num_workers=0, envs_per_worker=4, seed=0) as sampler:
        task = {"failures": 99, "above": 0.5}
        found = await sampler.sample(
            counting_policy, batch_size=40, first=7, seed=1, task=task, on_error="drop"
        )
    assert found.batch_size == 7
    assert (found.observations[0, :, 1] <= 0.5).all()


async def test_episode_that_kills_its_workers_can_be_dropped() -> None:
    async with AsyncSampler(DeadlyEnv, num_workers=1, envs_per_worker=1, max_restarts=1) as sampler:
        with pytest.raises(WorkerDiedError):
            await sampler.sample(counting_policy, batch_size=1, on_error="drop")
        assert sampler.statistics.restarts == 2


async def test_stream_goes_on_without_what_is_dropped() -> None:
    async with AsyncSampler(FlakyEnv, num_workers=0, envs_per_worker=4, seed=0) as sampler:
        stream = sampler.stream(
            counting_policy,
            batch_size=9,
            seed=1,
            task={"failures": 99, "above": 0.5},
            on_error="drop",
        )
        taken = [episode async for episode in stream]
    assert 0 < len(taken) < 9
    assert stream.num_dropped == 9 - len(taken)


async def test_other_words_for_on_error_are_refused() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0) as sampler:
        wrong: Any = "ignore"
        with pytest.raises(ConfigurationError, match="wanted one of raise, retry, drop"):
            await sampler.sample(counting_policy, on_error=wrong)
