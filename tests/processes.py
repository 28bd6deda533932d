"""Processes, as /proc tells of them; scripts in their own ones; waiting for what others do."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PATIENCE = 60.0
"""Seconds after which what we wait for will not come. Nothing that succeeds takes nearly as long,
however busy the machine is."""


def children() -> set[int]:
    """Return our child processes, zombies too, and those that a fork server has made for us.

    The server itself and multiprocessing's resource tracker are nobody's fault.
    """
    tracker: Any = resource_tracker._resource_tracker
    server: Any = forkserver._forkserver
    found = children_of(os.getpid())
    if server._forkserver_pid in found:
        found |= children_of(server._forkserver_pid)
    return found - {tracker._pid, server._forkserver_pid}


def children_of(pid: int) -> set[int]:
    """Return the child processes of one that runs, zombies too."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except FileNotFoundError:  # the thread has ended meanwhile
            continue
    return found


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """Return the open descriptors of a process and what each one refers to."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except FileNotFoundError:  # the one that listed the directory
            continue
    return found


def is_alive(pid: int) -> bool:
    """Tell whether the process runs; one that only waits to be reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def is_in_use_elsewhere(path: Path) -> bool:
    """Tell whether processes other than ours have the file mapped, or have removed it already."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return True
    # Not by its name: a semaphore is mapped under another one than it has later.
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    mapped = f" {device} {status.st_ino} "
    ours = children() | {os.getpid()}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) not in ours and mapped in (entry / "maps").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is not of this user
    return not path.exists()


def mappings(pid: int) -> str:
    """Return what the process has mapped, as /proc tells it."""
    return Path(f"/proc/{pid}/maps").read_text()


def resident_mebibytes(pid: int) -> float:
    """Return the VmRSS of a process; 0: of this one."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


@contextmanager
def start_python(*args: str | Path, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Start Python in a process group of its own, which ends with the block at the latest."""
    with subprocess.Popen(
        [sys.executable, *args], text=True, start_new_session=True, **options
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:  # a test has failed, and nobody else would end it
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def start_command(*args: str | Path, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Start `asyncmaml` with some arguments; see `start_python`."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with start_python("-m", "asyncmaml", *args, env=env, **options) as process:
        yield process


@contextmanager
def start_script(
    path: Path, script: str, *args: str, warnings: str = "error", **options: Any
) -> Iterator["subprocess.Popen[str]"]:
    """Start a script that finds our package and the fakes; see `start_python`."""
    path.write_text(textwrap.dedent(script))
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONWARNINGS": warnings}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_python(path, *args, env=env, **options) as process:
        yield process


def run_script(path: Path, script: str, *args: str, warnings: str = "error") -> str:
    """Run a script to its end, which must be a quiet one; return what it printed."""
    with start_script(path, script, *args, warnings=warnings) as process:
        output, complaints = process.communicate(timeout=PATIENCE)
    assert (process.returncode, complaints) == (0, "")
    return output


def in_a_fork_each(ways: list[str]) -> str:
    """Go on in a fork of this script for each of the ways, and return that one there.

    What the script has loaded is so loaded once. The forks write into `WAY.output` and
    `WAY.complaints`, one after the other; this process ends with the last one, and prints of each
    its exit code and which of the processes that its output names were alive when it had ended.
    Without ways it goes on itself.
    """
    ended = {}
    for way in ways:
        if pid := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            named = map(int, Path(f"{way}.output").read_text().split())
            ended[way] = code, [child for child in named if is_alive(child)]
            continue
        for stream, name in enumerate(("output", "complaints"), start=1):
            file = os.open(f"{way}.{name}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, stream)
            os.close(file)
        return way
    if not ways:
        return ""
    print(json.dumps(ended))
    raise SystemExit


async def until(
    is_so: Callable[[], bool], seconds: float = PATIENCE, *, pause: float = 0.001
) -> float:
    """Let the loop go on until it is so; return how long that took.

    Without a `pause` between two looks nothing is missed, but the looking takes the interpreter
    from the sampler's thread.
    """
    began = time.perf_counter()
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110  (the sampler's thread sets no event for tests)
            await asyncio.sleep(pause)
    return time.perf_counter() - began


def wait_until(is_so: Callable[[], bool], seconds: float = PATIENCE) -> float:
    """Wait until it is so; return how long that took."""
    began = time.perf_counter()
    while not is_so():
        assert time.perf_counter() - began < seconds, f"not within {seconds} s"
        time.sleep(0.005)
    return time.perf_counter() - began


@contextmanager
def held(sampler: Any) -> Iterator[None]:
    """Have the sampler's thread wait meanwhile."""
    may_go = threading.Event()
    sampler._engine._call(may_go.wait, PATIENCE)
    try:
        yield
    finally:
        may_go.set()


async def all_at_once(sampler: Any, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Await calls that the sampler's thread hears of between two of its ticks, in their order."""
    with held(sampler):
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)  # they have all been made
    return await asyncio.gather(*tasks)


def waiting_gates(directory: Path) -> tuple[Path, Path]:
    """Make the two FIFOs of a `WaitingEnv`."""
    gates = directory / "arrived", directory / "gate"
    for gate in gates:
        os.mkfifo(gate)
    return gates
