"""Wall and CPU time of this process and its descendants, and the spread of repeats."""

import os
import statistics
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Reading:
    """Seconds."""

    wall_seconds: float
    parent_cpu_seconds: float
    children_cpu_seconds: float
    others_cpu_seconds: float
    """Of everything else on this machine: whether it was quiet."""


class Meter:
    """Counts time from its making on. Descendants are those that live at that moment.

    `getrusage` counts children that have ended only; ours live.
    """

    def __init__(self) -> None:
        self._descendants = list(descendants("self"))
        self._machine_began = _machine_cpu()
        self._children_began = self._children_cpu()
        self._parent_began = time.process_time()
        self._began = time.perf_counter()

    @property
    def wall_seconds(self) -> float:
        """Since the meter was made."""
        return time.perf_counter() - self._began

    def read(self) -> Reading:
        """Return the times since the meter was made."""
        wall = self.wall_seconds
        parent = time.process_time() - self._parent_began
        children = self._children_cpu() - self._children_began
        others = _machine_cpu() - self._machine_began - parent - children
        return Reading(wall, parent, children, max(0.0, others))

    def _children_cpu(self) -> float:
        # The CPU clock of another process, all its threads, as clock_getcpuclockid(3) names it:
        # nanoseconds, where utime and stime in /proc/PID/stat come in steps of 10 ms.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._descendants)


@dataclass(frozen=True)
class SamplingCpu:
    """CPU seconds that an `AsyncSampler` took, and whatever else ran."""

    workers: float
    sampler: float
    """Its thread."""
    event_loop: float
    """The main thread, which calls it."""
    others: float
    """Everything else on this machine; a learner of this process is not in it."""

    @property
    def sampling(self) -> float:
        """All that sampling took."""
        return self.workers + self.sampler + self.event_loop


class SamplingMeter:
    """Counts CPU time from its making on, that of a learner in another thread left out."""

    def __init__(self) -> None:
        self._meter = Meter()
        samplers = [each for each in threading.enumerate() if each.name == "asyncmaml-sampler"]
        assert len(samplers) == 1, samplers
        self._sampler = _ThreadClock(samplers[0])
        self._event_loop = _ThreadClock(threading.main_thread())

    def read(self) -> SamplingCpu:
        """Return the times since the meter was made."""
        sampler, event_loop = self._sampler.read(), self._event_loop.read()
        reading = self._meter.read()
        workers, others = reading.children_cpu_seconds, reading.others_cpu_seconds
        return SamplingCpu(workers, sampler, event_loop, others)


class _ThreadClock:
    """The CPU time of a thread of this process, from its making on."""

    def __init__(self, thread: threading.Thread) -> None:
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._began = time.clock_gettime(self._clock)

    def read(self) -> float:
        return time.clock_gettime(self._clock) - self._began


def _machine_cpu() -> float:
    """CPU seconds of all processes since boot, with what a virtual machine's host took."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int | str) -> Iterable[int]:
    """Yield the processes that a process has started, and those that they have; "self": ours."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from descendants(child)


@dataclass(frozen=True)
class Measurement:
    """What one contender did in one repeat."""

    transitions: int
    """Valid ones: no reset steps, no rows without an episode."""
    reading: Reading
    rows_per_forward: float
    busy_us_per_tick: float | None = None
    """The sampler thread's gather, forward and scatter; of an `AsyncSampler` alone."""
    forward_us_per_tick: float | None = None
    """Its policy's forward and the drawing of actions alone."""
    environment_seconds: float | None = None
    """Its workers inside of environments, summed."""

    @property
    def rate(self) -> float:
        """Transitions a second."""
        return self.transitions / self.reading.wall_seconds

    @property
    def parent_us(self) -> float:
        """CPU time of this process, a transition."""
        return self.reading.parent_cpu_seconds / self.transitions * 1e6

    @property
    def children_us(self) -> float:
        """CPU time of its descendants, a transition."""
        return self.reading.children_cpu_seconds / self.transitions * 1e6

    @property
    def cpu_us(self) -> float:
        """CPU time a transition, all processes."""
        return self.parent_us + self.children_us


@dataclass(frozen=True)
class Spread:
    """Median and extremes of repeats."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Of at least one value."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))
