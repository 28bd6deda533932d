"""A driver in a terminal: what is typed there, and the terminal itself, reach all its processes."""

import asyncio
import multiprocessing
import os
import pty
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from fakes import CountingEnv
from faulty import ClosingForEverEnv
from oracle import uniform
from processes import PATIENCE, children, descriptors, is_alive, until, wait_until

from asyncmaml import AsyncSampler

CTRL_C = b"\x03"
Driver = tuple[BaseProcess, list[int], int]
"""The process, its workers, and our end of its terminal."""


def _drive(told: Connection, terminal: str, others: list[int], second_env: Any) -> None:
    """Sample without end in the terminal's foreground; say who the workers are."""
    os.setsid()
    for descriptor in others:  # it would keep the terminal open
        os.close(descriptor)
    theirs = os.open(terminal, os.O_RDWR)  # the first one that a session opens is its own
    for descriptor in (0, 1, 2):
        os.dup2(theirs, descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` would have us ignore

    async def main() -> None:
        async with (
            AsyncSampler(lambda: CountingEnv(length=10**9), num_workers=2) as endless,
            AsyncSampler(second_env, num_workers=1, batch_size=1) as idle,
        ):
            await idle.sample(uniform)
            sampling = asyncio.create_task(endless.sample(uniform))
            await until(lambda: endless.statistics.transitions > 100)
            told.send(sorted(children()))
            await sampling

    asyncio.run(main())


@pytest.fixture(params=[CountingEnv])
def driver(
    request: pytest.FixtureRequest,
) -> Iterator[Driver]:
    """Yield a driver that samples; its terminal may be closed."""
    ours, theirs = pty.openpty()
    read, write = multiprocessing.Pipe(duplex=False)
    # Forked, since that saves the second that torch takes.
    process = multiprocessing.get_context("fork").Process(
        target=_drive, args=(write, os.ttyname(theirs), [ours, theirs], request.param)
    )
    process.start()
    os.close(theirs)
    write.close()
    with read:
        workers = read.recv()
    assert len(workers) == 3
    yield process, workers, ours
    process.join()
    process.close()
    if ours in descriptors():
        os.close(ours)


def shown(terminal: int) -> str:
    """Return what has been written to a terminal whose programs have ended."""
    text = b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # there is nobody on the other side
            return text.decode().replace("\r", "")
        text += data


def test_closed_terminal_ends_the_driver_and_its_workers(
    driver: Driver,
) -> None:
    process, workers, terminal = driver
    os.close(terminal)
    wait_until(lambda: not any(map(is_alive, workers)))
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGHUP


@pytest.mark.parametrize(
    ("driver", "times"), [(CountingEnv, 1), (ClosingForEverEnv, 2)], indirect=["driver"]
)
def test_ctrl_c_typed_ends_the_driver_and_its_workers_quietly(driver: Driver, times: int) -> None:
    """The second time while an environment takes its two seconds to close."""
    process, workers, terminal = driver
    began = time.perf_counter()
    os.write(terminal, CTRL_C)
    if times == 2:
        process.join(0.3)
        assert process.exitcode is None
        os.write(terminal, CTRL_C)
    process.join(PATIENCE)
    print(f"ended after {time.perf_counter() - began} s")
    assert process.exitcode is not None
    assert not any(map(is_alive, workers))
    text = shown(terminal)
    assert text.count("Traceback") <= 2  # asyncio.run's two, one caused by the other
    assert text.rstrip().endswith("KeyboardInterrupt")
    assert "worker" not in text
