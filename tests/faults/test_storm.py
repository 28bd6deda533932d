"""Everything at once; `benchmarks/chaos.py` is the long form."""

import asyncio
import os
import random
import signal
from typing import Any

import pytest
import torch
from fakes import (
    RaisingEnv,
)
from oracle import assert_same, lockstep, uniform
from processes import PATIENCE, children, until
from torch import Tensor
from torch.distributions import Categorical, Distribution

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import (
    EnvironmentFailedError,
    PolicyError,
)

pytestmark = pytest.mark.usefixtures("quick_workers")


@pytest.mark.parametrize(("num_workers", "num_rows", "num_deaths"), [(0, 3, 0), (2, 3, 2)])
async def test_results_are_the_same_among_cancellations_failures_and_deaths(
    num_workers: int, num_rows: int, num_deaths: int
) -> None:
    chance = random.Random(0)
    calls: list[dict[str, Any]] = [
        {"batch_size": chance.randint(1, 12), "seed": seed, "task": {"number": float(seed % 4)}}
        for seed in range(40)
    ]
    wanted = lockstep(lambda: RaisingEnv(length=None), uniform, calls, seed=0)

    async def later(rounds: int) -> None:
        for _ in range(chance.randrange(rounds)):
            await asyncio.sleep(0)

    async def good(call: dict[str, Any], episodes: BatchEpisodes) -> None:
        await later(60)
        assert_same(await sampler.sample(uniform, **call), episodes)

    async def cancelled() -> None:
        await later(60)
        sampling = asyncio.create_task(sampler.sample(uniform, batch_size=30, seed=1))
        await later(200)
        sampling.cancel()
        await asyncio.wait([sampling])

    async def failing(phase: str) -> None:
        await later(60)
        with pytest.raises(EnvironmentFailedError):
            await sampler.sample(uniform, batch_size=5, task={"phase": phase, "at": 0})

    def three(observations: Tensor) -> Distribution:
        return Categorical(logits=torch.zeros(len(observations), 3))

    async def misfit() -> None:
        await later(60)
        with pytest.raises(PolicyError):
            await sampler.sample(three, batch_size=5)

    async def deadly() -> None:
        await later(300)
        os.kill(chance.choice(sorted(children())), signal.SIGKILL)

    jobs = [good(call, episodes) for call, episodes in zip(calls, wanted, strict=True)]
    jobs += [cancelled() for _ in range(20)]
    jobs += [failing(phase) for phase in ("reset_task", "reset", "step") for _ in range(4)]
    jobs += [misfit() for _ in range(5)]
    jobs += [deadly() for _ in range(num_deaths)]
    chance.shuffle(jobs)
    async with AsyncSampler(
        lambda: RaisingEnv(length=None),
        num_workers=num_workers,
        envs_per_worker=num_rows,
        seed=0,
        max_restarts=20,
    ) as sampler:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*jobs)
        await until(lambda: "0 rows busy" in repr(sampler) and "0 requests" in repr(sampler))
