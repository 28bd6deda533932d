"""One round of the storm: a sampler, overlapping calls, and all kinds of faults at random moments.

What is drawn at random comes from one seed; when it strikes depends on the machine. Every call
that should succeed is held against the lock-step sampler, bit for bit.
"""

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from storm_env import StormEnv
from torch import Tensor
from torch.distributions import Categorical, Distribution

from asyncmaml import AsyncSampler, BatchEpisodes, BatchSampler, CategoricalMLPPolicy
from asyncmaml.errors import (
    EnvironmentFailedError,
    PolicyError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from asyncmaml.learning.mlp import MLPPolicy
from asyncmaml.sampling.lane import Lane
from asyncmaml.sampling.links import Link, ProcessLink

ROOT_SEED = 0
STEP_TIMEOUT = 1.0
START_TIMEOUT = 8.0
"""Starts go on beside everything else; on a machine with few cores they take their time."""
MAX_RESTARTS = 8
"""An episode that has bad luck alone does not lose that many workers."""
ROUND_SECONDS = 60.0
"""A round takes 2 to 10; one that has not ended by then hangs."""
_SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "stop": signal.SIGSTOP}
_TENSORS = (
    "observations",
    "actions",
    "rewards",
    "log_probs",
    "mask",
    "lengths",
    "terminated",
    "truncated",
    "last_observations",
)


@dataclass
class Tally:
    """What a storm has come to."""

    calls: int = 0
    episodes: int = 0
    """Checked against the oracle."""
    mismatches: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from a fault from outside until others in place of its victims take episodes."""


@dataclass(frozen=True)
class Call:
    """Arguments of a `sample()`, and what it has to return."""

    arguments: dict[str, Any]
    params: dict[str, Tensor] | None
    wanted: BatchEpisodes


class Oracle:
    """Calls with known results."""

    def __init__(self, num_calls: int, chance: random.Random) -> None:
        torch.manual_seed(ROOT_SEED)
        self.policy: MLPPolicy = CategoricalMLPPolicy(3, 2, hidden_sizes=(32, 32))
        variants: list[dict[str, Tensor] | None] = [None]
        for scale in (0.5, 2.0):
            named = self.policy.named_parameters()
            variants.append({name: (scale * value).detach() for name, value in named})
        self.calls: list[Call] = []
        with BatchSampler(StormEnv, num_workers=0, seed=ROOT_SEED) as sampler:
            for number in range(num_calls):
                task = {"number": float(number % 5)}
                arguments = {"batch_size": chance.randint(1, 24), "seed": number}
                params = chance.choice(variants)
                sampler.reset_task(task)
                wanted = sampler.sample(self.policy, params, **arguments)
                self.calls.append(Call(arguments | {"task": task}, params, wanted))


class Round:
    """One sampler in the storm.

    Args:
        oracle: Says what is right.
        tally: Counted in place.
        chance: Where everything drawn comes from.
        folder: For notes of what has been done once.
        living: Returns the worker processes.
        start_method: Of the workers; None: drawn.
    """

    def __init__(
        self,
        oracle: Oracle,
        tally: Tally,
        chance: random.Random,
        folder: Path,
        living: Callable[[], set[int]],
        start_method: Any = None,
    ) -> None:
        self._oracle = oracle
        self._tally = tally
        self._chance = chance
        self._folder = folder
        self._living = living
        self._start_method = start_method
        self._num_markers = 0

    async def run(self) -> None:
        """Open a sampler, have everything happen to it at once, close it."""
        chance = self._chance
        jobs: list[Callable[[], Awaitable[None]]] = [
            *[self._good] * 100,
            *[self._slow] * 4,
            *[self._cancelled] * 16,
            *[self._raising] * 8,
            *[self._misfit] * 4,
            *[self._fatal_once] * 3,
        ]
        if chance.random() < 0.2:
            jobs.append(self._fatal)
        chance.shuffle(jobs)
        drawn: Any = chance.choices(["spawn", "forkserver", "fork"], [6, 3, 1])[0]
        async with AsyncSampler(
            StormEnv,
            num_workers=chance.randint(1, 4),
            envs_per_worker=chance.randint(1, 8),
            groups_per_worker=chance.randint(1, 2),
            seed=ROOT_SEED,
            step_timeout=STEP_TIMEOUT,
            start_timeout=START_TIMEOUT,
            max_restarts=MAX_RESTARTS,
            start_method=self._start_method or drawn,
            worker_output="capture",
        ) as self._sampler:
            try:
                async with asyncio.timeout(ROUND_SECONDS):
                    async with asyncio.TaskGroup() as group:
                        for job in jobs:
                            group.create_task(self._later(job))
                        for _ in range(chance.randint(1, 4)):
                            group.create_task(self._later(self._strike))
                await self._settle()
            except Exception as error:  # of which none is right
                self._complain(f"a round ended with {error!r}: {self._state()}")
            self._tally.restarts += self._sampler.statistics.restarts

    async def _later(self, job: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(self._chance.random() * 1.5)
        try:
            await job()
        except Exception as error:
            self._complain(f"{job.__name__} raised {error!r}")

    def _complain(self, what: str) -> None:
        self._tally.mismatches.append(what)

    async def _settle(self) -> None:
        """Wait until no row and no request is left over."""
        async with asyncio.timeout(5):
            while not self._is_idle():  # noqa: ASYNC110  (no event tells it)
                await asyncio.sleep(0.005)

    def _state(self) -> str:
        """Say what there is to know where a round hangs."""
        told = [
            f"lane {lane.worker}.{lane.group} "
            f"{'lost' if lane.link is None else 'stepping' if lane.is_stepping else 'waiting'}"
            for lane in self._lanes()
        ]
        return f"{self._sampler!r}, {', '.join(told)}, workers {sorted(self._living())}"

    def _is_idle(self) -> bool:
        return re.search(" 0 rows busy, .* 0 requests", repr(self._sampler)) is not None

    # -- calls that succeed ---------------------------------------------------------------------

    async def _good(self, **extra: Any) -> None:
        call = self._chance.choice(self._oracle.calls)
        arguments = call.arguments | {"task": call.arguments["task"] | extra}
        found = await self._sampler.sample(self._oracle.policy, call.params, **arguments)
        self._tally.calls += 1
        self._tally.episodes += call.wanted.batch_size
        for name in _TENSORS:
            if not torch.equal(getattr(found, name), getattr(call.wanted, name)):
                self._complain(f"{name} of {arguments}")

    async def _slow(self) -> None:
        self._tally.faults["slow steps"] += 1
        await self._good(slow=self._chance.uniform(0.001, 0.02))

    async def _fatal_once(self) -> None:
        deed = self._chance.choice(["exit", "segfault", "hang"])
        self._num_markers += 1
        marker = self._folder / f"{id(self)}-{self._num_markers}"
        await self._good(deed=deed, at=self._chance.choice(["reset", 0, 2]), marker=str(marker))
        if marker.exists():
            self._tally.faults[f"{deed} in the environment"] += 1
            marker.unlink()

    # -- calls that do not ----------------------------------------------------------------------

    async def _cancelled(self) -> None:
        call = self._chance.choice(self._oracle.calls)
        sampling = asyncio.create_task(
            self._sampler.sample(self._oracle.policy, call.params, **call.arguments)
        )
        await asyncio.sleep(self._chance.random() * 0.05)
        self._tally.faults["cancellation"] += sampling.cancel()
        await asyncio.wait([sampling])

    async def _raising(self) -> None:
        at = self._chance.choice(["reset", 0])
        task = {"number": 1.0, "deed": "raise", "at": at}
        self._tally.faults["exception"] += 1
        try:
            await self._sampler.sample(self._oracle.policy, batch_size=5, task=task)
        except EnvironmentFailedError as error:
            if error.step != (None if at == "reset" else 0) or "refused" not in str(error):
                self._complain(f"an exception in {at} was told as {error!r}")
        else:
            self._complain("an exception was swallowed")

    async def _misfit(self) -> None:
        def three(observations: Tensor) -> Distribution:
            return Categorical(logits=torch.zeros(len(observations), 3))

        self._tally.faults["policy that does not fit"] += 1
        try:
            await self._sampler.sample(three, batch_size=5)
        except PolicyError:
            return
        self._complain("a policy that does not fit was taken")

    async def _fatal(self) -> None:
        task = {"number": 1.0, "deed": "exit", "at": 0}
        self._tally.faults["exit in the environment, always"] += 1
        try:
            await self._sampler.sample(self._oracle.policy, batch_size=1, task=task)
        except WorkerDiedError as error:
            if error.batch_id != 0 or error.task != task or error.seed is None:
                self._complain(f"a death was told as {error!r}")
        except WorkerTimeoutError:
            pass  # its last worker was stopped from outside
        else:
            self._complain("an environment that always ends its process has returned episodes")

    # -- faults from outside --------------------------------------------------------------------

    async def _strike(self) -> None:
        """Do something to a worker, or to all of them; wait until others are in their place."""
        kind = self._chance.choices(["kill", "segfault", "stop", "kill all"], [5, 2, 2, 1])[0]
        living = sorted(self._living())
        if not living:
            return
        victims = living if kind == "kill all" else [self._chance.choice(living)]
        lost = {lane: lane.link for lane in self._lanes() if _pid_of(lane.link) in victims}
        began = time.perf_counter()
        for pid in victims:
            os.kill(pid, _SIGNALS.get(kind, signal.SIGKILL))
        self._tally.faults[f"{kind} from outside"] += 1
        while any(lane.link in (None, link) for lane, link in lost.items()):
            await asyncio.sleep(0.001)
            if kind == "stop" and time.perf_counter() - began > 3 * STEP_TIMEOUT:
                os.kill(victims[0], signal.SIGCONT)  # it had nothing to do, so nobody missed it
                return
        if lost:  # else it was still starting
            took = time.perf_counter() - began
            self._tally.recoveries.setdefault(kind, []).append(took)

    def _lanes(self) -> list[Lane]:
        engine = self._sampler._engine
        assert engine is not None
        assert engine._coordinator is not None
        return engine._coordinator.lanes


def _pid_of(link: Link | None) -> int | None:
    return link.process.aio_process.pid if isinstance(link, ProcessLink) else None
