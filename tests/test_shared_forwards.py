import asyncio
import gc
import random
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - what every torch user calls it
from fakes import CountingEnv
from oracle import are_same, assert_same, lockstep, policy_of
from processes import all_at_once
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from asyncmaml import AsyncSampler, BatchEpisodes, NormalMLPPolicy
from asyncmaml.errors import NotFiniteError, PolicyError
from asyncmaml.intraop import one_intraop_thread
from asyncmaml.learning.mlp import NONLINEARITIES
from asyncmaml.sampling.row_places import RowLayout, padded
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.stacking import _stack_of_matrices

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


class SeldomWrongWhenStacked(PlainModule):
    """By vmap it gives something else, but far from the start only."""

    def forward(self, observations: Tensor) -> Distribution:
        is_stacked = torch._C._functorch.is_batchedtensor(observations)
        error = torch.where(observations.abs() > 0.45, 1e-4, 0.0) if is_stacked else 0.0
        mean = self.net(observations) + error
        normal = Normal(mean, self.get_buffer("scale"), validate_args=False)
        return Independent(normal, 1, validate_args=False)


class SigmoidModule(PlainModule):
    """By vmap the last numbers of its odd layer come from another routine of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 33), nn.Sigmoid(), nn.Linear(33, 2))


class UnknownDistribution(PlainModule):
    """Returns a distribution that vmap cannot carry."""

    def forward(self, observations: Tensor) -> Distribution:
        return torch.distributions.Laplace(self.net(observations), 0.05, validate_args=False)


class ModuleWithAttributes(PlainModule):
    """Its spread is a number of Python's, which no parameter or buffer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.std = 0.05

    def forward(self, observations: Tensor) -> Distribution:
        mean = self.net(observations)
        normal = Normal(mean, torch.full_like(mean, self.std), validate_args=False)
        return Independent(normal, 1, validate_args=False)


class CategoricalModule(nn.Module):
    """Takes observations only; every copy of it notes the shape of those of its forwards."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.note = shapes.append

    def forward(self, observations: Tensor) -> Distribution:
        self.note(tuple(observations.shape))
        return Categorical(logits=3 * self.net(observations), validate_args=False)


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
        together = await all_at_once(sampler, *(sampler.sample(policy, **call) for call in calls))
        alone = [await sampler.sample(policy, **call) for call in calls]
    return together, alone


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(CountingPolicy, id="stacks itself"),
        pytest.param(PlainModule, id="by vmap"),
        pytest.param(WrongWhenStacked, id="wrong when stacked"),
        pytest.param(SeldomWrongWhenStacked, id="seldom wrong by vmap"),
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


async def test_policy_of_tiny_layers_gets_what_it_would_get_alone_however_often() -> None:
    """Stacked, layers of 2 x 4 differ in the last bit, but not in every row: no chance decides."""
    torch.manual_seed(0)
    policy = NormalMLPPolicy(2, 2, (4,))
    found = []
    for seed in range(20):
        async with AsyncSampler(NAVIGATION, num_workers=0, seed=1, max_episode_steps=4) as sampler:

            def sampled(number: int, seed: int = seed, sampler: AsyncSampler = sampler) -> Any:
                params = params_of(policy, 2 * seed + number)
                return sampler.sample(policy, params, batch_size=2, seed=number)

            together = await all_at_once(sampler, sampled(0), sampled(1))
            alone = [await sampled(0), await sampled(1)]
        found += [are_same(*pair) for pair in zip(together, alone, strict=True)]
    assert found == [True] * 40


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize("widths", [(2, 2, 2), (2, 4, 2), (3, 9, 1), (20, 6, 6), (2, 100, 2)])
def test_policy_says_of_itself_whether_it_stacks_exactly(
    widths: tuple[int, int, int], nonlinearity: str
) -> None:
    torch.manual_seed(0)
    size, hidden, actions = widths
    policy = NormalMLPPolicy(size, actions, (hidden,), nonlinearity)
    sets = [params_of(policy, number) for number in range(3)]
    stack = {name: torch.stack([params[name] for params in sets]) for name in sets[0]}
    with one_intraop_thread() as block, torch.inference_mode():
        block = RowLayout(PolicySnapshot(policy, None, torch.device("cpu")), block).block
        for num_rows in (16, 20, 24, 28, 32, 64, 128):
            rows = torch.randn(3, num_rows, size)
            together = policy(rows, stack).mean
            alone = [
                policy(padded(own, block), params).mean[:num_rows]
                for own, params in zip(rows, sets, strict=True)
            ]
            if policy.stacks_exactly(num_rows):
                assert torch.equal(together, torch.stack(alone)), num_rows
            torch.testing.assert_close(together, torch.stack(alone))
        assert policy.stacks_exactly(128) == (actions > 1)


@pytest.mark.parametrize(
    "policy", [SigmoidModule(), NormalMLPPolicy(2, 2, (100,), "sigmoid", init_std=0.05)]
)
async def test_last_rows_of_a_stack_get_what_they_would_get_alone(policy: nn.Module) -> None:
    """Few rows are the same however they are stacked; then there are more of them."""
    torch.manual_seed(0)
    sets = [params_of(policy, number) for number in range(3)]
    async with AsyncSampler(
        NAVIGATION, num_workers=0, envs_per_worker=60, seed=1, max_episode_steps=20
    ) as sampler:
        for batch_size in (2, 16, 20):

            def sampled(number: int, batch_size: int = batch_size) -> Any:
                return sampler.sample(policy, sets[number], batch_size=batch_size, seed=number)

            together = await all_at_once(sampler, *map(sampled, range(3)))
            for number, found in enumerate(together):
                assert_same(found, await sampled(number))


async def test_different_parameters_of_one_policy_share_a_forward() -> None:
    policy = CountingPolicy()
    await together_and_alone(policy)
    stacked = [shape for shape in policy.shapes if len(shape) == 3]
    assert max(shape[0] for shape in stacked) == NUM_SETS
    assert len(stacked) > 50  # of the 100 steps that all of them are under way together


async def test_later_parameters_of_a_policy_share_a_forward_from_their_first_step() -> None:
    policy = CountingPolicy()
    async with AsyncSampler(NAVIGATION, num_workers=0, seed=1, max_episode_steps=3) as sampler:
        for _ in range(2):  # the first time, forwards apart tell that a shared one is the same
            policy.shapes.clear()
            sets = [params_of(policy, number) for number in range(NUM_SETS)]
            await all_at_once(
                sampler, *(sampler.sample(policy, params, batch_size=2) for params in sets)
            )
    assert policy.shapes == [(NUM_SETS, 16, 2)] * 3


async def test_plain_modules_with_attributes_of_their_own_get_what_they_would_get_alone() -> None:
    module = ModuleWithAttributes()
    async with AsyncSampler(NAVIGATION, num_workers=0, envs_per_worker=60, seed=1) as sampler:

        async def call(number: int, std: float) -> asyncio.Task[BatchEpisodes]:
            module.std = std
            with torch.no_grad():
                module.get_parameter("net.0.bias").fill_(0.1 * number)
            sampling = asyncio.create_task(sampler.sample(module, batch_size=8, seed=number))
            await asyncio.sleep(0)  # the call takes its copy of the module
            return sampling

        async def together(stds: list[float]) -> list[BatchEpisodes]:
            return [await each for each in [await call(*pair) for pair in enumerate(stds)]]

        async def alone(stds: list[float]) -> list[BatchEpisodes]:
            return [await (await call(*pair)) for pair in enumerate(stds)]

        for stds in ([0.05, 0.05], [0.01, 0.09], [0.02, 0.02, 0.05, 0.02]):
            pairs = zip(await together(stds), await alone(stds), strict=True)
            for found, wanted in pairs:
                assert_same(found, wanted)


@pytest.mark.parametrize("policy", [CountingPolicy, PlainModule])
async def test_parameters_of_another_type_do_not_change_those_of_others(
    policy: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    used = policy()
    singles = [params_of(used, number) for number in (1, 2)]
    doubles = [
        {name: value.double() for name, value in params_of(used, number).items()}
        for number in (3, 4)
    ]

    async def sampled(params: dict[str, Tensor]) -> BatchEpisodes | BaseException:
        try:
            return await sampler.sample(used, params, batch_size=8, seed=5)
        except PolicyError as error:  # observations are float32: alone it fails as well
            return error

    async with AsyncSampler(NAVIGATION, num_workers=0, envs_per_worker=60, seed=1) as sampler:
        for sets in (singles, [singles[0], doubles[0]], doubles):
            together = await all_at_once(sampler, *map(sampled, sets))
            for found, params in zip(together, sets, strict=True):
                wanted = await sampled(params)
                assert type(found) is type(wanted)
                if isinstance(found, BatchEpisodes) and isinstance(wanted, BatchEpisodes):
                    assert_same(found, wanted)


async def test_categorical_modules_are_the_same_by_vmap_and_share_a_forward() -> None:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = []
    module = CategoricalModule(shapes)
    calls: list[dict[str, Any]] = [
        {"params": params_of(module, number), "batch_size": 60, "seed": number}
        for number in range(NUM_SETS)
    ]
    async with AsyncSampler("CartPole-v1", num_workers=0, envs_per_worker=60, seed=1) as sampler:
        together = await all_at_once(sampler, *(sampler.sample(module, **call) for call in calls))
        num_forwards, num_ticks = len(shapes), sampler.statistics.ticks
        alone = [await sampler.sample(module, **call) for call in calls]
    for found, wanted in zip(together, alone, strict=True):
        assert_same(found, wanted)
    # Those that are held against separate ones are a few ticks.
    assert num_ticks > 60
    assert num_forwards < 3 * num_ticks


async def test_parameters_are_let_go_of_when_their_requests_are_done() -> None:
    policy = CountingPolicy()
    last = weakref.ref(policy)
    async with AsyncSampler(NAVIGATION, num_workers=0, envs_per_worker=60, seed=1) as sampler:
        sets = [params_of(policy, number) for number in range(NUM_SETS)]
        await all_at_once(sampler, *(sampler.sample(policy, each, batch_size=3) for each in sets))
        assert max(map(len, policy.shapes)) == 3  # they were stacked
        await sampler.sample(PlainModule(), batch_size=1)  # the sampler remembers its last policy
        del policy
        gc.collect()
        assert last() is None


async def test_requests_with_the_policys_own_parameters_share_a_forward_without_stacking() -> None:
    policy = CountingPolicy()
    async with AsyncSampler(NAVIGATION, num_workers=0, envs_per_worker=60, seed=1) as sampler:
        await all_at_once(sampler, *(sampler.sample(policy, batch_size=10) for _ in range(6)))
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


class DrawnEnv(CountingEnv):
    """Observes a new number in every step, as most environments do."""

    def __init__(self) -> None:
        super().__init__(length=None)

    def observation(self) -> Any:
        self.drawn = float(self.np_random.random())
        return super().observation()


@pytest.mark.parametrize("num_rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
async def test_few_rows_of_several_sets_that_come_and_go_are_as_if_alone(num_rounds: int) -> None:
    """A stack that was the same as separate forwards once must be so whatever is in it."""
    policy = policy_of(DrawnEnv(), (32, 32))
    sets: list[dict[str, Tensor] | None] = [None]
    for scale in (0.5, 2.0):
        named = policy.named_parameters()
        sets.append({name: (scale * value).detach() for name, value in named})
    calls: list[dict[str, Any]] = [
        {
            "batch_size": 1 + number % 24,
            "seed": number,
            "params": sets[number % 3],
            "task": {"number": float(number % 5)},
        }
        for number in range(60)
    ]
    wanted = lockstep(DrawnEnv, policy, calls, seed=0)
    chance = random.Random(0)

    async def sample(number: int) -> bool:
        await asyncio.sleep(chance.random() * 0.3)
        return are_same(await sampler.sample(policy, **calls[number]), wanted[number])

    for _ in range(num_rounds):  # each compares anew, in other company
        async with AsyncSampler(DrawnEnv, num_workers=0, envs_per_worker=5, seed=0) as sampler:
            assert all(await asyncio.gather(*map(sample, range(len(calls)))))


def test_set_of_rows_in_a_stack_is_bitwise_what_whole_blocks_give_it_alone() -> None:
    """What the padding of stacked sets rests on; a sweep on the machine at hand."""
    chance = random.Random(0)
    widths = [2, 3, 5, 8, 10, 17, 33, 64, 100, 128, 256]
    with one_intraop_thread() as block, torch.inference_mode():
        for _ in range(300):
            inputs, outputs = chance.choice(widths), chance.choice(widths)
            rows = chance.randrange(block, 4 * block)
            size = rows + -rows % 4
            if size * inputs * outputs < 400:
                continue
            weights = [torch.randn(outputs, inputs) for _ in range(5)]
            biases = [torch.randn(outputs) for _ in range(5)]
            observations = torch.zeros(5, size, inputs)
            observations[:, :rows] = torch.randn(5, rows, inputs)
            stacked = torch.baddbmm(
                torch.stack(biases).unsqueeze(1),
                observations,
                _stack_of_matrices(weights).transpose(1, 2),
            )
            for own, weight, bias, found in zip(
                observations, weights, biases, stacked, strict=True
            ):
                alone = F.linear(padded(own[:rows], block), weight, bias)
                assert torch.equal(found[:rows], alone[:rows]), (inputs, outputs, rows)
