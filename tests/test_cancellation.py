"""A call may be cancelled anywhere; it costs nobody else anything."""

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cancelling import cancel_at_every_await
from fakes import CountingEnv, WaitingEnv
from gymnasium.envs.classic_control import CartPoleEnv
from oracle import assert_same, counting_policy, lockstep, policy_of, uniform
from processes import children, until, waiting_gates

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import SamplerStateError
from asyncmaml.learning.policies import MLPPolicy

pytestmark = pytest.mark.usefixtures("quick_workers")

CARTPOLE = "CartPole-v1"


@pytest.fixture(scope="module")
def policy() -> MLPPolicy:
    """One for CartPole."""
    return policy_of(CartPoleEnv())


def calls_are_over(sampler: AsyncSampler) -> bool:
    return " 0 rows busy" in repr(sampler) and repr(sampler).endswith(" 0 requests]>")


@pytest.mark.parametrize("how", ["cancel", "timeout", "sibling"])
@pytest.mark.parametrize("num_workers", [0, 1])
async def test_cancelled_sample_leaves_the_sampler_usable(
    how: str, num_workers: int, policy: MLPPolicy
) -> None:
    async with AsyncSampler(
        CARTPOLE, num_workers=num_workers, envs_per_worker=4, seed=0, batch_size=5
    ) as sampler:
        endless = sampler.sample(uniform, batch_size=10**6, seed=1)
        under_way = sampler.statistics.transitions + 20
        if how == "cancel":
            sampling = asyncio.create_task(endless)
            await until(lambda: sampler.statistics.transitions > under_way)
            sampling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sampling
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await endless
        else:
            with pytest.raises(ExceptionGroup) as caught:
                await with_failing_sibling(sampler, endless, under_way)
            assert caught.group_contains(ZeroDivisionError)
        await until(lambda: calls_are_over(sampler))
        found = await sampler.sample(policy)
    assert_same(found, lockstep(CARTPOLE, policy, seed=0, batch_size=5)[0])


async def with_failing_sibling(sampler: AsyncSampler, endless: Any, under_way: int) -> None:
    async def fail() -> None:
        await until(lambda: sampler.statistics.transitions > under_way)
        raise ZeroDivisionError

    async with asyncio.TaskGroup() as group:
        group.create_task(endless)
        group.create_task(fail())


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_cancelling_at_any_tick_changes_no_other_episode(num_workers: int) -> None:
    env = lambda: CountingEnv(length=None)  # noqa: E731
    rounds, chance = 40, random.Random(0)
    calls: list[dict[str, Any]] = [
        {"batch_size": 7, "task": {"number": float(index % 3)}} for index in range(rounds)
    ]
    wanted = lockstep(env, counting_policy, calls, seed=0)
    async with AsyncSampler(env, num_workers=num_workers, envs_per_worker=3, seed=0) as sampler:
        for call, episodes in zip(calls, wanted, strict=True):
            doomed = asyncio.create_task(
                sampler.sample(counting_policy, batch_size=50, seed=1, task={"number": 9.0})
            )
            kept = asyncio.create_task(sampler.sample(counting_policy, **call))
            limit = sampler.statistics.ticks + chance.randrange(12)
            await until(partial(has_ticked, sampler, limit), pause=0)
            doomed.cancel()
            assert_same(await kept, episodes)
        await until(lambda: calls_are_over(sampler))


def has_ticked(sampler: AsyncSampler, limit: int) -> bool:
    return sampler.statistics.ticks >= limit


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_closing_the_coroutine_of_a_call_frees_its_rows(num_workers: int) -> None:
    async with AsyncSampler(
        CountingEnv, num_workers=num_workers, envs_per_worker=4, seed=0, batch_size=5
    ) as sampler:
        call = sampler.sample(uniform, batch_size=10**6, seed=1)
        call.send(None)
        await until(lambda: sampler.statistics.transitions > 20)
        call.close()
        await until(lambda: calls_are_over(sampler))
        found = await sampler.sample(uniform)
    assert_same(found, lockstep(CountingEnv, uniform, seed=0, batch_size=5)[0])


async def test_cancelling_before_the_sampler_has_heard_of_the_call() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0, batch_size=1) as sampler:
        for _ in range(20):
            sampling = asyncio.create_task(sampler.sample(counting_policy))
            await asyncio.sleep(0)
            sampling.cancel()
        await sampler.sample(counting_policy)
        await until(lambda: calls_are_over(sampler))


async def test_cancelling_one_call_takes_only_its_rows(tmp_path: Path) -> None:
    gates = waiting_gates(tmp_path)
    async with AsyncSampler(
        lambda: WaitingEnv(*gates), num_workers=1, envs_per_worker=1, seed=0
    ) as sampler:
        first, second = (
            asyncio.create_task(sampler.sample(counting_policy, batch_size=1)) for _ in range(2)
        )
        await asyncio.to_thread(gates[0].read_bytes)
        assert repr(sampler).endswith("1 rows busy, 0 idle, 2 requests]>")
        first.cancel()
        await until(lambda: repr(sampler).endswith("0 rows busy, 1 idle, 1 requests]>"))
        await asyncio.to_thread(gates[1].write_bytes, b".")  # the cancelled step ends
        await asyncio.to_thread(gates[0].read_bytes)
        await asyncio.to_thread(gates[1].write_bytes, b".")
        assert (await second).lengths.tolist() == [3]


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_cancelled_start_leaves_nothing(num_workers: int) -> None:
    """Cancelled after ever more rounds of the loop; what is left the fixture would see."""
    for rounds in (0, 1, 2, 30, 300):
        sampler = AsyncSampler(CountingEnv, num_workers=num_workers, start_method="spawn")
        starting = asyncio.create_task(sampler.start())
        for _ in range(rounds):
            await asyncio.sleep(0)
        starting.cancel()
        try:
            await starting
        except asyncio.CancelledError:
            assert not children()
            with pytest.raises(SamplerStateError):
                await sampler.sample(counting_policy)
        else:  # it was faster
            await sampler.close()


async def test_start_cancelled_while_a_worker_makes_its_environment(tmp_path: Path) -> None:
    gates = waiting_gates(tmp_path)

    def make() -> CountingEnv:
        gates[0].write_bytes(b".")
        gates[1].read_bytes()
        return CountingEnv()

    starting = asyncio.create_task(AsyncSampler(make, num_workers=1, start_method="spawn").start())
    await asyncio.to_thread(gates[0].read_bytes)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not children()


async def storm(
    sampler: AsyncSampler, wanted: list[BatchEpisodes], num_doomed: int, chance: random.Random
) -> None:
    """Cancel calls and streams at random ticks among others that are kept."""
    doomed: dict[asyncio.Task[Any], int] = {}
    kept: dict[asyncio.Task[BatchEpisodes], int] = {}
    for number in range(num_doomed):
        never_ends = chance.choice((endless_call, endless_stream))
        task = asyncio.create_task(never_ends(sampler))
        doomed[task] = sampler.statistics.ticks + chance.randrange(40)
        if number % 4 == 0:
            seed = chance.randrange(len(wanted))
            call = sampler.sample(counting_policy, batch_size=7, seed=seed)
            kept[asyncio.create_task(call)] = seed
    while doomed:
        ticks = sampler.statistics.ticks
        for task in [task for task, limit in doomed.items() if limit <= ticks]:
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del doomed[task]
        await asyncio.sleep(0)
    for sampling, seed in kept.items():
        assert_same(await sampling, wanted[seed])


async def endless_call(sampler: AsyncSampler) -> None:
    await sampler.sample(counting_policy, batch_size=10**5, seed=1)


async def endless_stream(sampler: AsyncSampler) -> None:
    async for _ in sampler.stream(counting_policy, seed=2, look_ahead=3):
        pass


@pytest.mark.parametrize(
    ("num_workers", "num_storms"), [(0, 14), (2, 7), pytest.param(2, 20, marks=pytest.mark.slow)]
)
async def test_thousands_of_cancellations_change_no_other_episode(
    num_workers: int, num_storms: int
) -> None:
    """Of 100 calls and streams in each storm; together over two thousand."""
    env = lambda: CountingEnv(length=None)  # noqa: E731
    calls = [{"batch_size": 7, "seed": number} for number in range(20)]
    wanted = lockstep(env, counting_policy, calls, seed=0)
    async with AsyncSampler(env, num_workers=num_workers, envs_per_worker=6, seed=0) as sampler:
        for seed in range(num_storms):
            await storm(sampler, wanted, 100, random.Random(seed))
        await until(lambda: calls_are_over(sampler))


async def test_call_cancelled_at_any_await_leaves_nothing() -> None:
    async def scenario() -> None:
        async with AsyncSampler(CountingEnv, num_workers=1, envs_per_worker=2) as sampler:
            await sampler.sample(uniform, batch_size=3)
            async for _ in sampler.stream(uniform, batch_size=2):
                pass
            await sampler.reset_task({"number": 1.0})
            await sampler.sample(uniform, batch_size=1, first=1)

    async def nothing_is_left() -> None:
        await until(lambda: not children())  # a close() that was begun goes on by itself

    # start, two samples, the stream's first episode at the least, and close.
    assert await cancel_at_every_await(scenario, nothing_is_left) >= 5
