"""What ticks of the coordinator cost: its own code, driven by links that answer when told to.

CPU time of ticks with different numbers of groups and rows, and a fit that tells their shares.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from workloads import NULL_STEPS, SOURCES

import asyncmaml
from asyncmaml.envs.making import EnvMaker
from asyncmaml.intraop import one_intraop_thread
from asyncmaml.sampling.actor import Actor, to_environment
from asyncmaml.sampling.coordinator import Coordinator
from asyncmaml.sampling.lane import Lane, RowTable
from asyncmaml.sampling.links import InlineLink, layout_of
from asyncmaml.sampling.pacing import Pace
from asyncmaml.sampling.requests import Request, Terms
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.streams import Seeds
from asyncmaml.sampling.transitions import TransitionLog
from asyncmaml.worker.main import Setup

_CPU = torch.device("cpu")
_TICK_SHAPES = (
    # lanes in all, lanes in a tick, rows of a lane
    (1, 1, 1),
    (1, 1, 16),
    (1, 1, 128),
    (8, 8, 1),
    (8, 8, 16),
    (8, 2, 16),
    (8, 8, 64),
    (64, 8, 1),
    (64, 8, 8),
    (64, 64, 4),
)
_STEPS_AT_LEAST = NULL_STEPS // 2
_COLD_ROWS = 4
_PAUSE_SECONDS = 0.001


class HeldLink(InlineLink):
    """Steps its rows when it is told to, so that the coordinator's time can be told apart."""

    def step(self, group: int) -> None:
        """Wait for `answer`."""

    def answer(self) -> None:
        """Step the rows."""
        failures = self._fleet.groups[0].step()
        assert not failures


class Ticks:
    """A coordinator with lanes that no process stands behind; all rows are in episodes.

    Args:
        num_lanes: In all.
        num_rows: Of each lane.
        row_block: See `asyncmaml.sampling.row_places`.
        lanes_per_worker: Groups, as the coordinator is told.
        pace: See `Coordinator`.
    """

    def __init__(
        self,
        num_lanes: int,
        num_rows: int,
        row_block: int,
        lanes_per_worker: int = 1,
        pace: Pace | None = None,
    ) -> None:
        maker = EnvMaker.resolve(cast(str, SOURCES["NullBox"].env))
        self._links = [HeldLink(Setup(maker, num_rows, 1, [])) for _ in range(num_lanes)]
        ready = self._links[0].ready
        layout = layout_of(ready)
        count = num_lanes * num_rows
        table = RowTable(count)
        lanes = [
            Lane(at // lanes_per_worker, 0, at * num_rows, num_rows, table)
            for at in range(num_lanes)
        ]
        for lane, link in zip(lanes, self._links, strict=True):
            lane.link = link
        self._coordinator = Coordinator(
            lanes,
            table,
            Actor(ready.action_space, count, _CPU, row_block),
            to_environment(ready.action_space, True),
            TransitionLog(count, layout.observation, layout.action),
            max_attempts=0,
            trace=None,
            pace=pace,
        )
        torch.manual_seed(0)
        policy = asyncmaml.policy_for_spaces(ready.observation_space, ready.action_space)
        snapshot = PolicySnapshot(policy, None, _CPU)
        self._seeds = Seeds(0)
        for _ in range(2):  # one under way and the next one in the queue
            self._submit(snapshot, 8 * count)

    def _submit(self, snapshot: PolicySnapshot, batch_size: int) -> None:
        def again(_: object) -> None:
            self._submit(snapshot, batch_size)

        streams = self._seeds.next_request(None)
        terms = Terms(batch_size, 0.95, "cpu", batch_size, "raise")
        request = Request(snapshot, streams, None, terms, again)
        self._coordinator.submit(request)

    async def begin(self) -> None:
        """Have the tick that the requests have asked for: all lanes step then."""
        await asyncio.sleep(0)

    def step(self, lanes: Iterable[int]) -> None:
        """Step the rows of lanes, as their workers would."""
        for index in lanes:
            self._links[index].answer()

    async def reply(self, lanes: Iterable[int]) -> bool:
        """Tell the coordinator that lanes have stepped; return whether it made a tick of it."""
        coordinator = self._coordinator
        before = coordinator.counted.ticks
        for index in lanes:
            coordinator.stepped(coordinator.lanes[index], [])
        if coordinator.counted.ticks == before:
            await asyncio.sleep(0)
        return coordinator.counted.ticks > before

    async def run(self, lanes_in_tick: int, pause_seconds: float = 0.0) -> float:
        """Return the CPU microseconds of a tick with so many lanes, all else included.

        Args:
            lanes_in_tick: Of all lanes, in turn.
            pause_seconds: Slept before each tick, in which caches get cold.
        """
        coordinator = self._coordinator
        await self.begin()
        num_lanes = len(coordinator.lanes)
        turns = itertools.cycle(range(0, num_lanes, lanes_in_tick))
        steps = _STEPS_AT_LEAST + NULL_STEPS
        seconds, ticks = 0.0, 0
        for tick in range(steps * num_lanes // lanes_in_tick):
            first = next(turns)
            chosen = range(first, min(num_lanes, first + lanes_in_tick))
            self.step(chosen)
            if pause_seconds:
                await asyncio.sleep(pause_seconds)
            began = time.thread_time()
            has_ticked = await self.reply(chosen)
            assert has_ticked
            if tick >= _STEPS_AT_LEAST * num_lanes // lanes_in_tick:
                seconds += time.thread_time() - began
                ticks += 1
        return seconds / ticks * 1e6

    def close(self) -> None:
        """Let go of the rows."""
        for link in self._links:
            link.kill()


@dataclass(frozen=True)
class TickCost:
    """What one kind of tick takes."""

    num_lanes: int
    lanes_in_tick: int
    rows: int
    """Of one lane."""
    us: float

    @property
    def parts(self) -> list[float]:
        """How often each cost is in it: tick, tick_lane, tick_row, known_lane."""
        return [1, self.lanes_in_tick, self.lanes_in_tick * self.rows, self.num_lanes]


async def measure_ticks(shapes: Sequence[tuple[int, int, int]] = _TICK_SHAPES) -> list[TickCost]:
    """Measure ticks of different shapes, one after the other without a pause."""
    found = []
    with one_intraop_thread() as row_block, torch.inference_mode():
        for num_lanes, lanes_in_tick, rows in shapes:
            with closing(Ticks(num_lanes, rows, row_block)) as ticks:
                us = await ticks.run(lanes_in_tick)
            found.append(TickCost(num_lanes, lanes_in_tick, rows, us))
    return found


async def measure_cold_tick() -> float:
    """Return how many CPU microseconds a tick takes more after a millisecond's sleep."""
    with (
        one_intraop_thread() as row_block,
        torch.inference_mode(),
        closing(Ticks(1, _COLD_ROWS, row_block)) as ticks,
    ):
        found = [await ticks.run(1, _PAUSE_SECONDS) - await ticks.run(1) for _ in range(3)]
    return max(0.0, statistics.median(found))


def fit(parts: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return costs, none negative, that give the least relative errors, squared.

    Args:
        parts: How often each cost is in each measurement, shape (measurements, costs).
        measured: Shape (measurements,).
    """
    weighted = parts / measured[:, None]
    costs = np.zeros(parts.shape[1])
    left = np.ones(parts.shape[1], np.bool_)
    while left.any():
        solution = np.linalg.lstsq(weighted[:, left], np.ones(len(measured)), rcond=None)[0]
        if (solution >= 0).all():
            costs[left] = solution
            return costs
        # The one furthest below zero is none; without it the others come out differently.
        left[np.flatnonzero(left)[solution.argmin()]] = False
    return costs
