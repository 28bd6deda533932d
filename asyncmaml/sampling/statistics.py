"""Where a sampler's time goes."""

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counts and times since the sampler was started; seconds are of wall time.

    The sampler thread's time is `waiting + gather + forward + scatter`; the environments' time
    is counted in the workers, so with several of them it can exceed the wall time.
    """

    ticks: int = 0
    transitions: int = 0
    """Steps whose reward is in, of all requests, also of those that failed or were cancelled."""
    episodes: int = 0
    """Episodes that ended."""
    restarts: int = 0
    """Workers that were lost and replaced."""
    waiting_seconds: float = 0.0
    """The sampler thread had nothing to do."""
    gather_seconds: float = 0.0
    """Collecting replies, recording transitions, handing out episodes."""
    forward_seconds: float = 0.0
    """The policies' forward and the drawing of actions."""
    scatter_seconds: float = 0.0
    """Passing actions on to the workers."""
    environment_seconds: float = 0.0
    """Workers, or this process without them, inside of environments."""

    @property
    def rows_per_tick(self) -> float:
        """Mean number of rows that a tick draws actions for."""
        return self.transitions / self.ticks if self.ticks else 0.0
