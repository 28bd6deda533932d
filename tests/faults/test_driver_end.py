"""The end of the driver, by whatever cause: its workers end as well, quietly."""

import asyncio
import contextlib
import faulthandler
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from faulty import DoingEnv, DoingWhenMadeEnv
from oracle import uniform
from processes import (
    PATIENCE,
    children,
    children_of,
    is_alive,
    run_script,
    start_script,
    until,
    wait_until,
)

from asyncmaml import AsyncSampler

# --- the driver is torn away

ENDLESS_DEEDS = ("hang", "hang_with_the_gil", "loop")


def _drive(told: Any, how: str, method: Any, folder: Path) -> NoReturn:
    """Have three workers in steps without end, say who they are, and end."""
    tempfile.tempdir = str(folder)
    sys.stderr = sys.stdout = open(told.fileno(), "w", closefd=False)  # noqa: SIM115
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` would have us ignore

    async def main() -> None:
        sampler = AsyncSampler(
            DoingEnv,
            num_workers=3,
            envs_per_worker=1,
            batch_size=1,
            start_method=method,
            worker_output="capture",
        )
        await sampler.start()
        stuck = [
            asyncio.create_task(sampler.sample(uniform, task={"deed": deed}))
            for deed in ENDLESS_DEEDS
        ]
        await until(lambda: sampler.statistics.transitions == 3)
        print(*children(), flush=True)
        match how:
            case "os._exit":
                os._exit(3)
            case "a crash":
                faulthandler.disable()
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                signal.raise_signal(signal.SIGSEGV)
            case "after a fork":
                if not (heir := os.fork()):
                    signal.pause()
                print(heir, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.gather(*stuck)

    asyncio.run(main())
    raise AssertionError


@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("SIGKILL", "spawn"),
        ("SIGKILL", "forkserver"),
        ("SIGKILL", "fork"),
        ("SIGTERM", "spawn"),
        ("SIGHUP", "spawn"),  # the terminal is closed
        ("os._exit", "spawn"),
        ("a crash", "spawn"),
    ],
)
def test_workers_in_an_endless_step_end_with_their_driver(
    how: str, method: str, tmp_path: Path
) -> None:
    read, write = multiprocessing.Pipe(duplex=False)
    # Forked, since that saves the second that torch takes.
    driver = multiprocessing.get_context("fork").Process(
        target=_drive, args=(write, how, method, tmp_path)
    )
    driver.start()
    write.close()
    with read, open(read.fileno(), closefd=False) as told:
        pids = list(map(int, told.readline().split()))
        assert len(pids) == 3
        if how.startswith("SIG"):
            assert driver.pid is not None
            os.kill(driver.pid, signal.Signals[how])
        driver.join()
        took = wait_until(lambda: not any(map(is_alive, pids)))
        print(f"gone after {took} s")
        assert told.read() == ""
    driver.close()
    # Of a fork server, the folder of its socket is left: multiprocessing's own doing.
    assert method == "forkserver" or list(tmp_path.iterdir()) == []


def _start(method: Any) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)  # spawn itself may complain that nothing is told it
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    sampler = AsyncSampler(DoingWhenMadeEnv, {"deed": "hang"}, num_workers=3, start_method=method)
    asyncio.run(sampler.start())


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("num_started", [1, 3])
def test_workers_end_with_a_driver_that_is_killed_while_they_start(
    num_started: int, method: str
) -> None:
    driver = multiprocessing.get_context("fork").Process(target=_start, args=(method,))
    driver.start()
    pid = driver.pid
    assert pid is not None
    wait_until(lambda: len(children_of(pid)) >= num_started)
    os.kill(pid, signal.SIGSTOP)
    pids = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    driver.join()
    driver.close()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_workers_end_with_their_driver_though_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    """The fork has inherited the driver's ends of all pipes."""
    read, write = multiprocessing.Pipe(duplex=False)
    driver = multiprocessing.get_context("fork").Process(
        target=_drive, args=(write, "after a fork", "spawn", tmp_path)
    )
    driver.start()
    write.close()
    with read, open(read.fileno(), closefd=False) as told:
        pids = list(map(int, told.readline().split()))
        heir = int(told.readline())
        driver.join()
        try:
            wait_until(lambda: not any(map(is_alive, pids)))
            assert is_alive(heir)
        finally:
            os.kill(heir, signal.SIGKILL)
    driver.close()


# --- the driver ends without close()

ENDLESS = """
    import asyncio
    import sys

    import torch
    from fakes import CountingEnv
    from processes import children, in_a_fork_each, until

    from asyncmaml import AsyncSampler

    how = in_a_fork_each(sys.argv[1:])

    def policy(observations):
        return torch.distributions.Categorical(logits=torch.zeros(len(observations), 2))

    async def main():
        sampler = AsyncSampler(lambda: CountingEnv(length=10**9), num_workers=2)
        await sampler.start()
        sampling = asyncio.create_task(sampler.sample(policy))
        await until(lambda: sampler.statistics.transitions >= 100)
        print(*children(), flush=True)
        if how == "exit":
            return
        if how == "exit hard":
            raise SystemExit(0)
        await sampling

    asyncio.run(main())
"""


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) >= 2
    return pids


def ends(folder: Path, script: str, *ways: str) -> dict[str, tuple[int, str]]:
    """Have drivers end in some ways; return their exit codes and complaints.

    When one has ended no worker of its is left.
    """
    ended = json.loads(run_script(folder / "script.py", script, *ways))
    found = {}
    for how in ways:
        code, alive = ended[how]
        assert len((folder / f"{how}.output").read_text().split()) >= 2, how
        assert not alive, how
        found[how] = code, (folder / f"{how}.complaints").read_text()
    return found


def test_driver_that_ends_without_close_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for code, complaints in ends(tmp_path, ENDLESS, "exit", "exit hard").values():
        assert (code, complaints) == (0, "")


STUCK = """
    import asyncio
    import sys

    from faulty import DoingEnv, DoingWhenMadeEnv
    from oracle import uniform
    from processes import children, in_a_fork_each, until

    from asyncmaml import AsyncSampler

    how = in_a_fork_each(sys.argv[1:])

    async def main():
        sampler = AsyncSampler(DoingEnv, num_workers=3, envs_per_worker=1, batch_size=1)
        await sampler.start()
        stuck = [
            asyncio.create_task(sampler.sample(uniform, task={"deed": deed}))
            for deed in ("hang_with_the_gil", "loop", "hang_with_the_gil")
        ]
        await until(lambda: sampler.statistics.transitions == 3)
        print(*children(), flush=True)
        match how:
            case "raises":
                raise ArithmeticError("in the middle")
            case "exits in a callback":
                asyncio.get_running_loop().call_soon(sys.exit, 3)
            case "forgets":
                del sampler
                for sample in stuck:
                    sample.cancel()
                return
        await asyncio.gather(*stuck)

    asyncio.run(main())
"""


def test_driver_that_leaves_workers_in_an_endless_step_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = {"raises": 1, "exits in a callback": 3, "forgets": 0}
    for how, (code, complaints) in ends(tmp_path, STUCK, *wanted).items():
        assert code == wanted[how], how
        assert complaints.count("Traceback") == (how == "raises"), how
        assert complaints.endswith("ArithmeticError: in the middle\n" * (how == "raises")), how
        assert complaints == "" or how == "raises"


# --- Ctrl-C


def test_ctrl_c_ends_the_driver_and_its_workers(tmp_path: Path) -> None:
    with start_script(tmp_path / "script.py", ENDLESS) as process:
        pids = workers_of(process)
        os.killpg(process.pid, signal.SIGINT)
        _, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT
    assert complaints.count("Traceback") <= 2  # asyncio.run's two, one caused by the other
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    assert "worker" not in complaints
    assert not any(map(is_alive, pids))


SLOW_TO_CLOSE = """
    import asyncio

    from faulty import ClosingForEverEnv
    from oracle import uniform
    from processes import children

    from asyncmaml import AsyncSampler

    async def main():
        async with AsyncSampler(ClosingForEverEnv, num_workers=2, batch_size=1) as sampler:
            await sampler.sample(uniform)
            print(*children(), flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""


def test_second_ctrl_c_while_the_workers_close_ends_all_the_same(tmp_path: Path) -> None:
    with start_script(tmp_path / "script.py", SLOW_TO_CLOSE) as process:
        pids = workers_of(process)
        began = time.perf_counter()
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3)  # it gives the environments two seconds
        assert process.returncode is None
        os.killpg(process.pid, signal.SIGINT)
        _, complaints = process.communicate(timeout=PATIENCE)
    print(f"ended after {time.perf_counter() - began} s")
    assert process.returncode == -signal.SIGINT
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    assert "worker" not in complaints
    assert not any(map(is_alive, pids))
