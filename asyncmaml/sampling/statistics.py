"""Where a sampler's time goes, always counted: a tick adds a handful of numbers."""

import copy
from dataclasses import dataclass, field, fields
from typing import Self

from asyncmaml.errors import EpisodeError

HISTOGRAM_BINS = 24
"""Ticks of 1, 2 to 3, 4 to 7, ... rows; the last bin has all above."""


@dataclass
class Statistics:
    """Counts and times since the sampler was started; seconds are of wall time.

    `after - before` is what happened between two copies. The sampler thread's time is
    `waiting + record + gather + forward + scatter`; the environments' time is counted in the
    workers, so with several of them it can exceed the wall time.
    """

    wall_seconds: float = 0.0
    """Since the workers stood; it no longer grows once the sampler is closed."""
    ticks: int = 0
    transitions: int = 0
    """Steps whose reward is in, of all requests, also of those that failed or were cancelled."""
    episodes: int = 0
    """Episodes that ended."""
    requests: int = 0
    """Requests that were delivered."""
    restarts: int = 0
    """Workers that were lost and replaced."""
    waiting_seconds: float = 0.0
    """The sampler thread waited for replies; without workers it stepped environments meanwhile."""
    record_seconds: float = 0.0
    """Taking replies: rewards into the log, ends of episodes, results to who awaits them."""
    gather_seconds: float = 0.0
    """Handing out episodes and collecting observations."""
    forward_seconds: float = 0.0
    """The policies' forward and the drawing of actions."""
    scatter_seconds: float = 0.0
    """Passing actions on to the workers."""
    ticks_by_rows: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)
    """Ticks that drew actions for 1, for 2 to 3, for 4 to 7, ... rows."""
    worker_seconds: list[float] = field(default_factory=lambda: [0.0])
    """Of each worker, inside of environments; without workers, those of the sampler thread."""
    requests_in_flight: int = 0
    """Right now; a difference has that of its later copy, as for the next one."""
    episodes_queued: int = 0
    """Right now: episodes of these requests that no row has begun."""

    @property
    def environment_seconds(self) -> float:
        """Workers, or this process without them, inside of environments."""
        return sum(self.worker_seconds)

    @property
    def thread_seconds(self) -> float:
        """The sampler thread at work, environments in it not counted."""
        recording = self.record_seconds + self.gather_seconds
        return recording + self.forward_seconds + self.scatter_seconds

    @property
    def worker_busy_share(self) -> float:
        """The part of their time that the workers spent inside of environments, in [0, 1]."""
        available = self.wall_seconds * len(self.worker_seconds)
        return self.environment_seconds / available if available > 0 else 0.0

    @property
    def rows_per_tick(self) -> float:
        """Mean number of rows that a tick draws actions for."""
        return self.transitions / self.ticks if self.ticks else 0.0

    @property
    def steps_per_second(self) -> float:
        """Transitions per second of wall time."""
        return self.transitions / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def copy(self) -> Self:
        """Return the numbers as they are now."""
        twin = copy.copy(self)
        twin.ticks_by_rows = self.ticks_by_rows.copy()
        twin.worker_seconds = self.worker_seconds.copy()
        return twin

    def __sub__(self, earlier: "Statistics") -> "Statistics":
        """Return what was added since an earlier copy."""
        added = self.copy()
        for name in _ADDING:
            value, before = getattr(self, name), getattr(earlier, name)
            if isinstance(value, list):
                # The default has one worker; a copy from before the start knows no more.
                before = before + [0] * (len(value) - len(before))
                difference = [now - then for now, then in zip(value, before, strict=True)]
            else:
                difference = value - before
            setattr(added, name, difference)
        return added

    def scalars(self) -> dict[str, float]:
        """Return the numbers that a logger plots, by name: rates, shares and the queue.

        For TensorBoard: `writer.add_scalar(f"sampler/{name}", value, step)` for each of them.
        """
        wall = self.wall_seconds or float("inf")
        shares = {
            f"{name.removesuffix('_seconds')}_share": getattr(self, name) / wall
            for name in _THREAD_TIMES
        }
        return {
            "steps_per_second": self.steps_per_second,
            "episodes_per_second": self.episodes / wall,
            "rows_per_tick": self.rows_per_tick,
            "worker_busy_share": self.worker_busy_share,
            **shares,
            "restarts": float(self.restarts),
            "requests_in_flight": float(self.requests_in_flight),
            "episodes_queued": float(self.episodes_queued),
        }


_THREAD_TIMES = (
    "waiting_seconds",
    "record_seconds",
    "gather_seconds",
    "forward_seconds",
    "scatter_seconds",
)
_GAUGES = ("requests_in_flight", "episodes_queued")
_ADDING = tuple(part.name for part in fields(Statistics) if part.name not in _GAUGES)


@dataclass(frozen=True)
class SamplingRecord:
    """How a request came about: `episodes.record`."""

    queued_seconds: float
    """From the call until a row was given, or offered, its first episode."""
    seconds: float
    """From the call until its last episode was in."""
    before: Statistics
    """The sampler's when it took up the call."""
    after: Statistics
    """The sampler's when the last episode was in."""
    num_dropped: int = 0
    """Episodes that were asked for and are not there: see `first` and `on_error`."""
    num_retries: int = 0
    """Times that an episode was begun again because its environment or a worker failed."""
    failures: tuple[EpisodeError, ...] = ()
    """Why episodes were dropped, with `on_error="drop"`."""

    @property
    def statistics(self) -> Statistics:
        """Of the whole sampler meanwhile, other requests' part included."""
        return self.after - self.before
