import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from oracle import are_same, assert_same
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from asyncmaml import AsyncSampler, BatchEpisodes, NormalMLPPolicy
from asyncmaml.errors import NotFiniteError

NAVIGATION = "asyncmaml/Navigation2D-v0"
NUM_SETS = 6


class CountingPolicy(NormalMLPPolicy):
    """Notes the shape of the observations of each forward."""

    def __init__(self) -> None:
        super().__init__(2, 2, (16, 16), init_std=0.05)
        self.shapes: list[tuple[int, ...]] = []

    def forward(
        self, observations: Tensor, params: Mapping[str, Tensor] | None = None
    ) -> Distribution:
        self.shapes.append(tuple(observations.shape))
        return super().forward(observations, params)


class WrongWhenStacked(NormalMLPPolicy):
    """What a stacked forward gives is not what separate ones give."""

    def __init__(self) -> None:
        super().__init__(2, 2, (16, 16), init_std=0.05)

    def forward(
        self, observations: Tensor, params: Mapping[str, Tensor] | None = None
    ) -> Distribution:
        distribution = super().forward(observations, params)
        if observations.ndim == 2:
            return distribution
        assert isinstance(distribution, Independent)
        normal = distribution.base_dist
        return Independent(Normal(normal.loc + 1e-6, normal.scale, validate_args=False), 1)


class PlainModule(nn.Module):
    """Takes observations only, as most policies do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.register_buffer("scale", torch.full((2,), 0.05))

    def forward(self, observations: Tensor) -> Distribution:
        normal = Normal(self.net(observations), self.get_buffer("scale"), validate_args=False)
        return Independent(normal, 1, validate_args=False)


class UnknownDistribution(PlainModule):
    """Returns a distribution that vmap cannot carry."""

    def forward(self, observations: Tensor) -> Distribution:
        return torch.distributions.Laplace(self.net(observations), 0.05, validate_args=False)


def params_of(policy: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value.detach() + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in policy.named_parameters()
    }


async def together_and_alone(policy: nn.Module) -> tuple[list[BatchEpisodes], list[BatchEpisodes]]:
    async with AsyncSampler(NAVIGATION, num_workers=0, envs_per_worker=60, seed=1) as sampler:
        tasks = sampler.sample_tasks(NUM_SETS)
        calls: list[dict[str, Any]] = [
            {
                "params": params_of(policy, number),
                "task": tasks[number],
                "batch_size": 3 + number,
                "seed": number,
            }
            for number in range(NUM_SETS)
        ]
        together = await asyncio.gather(*(sampler.sample(policy, **call) for call in calls))
        alone = [await sampler.sample(policy, **call) for call in calls]
    return together, alone


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(CountingPolicy, id="stacks itself"),
        pytest.param(PlainModule, id="by vmap"),
        pytest.param(WrongWhenStacked, id="wrong when stacked"),
        pytest.param(UnknownDistribution, id="not for vmap"),
    ],
)
async def test_requests_with_parameters_of_their_own_get_what_they_would_get_alone(
    policy: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    together, alone = await together_and_alone(policy())
    for found, wanted in zip(together, alone, strict=True):
        assert_same(found, wanted)
    assert not are_same(together[0], together[1])


async def test_different_parameters_of_one_policy_share_a_forward() -> None:
    policy = CountingPolicy()
    await together_and_alone(policy)
    stacked = [shape for shape in policy.shapes if len(shape) == 3]
    assert max(shape[0] for shape in stacked) == NUM_SETS
    assert len(stacked) > 50  # of the 100 steps that all of them are under way together


async def test_requests_with_the_policys_own_parameters_share_a_forward_without_stacking() -> None:
    policy = CountingPolicy()
    async with AsyncSampler(NAVIGATION, num_workers=0, envs_per_worker=60, seed=1) as sampler:
        await asyncio.gather(*(sampler.sample(policy, batch_size=10) for _ in range(6)))
    assert {len(shape) for shape in policy.shapes} == {2}
    assert len(policy.shapes) < 150  # one for each of 100 steps, and each request's first


async def test_parameters_changed_between_two_calls_are_not_shared() -> None:
    policy = NormalMLPPolicy(2, 2, (16, 16))
    async with AsyncSampler(NAVIGATION, num_workers=0, envs_per_worker=60, seed=1) as sampler:
        first = asyncio.create_task(sampler.sample(policy, batch_size=4, seed=1))
        await asyncio.sleep(0)
        with torch.no_grad():
            policy.get_parameter("mu.bias").add_(1)
        second = asyncio.create_task(sampler.sample(policy, batch_size=4, seed=1))
        before, after = await first, await second
    assert not torch.equal(before.actions, after.actions)


async def test_parameters_that_give_nan_fail_their_own_request_alone() -> None:
    policy = CountingPolicy()
    broken = {name: torch.full_like(value, torch.nan) for name, value in policy.named_parameters()}
    good = params_of(policy, 1)
    async with AsyncSampler(NAVIGATION, num_workers=0, envs_per_worker=60, seed=1) as sampler:
        first, failed, second = await asyncio.gather(
            sampler.sample(policy, good, batch_size=5, seed=1),
            sampler.sample(policy, broken, batch_size=5, seed=2),
            sampler.sample(policy, good, batch_size=5, seed=3),
            return_exceptions=True,
        )
        assert isinstance(failed, NotFiniteError)
        assert isinstance(first, BatchEpisodes)
        assert isinstance(second, BatchEpisodes)
        assert_same(first, await sampler.sample(policy, good, batch_size=5, seed=1))
        assert_same(second, await sampler.sample(policy, good, batch_size=5, seed=3))
