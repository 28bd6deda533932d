"""Every test leaves the process as it was: no child, thread, descriptor or shared segment."""

import gc
import multiprocessing
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import uvloop

pytest.register_assert_rewrite("cancelling", "oracle", "processes")

from oracle import PENDULUM, lockstep, policy_of  # noqa: E402  (rewritten as they are imported)
from processes import children, descriptors, is_in_use_elsewhere  # noqa: E402

from asyncmaml import BatchEpisodes  # noqa: E402
from asyncmaml.learning.policies import MLPPolicy  # noqa: E402


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


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = _belongings()
    yield
    if _left_since(before):
        gc.collect()  # what no test closes may still be closed by its end
        assert not _left_since(before)


@pytest.fixture
def register() -> Iterator[Any]:
    """Return `gymnasium.register`; what it adds is gone afterwards."""
    entries = dict(gymnasium.registry)
    yield gymnasium.register
    gymnasium.registry.clear()
    gymnasium.registry.update(entries)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Have what multiprocessing keeps until this process ends: a server, a heap of memory."""
    multiprocessing.get_context("forkserver").Process().start()
    multiprocessing.RawArray("b", 4096)


@pytest.fixture(scope="session")
def pendulum() -> tuple[MLPPolicy, BatchEpisodes]:
    """Return a policy, and the 30 episodes that it should come to with `PENDULUM`."""
    pendulum_policy = policy_of(gymnasium.make(PENDULUM["env"]).unwrapped)
    return pendulum_policy, lockstep(policy=pendulum_policy, batch_size=30, **PENDULUM)[0]
