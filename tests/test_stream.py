import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import CountingEnv, RaisingEnv, WaitingEnv
from oracle import assert_same, policy_of, uniform
from processes import until, waiting_gates

from asyncmaml import AsyncSampler, BatchEpisodes, NormalMLPPolicy
from asyncmaml.errors import ConfigurationError, EnvironmentFailedError, SamplerStateError

pytestmark = pytest.mark.usefixtures("quick_workers")

CARTPOLE = "CartPole-v1"


def assert_is_episode(found: BatchEpisodes, batch: BatchEpisodes, batch_id: int) -> None:
    length = int(batch.lengths[batch_id])
    assert found.lengths.tolist() == [length]
    for name in ("observations", "actions", "rewards", "log_probs"):
        wanted = getattr(batch, name)[:length, batch_id : batch_id + 1]
        assert torch.equal(getattr(found, name), wanted), name
    assert torch.equal(found.last_observations[0], batch.last_observations[batch_id])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_stream_hands_out_the_episodes_of_the_batch(num_workers: int, ordered: bool) -> None:
    async with AsyncSampler(CARTPOLE, num_workers=num_workers, envs_per_worker=4) as sampler:
        policy = policy_of(sampler)
        batch = await sampler.sample(policy, batch_size=20, seed=7)
        ids = []
        async for episode in sampler.stream(policy, batch_size=20, seed=7, ordered=ordered):
            assert_is_episode(episode, batch, int(episode.batch_ids))
            ids.append(int(episode.batch_ids))
    assert sorted(ids) == list(range(20))
    assert (ids == list(range(20))) or not ordered


async def test_stream_counts_as_one_call() -> None:
    async with AsyncSampler(CARTPOLE, num_workers=0, seed=3) as sampler:
        policy = policy_of(sampler)
        first = await sampler.sample(policy, batch_size=3)
        async for _ in sampler.stream(policy, batch_size=2):
            pass
        third = await sampler.sample(policy, batch_size=3)
    async with AsyncSampler(CARTPOLE, num_workers=0, seed=3) as sampler:
        assert_same(await sampler.sample(policy, batch_size=3), first)
        await sampler.sample(policy, batch_size=5)
        assert_same(await sampler.sample(policy, batch_size=3), third)


async def test_loop_that_is_left_frees_the_rows_of_an_endless_stream() -> None:
    async with AsyncSampler(CARTPOLE, num_workers=0, envs_per_worker=4) as sampler:
        policy = policy_of(sampler)
        async for _ in sampler.stream(policy):
            break
        gc.collect()
        await sampler.sample(policy, batch_size=1)  # by then the cancellation has been seen to
        assert "0 rows busy, 4 idle, 0 requests" in repr(sampler)


async def test_loop_that_is_left_frees_its_rows_within_one_step(tmp_path: Path) -> None:
    gates = waiting_gates(tmp_path)
    async with AsyncSampler(
        lambda: WaitingEnv(*gates), num_workers=1, envs_per_worker=1
    ) as sampler:
        stream = sampler.stream(uniform, look_ahead=2)
        first = asyncio.create_task(anext(stream))
        await asyncio.to_thread(gates[0].read_bytes)
        await asyncio.to_thread(gates[1].write_bytes, b".")
        await first
        await asyncio.to_thread(gates[0].read_bytes)
        del first, stream  # as at the end of a loop that is left
        gc.collect()
        # The second episode is still in its step; nobody owns it any more.
        await until(lambda: repr(sampler).endswith("0 rows busy, 1 idle, 0 requests]>"))
        await asyncio.to_thread(gates[1].write_bytes, b".")


class ShortOrLongEnv(CountingEnv):
    """Half of the episodes last one step, the others 300."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        self.limit = 300 if self.drawn > 0.5 else 1
        return observation, info


@pytest.mark.parametrize("ordered", [False, True])
async def test_episodes_come_as_they_complete_unless_ordered(ordered: bool) -> None:
    async with AsyncSampler(ShortOrLongEnv, num_workers=0, envs_per_worker=8) as sampler:
        stream = sampler.stream(uniform, batch_size=8, look_ahead=8, ordered=ordered, seed=1)
        episodes = [episode async for episode in stream]
        by_id = await sampler.sample(uniform, batch_size=8, seed=1)
    lengths = [int(episode.lengths) for episode in episodes]
    wanted: list[int] = by_id.lengths.tolist()
    assert wanted != sorted(wanted)
    assert lengths == (wanted if ordered else sorted(wanted))


async def test_look_ahead_bounds_what_is_under_way() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0, envs_per_worker=16) as sampler:
        stream = sampler.stream(uniform, look_ahead=3)
        await anext(stream)
        await sampler.sample(uniform, batch_size=100)  # would be time enough for more
        assert sampler.statistics.episodes == 100 + 3
        assert repr(stream) == "<EpisodeStream [0 episodes under way, 2 waiting to be taken]>"
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_updated_parameters_reach_the_episodes_that_are_not_yet_begun() -> None:
    policy = NormalMLPPolicy(2, 2, (8,), init_std=0.01)
    shifted = {name: value.detach().clone() for name, value in policy.named_parameters()}
    shifted["mu.bias"] += 1
    async with AsyncSampler("asyncmaml/Navigation2D-v0", num_workers=0) as sampler:
        stream = sampler.stream(policy, batch_size=6, look_ahead=2, ordered=True, seed=1)
        episodes = [await anext(stream)]
        stream.update(shifted)
        episodes += [episode async for episode in stream]
        assert [episode.params_version for episode in episodes] == [0, 0, 1, 1, 1, 1]
        after = await sampler.sample(policy, shifted, batch_size=6, seed=1)
    assert_is_episode(episodes[5], after, 5)


async def test_episode_that_fails_ends_the_stream_with_its_error() -> None:
    async with AsyncSampler(lambda: RaisingEnv(phase="step"), num_workers=0) as sampler:
        with pytest.raises(EnvironmentFailedError) as caught:
            async for _ in sampler.stream(uniform, batch_size=3, look_ahead=1):
                pass
        assert caught.value.batch_id == 0


async def test_closing_the_sampler_ends_its_streams_with_an_error() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0) as sampler:
        stream = sampler.stream(uniform)
        await anext(stream)
    with pytest.raises(SamplerStateError):
        [episode async for episode in stream]


async def test_stream_refuses_bad_arguments() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0) as sampler:
        with pytest.raises(ConfigurationError, match="look_ahead"):
            sampler.stream(uniform, look_ahead=0)
        with pytest.raises(ConfigurationError, match="batch_size"):
            sampler.stream(uniform, batch_size=0)


async def test_consumer_that_is_cancelled_leaves_the_sampler_usable() -> None:
    async def consume(sampler: AsyncSampler) -> None:
        async for _ in sampler.stream(policy_of(sampler)):
            pass

    async with AsyncSampler(CARTPOLE, num_workers=0, envs_per_worker=4) as sampler:
        policy = policy_of(sampler)
        wanted = await sampler.sample(policy, batch_size=5, seed=1)
        consumer = asyncio.create_task(consume(sampler))
        await sampler.sample(policy, batch_size=2)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert_same(await sampler.sample(policy, batch_size=5, seed=1), wanted)
