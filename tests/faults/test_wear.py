"""Over and over: nothing wears out."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import CountingEnv
from oracle import uniform
from processes import children, descriptors, resident_mebibytes, wait_until

from asyncmaml import AsyncSampler


def shared_mappings() -> int:
    """Count the shared memory of samplers that is mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:asyncmaml")


def belongings() -> tuple[int, int, int, int, int]:
    """Return the numbers of all that could pile up."""
    return (
        len(descriptors()),
        threading.active_count(),
        len(children()),
        shared_mappings(),
        len(os.listdir("/dev/shm")),
    )


def rest_of_native_threads(wanted: int) -> Callable[[], bool]:
    """Return whether no more than these are left; the last ones may still be ending."""
    return lambda: len(os.listdir("/proc/self/task")) <= wanted


async def open_and_close(method: Any) -> None:
    async with AsyncSampler(
        CountingEnv, num_workers=1, envs_per_worker=2, start_method=method
    ) as sampler:
        await sampler.sample(uniform, batch_size=2)


async def test_opening_and_closing_wears_nothing_out() -> None:
    counts = set()
    for cycle in range(12):
        await open_and_close("spawn")
        if not cycle:  # what libraries open once is open now
            threads = len(os.listdir("/proc/self/task"))
        counts.add(belongings())
        wait_until(rest_of_native_threads(threads), 1)
    assert len(counts) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
async def test_two_hundred_samplers_leave_nothing(method: Any) -> None:
    for _ in range(30):
        await open_and_close(method)
    threads = len(os.listdir("/proc/self/task"))
    before, memory = belongings(), resident_mebibytes(os.getpid())
    for _ in range(200):
        await open_and_close(method)
    wait_until(rest_of_native_threads(threads), 1)
    gc.collect()
    assert belongings() == before
    grown = resident_mebibytes(os.getpid()) / memory - 1
    print(f"memory: {memory:.0f} MiB {grown:+.2%}")
    assert grown < 0.02


@pytest.mark.parametrize(
    "num_episodes",
    [2_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
async def test_episodes_leave_nothing(num_episodes: int) -> None:
    """Neither here nor in a worker, be they with or without a task, cancelled or failed."""

    def memory() -> list[float]:
        gc.collect()
        return [resident_mebibytes(pid) for pid in (os.getpid(), *sorted(children()))]

    async with AsyncSampler(
        lambda: CountingEnv(length=None), num_workers=2, envs_per_worker=50, batch_size=100
    ) as sampler:

        async def sample(number: int) -> None:
            task = {"number": float(number)} if number % 2 else None
            if number % 10:
                await sampler.sample(uniform, task=task)
                return
            sampling = asyncio.create_task(sampler.sample(uniform, batch_size=10**6))
            await asyncio.sleep(0)
            sampling.cancel()
            await asyncio.wait([sampling])

        async def sample_many(num_calls: int) -> None:
            for start in range(0, num_calls, 20):
                await asyncio.gather(*map(sample, range(start, start + 20)))

        num_calls = num_episodes // 90
        await sample_many(max(100, num_calls // 10))
        before, used = belongings(), memory()
        await sample_many(num_calls)
        assert sampler.statistics.episodes > num_episodes
        assert belongings() == before
        growth = [after / at_first - 1 for after, at_first in zip(memory(), used, strict=True)]
    print(f"memory: {used[0]:.0f} MiB {growth[0]:+.2%}, workers {growth[1:]}")
    assert max(growth) < 0.02
