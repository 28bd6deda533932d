"""The samplers that are compared: opened once, measured again and again, closed.

All act with the same policy object. Where Gymnasium's vector environments are driven directly,
it is done as their users do: `policy(observations).sample()` in inference mode, with the default
autoreset, whose reset steps are not counted as transitions.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from measuring import Measurement, Meter
from numpy.typing import NDArray
from torch import nn
from workloads import Source

import asyncmaml
from asyncmaml.worker.fleet import DEFAULT_ROWS

REQUESTS_IN_FLIGHT = 2
SETTLE_SECONDS = 0.15


class Contender(ABC):
    """One way to sample, with its numbers of environments.

    Args:
        source: What is sampled.
        shape: The environments as the table tells them, such as "2 x 64".
        num_rows: Environments in all.
        is_vectorized: Whether the environment's natively vectorised form is used.
        forks: Whether it has to be opened before those that have threads: a forked child gets
            one thread, and the locks as the others held them.
    """

    family: str

    def __init__(
        self,
        source: Source,
        shape: str,
        num_rows: int,
        *,
        is_vectorized: bool = False,
        forks: bool = False,
    ) -> None:
        self.source = source
        self.shape = shape
        self.num_rows = num_rows
        self.is_vectorized = is_vectorized
        self.forks = forks

    @property
    def label(self) -> str:
        """Names it within its workload."""
        return f"{self.family} {self.shape}"

    @abstractmethod
    def open(self, policy: nn.Module) -> None:
        """Make everything that stays, and warm up."""

    @abstractmethod
    def measure(self, seconds: float) -> Measurement:
        """Sample for at least so long."""

    @abstractmethod
    def close(self) -> None:
        """End what `open` has made."""


class AsyncContender(Contender):
    """`AsyncSampler`, with one `sample()` under way and the next one in its queue.

    Measured in the steady state that a task group of many `sample()` calls has: the window
    begins and ends while all rows are busy, and the calls under way at its end are cancelled.

    Args:
        source: What is sampled.
        num_workers: As for `AsyncSampler`.
        envs_per_worker: Likewise.
        episodes_per_row: Of one `sample()`.
        groups_per_worker: As for `AsyncSampler`.
        vectorized: Likewise.
        note: Added to the shape.
    """

    family = "AsyncSampler"

    def __init__(
        self,
        source: Source,
        num_workers: int,
        envs_per_worker: int | None,
        episodes_per_row: int = 1,
        *,
        groups_per_worker: int | None = None,
        vectorized: bool = False,
        note: str = "",
    ) -> None:
        rows = envs_per_worker or DEFAULT_ROWS
        shape = f"{num_workers} x {rows}" if num_workers else f"{rows} inline"
        num_rows = max(1, num_workers) * rows
        super().__init__(source, shape + note, num_rows, is_vectorized=vectorized)
        self._runner = asyncio.Runner()
        self._sampler = asyncmaml.AsyncSampler(
            source.env,
            source.env_kwargs,
            batch_size=num_rows * episodes_per_row,
            num_workers=num_workers,
            envs_per_worker=envs_per_worker,
            groups_per_worker=groups_per_worker,
            max_episode_steps=source.max_episode_steps,
            vectorized=vectorized,
        )

    def open(self, policy: nn.Module) -> None:
        """See `Contender`."""
        self._policy = policy
        self._runner.run(self._warm_up())

    async def _warm_up(self) -> None:
        await self._sampler.start()
        await self._sampler.sample(self._policy, batch_size=self.num_rows)

    def measure(self, seconds: float) -> Measurement:
        """See `Contender`."""
        return self._runner.run(self._measure(seconds))

    async def _measure(self, seconds: float) -> Measurement:
        async with asyncio.TaskGroup() as group:
            feeders = [
                group.create_task(self._feed(), name=f"feed-{index}")
                for index in range(REQUESTS_IN_FLIGHT)
            ]
            await asyncio.sleep(SETTLE_SECONDS)
            meter = Meter()
            before = self._sampler.statistics
            await asyncio.sleep(seconds)
            after = self._sampler.statistics
            reading = meter.read()
            for feeder in feeders:
                feeder.cancel()
        passed = after - before
        if not passed.ticks:
            message = f"{self.label}: no tick within {seconds} s; raise the seconds. {passed}"
            raise RuntimeError(message)
        return Measurement(
            passed.transitions,
            reading,
            passed.rows_per_tick,
            passed.thread_seconds / passed.ticks * 1e6,
            passed.forward_seconds / passed.ticks * 1e6,
            passed.environment_seconds,
        )

    async def _feed(self) -> None:
        while True:
            await self._sampler.sample(self._policy)

    def close(self) -> None:
        """See `Contender`."""
        with self._runner:
            self._runner.run(self._sampler.close())


class LockStepContender(Contender):
    """`BatchSampler`: whole `sample()` calls, one after the other.

    Args:
        source: What is sampled.
        num_workers: As for `BatchSampler`.
        num_envs: Likewise.
        episodes_per_row: Of one `sample()`.
    """

    family = "BatchSampler"

    def __init__(
        self,
        source: Source,
        num_workers: int,
        num_envs: int | None = None,
        episodes_per_row: int = 1,
    ) -> None:
        num_rows = num_workers or num_envs or 1
        shape = f"{num_workers} x 1" if num_workers else f"{num_rows} inline"
        super().__init__(source, shape, num_rows, forks=num_workers > 0)
        self._num_workers = num_workers
        self._batch_size = num_rows * episodes_per_row

    def open(self, policy: nn.Module) -> None:
        """See `Contender`."""
        self._policy = policy
        self._sampler = asyncmaml.BatchSampler(
            self.source.env,
            self.source.env_kwargs,
            batch_size=self._batch_size,
            max_episode_steps=self.source.max_episode_steps,
            num_workers=self._num_workers,
            num_envs=self.num_rows,
        )
        self._sampler.sample(policy, batch_size=self.num_rows)

    def measure(self, seconds: float) -> Measurement:
        """See `Contender`."""
        transitions = 0
        meter = Meter()
        while meter.wall_seconds < seconds:
            transitions += int(self._sampler.sample(self._policy).lengths.sum())
        return Measurement(transitions, meter.read(), self.num_rows)

    def close(self) -> None:
        """See `Contender`."""
        self._sampler.close()


class VectorContender(Contender):
    """Gymnasium's own `SyncVectorEnv` or `AsyncVectorEnv`, driven as its users do.

    With one torch thread: for forwards of this size more of them only take the cores from the
    environments.
    """

    def __init__(self, source: Source, num_envs: int, *, is_async: bool) -> None:
        self.family = "AsyncVectorEnv" if is_async else "SyncVectorEnv"
        super().__init__(source, str(num_envs), num_envs, forks=is_async)

    def open(self, policy: nn.Module) -> None:
        """See `Contender`."""
        self._policy = policy
        vector_env = AsyncVectorEnv if self.forks else SyncVectorEnv
        self._envs: AsyncVectorEnv | SyncVectorEnv = vector_env([self.source.make] * self.num_rows)
        self._observations: NDArray[Any] = self._envs.reset(seed=0)[0]
        self._ended = np.zeros(self.num_rows, np.bool_)
        self.measure(0.05)

    def measure(self, seconds: float) -> Measurement:
        """See `Contender`."""
        observations, ended = self._observations, self._ended
        transitions = 0
        with one_torch_thread(), torch.inference_mode():
            meter = Meter()
            while meter.wall_seconds < seconds:
                actions = self._policy(torch.from_numpy(observations)).sample().numpy()
                observations, _, terminated, truncated, _ = self._envs.step(actions)
                # The step after an episode's last one resets it: no transition.
                transitions += self.num_rows - int(ended.sum())
                ended = terminated | truncated
            reading = meter.read()
        self._observations, self._ended = observations, ended
        return Measurement(transitions, reading, self.num_rows)

    def close(self) -> None:
        """See `Contender`."""
        self._envs.close()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Have torch compute in the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
