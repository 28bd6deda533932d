"""Every test leaves the process as it was: no child, thread, descriptor or shared segment."""

import gc
import multiprocessing
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import hypothesis
import pytest
import torch
import uvloop

pytest.register_assert_rewrite("cancelling", "oracle", "processes")

from faulty import CLOCK  # noqa: E402
from oracle import PENDULUM, lockstep, policy_of  # noqa: E402  (rewritten as they are imported)
from processes import children, descriptors, is_in_use_elsewhere, wait_until  # noqa: E402

from asyncmaml import AsyncSampler, BatchEpisodes  # noqa: E402
from asyncmaml.learning.policies import MLPPolicy  # noqa: E402
from asyncmaml.sampling.starting import safe_start  # noqa: E402

# A deadline for an example, or for the drawing of one, would be a test of how busy the machine is.
hypothesis.settings.register_profile(
    "any load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any load")

GOING = {"threads", "shared memory"}
"""What may be there for a moment longer: a thread that has told its end already, and a segment
that another program is about to take the name of."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make what was captured fit for pytest-xdist, which sends it as UTF-8: no half characters."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def _belongings() -> dict[str, Counter[Any]]:
    """Return what our process has that could be left behind."""
    return {
        "processes": Counter(children()),
        # Of Python alone: those of OpenMP come with the first large product, for good.
        "threads": Counter(threading.enumerate()),
        # matplotlib keeps the fonts open that it has written with.
        "descriptors": Counter(
            name for name in descriptors().values() if not name.endswith(".ttf")
        ),
        # Other programs of this machine have theirs there as well.
        "shared memory": Counter(entry.name for entry in Path("/dev/shm").iterdir()),
    }


def _left_since(before: dict[str, Counter[Any]]) -> dict[str, Counter[Any]]:
    left = {name: found - before[name] for name, found in _belongings().items()}
    for segment in list(left["shared memory"]):
        if is_in_use_elsewhere(Path("/dev/shm") / segment):
            del left["shared memory"][segment]
    return {name: things for name, things in left.items() if things}


@pytest.fixture(scope="session", autouse=True)
def what_libraries_open_once_is_open() -> None:
    # The first process that multiprocessing spawns starts its resource tracker, which keeps a pipe.
    resource_tracker.ensure_running()
    # The first loop of uvloop makes libuv's pipe for signals.
    uvloop.new_event_loop().close()
    # The first backward makes torch's autograd threads.
    torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
    # Torch and its kin are half a million objects that stay; no collection need look at them.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell has the jobs in its background ignore it, and so would all that we start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = _belongings()
    yield
    if not _left_since(before):
        return
    gc.collect()  # what no test closes may still be closed by its end
    if _left_since(before).keys() <= GOING:
        with suppress(AssertionError):
            wait_until(lambda: not _left_since(before), 5)
    assert not _left_since(before)


@pytest.fixture
def register() -> Iterator[Any]:
    """Return `gymnasium.register`; what it adds is gone afterwards."""
    entries = dict(gymnasium.registry)
    yield gymnasium.register
    gymnasium.registry.clear()
    gymnasium.registry.update(entries)


@pytest.fixture
def leaping_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the limits of samplers go by a clock that stands still but for `faulty.leap()`.

    So no worker is late because the machine is busy, and nobody waits until one is.
    """
    path = tmp_path / "clock"
    path.touch()
    monkeypatch.setenv(CLOCK, str(path))
    clock = SimpleNamespace(perf_counter=lambda: path.stat().st_size / 100)
    for module in ("coordinator", "pool"):
        monkeypatch.setattr(f"asyncmaml.sampling.{module}.time", clock)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Have what multiprocessing keeps until this process ends: a server, a heap of memory.

    Started as by a sampler, so that it has loaded what every worker needs.
    """
    with safe_start("forkserver") as context:
        context.Process().start()
    multiprocessing.RawArray("b", 4096)


@pytest.fixture
def quick_workers(fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have samplers that name no method start their workers by the fork server.

    For tests that are not about the start, the output or the end of a worker: a spawned one takes
    many times as long to start, and what it does afterwards is the same.
    """
    defaults = AsyncSampler.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "start_method", "forkserver")


@pytest.fixture(scope="session")
def pendulum() -> tuple[MLPPolicy, BatchEpisodes]:
    """Return a policy, and the 30 episodes that it should come to with `PENDULUM`."""
    pendulum_policy = policy_of(gymnasium.make(PENDULUM["env"]).unwrapped)
    return pendulum_policy, lockstep(policy=pendulum_policy, batch_size=30, **PENDULUM)[0]
