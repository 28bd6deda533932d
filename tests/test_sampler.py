"""What `AsyncSampler` promises: which episodes it returns, and what it does when interrupted."""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fakes import (
    ActionEnv,
    CountingEnv,
    CountingRowsEnv,
    DiscreteObservationEnv,
    EnvWithoutTasks,
    ForeignRowsEnv,
    ImageEnv,
    InnerEnv,
    PidEnv,
    ReusingEnv,
    SettableEnv,
    WaitingEnv,
)
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from oracle import assert_same, counting_policy, lockstep, policy_of, uniform
from processes import children, descriptors, until, waiting_gates
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from asyncmaml import AsyncSampler, BatchEpisodes, BatchSampler
from asyncmaml.errors import ConfigurationError, SamplerStateError
from asyncmaml.learning.policies import MLPPolicy

pytestmark = pytest.mark.usefixtures("quick_workers")

NAVIGATION = "asyncmaml/Navigation2D-v0"
CARTPOLE = "CartPole-v1"


@pytest.fixture(scope="module")
def policy() -> MLPPolicy:
    """One for CartPole."""
    return policy_of(CartPoleEnv())


def in_process(env: Any, *, rows: int = 3, **settings: Any) -> AsyncSampler:
    return AsyncSampler(env, num_workers=0, envs_per_worker=rows, **settings)


# --- the episodes


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7, 25])
async def test_exactly_batch_size_episodes_are_returned(batch_size: int) -> None:
    async with in_process(lambda: CountingEnv(length=None), seed=0) as sampler:
        episodes = await sampler.sample(counting_policy, batch_size=batch_size)
    assert episodes.batch_size == batch_size
    assert episodes.is_complete
    assert episodes.terminated.all()


async def test_batch_size_of_the_sampler_is_the_default() -> None:
    async with in_process(CountingEnv, batch_size=6) as sampler:
        assert (await sampler.sample(counting_policy)).batch_size == 6


async def test_gamma_is_that_of_the_episodes() -> None:
    async with in_process(CountingEnv, batch_size=1) as sampler:
        episodes = await sampler.sample(counting_policy, gamma=0.5)
    # Rewards 1 to 5: 4 + 5 / 2 = 6.5, 3 + 6.5 / 2 = 6.25, ...
    assert episodes.returns[:, 0].tolist() == [3.5625, 5.125, 6.25, 6.5, 5.0]


@pytest.mark.parametrize("env", [CountingEnv, ReusingEnv])
async def test_no_transition_lies_between_two_episodes(env: Callable[..., CountingEnv]) -> None:
    """Rows reset in the tick in which an episode ends, also where the env reuses its buffer."""
    async with in_process(lambda: env(length=None), rows=2, seed=0) as sampler:
        episodes = await sampler.sample(counting_policy, batch_size=20)
    assert len(set(episodes.lengths.tolist())) > 3
    for batch_id, length in enumerate(episodes.lengths.tolist()):
        steps = episodes.observations[:length, batch_id, 0]
        assert steps.tolist() == list(range(length))
        assert episodes.rewards[:length, batch_id].tolist() == list(range(1, length + 1))
        assert episodes.last_observations[batch_id, 0] == length
        drawn = episodes.observations[:length, batch_id, 1]
        assert (drawn == episodes.last_observations[batch_id, 1]).all()


async def test_vectorised_rows_tell_the_true_last_observation(register: Any) -> None:
    register("Counting-v0", CountingEnv, vector_entry_point=CountingRowsEnv)
    async with in_process("Counting-v0", rows=2) as sampler:
        episodes = await sampler.sample(counting_policy, batch_size=7)
    assert episodes.last_observations[:, 0].tolist() == [5] * 7
    assert episodes.observations[:, :, 0].T.tolist() == [[0, 1, 2, 3, 4]] * 7


async def test_env_kwargs_reach_the_environment() -> None:
    async with in_process(CountingEnv, env_kwargs={"length": 2, "offset": 3.0}) as sampler:
        episodes = await sampler.sample(counting_policy, batch_size=2)
    assert episodes.lengths.tolist() == [2, 2]
    assert (episodes.observations[:, :, 2] == 3).all()


async def test_max_episode_steps_truncates() -> None:
    async with in_process(CountingEnv, max_episode_steps=3) as sampler:
        episodes = await sampler.sample(counting_policy, batch_size=4)
    assert episodes.lengths.tolist() == [3] * 4
    assert episodes.truncated.all()
    assert not episodes.terminated.any()


async def test_episodes_own_their_memory() -> None:
    async with in_process(lambda: CountingEnv(length=None), batch_size=9, seed=0) as sampler:
        episodes = await sampler.sample(counting_policy)
        before = episodes.observations.clone()
        for _ in range(3):
            await sampler.sample(counting_policy)
        assert torch.equal(episodes.observations, before)


# --- policies


@pytest.mark.parametrize("batch_size", [15, 16])  # of 16 rows no copy is needed for padding
async def test_policy_that_works_in_place_does_not_rewrite_what_is_recorded(
    batch_size: int,
) -> None:
    def overwriting(observations: Tensor) -> Distribution:
        distribution = uniform(observations)
        observations.fill_(-100)
        return distribution

    async with in_process(CountingEnv, rows=16, batch_size=batch_size, seed=0) as sampler:
        found = await sampler.sample(overwriting)
    assert_same(found, lockstep(CountingEnv, uniform, seed=0, batch_size=batch_size)[0])


def cartpole_module() -> nn.Module:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.register_buffer("shift", torch.ones(2))

        def forward(self, observations: Tensor) -> Distribution:
            return Categorical(logits=self.linear(observations) + self.shift)

    torch.manual_seed(0)
    return Network()


async def test_plain_module_is_a_policy() -> None:
    module = cartpole_module()
    async with in_process(CARTPOLE, seed=0, batch_size=3) as sampler:
        episodes = await sampler.sample(module)
        assert_same(episodes, lockstep(CARTPOLE, module, seed=0, batch_size=3)[0])


async def test_plain_module_takes_params() -> None:
    module, other = cartpole_module(), cartpole_module()
    other.load_state_dict({name: value + 0.5 for name, value in module.state_dict().items()})
    other.get_buffer("shift").copy_(module.get_buffer("shift"))
    async with in_process(CARTPOLE, seed=0, batch_size=3) as sampler:
        with_params = await sampler.sample(module, dict(other.named_parameters()), seed=1)
        assert_same(with_params, await sampler.sample(other, seed=1))


async def test_function_is_a_policy() -> None:
    async with in_process(CountingEnv, seed=0, batch_size=3) as sampler:
        episodes = await sampler.sample(counting_policy)
    distribution = counting_policy(episodes.observations.flatten(0, 1))
    log_probs = distribution.log_prob(episodes.actions.flatten()).reshape(5, 3)
    torch.testing.assert_close(episodes.log_probs, log_probs)


async def test_function_that_names_params_gets_them() -> None:
    def scaled(observations: Tensor, params: Any = None) -> Distribution:
        bias = torch.zeros(2) if params is None else params["bias"]
        return Categorical(logits=torch.zeros(len(observations), 2) + bias)

    async with in_process(CountingEnv, batch_size=3) as sampler:
        ones = await sampler.sample(scaled, {"bias": torch.tensor([-100.0, 100.0])})
        zeros = await sampler.sample(scaled, {"bias": torch.tensor([100.0, -100.0])})
    assert (ones.actions == 1).all()
    assert (zeros.actions == 0).all()


async def test_policy_of_ours_takes_params(policy: MLPPolicy) -> None:
    other = policy_of(CartPoleEnv(), seed=9)
    async with in_process(CARTPOLE, seed=0, batch_size=3) as sampler:
        with_params = await sampler.sample(policy, dict(other.named_parameters()), seed=1)
        assert_same(with_params, await sampler.sample(other, seed=1))


async def test_params_that_require_gradients_leave_no_graph_in_the_episodes() -> None:
    own = policy_of(CartPoleEnv())
    params = {name: value * 2 for name, value in own.named_parameters()}
    async with in_process(CARTPOLE, batch_size=1) as sampler:
        episodes = await sampler.sample(own, params)
    assert not episodes.log_probs.requires_grad


@pytest.mark.parametrize("kind", ["ours", "params", "module"])
async def test_parameters_are_those_of_the_moment_of_the_call(kind: str) -> None:
    own: nn.Module = cartpole_module() if kind == "module" else policy_of(CartPoleEnv())
    params = None
    if kind == "params":
        params = {name: value.detach().clone() for name, value in own.named_parameters()}
    wanted = lockstep(CARTPOLE, own, [{"params": params}], seed=0, batch_size=20)[0]
    async with in_process(CARTPOLE, seed=0, batch_size=20) as sampler:
        sampling = asyncio.create_task(sampler.sample(own, params))
        await asyncio.sleep(0)  # the call has been made
        with torch.no_grad():
            for value in (params or dict(own.named_parameters())).values():
                value.fill_(torch.nan)
        assert_same(await sampling, wanted)


async def test_buffers_are_those_of_the_moment_of_the_call() -> None:
    module = cartpole_module()
    wanted = lockstep(CARTPOLE, module, seed=0, batch_size=20)[0]
    async with in_process(CARTPOLE, seed=0, batch_size=20) as sampler:
        sampling = asyncio.create_task(sampler.sample(module))
        await asyncio.sleep(0)
        module.get_buffer("shift").fill_(torch.nan)
        assert_same(await sampling, wanted)


# --- spaces


def box_action_env() -> ActionEnv:
    return ActionEnv(Box(-0.1, 0.1, (2,), np.float32))


def multi_discrete_env(start: tuple[int, int] = (0, 0)) -> ActionEnv:
    return ActionEnv(MultiDiscrete([2, 4], start=list(start)))


def seen_actions(episodes: BatchEpisodes) -> Tensor:
    """Return what an `ActionEnv` was given, shape (T, B, A)."""
    return torch.cat((episodes.observations[1:], episodes.last_observations[None]))


def wide_normal(observations: Tensor) -> Distribution:
    return Independent(Normal(torch.zeros(len(observations), 2), torch.ones(2)), 1)


async def test_box_actions_are_clipped_for_the_environment_alone() -> None:
    async with in_process(box_action_env, batch_size=4, seed=0) as sampler:
        episodes = await sampler.sample(wide_normal)
    seen = seen_actions(episodes)
    assert episodes.actions.abs().max() > 0.5
    assert torch.equal(seen, episodes.actions.clamp(-0.1, 0.1))
    log_probs = wide_normal(episodes.actions.flatten(0, 1)).log_prob(episodes.actions.flatten(0, 1))
    torch.testing.assert_close(episodes.log_probs.flatten(), log_probs)


async def test_box_actions_are_left_alone_without_clipping() -> None:
    async with in_process(box_action_env, batch_size=4, seed=0, clip_actions=False) as sampler:
        episodes = await sampler.sample(wide_normal)
    seen = seen_actions(episodes)
    assert torch.equal(seen, episodes.actions)


async def test_discrete_actions_are_recorded_from_0_and_passed_on_from_their_start() -> None:
    def three(observations: Tensor) -> Distribution:
        return Categorical(logits=torch.zeros(len(observations), 3))

    async with in_process(lambda: ActionEnv(Discrete(3, start=5)), batch_size=9, seed=0) as sampler:
        episodes = await sampler.sample(three)
    assert set(episodes.actions.flatten().tolist()) == {0, 1, 2}
    seen = seen_actions(episodes)
    assert torch.equal(seen[..., 0], episodes.actions + 5.0)


async def test_multi_discrete_actions_reach_the_environment() -> None:
    policy = policy_of(multi_discrete_env())
    async with in_process(multi_discrete_env, batch_size=9, seed=0) as sampler:
        episodes = await sampler.sample(policy)
    assert episodes.actions.dtype == torch.int64
    assert episodes.actions.shape == (5, 9, 2)
    assert episodes.actions.amax((0, 1)).tolist() == [1, 3]
    seen = seen_actions(episodes)
    assert torch.equal(seen, episodes.actions.float())
    assert_same(episodes, lockstep(multi_discrete_env, policy, seed=0, batch_size=9)[0])


async def test_multi_discrete_actions_are_passed_on_from_their_start() -> None:
    async with in_process(lambda: multi_discrete_env((3, -1)), batch_size=4, seed=0) as sampler:
        episodes = await sampler.sample(policy_of(multi_discrete_env()))
    seen = seen_actions(episodes)
    assert torch.equal(seen, episodes.actions + torch.tensor([3.0, -1.0]))


async def test_discrete_observations_are_integers() -> None:
    async with in_process(DiscreteObservationEnv, batch_size=3) as sampler:
        episodes = await sampler.sample(policy_of(DiscreteObservationEnv()))
    assert episodes.observations.dtype == torch.int64
    assert episodes.observations.T.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert episodes.last_observations.tolist() == [5] * 3


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_images_stay_uint8(num_workers: int) -> None:
    async with AsyncSampler(ImageEnv, num_workers=num_workers, batch_size=3) as sampler:
        episodes = await sampler.sample(policy_of(ImageEnv()))
    assert episodes.observations.dtype == episodes.last_observations.dtype == torch.uint8
    assert episodes.observations.shape == (5, 3, 4, 4, 3)
    assert episodes.observations[:, 0, 0, 0, 0].tolist() == [0, 100, 200, 44, 144]
    assert (episodes.last_observations == 244).all()


async def test_observation_space_of_a_class_of_the_test_crosses_the_pipe() -> None:
    class OwnBox(Box):
        pass

    def make() -> CountingEnv:
        env = CountingEnv()
        env.observation_space = OwnBox(-np.inf, np.inf, (3,), np.float32)
        return env

    async with AsyncSampler(make, num_workers=1) as sampler:
        assert type(sampler.observation_space).__name__ == "OwnBox"


# --- tasks


async def test_task_of_the_call_is_the_episodes() -> None:
    async with in_process(CountingEnv, batch_size=5) as sampler:
        episodes = await sampler.sample(counting_policy, task={"number": 4.0})
    assert (episodes.observations[:, :, 2] == 4).all()
    assert episodes.task == {"number": 4.0}


async def test_reset_task_sets_the_task_of_later_calls() -> None:
    async with in_process(CountingEnv, batch_size=2) as sampler:
        await sampler.reset_task({"number": 2.0})
        default = await sampler.sample(counting_policy)
        other = await sampler.sample(counting_policy, task={"number": 3.0})
        default_again = await sampler.sample(counting_policy)
        initial = await sampler.sample(counting_policy, task=None)
    seen = [
        episodes.last_observations[0, 2].item()
        for episodes in (default, other, default_again, initial)
    ]
    assert seen == [2, 3, 2, 0]


@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
async def test_request_without_task_gets_the_initial_one_after_requests_with_tasks(
    num_workers: int, vectorized: bool
) -> None:
    policy = policy_of(gymnasium.make(NAVIGATION))
    async with AsyncSampler(
        NAVIGATION, num_workers=num_workers, envs_per_worker=3, vectorized=vectorized, batch_size=4
    ) as sampler:
        first = await sampler.sample(policy, seed=1)
        await sampler.sample(policy, task={"goal": (0.1, 0.2)})
        assert_same(await sampler.sample(policy, seed=1), first)


async def test_task_is_that_of_the_moment_of_the_call() -> None:
    task = {"number": 1.0}
    async with in_process(CountingEnv, rows=1, batch_size=20) as sampler:
        sampling = asyncio.create_task(sampler.sample(counting_policy, task=task))
        await asyncio.sleep(0)
        task["number"] = 2.0
        episodes = await sampling
    assert (episodes.observations[:, :, 2] == 1).all()


async def test_many_tasks_at_once_reach_their_own_episodes() -> None:
    async with AsyncSampler(
        lambda: CountingEnv(length=None), num_workers=2, envs_per_worker=4, seed=0
    ) as sampler:
        results = await asyncio.gather(
            *(
                sampler.sample(counting_policy, task={"number": float(number)}, batch_size=3)
                for number in range(1, 30)
            )
        )
    for number, episodes in enumerate(results, 1):
        assert (episodes.last_observations[:, 2] == number).all()


def test_lock_step_sampler_gives_tasks_to_an_environment_with_set_task() -> None:
    with BatchSampler(SettableEnv, batch_size=2, num_workers=0) as sampler:
        sampler.reset_task(7.0)
        episodes = sampler.sample(uniform)
    assert episodes.rewards.tolist() == [[7, 7]]
    assert episodes.task == 7.0


def test_lock_step_sampler_goes_back_to_the_task_of_the_constructor() -> None:
    with BatchSampler(SettableEnv, {"number": 3.0}, batch_size=2, num_workers=0) as sampler:
        sampler.reset_task(7.0)
        sampler.reset_task(None)
        episodes = sampler.sample(uniform)
    assert episodes.rewards.tolist() == [[3, 3]]
    assert episodes.task is None


async def test_same_seed_draws_the_same_tasks_as_the_lock_step_sampler() -> None:
    def goals(tasks: list[Any]) -> list[list[float]]:
        return [task["goal"].tolist() for task in tasks]

    with BatchSampler(NAVIGATION, seed=4, num_workers=0, batch_size=1) as batch_sampler:
        wanted = [goals(batch_sampler.sample_tasks(3)) for _ in range(2)]
    async with in_process(NAVIGATION, seed=4) as sampler:
        found = [goals(sampler.sample_tasks(3)) for _ in range(2)]
    assert found == wanted
    assert found[0] != found[1]


async def test_seed_of_a_draw_of_tasks_replaces_its_number_and_leaves_the_count() -> None:
    def goals(tasks: list[Any]) -> list[list[float]]:
        return [task["goal"].tolist() for task in tasks]

    async with in_process(NAVIGATION, seed=4) as sampler:
        counted = [goals(sampler.sample_tasks(2)) for _ in range(2)]
    with BatchSampler(NAVIGATION, seed=4, num_workers=0, batch_size=1) as batch_sampler:
        of_lock_step = goals(batch_sampler.sample_tasks(2, seed=7))
    async with in_process(NAVIGATION, seed=4) as sampler:
        first, named = goals(sampler.sample_tasks(2)), goals(sampler.sample_tasks(2, seed=7))
        assert [first, goals(sampler.sample_tasks(2))] == counted
        assert named == goals(sampler.sample_tasks(2, seed=7)) == of_lock_step
        assert named not in counted
        with pytest.raises(ConfigurationError, match="seed is -1"):
            sampler.sample_tasks(2, seed=-1)


async def test_tasks_of_the_environment_can_be_sampled_with() -> None:
    async with in_process(CountingEnv, seed=4, batch_size=2) as sampler:
        for task in sampler.sample_tasks(3):
            episodes = await sampler.sample(counting_policy, task=task)
            numbers = episodes.observations[..., 2]
            assert torch.equal(numbers, torch.full_like(numbers, task["number"]))


async def test_environment_without_tasks_is_one_task() -> None:
    async with in_process(EnvWithoutTasks, batch_size=2) as sampler:
        episodes = await sampler.sample(policy_of(EnvWithoutTasks()))
    assert episodes.task is None


# --- what an environment may be


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["lambda", "local", "class", "spec", "big"])
async def test_environment_may_be_given_as(kind: str, num_workers: int, policy: MLPPolicy) -> None:
    table = np.zeros(100_000)  # more than a pipe's buffer holds

    def local() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(CARTPOLE)

    def with_table() -> gymnasium.Env[Any, Any]:
        assert table.size == 100_000
        return CartPoleEnv()

    kinds: dict[str, Any] = {
        "lambda": lambda: CartPoleEnv(),
        "local": local,
        "class": CartPoleEnv,
        "spec": gymnasium.spec(CARTPOLE),
        "big": with_table,
    }
    async with AsyncSampler(
        kinds[kind], num_workers=num_workers, seed=0, batch_size=2, max_episode_steps=60
    ) as sampler:
        episodes = await sampler.sample(policy)
    wanted = lockstep(CARTPOLE, policy, seed=0, batch_size=2, max_episode_steps=60)[0]
    assert_same(episodes, wanted)


async def test_worker_finds_an_environment_that_the_user_has_registered(
    register: Any,
) -> None:
    register("Mine-v0", lambda: CountingEnv(offset=7.0))
    async with AsyncSampler(lambda: InnerEnv("Mine-v0"), num_workers=1, batch_size=1) as sampler:
        episodes = await sampler.sample(counting_policy)
    assert (episodes.observations[:, :, 2] == 7).all()


async def test_vectorised_environment_need_not_derive_from_ours(register: Any) -> None:
    register("Foreign-v0", CountingEnv, vector_entry_point=ForeignRowsEnv)
    async with in_process("Foreign-v0", seed=0, batch_size=7) as sampler:
        found = await sampler.sample(counting_policy)
    assert_same(found, lockstep(CountingEnv, counting_policy, seed=0, batch_size=7)[0])


async def test_without_workers_the_environments_are_in_this_process() -> None:
    async with in_process(PidEnv, batch_size=2) as sampler:
        episodes = await sampler.sample(counting_policy)
    low, high, _ = episodes.last_observations[0].tolist()
    assert low + 4096 * high == os.getpid()


async def test_workers_share_the_episodes() -> None:
    async with AsyncSampler(PidEnv, num_workers=2, envs_per_worker=2, batch_size=8) as sampler:
        episodes = await sampler.sample(counting_policy)
        pids = {low + 4096 * high for low, high, _ in episodes.last_observations.tolist()}
        assert pids == children()


async def test_spaces_are_those_of_one_environment() -> None:
    async with in_process(CARTPOLE) as sampler:
        assert sampler.observation_space == CartPoleEnv().observation_space
        assert sampler.action_space == CartPoleEnv().action_space


# --- repr


async def test_repr_tells_workers_rows_and_requests(tmp_path: Path) -> None:
    gates = waiting_gates(tmp_path)
    sampler = AsyncSampler(lambda: WaitingEnv(*gates), num_workers=1, envs_per_worker=3)
    assert repr(sampler).endswith("[not started]>")
    async with sampler:
        assert repr(sampler).endswith("[1 workers, 0 rows busy, 3 idle, 0 requests]>")
        sampling = asyncio.create_task(sampler.sample(counting_policy, batch_size=1))
        await asyncio.to_thread(gates[0].read_bytes)
        assert repr(sampler).endswith("[1 workers, 1 rows busy, 2 idle, 1 requests]>")
        await asyncio.to_thread(gates[1].write_bytes, b".")
        await sampling
        assert repr(sampler).endswith("[1 workers, 0 rows busy, 3 idle, 0 requests]>")
    assert repr(sampler).endswith("[closed]>")


async def test_looking_at_a_sampler_from_another_thread_changes_nothing(tmp_path: Path) -> None:
    """The sampler's thread may be in the middle of a tick."""
    gates = waiting_gates(tmp_path)
    async with AsyncSampler(
        lambda: WaitingEnv(*gates), num_workers=1, envs_per_worker=2
    ) as sampler:
        sampling = asyncio.create_task(sampler.sample(counting_policy, batch_size=1))
        await asyncio.to_thread(gates[0].read_bytes)
        assert sampler._engine is not None
        coordinator = sampler._engine._coordinator
        assert coordinator is not None
        sampling.cancel()
        # The row is taken from the request: what its lane knows is to be computed anew, and not
        # before the environment has answered.
        await until(lambda: coordinator.num_requests == 0)
        before = [dict(vars(lane)) for lane in coordinator.lanes]
        assert " 0 rows busy" in repr(sampler)
        assert sampler.statistics.episodes == 0
        assert [dict(vars(lane)) for lane in coordinator.lanes] == before
        assert any(lane._has_changed for lane in coordinator.lanes)
        await asyncio.to_thread(gates[1].write_bytes, b".")


async def test_repr_tells_the_environment() -> None:
    assert "CartPole-v1" in repr(AsyncSampler(CARTPOLE))
    assert "CountingEnv" in repr(AsyncSampler(CountingEnv))


# --- life


async def test_close_is_idempotent() -> None:
    async with AsyncSampler(CountingEnv, num_workers=1) as sampler:
        await sampler.close()
        await sampler.close()
    await sampler.close()


async def test_close_before_start_is_allowed_and_final() -> None:
    sampler = AsyncSampler(CountingEnv)
    await sampler.close()
    with pytest.raises(SamplerStateError):
        await sampler.start()


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_close_raises_in_every_sample_under_way(num_workers: int) -> None:
    async with AsyncSampler(
        lambda: CountingEnv(length=10**9), num_workers=num_workers, envs_per_worker=2
    ) as sampler:
        samplings = [
            asyncio.create_task(sampler.sample(counting_policy, batch_size=3)) for _ in range(3)
        ]
        await until(lambda: sampler.statistics.transitions > 50)
        await sampler.close()
        results = await asyncio.gather(*samplings, return_exceptions=True)
    assert [type(result) for result in results] == [SamplerStateError] * 3


async def test_closed_sampler_holds_no_descriptor() -> None:
    """Even where it is still referenced, and no garbage has been collected."""
    gc.collect()
    before = descriptors()
    gc.disable()
    try:
        async with AsyncSampler(CountingEnv, num_workers=2, batch_size=2) as sampler:
            await sampler.sample(counting_policy)
        assert set(descriptors().values()) <= set(before.values())
    finally:
        gc.enable()


async def test_close_cancelled_at_once_still_ends_everything() -> None:
    sampler = AsyncSampler(CountingEnv, num_workers=1)
    await sampler.start()
    closing = asyncio.create_task(sampler.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(SamplerStateError):
        await sampler.sample(counting_policy)
    await sampler.close()  # waits for the first one's work


async def test_call_of_the_pass_that_closes_the_sampler_is_told() -> None:
    async with in_process(CountingEnv) as sampler:
        sampling = asyncio.create_task(sampler.sample(counting_policy))
        await asyncio.sleep(0)
        assert not sampling.done()
    with pytest.raises(SamplerStateError, match="closed while"):
        await sampling


async def test_close_while_starting_ends_both() -> None:
    sampler = AsyncSampler(CountingEnv, num_workers=1)
    starting = asyncio.create_task(sampler.start())
    await asyncio.sleep(0)
    await sampler.close()
    with pytest.raises(SamplerStateError):
        await starting


async def test_sampler_starts_once() -> None:
    async with in_process(CountingEnv) as sampler:
        with pytest.raises(SamplerStateError, match="started before"):
            await sampler.start()
        await sampler.sample(counting_policy, batch_size=1)


async def test_closed_sampler_does_not_start_again() -> None:
    async with in_process(CountingEnv) as sampler:
        pass
    with pytest.raises(SamplerStateError, match="open a new AsyncSampler"):
        await sampler.start()


@pytest.mark.parametrize(
    "use",
    [
        lambda sampler: sampler.sample(counting_policy),
        lambda sampler: sampler.reset_task(None),
        lambda sampler: asyncio.to_thread(sampler.sample_tasks, 1),
        lambda sampler: asyncio.to_thread(lambda: sampler.observation_space),
    ],
)
async def test_use_before_start_and_after_close_is_refused(use: Any) -> None:
    sampler = in_process(CountingEnv)
    with pytest.raises(SamplerStateError, match="not started"):
        await use(sampler)
    async with sampler:
        pass
    with pytest.raises(SamplerStateError, match="closed"):
        await use(sampler)


def test_each_asyncio_run_may_have_a_sampler(policy: MLPPolicy) -> None:
    async def main() -> BatchEpisodes:
        async with AsyncSampler(CARTPOLE, num_workers=1, seed=0, batch_size=2) as sampler:
            return await sampler.sample(policy)

    assert_same(asyncio.run(main()), asyncio.run(main()))


async def test_two_samplers_at_once_do_not_mix(policy: MLPPolicy) -> None:
    async def episodes(seed: int) -> BatchEpisodes:
        async with AsyncSampler(CARTPOLE, num_workers=1, seed=seed, batch_size=5) as sampler:
            return await sampler.sample(policy)

    for seed, found in enumerate(await asyncio.gather(*map(episodes, range(3)))):
        assert_same(found, lockstep(CARTPOLE, policy, seed=seed, batch_size=5)[0])


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_forgotten_sampler_ends_by_itself(num_workers: int) -> None:
    threads = set(threading.enumerate())
    sampler = AsyncSampler(CountingEnv, num_workers=num_workers, batch_size=2)
    await sampler.start()
    await sampler.sample(counting_policy)
    gone = weakref.ref(sampler)
    del sampler
    gc.collect()
    assert gone() is None
    assert not children()
    assert set(threading.enumerate()) <= threads


async def test_call_is_keyword_only_from_task_on() -> None:
    call: Any = AsyncSampler(CARTPOLE).sample
    with pytest.raises(TypeError, match="positional"):
        await call(counting_policy, None, {})
