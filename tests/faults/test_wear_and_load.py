"""Many at once, much at once, over and over: nothing wears out, nothing mixes."""

import asyncio
import os
import random
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    CountingEnv,
    ImageEnv,
    RaisingEnv,
)
from oracle import assert_same, lockstep, uniform
from processes import (
    children,
    descriptors,
    until,
    wait_until,
)
from torch import Tensor
from torch.distributions import Categorical, Distribution

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import (
    EnvironmentFailedError,
    PolicyError,
)


async def test_opening_and_closing_wears_nothing_out() -> None:
    def are_native_threads_gone() -> bool:
        return len(os.listdir("/proc/self/task")) <= threads

    counts = set()
    for cycle in range(30):
        async with AsyncSampler(CountingEnv, num_workers=1, envs_per_worker=2) as sampler:
            await sampler.sample(uniform, batch_size=2)
        if not cycle:  # what libraries open once is open now
            threads = len(os.listdir("/proc/self/task"))
        counts.add((len(descriptors()), threading.active_count()))
        wait_until(are_native_threads_gone, 1)  # the last one may still end
    assert len(counts) == 1


async def test_large_task_crosses_the_pipe() -> None:
    table = np.random.default_rng(0).bytes(300 << 10)
    tasks = [{"number": float(number), "table": table} for number in range(5)]
    async with AsyncSampler(
        CountingEnv, num_workers=2, envs_per_worker=1, batch_size=4, seed=0
    ) as sampler:
        results = await asyncio.gather(*(sampler.sample(uniform, task=task) for task in tasks))
    for number, episodes in enumerate(results):
        assert (episodes.observations[..., 2] == number).all()


async def test_observations_of_a_mebibyte_are_carried() -> None:
    async with AsyncSampler(
        lambda: ImageEnv(size=592, length=4), num_workers=2, envs_per_worker=2, batch_size=6
    ) as sampler:
        episodes = await sampler.sample(uniform)
    assert episodes.observations[0, 0].nbytes > 1 << 20
    firsts = episodes.observations.flatten(2)[..., 0]
    assert firsts.T.tolist() == [[0, 100, 200, 44]] * 6
    assert (episodes.observations.flatten(2) == firsts[..., None]).all()


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
        async with asyncio.timeout(15):
            await asyncio.gather(*jobs)
        await until(lambda: "0 rows busy" in repr(sampler) and "0 requests" in repr(sampler))
