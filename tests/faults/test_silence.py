"""Workers that neither answer nor die."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import CountingEnv, SecondWaitsEnv, WaitingEnv
from faulty import DoingEnv, SlowToBeginEnv, be_slow, leap
from oracle import PENDULUM, assert_same, lockstep, uniform
from processes import PATIENCE, children, is_alive, until
from torch import Tensor
from torch.distributions import Distribution

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import WorkerTimeoutError
from asyncmaml.learning.policies import MLPPolicy
from asyncmaml.sampling.lane import Lane, RowTable
from asyncmaml.sampling.links import Link
from asyncmaml.sampling.watch import WorkerWatch
from asyncmaml.worker.layout import Layout
from asyncmaml.worker.protocol import Order


async def test_stopped_worker_is_killed_and_changes_nothing(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(
        **PENDULUM, num_workers=2, envs_per_worker=5, step_timeout=1
    ) as sampler:
        stopped = min(children())
        sampling = asyncio.create_task(sampler.sample(used, batch_size=30))
        await until(lambda: sampler.statistics.transitions > 300)
        os.kill(stopped, signal.SIGSTOP)
        assert_same(await sampling, wanted)
        assert sampler.statistics.restarts == 1
        assert not is_alive(stopped)


async def test_environment_that_never_answers_is_given_up(tmp_path: Path) -> None:
    gates = tmp_path / "arrived", tmp_path / "gate"
    for gate in gates:
        os.mkfifo(gate)
    # Held open for reading, so that nobody waits to say that he has arrived.
    arrived = os.open(gates[0], os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with AsyncSampler(
            WaitingEnv,
            env_kwargs={"arrived": gates[0], "gate": gates[1]},
            num_workers=1,
            envs_per_worker=1,
            step_timeout=0.3,
            max_restarts=1,
        ) as sampler:
            with pytest.raises(
                WorkerTimeoutError, match=r"within 0\.3 s .*raise step_timeout"
            ) as caught:
                await sampler.sample(uniform, batch_size=1)
        assert caught.value.batch_id == 0
        assert f"seed {caught.value.seed}" in str(caught.value)
    finally:
        os.close(arrived)


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_hung_worker_is_given_up_though_its_other_group_has_answered(
    num_workers: int, tmp_path: Path
) -> None:
    gates = tmp_path / "arrived", tmp_path / "gate"
    for gate in gates:
        os.mkfifo(gate)
    arrived = os.open(gates[0], os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with AsyncSampler(
            SecondWaitsEnv,
            env_kwargs={"arrived": gates[0], "gate": gates[1], "length": 1000},
            num_workers=num_workers,
            envs_per_worker=4,
            groups_per_worker=2,
            step_timeout=0.3,
            max_restarts=0,
        ) as sampler:
            with pytest.raises(WorkerTimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await sampler.sample(uniform, batch_size=2)
    finally:
        os.close(arrived)


@pytest.mark.usefixtures("leaping_clock")
async def test_policy_slower_than_the_step_timeout_costs_no_worker() -> None:
    """The time of a worker's answer does not include that of a forward for another."""

    def slow(observations: Tensor) -> Distribution:
        leap(0.25)
        be_slow(0.06)  # so that the next look at the workers comes right behind the tick
        return uniform(observations)

    async with AsyncSampler(
        lambda: CountingEnv(length=2), num_workers=2, envs_per_worker=1, step_timeout=0.2
    ) as sampler:
        # One after the other, so that the workers are not in step with each other.
        first = asyncio.create_task(sampler.sample(slow, batch_size=1))
        await until(lambda: sampler.statistics.ticks > 0)
        await asyncio.gather(first, sampler.sample(slow, batch_size=1))
        assert sampler.statistics.restarts == 0


async def test_stopped_worker_does_not_keep_close_waiting() -> None:
    async with AsyncSampler(CountingEnv, num_workers=2) as sampler:
        stopped = min(children())
        os.kill(stopped, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            await sampler.close()
    assert not is_alive(stopped)


@pytest.mark.usefixtures("leaping_clock")
async def test_many_slow_constructors_and_resets_in_one_command_are_no_silence() -> None:
    """Each gets its own time; a command of 6 rows takes six times as long as one of them may."""
    async with AsyncSampler(
        SlowToBeginEnv,
        {"seconds": 0.1},
        num_workers=1,
        envs_per_worker=6,
        groups_per_worker=1,
        batch_size=6,
        step_timeout=0.2,
    ) as sampler:
        assert (await sampler.sample(uniform)).is_complete
        assert sampler.statistics.restarts == 0


@pytest.mark.usefixtures("leaping_clock")
async def test_reset_may_take_longer_than_a_step() -> None:
    async with AsyncSampler(
        SlowToBeginEnv,
        {"seconds": 0.3},
        num_workers=1,
        envs_per_worker=1,
        batch_size=1,
        step_timeout=0.1,
    ) as sampler:
        assert (await sampler.sample(uniform)).is_complete
        assert sampler.statistics.restarts == 0


@pytest.mark.usefixtures("leaping_clock")
async def test_reset_without_end_is_given_up() -> None:
    async with AsyncSampler(
        DoingEnv,
        {"deed": "hang", "at": "reset"},
        num_workers=1,
        envs_per_worker=1,
        start_timeout=40.0,
        max_restarts=0,
        worker_output="capture",
    ) as sampler:
        with pytest.raises(
            WorkerTimeoutError, match=r"begin an episode within 40\.0 s .*raise start_timeout"
        ) as caught:
            await sampler.sample(uniform, batch_size=1)
    assert (caught.value.batch_id, caught.value.step) == (0, None)
    assert caught.value.stderr_tail == "I will think about it"


class FixedLink(Link):
    """Has arrays, and does nothing."""

    def __init__(self) -> None:
        super().__init__()
        layout = Layout(4, ((), np.dtype(np.int64)), ((), np.dtype(np.int64)))
        self.arrays = [layout.views(bytearray(layout.num_bytes), 0)]

    def step(self, group: int) -> None:
        pass

    def _keep_task(self, number: int, payload: bytes) -> None:
        pass

    def _forget_task(self, number: int) -> None:
        pass

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("place", "complaints"),
    [
        (2, ["", "", "did not finish a step within 10 s .* raise step_timeout"]),
        (1, ["", "", "", "", "did not begin an episode within 30 s .* raise start_timeout"]),
        (4 + 3, ["", "", "", "", "did not begin an episode within 30 s"]),  # an offer
        (-1, ["", "", "did not finish a step within 10 s"]),  # rows that are stepped as one
    ],
)
def test_each_thing_that_a_worker_may_be_at_has_its_limit(
    place: int, complaints: list[str]
) -> None:
    """Looked at every 8 seconds."""
    lane = Lane(0, 0, 0, 4, RowTable(4))
    lane.link = FixedLink()
    lane._order(1, int(Order.START))
    lane._order(2, int(Order.STEP))
    lane.begin_step(100.0)
    watch = WorkerWatch(7, [lane], lambda lane: False, step_timeout=10, start_timeout=30)
    lane.arrays.at_work[0] = 0
    assert watch.complaint(104.0) == ""
    lane.arrays.at_work[0] = place  # it got on, so its time begins anew
    for look, complaint in enumerate(complaints):
        told = watch.complaint(105.0 + 8 * look)
        assert re.search(complaint, told)
        assert bool(told) == bool(complaint)
    assert told.startswith("worker 7 ")


def two_groups_at_work() -> tuple[list[Lane], WorkerWatch]:
    """Return the lanes of a worker that got a command for each of its groups at 100 s."""
    table, link = RowTable(8), FixedLink()
    link.arrays *= 2
    lanes = [Lane(0, group, 4 * group, 4, table) for group in range(2)]
    for lane in lanes:
        lane.link = link
        lane._order(1, int(Order.STEP))
        lane.begin_step(100.0)
    watch = WorkerWatch(0, lanes, lambda lane: lane is lanes[0], step_timeout=10, start_timeout=30)
    assert watch.complaint(101.0) == ""
    return lanes, watch


def test_time_of_a_command_begins_when_the_one_before_it_is_answered() -> None:
    lanes, watch = two_groups_at_work()
    lanes[0].answered_at = 108.0
    assert watch.complaint(117.9) == ""
    assert "did not finish a step" in watch.complaint(118.1)


def test_reply_that_waits_for_its_tick_is_no_silence() -> None:
    lanes, watch = two_groups_at_work()
    lanes[1].is_stepping = False
    assert watch.complaint(1000.0) == ""


@pytest.mark.usefixtures("leaping_clock")
async def test_reply_that_comes_too_late_answers_no_later_command(tmp_path: Path) -> None:
    """Its worker is killed, so there is nobody who could give it."""
    async with AsyncSampler(
        DoingEnv,
        {"deed": "pause", "marker": str(tmp_path / "done"), "length": 6},
        num_workers=1,
        envs_per_worker=2,
        step_timeout=0.2,
        seed=0,
    ) as sampler:
        found = await sampler.sample(uniform, batch_size=8)
        assert sampler.statistics.restarts == 1
        again = await sampler.sample(uniform, batch_size=8)
    calls: list[dict[str, Any]] = [{"batch_size": 8}] * 2
    wanted = lockstep(lambda: CountingEnv(length=6), uniform, calls, seed=0)
    assert_same(found, wanted[0])
    assert_same(again, wanted[1])
