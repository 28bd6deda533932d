"""What an iteration's sampling reaches of the machine's limit, from what was measured of it."""

from dataclasses import dataclass

from comparison import Limit
from measuring import SamplingCpu

from asyncmaml.checkpoint import Row

PARTS = {
    "sampling_seconds": "sampling",
    "adaptation_seconds": "adaptation that sticks out",
    "outer_seconds": "outer step",
    "idle_seconds": "idle",
}
"""Of an iteration, as the trainer divides its `seconds`: the columns, and what people call them."""


@dataclass(frozen=True)
class Sampled:
    """Transitions, and what it took to sample them.

    Args:
        transitions: Of all phases.
        seconds: In which the sampler had work.
        cores: That could be used.
        cpu: Outside of these seconds the sampler stands still.
    """

    transitions: int
    seconds: float
    cores: int
    cpu: SamplingCpu

    @property
    def rate(self) -> float:
        """Transitions per second in which the sampler had work."""
        return self.transitions / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time of sampling, a transition."""
        return self.us_each(self.cpu.sampling)

    def us_each(self, seconds: float) -> float:
        """Return microseconds a transition."""
        return seconds / self.transitions * 1e6

    @property
    def cores_share(self) -> float:
        """The part of the cores' time that sampling got while the sampler had work."""
        return self.cpu.sampling / (self.cores * self.seconds)

    def wall_share(self, limit: Limit) -> float:
        """Return the share of a limit reached in wall time: `cpu_share` times `cores_share`."""
        return self.rate / limit.rate

    def cpu_share(self, limit: Limit) -> float:
        """Return the share of a limit reached in CPU time."""
        return limit.cpu_us / self.cpu_us


@dataclass(frozen=True)
class TimedIteration:
    """An iteration of the trainer.

    Args:
        row: As the trainer has logged it.
        sampled: In it.
    """

    row: Row
    sampled: Sampled

    def part(self, name: str) -> float:
        """Return the share of the iteration's time that one of `PARTS` takes."""
        return float(self.row[name] / self.row["seconds"])

    @property
    def waiting_share(self) -> float:
        """The part of the time before the outer step in which the sampler had no work.

        It waits for the adaptation then, or for nothing at all.
        """
        row = self.row
        before_outer = row["seconds"] - row["outer_seconds"]
        return float((row["adaptation_seconds"] + row["idle_seconds"]) / before_outer)


def timed_iterations(
    rows: list[Row], cpu: dict[int, SamplingCpu], cores: int
) -> list[TimedIteration]:
    """Return those iterations whose CPU time was measured.

    Args:
        rows: Of the run, from its first iteration on; `env_steps` counts from its begin.
        cpu: By the iteration's number.
        cores: That could be used.
    """
    found = []
    steps_before = 0
    for row in rows:
        if row["iteration"] in cpu:
            transitions = int(row["env_steps"]) - steps_before
            seconds, used = float(row["sampling_seconds"]), cpu[row["iteration"]]
            found.append(TimedIteration(row, Sampled(transitions, seconds, cores, used)))
        steps_before = int(row["env_steps"])
    return found
