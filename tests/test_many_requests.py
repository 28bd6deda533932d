"""Many calls at once: in the order of their calls, and with nothing held by those that wait."""

import asyncio
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CountingEnv, WaitingEnv
from oracle import assert_same, counting_policy, lockstep, policy_of, uniform
from processes import all_at_once, until, waiting_gates

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.sampling.dealing import Dealer
from asyncmaml.sampling.lane import Lane, RowTable
from asyncmaml.sampling.requests import Request, Terms
from asyncmaml.sampling.streams import Seeds
from asyncmaml.sampling.transitions import NOBODY

pytestmark = pytest.mark.usefixtures("quick_workers")


async def test_earlier_calls_are_done_before_later_ones() -> None:
    done: list[int] = []
    async with AsyncSampler(CountingEnv, num_workers=0, envs_per_worker=4) as sampler:

        async def call(number: int) -> None:
            await sampler.sample(uniform, batch_size=20)
            done.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(call(number))
    assert done == list(range(30))


async def test_long_call_does_not_keep_idle_rows_from_a_short_one() -> None:
    """Rows that the first call has no episodes for go to the second at once."""
    async with AsyncSampler(CountingEnv, num_workers=0, envs_per_worker=8) as sampler:
        _, second = await all_at_once(
            sampler, sampler.sample(uniform, batch_size=5), sampler.sample(uniform, batch_size=3)
        )
    assert second.record is not None
    # 5 + 3 episodes of 5 steps fill the 8 rows once: nobody has waited for anybody.
    assert second.record.after.ticks <= 6


async def test_call_that_waits_for_its_turn_holds_nothing_of_its_episodes(tmp_path: Path) -> None:
    arrived, gate = waiting_gates(tmp_path)
    async with AsyncSampler(
        lambda: WaitingEnv(arrived, gate), num_workers=1, envs_per_worker=1
    ) as sampler:
        calls = [asyncio.create_task(sampler.sample(uniform, batch_size=1))]
        await asyncio.to_thread(arrived.read_bytes)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        calls += [
            asyncio.create_task(sampler.sample(uniform, batch_size=10**6)) for _ in range(200)
        ]
        await until(lambda: sampler.statistics.requests_in_flight == 201)
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        gate.write_bytes(b".")
    assert held < 200 * 20_000  # 20 KiB a call; one number for each episode would be 8 MB


async def test_thousand_calls_at_once_each_get_their_own_episodes() -> None:
    calls = [{"batch_size": 2, "seed": seed} for seed in range(10)]
    wanted = lockstep(CountingEnv, counting_policy, calls, seed=0)
    async with AsyncSampler(CountingEnv, num_workers=2, envs_per_worker=32, seed=0) as sampler:
        found: list[BatchEpisodes] = await asyncio.gather(
            *(
                sampler.sample(counting_policy, batch_size=2, seed=number % 10)
                for number in range(1000)
            )
        )
        assert sampler.statistics.requests == 1000
    for number, episodes in enumerate(found):
        assert_same(episodes, wanted[number % 10])


async def test_forty_learners_get_what_each_would_get_alone() -> None:
    """Sample, one policy-gradient step, sample: all at once as one after the other."""
    async with AsyncSampler(
        "CartPole-v1", num_workers=2, envs_per_worker=16, max_episode_steps=20, seed=0
    ) as sampler:
        policy = policy_of(sampler)

        async def learn(number: int) -> BatchEpisodes:
            before = await sampler.sample(policy, batch_size=4, seed=number)
            loss = -policy(before.observations).log_prob(before.actions) * before.returns
            params = policy.update_params((loss * before.mask).mean(), step_size=0.5)
            return await sampler.sample(policy, params, batch_size=4, seed=1000 + number)

        alone = [await learn(number) for number in range(40)]
        together = await asyncio.gather(*(learn(number) for number in range(40)))
    for left, right in zip(together, alone, strict=True):
        assert_same(left, right)
    assert not torch.equal(alone[0].actions, alone[1].actions)


def test_lost_offer_of_a_cancelled_call_is_not_charged_to_who_got_its_slot() -> None:
    """A worker dies over an offer whose call is gone, and whose slot is another call's by now."""
    table = RowTable(1)
    lane = Lane(0, 0, 0, 1, table)
    names = ("offers", "offer_seed", "offer_task", "at_work")
    arrays = SimpleNamespace(**{name: np.zeros(2, np.int64) for name in names})
    link: Any = SimpleNamespace(arrays=[arrays])
    lane.link = link
    dealer = Dealer([lane])

    def call() -> Request:
        policy: Any = SimpleNamespace(plan=None)
        terms = Terms(4, 0.9, "cpu", 4, "raise")
        request = Request(policy, Seeds(1).next_request(None), None, terms, lambda _: None)
        request.slot = 0
        dealer.add(request)
        return request

    cancelled = call()
    lane.offer([(cancelled, cancelled.take(1))])
    arrays.at_work[0] = lane.num_rows  # at the reset of the first offer
    assert lane.take_from_the_worker() == {(0, 0)}
    lane.withdraw()
    lane.offer([(cancelled, range(1))])
    cancelled.is_done = True
    dealer.remove(cancelled)
    assert call().slot == 0
    assert {slot for slot, _ in lane.take_from_the_worker()} == {NOBODY}


async def test_reply_that_no_tick_has_taken_when_the_sampler_closes_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with AsyncSampler(CountingEnv, num_workers=0) as sampler:
        await sampler.sample(uniform, batch_size=1)
        engine: Any = sampler._engine
        coordinator = engine._coordinator

        def release_with_a_tick_due() -> None:
            coordinator._replies.append((coordinator.lanes[0], []))
            coordinator.release_lanes()
            coordinator._tick()

        engine._call(release_with_a_tick_due)
    assert "Exception" not in caplog.text
