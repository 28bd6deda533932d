"""Over and over: nothing wears out."""

import asyncio
import gc
import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import CountingEnv
from oracle import uniform
from processes import (
    PATIENCE,
    children,
    descriptors,
    is_in_use_elsewhere,
    resident_mebibytes,
    start_script,
    wait_until,
)

from asyncmaml import AsyncSampler


def shared_mappings() -> int:
    """Count the shared memory of samplers that is mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:asyncmaml")


def belongings() -> tuple[int, int, int]:
    """Return the numbers of what could pile up, and has ended when the sampler is closed."""
    return len(descriptors()), len(children()), shared_mappings()


def going() -> tuple[int, int]:
    """Return the numbers of threads, all and Python's; the last ones may still be ending."""
    return len(os.listdir("/proc/self/task")), threading.active_count()


def no_more_threads_than(wanted: tuple[int, int]) -> Callable[[], bool]:
    """Return whether no more than these are left."""
    return lambda: all(number <= most for number, most in zip(going(), wanted, strict=True))


def own_segments() -> set[str]:
    """Return what lies in shared memory under a name and is no other program's."""
    directory = Path("/dev/shm")
    return {entry.name for entry in directory.iterdir() if not is_in_use_elsewhere(entry)}


OTHER_PROGRAM = """
    import multiprocessing
    import os
    import sys

    if os.fork():  # a child of the test's process would be its own
        os.wait()
        sys.exit()
    lock = multiprocessing.get_context("spawn").Lock()
    print(lock._semlock.name, flush=True)
    sys.stdin.read()
"""


def test_segments_of_another_program_are_told_from_our_own(tmp_path: Path) -> None:
    ours: Any = multiprocessing.get_context("spawn").Lock()
    own = f"sem.{ours._semlock.name.lstrip('/')}"
    with start_script(tmp_path / "other.py", OTHER_PROGRAM, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        others = f"sem.{process.stdout.readline().strip().lstrip('/')}"
        assert (Path("/dev/shm") / others).exists()
        assert own in own_segments()
        assert others not in own_segments()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


async def open_and_close(method: Any) -> None:
    async with AsyncSampler(
        CountingEnv, num_workers=1, envs_per_worker=2, start_method=method
    ) as sampler:
        await sampler.sample(uniform, batch_size=2)


async def test_opening_and_closing_wears_nothing_out() -> None:
    counts = set()
    for cycle in range(6):
        await open_and_close("spawn")
        if not cycle:  # what libraries open once is open now
            threads = going()
        counts.add(belongings())
        wait_until(no_more_threads_than(threads))
    assert len(counts) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
async def test_two_hundred_samplers_leave_nothing(method: Any) -> None:
    for _ in range(30):
        await open_and_close(method)
    threads, segments = going(), own_segments()
    before, memory = belongings(), resident_mebibytes(os.getpid())
    for _ in range(200):
        await open_and_close(method)
    wait_until(no_more_threads_than(threads))
    gc.collect()
    assert belongings() == before
    wait_until(lambda: own_segments() <= segments)
    grown = resident_mebibytes(os.getpid()) / memory - 1
    print(f"memory: {memory:.0f} MiB {grown:+.2%}")
    assert grown < 0.02


@pytest.mark.parametrize(
    "num_episodes",
    [2_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
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
        before, threads, used = belongings(), going(), memory()
        await sample_many(num_calls)
        assert sampler.statistics.episodes > num_episodes
        assert belongings() == before
        wait_until(no_more_threads_than(threads))
        growth = [after / at_first - 1 for after, at_first in zip(memory(), used, strict=True)]
    print(f"memory: {used[0]:.0f} MiB {growth[0]:+.2%}, workers {growth[1:]}")
    assert max(growth) < 0.02
