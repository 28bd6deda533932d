"""Measures what the parts of a sampler cost on this machine, for `simulation`.

The coordinator's part is told by `tick_costs`. The pipes' part is one worker of the sampler's
own, whose rows have nothing to do: message back, message forth. Neither depends on how many cores
are free, but for the time to wake up.
"""

import asyncio
import itertools
import socket
import statistics
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from simulation import Costs, StepCost
from tick_costs import TickCost, fit, measure_cold_tick, measure_ticks
from workloads import NULL_STEPS, SOURCES, Source

from asyncmaml.envs.making import EnvMaker
from asyncmaml.sampling.links import ProcessLink
from asyncmaml.sampling.pool import PoolSettings, WorkerPool
from asyncmaml.worker.protocol import NO_TASK, STEPPED, Order

_EXCHANGES = 400
_PIPES = 8


def _nobody_behind(pipe: socket.socket) -> SimpleNamespace:
    """Return what a link sees of a worker's process, where there is none."""
    output = SimpleNamespace(watch=lambda loop: None)
    return SimpleNamespace(pipe=pipe, exit_descriptor=None, output=output)


async def measure_looks() -> tuple[float, float]:
    """Return the CPU microseconds of one look at the pipes, and of each reply in it."""
    loop = asyncio.get_running_loop()
    pairs = [socket.socketpair() for _ in range(_PIPES)]
    links = []
    for ours, _ in pairs:
        ours.setblocking(False)
        links.append(ProcessLink(cast(Any, _nobody_behind(ours))))
        links[-1].on_stepped = lambda group, failures: None
    found: dict[int, list[float]] = {1: [], _PIPES: []}
    try:
        for count in list(found) * (_EXCHANGES // 2):
            for _, theirs in pairs[:count]:
                theirs.sendall(STEPPED[0])
            began = time.thread_time()
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # in the first turn the callbacks come behind us
            found[count].append((time.thread_time() - began) * 1e6)
    finally:
        for ours, theirs in pairs:
            loop.remove_reader(ours)
            ours.close()
            theirs.close()
    one, all_of_them = (statistics.median(each) for each in found.values())
    receive = max(0.0, (all_of_them - one) / (_PIPES - 1))
    return max(0.0, one - receive), receive


class _Worker:
    """One worker of the sampler's own, told what to do by hand."""

    def __init__(self, pool: WorkerPool, link: ProcessLink) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self.link = link

    @classmethod
    async def open(cls, source: Source, num_rows: int, *, vectorized: bool = True) -> "_Worker":
        """Start a worker with one group of rows."""
        maker = EnvMaker.resolve(
            source.env, source.env_kwargs, source.max_episode_steps, vectorized=vectorized
        )
        pool = WorkerPool(maker, PoolSettings(1, num_rows, 1, 60.0, 60.0, 0))
        await pool.open()
        return cls(pool, cast(ProcessLink, pool._links[0]))

    def send(self) -> "asyncio.Future[None]":
        """Send one command; return what is done with its reply."""
        replied: asyncio.Future[None] = self._loop.create_future()
        self.link.on_stepped = lambda group, failures: replied.set_result(None)
        self.link.step(0)
        return replied

    async def repeat(self, count: int, before_each: Any = None) -> list[float]:
        """Send so many commands, each on the last one's reply; return their wall seconds."""
        done: asyncio.Future[None] = self._loop.create_future()
        walls: list[float] = []
        sent = 0.0

        def send() -> None:
            nonlocal sent
            if before_each is not None:
                before_each()
            sent = time.perf_counter()
            self.link.step(0)

        def stepped(group: int, failures: object) -> None:
            walls.append(time.perf_counter() - sent)
            assert not failures
            if len(walls) < count:
                send()
            else:
                done.set_result(None)

        self.link.on_stepped = stepped
        send()
        await done
        return walls

    async def close(self) -> None:
        """End it."""
        await self._pool.close()


async def measure_pipes() -> tuple[float, float, float]:
    """Return microseconds: CPU of one send, CPU of a worker's command, and one wake-up.

    A wake-up is what an exchange takes more when the other end sleeps a millisecond in between.
    """
    worker = await _Worker.open(SOURCES["Sleeping"], 1)
    arrays = worker.link.arrays[0]
    try:
        await worker.repeat(50)  # nothing is to be done for its row
        pid = worker.link.process.aio_process.pid
        assert pid is not None
        clock = (~pid << 3) | 2  # see `measuring`
        began = time.clock_gettime(clock)
        at_once = statistics.median(await worker.repeat(_EXCHANGES))
        command = (time.clock_gettime(clock) - began) / _EXCHANGES
        sends = []
        for _ in range(_EXCHANGES // 4):
            began = time.thread_time()
            replied = worker.send()
            sends.append(time.thread_time() - began)
            await replied
        arrays.orders[:], arrays.start_task[:], arrays.actions[:] = Order.START, NO_TASK, 0
        await worker.repeat(1)
        arrays.orders[:] = Order.STEP
        later = []
        for _ in range(NULL_STEPS // 2):
            busy = float(arrays.busy_seconds[0])
            wall = (await worker.repeat(1))[0]
            later.append(wall - (float(arrays.busy_seconds[0]) - busy))
    finally:
        await worker.close()
    wake = max(0.0, statistics.median(later) - at_once)
    return statistics.median(sends) * 1e6, command * 1e6, wake * 1e6


async def measure_step(source: Source, num_rows: int, seconds: float) -> StepCost:
    """Measure what one row's step takes in a worker, with what the worker does around it."""
    worker = await _Worker.open(source, num_rows)
    arrays = worker.link.arrays[0]
    generator = np.random.default_rng(0)
    drawn = iter(_actions(source, num_rows))
    taken: list[float] = []

    def order() -> None:
        taken.append(float(arrays.busy_seconds[0]))
        arrays.orders[:] = Order.STEP if len(taken) > 1 else Order.START
        arrays.orders[arrays.outcomes != 0] = Order.START
        arrays.start_seed[:] = generator.integers(0, 1 << 31, num_rows)
        arrays.start_task[:] = NO_TASK
        arrays.actions[:] = next(drawn)

    try:
        await worker.repeat(4, order)
        began = time.perf_counter()
        taken.clear()
        arrays.outcomes[:] = 0
        while time.perf_counter() - began < seconds:
            await worker.repeat(8, order)
    finally:
        await worker.close()
    of_commands = np.diff(taken[1:]) * 1e6
    # Of a command's rows the variances add up.
    deviation = float(of_commands.std()) / num_rows**0.5
    return StepCost(float(of_commands.mean()) / num_rows, deviation)


def _actions(source: Source, num_rows: int) -> Iterator[NDArray[Any]]:
    env = source.make()
    env.action_space.seed(0)
    drawn = [np.stack([env.action_space.sample() for _ in range(num_rows)]) for _ in range(64)]
    env.close()
    return itertools.cycle(drawn)


async def measure_costs() -> tuple[Costs, list[TickCost]]:
    """Measure everything but the environments."""
    ticks = await measure_ticks()
    parts = np.array([each.parts for each in ticks], np.float64)
    tick, tick_lane, tick_row, known_lane = fit(parts, np.array([each.us for each in ticks]))
    take_up, receive = await measure_looks()
    send, command, wake = await measure_pipes()
    cold = await measure_cold_tick()
    return (
        Costs(
            tick=float(tick),
            tick_lane=float(tick_lane),
            tick_row=float(tick_row),
            known_lane=float(known_lane),
            wake=wake + cold,
            take_up=take_up,
            receive=receive,
            send=send,
            worker_wake=wake,
            command=command,
        ),
        ticks,
    )
