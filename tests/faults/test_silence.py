"""Workers that neither answer nor die."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from fakes import (
    CountingEnv,
    SecondWaitsEnv,
    WaitingEnv,
)
from oracle import PENDULUM, assert_same, uniform
from processes import (
    children,
    is_alive,
    until,
)
from torch import Tensor
from torch.distributions import Distribution

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import (
    WorkerTimeoutError,
)
from asyncmaml.learning.policies import MLPPolicy


async def test_stopped_worker_is_killed_and_changes_nothing(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(
        **PENDULUM, num_workers=2, envs_per_worker=5, step_timeout=1
    ) as sampler:
        stopped = min(children())
        sampling = asyncio.create_task(sampler.sample(used, batch_size=60))
        await until(lambda: sampler.statistics.transitions > 300)
        os.kill(stopped, signal.SIGSTOP)
        assert_same(await sampling, wanted)
        assert sampler.statistics.restarts == 1
        assert not is_alive(stopped)


async def test_environment_that_never_answers_is_given_up(tmp_path: Path) -> None:
    gates = tmp_path / "arrived", tmp_path / "gate"
    for gate in gates:
        os.mkfifo(gate)
    # Held open for reading, so that nobody waits to say that he has arrived.
    arrived = os.open(gates[0], os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with AsyncSampler(
            WaitingEnv,
            env_kwargs={"arrived": gates[0], "gate": gates[1]},
            num_workers=1,
            envs_per_worker=1,
            step_timeout=0.3,
            max_restarts=1,
        ) as sampler:
            with pytest.raises(
                WorkerTimeoutError, match=r"within 0\.3 s .*raise step_timeout"
            ) as caught:
                await sampler.sample(uniform, batch_size=1)
        assert caught.value.batch_id == 0
        assert f"seed {caught.value.seed}" in str(caught.value)
    finally:
        os.close(arrived)


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_hung_worker_is_given_up_though_its_other_group_has_answered(
    num_workers: int, tmp_path: Path
) -> None:
    gates = tmp_path / "arrived", tmp_path / "gate"
    for gate in gates:
        os.mkfifo(gate)
    arrived = os.open(gates[0], os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with AsyncSampler(
            SecondWaitsEnv,
            env_kwargs={"arrived": gates[0], "gate": gates[1], "length": 1000},
            num_workers=num_workers,
            envs_per_worker=4,
            groups_per_worker=2,
            step_timeout=0.3,
            max_restarts=0,
        ) as sampler:
            with pytest.raises(WorkerTimeoutError):
                async with asyncio.timeout(3):
                    await sampler.sample(uniform, batch_size=2)
    finally:
        os.close(arrived)


async def test_policy_slower_than_the_step_timeout_costs_no_worker() -> None:
    """The time of a worker's answer does not include that of a forward for another."""

    def slow(observations: Tensor) -> Distribution:
        time.sleep(0.25)
        return uniform(observations)

    async with AsyncSampler(
        lambda: CountingEnv(length=2), num_workers=2, envs_per_worker=1, step_timeout=0.2
    ) as sampler:
        # One after the other, so that the workers are not in step with each other.
        first = asyncio.create_task(sampler.sample(slow, batch_size=1))
        await until(lambda: sampler.statistics.ticks > 0)
        await asyncio.gather(first, sampler.sample(slow, batch_size=1))
        assert sampler.statistics.restarts == 0


async def test_stopped_worker_does_not_keep_close_waiting() -> None:
    async with AsyncSampler(CountingEnv, num_workers=2) as sampler:
        stopped = min(children())
        os.kill(stopped, signal.SIGSTOP)
        async with asyncio.timeout(4):
            await sampler.close()
    assert not is_alive(stopped)
