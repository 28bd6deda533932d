"""An environment that does something to its process; a worker imports this: no torch here."""

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from fakes import CountingEnv, Step

FLOOD_BYTES = 4 << 20
FOR_EVER = 3600.0
CLOCK = "ASYNCMAML_TEST_CLOCK"
"""Names the file whose size is the time, in hundredths of a second; see `leaping_clock`."""


def be_slow(seconds: float) -> None:
    """Do nothing for a while: the slowness is the fault, and waits for nobody."""
    threading.Event().wait(seconds)


def stand_still(seconds: float) -> None:
    """Be slow, and by a `leaping_clock` a thousand times as slow."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        be_slow(0.05)
        leap(50)


def leap(seconds: float) -> None:
    """Have this time pass at once, for a sampler whose limits go by a `leaping_clock`."""
    if path := os.environ.get(CLOCK):
        with open(path, "ab") as clock:
            clock.write(b"." * round(100 * seconds))


def segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(2, b"assertion of a C library failed")
    os.abort()


def exit_hard() -> None:
    os._exit(7)


def use_up_memory() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, limits[1]))
    try:
        bytearray(1 << 34)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def kill() -> None:
    sys.stderr.write("these are my last words")  # without an end of line
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    print("I will think about it", file=sys.stderr)
    stand_still(FOR_EVER)


def pause() -> None:
    """Be late, but not for ever: who looks now and then sees it, and who does not gets a reply."""
    stand_still(5)


def hang_with_the_gil() -> None:
    """As a C library without an end would do."""
    ctypes.PyDLL(None).sleep(3600)


def loop() -> None:
    while True:
        pass


def flood() -> None:
    for descriptor in (1, 2):
        for _ in range(FLOOD_BYTES >> 16):
            os.write(descriptor, b"x" * (1 << 16))


def flood_log() -> None:
    for number in range(2000):
        logging.getLogger("env").error("%d %s", number, "y" * 2000)


def speak() -> None:
    print("from Python")
    print("complaint of Python", file=sys.stderr)
    os.write(1, b"from C\n")
    subprocess.run(["sh", "-c", "echo complaint of a child >&2"], check=True)


def warn() -> None:
    warnings.warn("the model is old", UserWarning, stacklevel=2)


def log() -> None:
    logger = logging.getLogger("simulator.physics")
    logger.info("nobody wants to know")
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logger.exception("no contact with %s", "the ground")


def log_too_much() -> None:
    logging.getLogger("env").error("\N{GRINNING FACE}\ud800" * 100_000)


def log_what_cannot_be_formatted() -> None:
    logging.getLogger("env").error("%d", "no number")


def touch_cuda() -> None:
    import torch

    with contextlib.suppress(AssertionError, RuntimeError):  # a machine without, or a fork
        torch.zeros(1, device="cuda")


def collect_garbage() -> None:
    gc.collect()


class DoingEnv(CountingEnv):
    """Does `deed`, a function of this module, before step `at`; where there is a `marker`, once.

    A task may name the deed as well: `{"deed": "speak"}`.
    """

    def __init__(
        self, deed: str = "", at: Any = 1, length: int | None = 3, marker: str | None = None
    ) -> None:
        super().__init__(length)
        self.deed, self.at, self.marker = deed, at, marker

    def do(self) -> None:
        deed = self.task.get("deed", self.deed)
        if not deed:
            return
        if self.marker is not None:
            if Path(self.marker).exists():
                return
            Path(self.marker).touch()
        globals()[deed]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.task.get("at", self.at) == "reset":
            self.do()
        return super().reset(seed=seed)

    def step(self, action: Any) -> Step:
        if self.steps == self.task.get("at", self.at):
            self.do()
        return super().step(action)


class DoingWhenMadeEnv(DoingEnv):
    """Does it in its constructor."""

    def __init__(self, deed: str = "") -> None:
        super().__init__(deed)
        self.do()


class ReturningEnv(CountingEnv):
    """Observes `value` in step `at`, and `good` in all others."""

    def __init__(self, space: Any, good: Any, value: Any, at: int = 2) -> None:
        super().__init__()
        self.observation_space = space
        self.good, self.value, self.at = good, value, at

    def observation(self) -> Any:
        return self.value if self.steps == self.at else self.good


class NestedEnv(CountingEnv):
    """Opens a sampler of its own at the first reset; observes the sum of an episode's rewards."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        import asyncio  # these three would otherwise be in every worker of the tests

        from oracle import uniform

        from asyncmaml import AsyncSampler

        async def sample() -> float:
            async with AsyncSampler(CountingEnv, num_workers=1) as sampler:
                return float((await sampler.sample(uniform, batch_size=1)).rewards.sum())

        self.offset = asyncio.run(sample())
        return super().reset(seed=seed)


class ThreadCountEnv(CountingEnv):
    """Observes how many threads its process has once it has multiplied matrices."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        square = np.ones((512, 512))
        assert (square @ square)[0, 0] == 512
        self.offset = len(os.listdir("/proc/self/task"))
        return super().reset(seed=seed)


class SlowToBeginEnv(CountingEnv):
    """Takes its time to be made, and to be reset: so long by a `leaping_clock`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.take_time()

    def take_time(self) -> None:
        be_slow(0.06)  # so that somebody looks before and behind
        leap(self.seconds)
        be_slow(0.06)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.take_time()
        return super().reset(seed=seed)


class PartingEnv(CountingEnv):
    """Says something as it is closed."""

    def close(self) -> None:
        print("goodbye")
        logging.getLogger("env").error("closed")


class ClosingForEverEnv(CountingEnv):
    """Cannot be closed in a worker."""

    def close(self) -> None:
        if "asyncmaml.sampling" not in sys.modules:  # in the driver there is one for its tasks
            be_slow(FOR_EVER)


class HelpedEnv(CountingEnv):
    """Starts a process that holds all that its worker has open; `folder/PID` tells its number."""

    def __init__(self, how: str, folder: Path, driver: int) -> None:
        super().__init__()
        if os.getpid() == driver:  # it makes one for its tasks
            return
        told = folder / str(os.getpid())
        if how == "os.system":
            os.system(f"sleep 300 & echo $! > {told}")
        elif helper := os.fork():
            told.write_text(str(helper))
        else:
            signal.pause()


class OrphaningEnv(CountingEnv):
    """Kills its process once, and leaves another one that has written and holds its streams.

    The file `told` has the number of the one that is left.
    """

    def __init__(self, told: Path) -> None:
        super().__init__(length=3)
        self.told = told

    def step(self, action: Any) -> Step:
        if self.steps == 1 and not self.told.exists():
            has_written, telling = os.pipe()
            deeds = f"echo orphan >&2; echo >&{telling}; exec sleep 60"
            orphan = subprocess.Popen(["sh", "-c", deeds], pass_fds=[telling])
            os.read(has_written, 1)
            self.told.write_text(str(orphan.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class LoudEnv(CountingEnv):
    """Raises with a text as long as its task says."""

    def step(self, action: Any) -> Step:
        if self.task.get("loud"):
            raise ArithmeticError("z" * self.task["loud"])
        return super().step(action)


class LengthEnv(CountingEnv):
    """Lasts as many steps as its task says, and on until the file is there that it may name."""

    def reset_task(self, task: Any) -> None:
        super().reset_task(task)
        self.length = task["length"]

    def step(self, action: Any) -> Step:
        observation, reward, ended, truncated, info = super().step(action)
        if ended and "until" in self.task:
            ended = os.path.exists(self.task["until"])
        return observation, reward, ended, truncated, info


class GatedResetEnv(CountingEnv):
    """Waits in the reset where its task names two FIFOs: to say so, and to be let go."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if "gate" in self.task:
            Path(self.task["arrived"]).write_bytes(b".")
            Path(self.task["gate"]).read_bytes()
        return super().reset(seed=seed)
