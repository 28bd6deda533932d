"""Many at once, and much at once: no deadlock, nobody starves, nothing mixes."""

import asyncio
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvloop
from fakes import CountingEnv, ImageEnv
from faulty import GatedResetEnv, LengthEnv, LoudEnv
from oracle import assert_same, lockstep, uniform
from processes import PATIENCE, children, descriptors, until

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import EnvironmentFailedError, WorkerStartError

pytestmark = pytest.mark.usefixtures("quick_workers")


async def test_large_task_crosses_the_pipe() -> None:
    table = np.random.default_rng(0).bytes(300 << 10)
    tasks = [{"number": float(number), "table": table} for number in range(5)]
    async with AsyncSampler(
        CountingEnv, num_workers=2, envs_per_worker=1, batch_size=4, seed=0
    ) as sampler:
        results = await asyncio.gather(*(sampler.sample(uniform, task=task) for task in tasks))
    for number, episodes in enumerate(results):
        assert (episodes.observations[..., 2] == number).all()


async def test_observations_of_a_mebibyte_are_carried() -> None:
    async with AsyncSampler(
        lambda: ImageEnv(size=592, length=4), num_workers=2, envs_per_worker=2, batch_size=6
    ) as sampler:
        episodes = await sampler.sample(uniform)
    assert episodes.observations[0, 0].nbytes > 1 << 20
    firsts = episodes.observations.flatten(2)[..., 0]
    assert firsts.T.tolist() == [[0, 100, 200, 44]] * 6
    assert (episodes.observations.flatten(2) == firsts[..., None]).all()


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_observations_of_16_mebibytes_are_carried(loop_kind: str) -> None:
    async def main() -> BatchEpisodes:
        async with AsyncSampler(
            lambda: ImageEnv(size=2365, length=2), num_workers=1, envs_per_worker=1, batch_size=1
        ) as sampler:
            return await sampler.sample(uniform)

    factory = uvloop.new_event_loop if loop_kind == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        episodes = runner.run(main())
    assert episodes.observations[0, 0].nbytes > 16 << 20
    assert (episodes.observations[0] == 0).all()
    assert (episodes.observations[1] == 100).all()


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_tasks_of_16_mebibytes_are_carried(loop_kind: str) -> None:
    table = np.random.default_rng(0).bytes(16 << 20)
    tasks = [{"number": float(number), "table": table} for number in range(2)]

    async def main() -> list[BatchEpisodes]:
        async with AsyncSampler(
            CountingEnv, num_workers=2, envs_per_worker=1, batch_size=4, seed=0
        ) as sampler:
            return await asyncio.gather(*(sampler.sample(uniform, task=task) for task in tasks))

    factory = uvloop.new_event_loop if loop_kind == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        results = runner.run(main())
    for number, episodes in enumerate(results):
        assert (episodes.observations[..., 2] == number).all()


async def test_environments_and_errors_of_16_mebibytes_are_carried() -> None:
    """What a worker is told first, and what it tells of a row that failed."""
    table = np.random.default_rng(0).bytes(16 << 20)

    def make() -> LoudEnv:
        return LoudEnv(offset=float(sum(table[::4096])))

    async with AsyncSampler(make, num_workers=1, envs_per_worker=2, batch_size=2) as sampler:
        with pytest.raises(EnvironmentFailedError) as caught:
            await sampler.sample(uniform, task={"loud": 16 << 20})
        episodes = await sampler.sample(uniform, task={})
    assert str(caught.value).count("z") >= 16 << 20
    assert (episodes.observations[..., 2] == sum(table[::4096])).all()


async def test_both_ends_may_send_more_than_a_pipe_holds_at_once() -> None:
    """The worker says at length why its rows failed while it is sent tasks that are as large."""
    async with AsyncSampler(
        LoudEnv, num_workers=1, envs_per_worker=40, groups_per_worker=2, seed=0
    ) as sampler:

        async def fail(number: int) -> None:
            task = {"number": 0.0, "loud": 300_000, "data": bytes(300_000 + number)}
            with pytest.raises(EnvironmentFailedError, match="z" * 1000):
                await sampler.sample(uniform, batch_size=20, task=task)

        async def succeed(number: int) -> None:
            task = {"number": float(number), "data": bytes(300_000)}
            episodes = await sampler.sample(uniform, batch_size=5, task=task)
            assert (episodes.observations[..., 2] == number).all()

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(job(number) for number in range(15) for job in (fail, succeed)))


@pytest.mark.parametrize("num_workers", [6, pytest.param(64, marks=pytest.mark.slow)])
async def test_many_workers_share_the_work(num_workers: int) -> None:
    async with AsyncSampler(
        CountingEnv, num_workers=num_workers, envs_per_worker=8, seed=0
    ) as sampler:
        assert len(children()) == num_workers
        size = 20 * num_workers
        found = await sampler.sample(uniform, batch_size=size)
        await asyncio.gather(*(sampler.sample(uniform, batch_size=7) for _ in range(num_workers)))
    assert_same(found, lockstep(CountingEnv, uniform, seed=0, batch_size=size)[0])


async def test_worker_for_which_no_descriptor_is_left_is_told() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with AsyncSampler(CountingEnv, num_workers=1, batch_size=2) as sampler:
        used = descriptors()
        free = [number for number in range(2000) if number not in used]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], hard))
            with pytest.raises(WorkerStartError, match=r"open files.*\(ulimit -n\)"):
                await AsyncSampler(CountingEnv, num_workers=8, start_method="spawn").start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await sampler.sample(uniform)).is_complete  # nor does it harm another


@pytest.mark.parametrize("num_rows", [512, pytest.param(4096, marks=pytest.mark.slow)])
async def test_many_rows_are_filled(num_rows: int) -> None:
    size = num_rows + 100
    async with AsyncSampler(
        CountingEnv, num_workers=2, envs_per_worker=num_rows // 2, seed=0
    ) as sampler:
        assert f"{num_rows} idle" in repr(sampler)
        found = await sampler.sample(uniform, batch_size=size)
    assert_same(found, lockstep(CountingEnv, uniform, seed=0, batch_size=size)[0])


@pytest.mark.parametrize("num_requests", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_many_requests_at_once_are_as_if_alone(num_requests: int) -> None:
    calls: list[dict[str, Any]] = [
        {"batch_size": 1 + number % 3, "seed": number, "task": {"number": float(number % 50)}}
        for number in range(num_requests)
    ]
    async with AsyncSampler(CountingEnv, num_workers=2, envs_per_worker=32, seed=0) as sampler:
        results = await asyncio.gather(*(sampler.sample(uniform, **call) for call in calls))
    wanted = lockstep(CountingEnv, uniform, calls, seed=0)
    for left, right in zip(results, wanted, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize(
    "long", [1_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_episodes_of_one_step_and_very_long_ones_go_side_by_side(
    long: int, tmp_path: Path
) -> None:
    may_end = tmp_path / "may end"
    async with AsyncSampler(
        LengthEnv, num_workers=2, envs_per_worker=3, batch_size=4, seed=0
    ) as sampler:
        task = {"length": long, "until": str(may_end)}
        slow = asyncio.create_task(sampler.sample(uniform, task=task))
        await until(lambda: sampler.statistics.transitions > 100)
        for _ in range(20):  # nobody waits for the long ones
            short = await sampler.sample(uniform, task={"length": 1})
            assert short.lengths.tolist() == [1] * 4
        assert not slow.done()
        may_end.touch()
        episodes = await slow
    for number, length in enumerate(episodes.lengths.tolist()):
        assert length >= long
        rewards, observations = episodes.rewards, episodes.observations
        assert torch.equal(rewards[:length, number], torch.arange(1.0, length + 1))
        assert torch.equal(observations[:length, number, 0], torch.arange(float(length)))


async def test_slow_reset_stalls_no_other_row(tmp_path: Path) -> None:
    """Each worker goes on while the reset of another waits at a gate."""
    arrived, gate = tmp_path / "arrived", tmp_path / "gate"
    for path in (arrived, gate):
        os.mkfifo(path)
    waiting = {"arrived": str(arrived), "gate": str(gate)}
    async with AsyncSampler(
        GatedResetEnv, num_workers=2, envs_per_worker=1, groups_per_worker=1, batch_size=1
    ) as sampler:
        slow = asyncio.create_task(sampler.sample(uniform, task=waiting))
        await asyncio.to_thread(arrived.read_bytes)
        for _ in range(10):
            assert (await sampler.sample(uniform, task={})).is_complete
        assert not slow.done()
        await asyncio.to_thread(gate.write_bytes, b".")
        assert (await slow).is_complete
