"""Where the time goes: counted, not guessed."""

import asyncio
import dataclasses
import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fakes import CountingEnv, DeadlyEnv, RaisingEnv, WaitingEnv
from gymnasium.envs.classic_control import CartPoleEnv
from oracle import counting_policy, policy_of, uniform
from processes import PATIENCE, until, waiting_gates
from torch import Tensor
from torch.distributions import Distribution

from asyncmaml import AsyncSampler, Statistics
from asyncmaml.errors import ConfigurationError, EnvironmentFailedError
from asyncmaml.learning.policies import MLPPolicy

pytestmark = pytest.mark.usefixtures("quick_workers")

CARTPOLE = "CartPole-v1"


@pytest.fixture(scope="module")
def policy() -> MLPPolicy:
    """One for CartPole."""
    return policy_of(CartPoleEnv())


# --- the sampler's


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_statistics_add_up(num_workers: int, policy: MLPPolicy) -> None:
    async with AsyncSampler(
        CARTPOLE, num_workers=num_workers, envs_per_worker=5, seed=0
    ) as sampler:
        results = await asyncio.gather(
            *(sampler.sample(policy, batch_size=size) for size in (1, 7, 30))
        )
        found = sampler.statistics
    assert found.transitions == sum(episodes.num_transitions for episodes in results)
    assert found.episodes == 38
    assert found.requests == 3
    assert found.restarts == 0
    assert 0 < found.ticks <= found.transitions
    assert sum(found.ticks_by_rows) == found.ticks
    assert found.rows_per_tick == found.transitions / found.ticks
    assert len(found.worker_seconds) == max(1, num_workers)
    assert 0 < found.worker_busy_share < 1
    assert min(found.record_seconds, found.gather_seconds, found.scatter_seconds) > 0
    assert 0 < found.forward_seconds < found.thread_seconds
    assert found.thread_seconds + found.waiting_seconds <= found.wall_seconds


async def test_histogram_tells_how_many_rows_act_together() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0, envs_per_worker=8) as sampler:
        await sampler.sample(counting_policy, batch_size=8)
        found = sampler.statistics.ticks_by_rows
        await sampler.sample(counting_policy, batch_size=1)
        more = sampler.statistics.ticks_by_rows
    # Episodes have 5 steps: 5 ticks of 8 rows, then 5 of one row.
    assert {index: count for index, count in enumerate(found) if count} == {3: 5}
    assert {index: count for index, count in enumerate(more) if count} == {0: 5, 3: 5}


async def test_difference_of_two_copies_is_what_happened_between(policy: MLPPolicy) -> None:
    async with AsyncSampler(CARTPOLE, num_workers=1, envs_per_worker=5) as sampler:
        await sampler.sample(policy, batch_size=3)
        before = sampler.statistics
        episodes = await sampler.sample(policy, batch_size=4)
        passed = sampler.statistics - before
    assert before.episodes == 3
    assert passed.episodes == 4
    assert passed.transitions == episodes.num_transitions
    assert sum(passed.ticks_by_rows) == passed.ticks
    assert passed.steps_per_second == passed.transitions / passed.wall_seconds
    assert 0 < passed.worker_seconds[0] < passed.wall_seconds


async def test_difference_from_before_the_start_is_everything(policy: MLPPolicy) -> None:
    sampler = AsyncSampler(CARTPOLE, num_workers=2)
    before = sampler.statistics
    async with sampler:
        await sampler.sample(policy, batch_size=4)
        now = sampler.statistics
    assert dataclasses.asdict(now - before) == dataclasses.asdict(now)


async def test_statistics_outlive_the_sampler(policy: MLPPolicy) -> None:
    async with AsyncSampler(CARTPOLE, num_workers=1, batch_size=2) as sampler:
        episodes = await sampler.sample(policy)
    closed = sampler.statistics
    assert closed.transitions == episodes.num_transitions
    assert closed.worker_seconds[0] > 0
    assert sampler.statistics == closed  # the clock has stopped


async def test_seconds_of_a_lost_worker_are_kept(tmp_path: Path) -> None:
    async with AsyncSampler(
        lambda: DeadlyEnv(str(tmp_path / "died")), num_workers=1, envs_per_worker=2
    ) as sampler:
        await sampler.sample(counting_policy, batch_size=2)
        found = sampler.statistics
    assert found.restarts == 1
    assert found.worker_seconds[0] > 0


async def test_queue_is_told_while_it_is_there(tmp_path: Path) -> None:
    arrived, gate = waiting_gates(tmp_path)
    async with AsyncSampler(
        lambda: WaitingEnv(arrived, gate), num_workers=1, envs_per_worker=1
    ) as sampler:
        calls = [
            asyncio.create_task(sampler.sample(counting_policy, batch_size=size)) for size in (1, 5)
        ]
        await asyncio.to_thread(arrived.read_bytes)
        await until(lambda: sampler.statistics.requests_in_flight == 2)
        assert sampler.statistics.episodes_queued == 5
        for call in calls:
            call.cancel()
        await until(lambda: sampler.statistics.requests_in_flight == 0)
        assert sampler.statistics.episodes_queued == 0
        gate.write_bytes(b".")


def test_scalars_are_numbers_by_name() -> None:
    statistics = Statistics(
        wall_seconds=2.0,
        ticks=4,
        transitions=40,
        episodes=6,
        waiting_seconds=1.0,
        forward_seconds=0.5,
        worker_seconds=[1.0, 2.0],
    )
    scalars = statistics.scalars()
    assert scalars["steps_per_second"] == 20
    assert scalars["episodes_per_second"] == 3
    assert scalars["rows_per_tick"] == 10
    assert scalars["worker_busy_share"] == 0.75
    assert scalars["waiting_share"] == 0.5
    assert scalars["forward_share"] == 0.25
    assert all(isinstance(value, float) for value in scalars.values())
    assert all(value == 0 for value in Statistics().scalars().values())


async def test_wait_before_a_call_is_not_the_calls() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0) as sampler:
        await sampler.sample(counting_policy, batch_size=1)
        opened = sampler.statistics
        # Long beside what a call takes: the wait must not be counted when the next tick begins.
        await until(lambda: sampler.statistics.wall_seconds > opened.wall_seconds + 0.5)
        before = sampler.statistics
        episodes = await sampler.sample(counting_policy, batch_size=1)
        passed = sampler.statistics - before
    assert passed.waiting_seconds <= passed.wall_seconds
    waited = before - opened
    assert waited.waiting_seconds == pytest.approx(waited.wall_seconds - waited.thread_seconds)
    assert episodes.record is not None
    assert episodes.record.statistics.scalars()["waiting_share"] <= 1.0


# --- a request's


async def test_record_tells_of_the_request() -> None:
    is_acting, may_act = threading.Event(), threading.Event()

    def gated(observations: Tensor) -> Distribution:
        is_acting.set()
        assert may_act.wait(PATIENCE)
        return counting_policy(observations)

    async with AsyncSampler(CountingEnv, num_workers=0, envs_per_worker=2) as sampler:
        began = time.perf_counter()
        first = asyncio.create_task(sampler.sample(gated, batch_size=6))
        await until(is_acting.is_set)
        acting = time.perf_counter()
        second = asyncio.create_task(sampler.sample(counting_policy, batch_size=6))
        await asyncio.sleep(0)
        called = time.perf_counter()
        await until(lambda: time.perf_counter() > called + 0.02)
        may_act.set()
        early, late = (await first).record, (await second).record
    assert early is not None
    assert late is not None
    assert 0 <= early.queued_seconds < acting - began
    # Two rows: the second call waits until the first has begun its last episode.
    assert 0.02 < late.queued_seconds < late.seconds
    assert early.seconds > called - acting + 0.02
    assert early.statistics.episodes == 6
    # Counted from when each was taken up, and no episode had ended by then.
    assert late.statistics.episodes == 12
    assert (early.num_dropped, early.num_retries, early.failures) == (0, 0, ())


async def test_episodes_of_another_origin_have_no_record() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0) as sampler:
        episodes = await sampler.sample(counting_policy, batch_size=2)
    assert episodes.record is not None
    assert episodes.select([0]).record is episodes.record
    episodes.record = None


# --- the trace


Event = dict[str, Any]


def spans(events: list[Event], lane: str) -> list[Event]:
    """Return the complete events of a lane, in the order of time."""
    named = {
        event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"
    }
    found = [event for event in events if event["ph"] == "X" and event["tid"] == named[lane]]
    return sorted(found, key=lambda event: event["ts"])


async def test_trace_has_a_lane_for_each_place(tmp_path: Path, policy: MLPPolicy) -> None:
    path = tmp_path / "trace.json"
    async with AsyncSampler(
        CARTPOLE, num_workers=2, envs_per_worker=4, seed=0, trace=path
    ) as sampler:
        await asyncio.gather(*(sampler.sample(policy, batch_size=8) for _ in range(3)))
        with sampler.span("outer update"):
            pass
        statistics = sampler.statistics
    events: list[Event] = json.loads(path.read_text())
    ticks = [event for event in spans(events, "sampler thread") if event["name"] == "tick"]
    assert sum(event["args"]["rows"] for event in ticks) == statistics.transitions
    assert sum(1 for event in ticks if event["args"]["rows"]) == statistics.ticks
    for worker in range(2):
        steps = spans(events, f"worker {worker}")
        ends = [step["ts"] + step["dur"] for step in steps]
        assert all(end <= step["ts"] for end, step in zip(ends, steps[1:], strict=False))
        seconds = sum(step["dur"] for step in steps) / 1e6
        assert seconds == pytest.approx(statistics.worker_seconds[worker], rel=1e-6)
    mine = spans(events, threading.current_thread().name)
    assert [event["name"] for event in mine] == ["outer update"]
    requests = [event for event in events if event.get("cat") == "request"]
    phases: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for event in requests:
        phases[event["id"]].append((event["name"], event["ph"]))
    assert (
        list(phases.values())
        == [[("waiting", "b"), ("waiting", "e"), ("sampling", "b"), ("sampling", "e")]] * 3
    )


async def test_parts_of_a_tick_lie_inside_of_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with AsyncSampler(CountingEnv, num_workers=0, trace=path) as sampler:
        await sampler.sample(uniform, batch_size=3)
    events = spans(json.loads(path.read_text()), "sampler thread")
    ticks = [event for event in events if event["name"] == "tick"]
    parts = [event for event in events if event["name"] != "tick"]
    assert {event["name"] for event in parts} == {"record", "gather", "forward", "scatter"}
    for part in parts:
        within = [
            tick
            for tick in ticks
            if tick["ts"] - 1e-3 <= part["ts"]
            and part["ts"] + part["dur"] <= tick["ts"] + tick["dur"] + 1e-3
        ]
        assert len(within) == 1


async def test_trace_can_be_read_before_its_end(tmp_path: Path) -> None:
    """As viewers do: what a crash leaves is an array without its closing bracket."""
    path = tmp_path / "trace.json"
    async with AsyncSampler(CountingEnv, num_workers=0, envs_per_worker=1, trace=path) as sampler:
        await sampler.sample(uniform, batch_size=100)
        text = path.read_text()
    assert len(json.loads(text + "]")) >= 2048


async def test_trace_is_whole_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(EnvironmentFailedError):
        async with AsyncSampler(lambda: RaisingEnv("reset"), num_workers=1, trace=path) as sampler:
            await sampler.sample(uniform, batch_size=2)
    assert json.loads(path.read_text())


async def test_trace_of_a_start_that_fails_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(EnvironmentFailedError):
        await AsyncSampler(lambda: RaisingEnv("constructor"), num_workers=1, trace=path).start()
    assert json.loads(path.read_text())


async def test_trace_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    sampler = AsyncSampler(CountingEnv, num_workers=0, trace=tmp_path / "none" / "trace.json")
    with pytest.raises(ConfigurationError, match="No such file"):
        await sampler.start()


async def test_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncSampler(
        CountingEnv, num_workers=0, envs_per_worker=1, trace="/dev/full"
    ) as sampler:
        episodes = await sampler.sample(uniform, batch_size=150)
        assert episodes.batch_size == 150
    assert "the trace /dev/full ends here: [Errno 28]" in caplog.text


async def test_span_without_a_trace_does_nothing() -> None:
    async with AsyncSampler(CountingEnv, num_workers=0) as sampler:
        with sampler.span("anything"):
            await sampler.sample(uniform, batch_size=1)
