"""A sampler as a model of discrete events: one coordinator, W workers with G groups of rows each.

The coordinator is one server. It sleeps until a reply is in; takes up all that are in by then;
makes a tick of them, or waits for more, as `Coordinator.stepped` does by `Pace`; and sends the
groups of the tick their next step, each when its message has been written. A worker does its
groups' steps in the order in which they were sent, one row after the other. Every worker has a
core of its own, and so has the coordinator.

What everything costs is given (`Costs`); what is random is drawn from a generator with a fixed
seed, so the same costs give the same prediction.
"""

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncmaml.sampling.pacing import Pace

_WARM_UP_SHARE = 0.2  # of the ticks or steps, before anything is counted


@dataclass(frozen=True)
class Costs:
    """What the parts take, in microseconds."""

    tick: float
    """Of the coordinator for each tick, whatever is in it."""
    tick_lane: float
    """For each group in the tick: collecting, gathering, scattering."""
    tick_row: float
    """For each row in the tick: forward, drawing, recording."""
    known_lane: float
    """For each group that the sampler has, in the tick or not."""
    wake: float
    """For each time that the coordinator has slept: until it runs, and for its cold caches."""
    take_up: float
    """Of the coordinator for each look at the pipes."""
    receive: float
    """Of the coordinator for each reply."""
    send: float
    """Of the coordinator for each command."""
    worker_wake: float
    """From a command that was sent until a worker that had slept runs."""
    command: float
    """Of a worker for each command, whatever its rows."""


@dataclass(frozen=True)
class StepCost:
    """What one row's step takes in its worker, in microseconds: gamma distributed."""

    mean: float
    deviation: float = 0.0

    def of_rows(self, num_rows: int, generator: np.random.Generator) -> float:
        """Draw what the steps of so many rows take together."""
        if not self.deviation or not num_rows:
            return self.mean * num_rows
        # The sum of gamma variables of one scale is gamma distributed.
        shape = (self.mean / self.deviation) ** 2
        return float(generator.gamma(shape * num_rows, self.deviation**2 / self.mean))


@dataclass(frozen=True)
class Fleet:
    """The rows of all workers."""

    num_workers: int
    rows_per_worker: int
    num_groups: int = 1

    @property
    def group_sizes(self) -> list[int]:
        """Rows of each group of a worker."""
        groups = min(self.num_groups, self.rows_per_worker)
        return [(self.rows_per_worker + index) // groups for index in reversed(range(groups))]


@dataclass(frozen=True)
class Prediction:
    """What a simulated sampler did, after its start."""

    rate: float
    """Transitions a second."""
    worker_share: float
    """Of the time, in which a worker does a command; mean of the workers."""
    coordinator_share: float
    """Of the time, in which the coordinator does anything."""
    rows_per_tick: float


def simulate(
    costs: Costs, step: StepCost, fleet: Fleet, *, steps_per_lane: int = 200, seed: int = 0
) -> Prediction:
    """Return what a sampler with these costs does in its steady state.

    Args:
        costs: Of the machine.
        step: Of the environment.
        fleet: The rows.
        steps_per_lane: Steps of each group, on average, that are simulated; the first fifth of
            the transitions is not counted.
        seed: Of what is random.
    """
    return Simulation(costs, step, fleet, np.random.default_rng(seed)).run(steps_per_lane)


class Simulation:
    """One run of the model; see `simulate`. `pace` says which replies wait for others."""

    def __init__(
        self,
        costs: Costs,
        step: StepCost,
        fleet: Fleet,
        generator: np.random.Generator,
        pace: Pace | None = None,
    ) -> None:
        self._costs = costs
        self._step = step
        self._generator = generator
        sizes = fleet.group_sizes
        self._rows = sizes * fleet.num_workers
        self._lanes = [(w, g) for w in range(fleet.num_workers) for g in range(len(sizes))]
        """Worker and group of each."""
        self._pace = Pace(fleet.num_workers) if pace is None else pace
        self._free_at = [0.0] * fleet.num_workers
        """When each worker has done all it was sent."""
        self._worker_busy: NDArray[np.float64] = np.zeros(fleet.num_workers)
        self._replies: list[tuple[float, int, float]] = []
        """A heap: when a reply is in the pipe, its lane, and when its step began."""
        self._waiting: deque[int] = deque()
        """Lanes whose reply was taken up, before a tick."""
        self._transitions = self._ticks = 0
        self._busy = 0.0

    def run(self, steps_per_lane: int) -> Prediction:
        """Simulate until as many transitions are made as so many steps of each lane give."""
        wanted = steps_per_lane * sum(self._rows)
        now = self.begin()
        began = self._snapshot(now)
        has_begun = False
        while self._transitions < wanted:
            now = self._turn(now)
            if not has_begun and self._transitions >= _WARM_UP_SHARE * wanted:
                began, has_begun = self._snapshot(now), True
        time, transitions, ticks, busy, workers = (
            after - before for after, before in zip(self._snapshot(now), began, strict=True)
        )
        return Prediction(
            transitions / time * 1e6,
            workers / time / len(self._free_at),
            busy / time,
            transitions / ticks,
        )

    def begin(self) -> float:
        """Send everything off at once, as when a first request comes; return when it is done."""
        self._waiting.extend(range(len(self._rows)))
        return self.tick(0.0)

    def _snapshot(self, now: float) -> tuple[float, int, int, float, float]:
        # A worker's time is booked when its command is sent: what lies ahead does not count yet.
        ahead = sum(max(0.0, free - now) for free in self._free_at)
        done = float(self._worker_busy.sum()) - ahead
        return now, self._transitions, self._ticks, self._busy, done

    def _turn(self, now: float) -> float:
        """Do one turn of the coordinator's event loop; return when it ends."""
        costs, began = self._costs, now
        if self._replies[0][0] > now:
            # Woken by the first reply; those that come until it runs are taken up with it.
            began = self._replies[0][0]
            now = began + costs.wake
        took_up = now
        now += costs.take_up
        is_due = False
        while self._replies and self._replies[0][0] <= took_up:
            ended, lane, step_began = heapq.heappop(self._replies)
            now += costs.receive
            is_due |= self.take(lane, step_began, ended, now)
        if is_due:
            now = self.tick(now)
        self._busy += now - began
        return now

    def take(self, lane: int, began: float, ended: float, now: float) -> bool:
        """Take up a reply; return whether a tick is due, as `Coordinator.stepped` has it.

        Args:
            lane: Whose reply.
            began: When its step began.
            ended: When that was over.
            now: The clock.
        """
        self._waiting.append(lane)
        self._transitions += self._rows[lane]
        self._pace.replied(*self._lanes[lane], began, ended)
        waiting = {self._lanes[each][0] for each in self._waiting}
        return not (self._pace.is_anything_under_way and self._pace.should_wait(waiting, now))

    def tick(self, now: float) -> float:
        """Act for all lanes whose reply is in and send them on; return when it ends."""
        costs, began = self._costs, now
        lanes = list(self._waiting)
        self._waiting.clear()
        rows = sum(self._rows[lane] for lane in lanes)
        now += costs.tick + costs.tick_lane * len(lanes) + costs.tick_row * rows
        now += costs.known_lane * len(self._rows)
        self._ticks += 1
        for lane in lanes:
            now += costs.send
            worker, group = self._lanes[lane]
            self._pace.sent(worker, group, now)
            free_at = self._free_at[worker]
            begins = free_at if free_at > now else now + costs.worker_wake
            takes = costs.command + self._step.of_rows(self._rows[lane], self._generator)
            self._free_at[worker] = begins + takes
            self._worker_busy[worker] += takes
            heapq.heappush(self._replies, (begins + takes, lane, begins))
        self._pace.ticked(now - began)
        return now


def saturation(predictions: Mapping[Fleet, Prediction], share: float = 0.9) -> int | None:
    """Return the least number of workers whose busy share is below `share` of the smallest fleet's.

    None where no fleet is so large.
    """
    fleets = sorted(predictions, key=lambda fleet: fleet.num_workers)
    wanted = share * predictions[fleets[0]].worker_share
    for fleet in fleets[1:]:
        if predictions[fleet].worker_share < wanted:
            return fleet.num_workers
    return None


def coordinator_bound(costs: Costs, fleet: Fleet) -> float:
    """Return the transitions a second of a coordinator that never sleeps, all rows in each tick.

    No sampler of so many rows is faster: larger ticks are cheaper a row.
    """
    lanes = fleet.num_workers * len(fleet.group_sizes)
    rows = fleet.num_workers * fleet.rows_per_worker
    per_lane = costs.tick_lane + costs.known_lane + costs.receive + costs.send
    took = costs.take_up + costs.tick + lanes * per_lane + rows * costs.tick_row
    return rows / took * 1e6


def worker_bound(costs: Costs, step: StepCost, fleet: Fleet) -> float:
    """Return the transitions a second of workers that never wait."""
    takes = costs.command * len(fleet.group_sizes) + step.mean * fleet.rows_per_worker
    return fleet.num_workers * fleet.rows_per_worker / takes * 1e6
