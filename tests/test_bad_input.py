"""Every mistake gets an error of our tree that says who found what, wanted what, and what now."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from fakes import (
    ActionEnv,
    CountingEnv,
    CountingRowsEnv,
    DictEnv,
    EnvWithoutTasks,
    EnvWithSpaces,
    NotFiniteEnv,
    NotFiniteThenRaisingEnv,
    OddShapeEnv,
    RaisingEnv,
    ReadableHere,
)
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Tuple
from oracle import assert_same, lockstep, policy_of, uniform
from processes import PATIENCE, children
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Gamma, Independent, Normal

from asyncmaml import AsyncMAMLError, AsyncSampler, BatchEpisodes, BatchSampler
from asyncmaml.errors import (
    ConfigurationError,
    EnvironmentFailedError,
    EventLoopError,
    NotFiniteError,
    ParameterError,
    PolicyError,
    SamplerStateError,
    UnknownEnvironmentError,
    UnsupportedSpaceError,
    WorkerStartError,
)
from asyncmaml.learning.policies import MLPPolicy
from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.statistics import Statistics
from asyncmaml.sampling.streams import Seeds

CARTPOLE = "CartPole-v1"
NAVIGATION = "asyncmaml/Navigation2D-v0"
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


def quick_workers(test: Any) -> Any:
    """Give `workers`, the arguments for none and one, to a test of many cases.

    A fork server makes its worker in a tenth of the time.
    """
    arguments = [{"num_workers": 0}, {"num_workers": 1, "start_method": "forkserver"}]
    cases = pytest.mark.parametrize("workers", arguments, ids=["0", "1"])
    return pytest.mark.usefixtures("fork_server")(cases(test))


def in_process(env: Any, *, rows: int = 4, **settings: Any) -> AsyncSampler:
    return AsyncSampler(env, num_workers=0, envs_per_worker=rows, seed=0, **settings)


async def refused(kind: type[Exception], *words: str, sampling: Any) -> Any:
    """Await what must raise exactly this kind; return the error, whose text has the words."""
    with pytest.raises(AsyncMAMLError) as caught:
        async with asyncio.timeout(PATIENCE):
            await sampling
    assert type(caught.value) is kind, caught.value
    for word in words:
        assert word in str(caught.value)
    return caught.value


# --- arguments of the sampler


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"env": "CartPoll-v1"}, UnknownEnvironmentError, ["CartPoll-v1", "CartPole-v1"]),
        ({"env": 7}, UnknownEnvironmentError, ["7", "pass a Gymnasium id"]),
        ({"batch_size": 0}, ConfigurationError, ["batch_size is 0", "at least 1"]),
        ({"batch_size": 2.0}, ConfigurationError, ["batch_size is 2.0", "whole number"]),
        ({"batch_size": True}, ConfigurationError, ["batch_size is True", "whole number"]),
        ({"num_workers": -1}, ConfigurationError, ["num_workers is -1", "at least 0"]),
        ({"num_workers": "2"}, ConfigurationError, ["num_workers is '2'", "whole number"]),
        ({"envs_per_worker": 0}, ConfigurationError, ["envs_per_worker is 0", "at least 1"]),
        ({"seed": -1}, ConfigurationError, ["seed is -1", "at least 0"]),
        ({"seed": 0.5}, ConfigurationError, ["seed is 0.5", "whole number"]),
        ({"step_timeout": 0}, ConfigurationError, ["step_timeout is 0", "positive"]),
        ({"step_timeout": None}, ConfigurationError, ["step_timeout is None", "seconds"]),
        ({"start_timeout": -1.0}, ConfigurationError, ["start_timeout is -1.0", "positive"]),
        ({"start_timeout": float("nan")}, ConfigurationError, ["start_timeout is nan"]),
        ({"max_restarts": -1}, ConfigurationError, ["max_restarts is -1", "at least 0"]),
        ({"max_episode_steps": 0}, ConfigurationError, ["max_episode_steps is 0", "at least 1"]),
        ({"env_kwargs": "low"}, ConfigurationError, ["env_kwargs is 'low'", "dict"]),
        ({"device": "gpu"}, ConfigurationError, ["device is 'gpu'", "torch"]),
        ({"device": "meta:x"}, ConfigurationError, ["device is 'meta:x'"]),
    ],
)
def test_argument_out_of_its_range_is_refused_at_once(
    arguments: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(AsyncMAMLError) as caught:
        AsyncSampler(**({"env": CARTPOLE} | arguments))
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


def test_lock_step_sampler_without_environments_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_envs is 0"):
        BatchSampler(CARTPOLE, num_workers=0, num_envs=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_timeout", np.int64(3)),
        ("step_timeout", np.float32(0.5)),
        ("step_timeout", float("inf")),
        ("seed", np.int64(3)),
        ("batch_size", np.int32(3)),
        ("num_workers", np.uint8(1)),
        ("max_restarts", 0),
    ],
)
def test_numbers_of_numpy_are_numbers(name: str, value: Any) -> None:
    AsyncSampler(CARTPOLE, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, ["batch_size is 0", "at least 1"]),
        ({"batch_size": -3}, ["batch_size is -3", "at least 1"]),
        ({"batch_size": 1.5}, ["batch_size is 1.5", "whole number"]),
        ({"gamma": 1.1}, ["gamma is 1.1", "between 0 and 1"]),
        ({"gamma": -0.1}, ["gamma is -0.1", "between 0 and 1"]),
        ({"gamma": float("nan")}, ["gamma is nan", "between 0 and 1"]),
        ({"gamma": "0.9"}, ["gamma is '0.9'", "between 0 and 1"]),
        ({"seed": -1}, ["seed is -1", "at least 0"]),
        ({"seed": "7"}, ["seed is '7'", "whole number"]),
        ({"task": (number for number in "ab")}, ["cannot be sent to a worker", "plain data"]),
    ],
)
async def test_argument_of_a_call_out_of_its_range_is_refused(
    arguments: dict[str, Any], words: list[str]
) -> None:
    async with in_process(CARTPOLE) as sampler:
        await refused(ConfigurationError, *words, sampling=sampler.sample(uniform, **arguments))
        assert (await sampler.sample(uniform, batch_size=2)).is_complete


@pytest.mark.parametrize("gamma", [np.float32(0.5), np.float64(0.5), 1, 0])
async def test_gamma_may_be_any_real_number(gamma: Any) -> None:
    async with in_process(CountingEnv) as sampler:
        assert (await sampler.sample(uniform, batch_size=1, gamma=gamma)).gamma == gamma


@pytest.mark.parametrize("num_tasks", [0, -1, 1.5])
async def test_number_of_tasks_is_checked(num_tasks: Any) -> None:
    async with in_process(CountingEnv) as sampler:
        with pytest.raises(ConfigurationError, match=r"num_tasks is .*at least 1"):
            sampler.sample_tasks(num_tasks)


async def test_tasks_of_an_environment_without_tasks_are_refused() -> None:
    async with in_process(EnvWithoutTasks) as sampler:
        with pytest.raises(ConfigurationError, match=r"no sample_tasks.*add "):
            sampler.sample_tasks(2)


# --- the environment


@WORKERS
@pytest.mark.parametrize(
    ("env", "words"),
    [
        (lambda: None, ["returned None", "gymnasium.Env was wanted"]),
        (lambda: CountingRowsEnv(2), ["CountingRowsEnv", "gymnasium.Env was wanted"]),
    ],
)
async def test_callable_that_returns_no_environment_is_told(
    env: Any, words: list[str], num_workers: int
) -> None:
    with pytest.raises(AsyncMAMLError) as caught:
        await AsyncSampler(env, num_workers=num_workers).start()
    for word in words:
        assert word in str(caught.value)
    assert not children()


@WORKERS
async def test_constructor_that_raises_is_told_with_its_traceback(num_workers: int) -> None:
    sampler = AsyncSampler(RaisingEnv, env_kwargs={"phase": "constructor"}, num_workers=num_workers)
    error = await refused(
        EnvironmentFailedError, "RaisingEnv", "refused in constructor", sampling=sampler.start()
    )
    assert "in fail" in error.remote_traceback
    assert any("ArithmeticError" in note for note in error.__notes__)
    assert not children()


async def test_constructor_that_raises_in_a_later_row_fails_the_episode_alone() -> None:
    """Rows make their environments when they are first used."""
    licences = ["first", "second", "third"]

    def make() -> CountingEnv:
        if not licences:
            message = "no more licences"
            raise OSError(message)
        return CountingEnv()

    async with in_process(make, rows=3) as sampler:
        assert (await sampler.sample(uniform, batch_size=1)).is_complete
        licences.clear()
        await refused(
            EnvironmentFailedError,
            "constructor failed",
            "no more licences",
            sampling=sampler.sample(uniform, batch_size=3),
        )
        licences.append("fourth")
        assert (await sampler.sample(uniform, batch_size=3)).is_complete


async def test_environment_that_cannot_be_sent_is_told() -> None:
    numbers = (number for number in range(3))

    def make() -> CountingEnv:
        next(numbers)
        return CountingEnv()

    await refused(
        WorkerStartError,
        "make",
        "cannot be sent to a worker",
        "num_workers=0",
        sampling=AsyncSampler(make, num_workers=1).start(),
    )


async def test_worker_that_ends_over_its_first_environment_is_told() -> None:
    def make() -> CountingEnv:
        raise SystemExit(3)

    await refused(
        WorkerStartError,
        "exit code 3",
        "make",
        sampling=AsyncSampler(make, num_workers=2).start(),
    )
    assert not children()


async def test_first_environment_that_takes_too_long_is_told() -> None:
    def make() -> CountingEnv:
        import signal

        signal.pause()
        return CountingEnv()

    await refused(
        WorkerStartError,
        "within 0.6 s",
        "raise start_timeout",
        sampling=AsyncSampler(make, num_workers=1, start_timeout=0.6).start(),
    )
    assert not children()


@WORKERS
@pytest.mark.parametrize(
    ("env", "words"),
    [
        (DictEnv, ["observation space is Dict", "Box and Discrete", "FlattenObservation"]),
        (
            lambda: EnvWithSpaces(action_space=MultiBinary(3)),
            ["action space is MultiBinary", "MultiDiscrete", "wrap"],
        ),
        (
            lambda: EnvWithSpaces(action_space=Tuple((Discrete(2), Discrete(2)))),
            ["action space is Tuple", "wrap"],
        ),
        (
            lambda: EnvWithSpaces(observation_space=MultiDiscrete([2, 2])),
            ["observation space is MultiDiscrete", "wrap"],
        ),
    ],
)
async def test_space_that_cannot_be_carried_is_told(
    env: Any, words: list[str], num_workers: int
) -> None:
    sampler = AsyncSampler(env, num_workers=num_workers)
    await refused(UnsupportedSpaceError, *words, sampling=sampler.start())
    if not num_workers:
        with pytest.raises(UnsupportedSpaceError):
            BatchSampler(env, num_workers=0, batch_size=1)


async def test_environment_with_unsupported_spaces_is_closed() -> None:
    closed = []

    class ClosingEnv(DictEnv):
        def close(self) -> None:
            closed.append(self)

    await refused(UnsupportedSpaceError, sampling=in_process(ClosingEnv).start())
    assert len(closed) == 1


async def test_observation_of_another_shape_than_its_space_is_told() -> None:
    async with in_process(OddShapeEnv) as sampler:
        await refused(
            EnvironmentFailedError,
            "shape (2,)",
            "space says (3,)",
            sampling=sampler.sample(uniform),
        )


# --- exceptions of the environment


EPISODE = {"number": 1.0}
RESET_SEEDS = Seeds(0).next_request(7).reset_seeds(0, 3).tolist()
"""What the environments of a call with seed 7 are reset with, where the sampler's seed is 0."""


@quick_workers
@pytest.mark.parametrize("error", ["plain", "two arguments", "unpicklable"])
@pytest.mark.parametrize(
    ("phase", "step"), [("reset_task", None), ("reset", None), ("step", 0), ("step", 3)]
)
async def test_exception_is_raised_by_the_sample_that_owns_the_episode_alone(
    phase: str, step: int | None, error: str, workers: dict[str, Any]
) -> None:
    task = {"phase": phase, "at": step, "error": error}
    async with AsyncSampler(RaisingEnv, envs_per_worker=4, seed=0, **workers) as sampler:
        failing = refused(
            EnvironmentFailedError,
            f"{phase} failed",
            sampling=sampler.sample(uniform, task=task, batch_size=3, seed=7),
        )
        others = [sampler.sample(uniform, task=EPISODE, batch_size=5, seed=seed) for seed in (1, 2)]
        found, *results = await asyncio.gather(failing, *others)
    assert (found.task, found.step) == (task, step)
    assert found.batch_id in range(3)
    assert found.seed == RESET_SEEDS[found.batch_id]
    names = {"two arguments": "TwoArgumentsError", "unpicklable": "UnpicklableError"}
    assert names.get(error, "ArithmeticError") in str(found)
    assert f"seed {found.seed}" in str(found)
    assert "fakes.py" in found.remote_traceback
    for result, wanted in zip(results, raising_oracle(), strict=True):
        assert_same(result, wanted)


def raising_oracle() -> list[BatchEpisodes]:
    calls = [{"task": EPISODE, "batch_size": 5, "seed": seed} for seed in (1, 2)]
    return lockstep(RaisingEnv, uniform, calls, seed=0)


async def test_sampler_stays_usable_after_many_exceptions() -> None:
    async with in_process(RaisingEnv, rows=2) as sampler:
        for index in range(20):
            task = {"phase": ("reset", "step", "reset_task")[index % 3], "at": index % 5}
            await refused(
                EnvironmentFailedError,
                sampling=sampler.sample(uniform, task=task, batch_size=1 + index % 3, seed=1),
            )
        found = await sampler.sample(uniform, task=EPISODE, batch_size=5)
        assert "0 rows busy" in repr(sampler)
    wanted = lockstep(RaisingEnv, uniform, [{"task": EPISODE, "batch_size": 5}], seed=0)[0]
    assert_same(found, wanted)


async def test_environment_that_raised_is_closed_and_made_anew() -> None:
    closed: list[Any] = []

    class ClosingEnv(RaisingEnv):
        def close(self) -> None:
            closed.append(self)

    async with in_process(ClosingEnv, rows=1) as sampler:
        task = {"phase": "step", "at": 1}
        await refused(EnvironmentFailedError, sampling=sampler.sample(uniform, task=task))
        assert len(closed) == 1
        assert (await sampler.sample(uniform, batch_size=1)).is_complete


async def test_task_for_an_environment_without_tasks_is_told() -> None:
    async with in_process(EnvWithoutTasks) as sampler:
        await refused(
            EnvironmentFailedError,
            "has neither reset_task(task) nor",
            "leave the task out",
            sampling=sampler.sample(uniform, task={"goal": 1}),
        )


@WORKERS
async def test_task_that_no_worker_can_read_fails_its_sample_alone(num_workers: int) -> None:
    async with AsyncSampler(CountingEnv, num_workers=num_workers, seed=0) as sampler:
        here = not num_workers
        sampling = sampler.sample(
            uniform, task={"number": 1.0, "odd": ReadableHere()}, batch_size=2
        )
        if here:
            assert (await sampling).is_complete
        else:
            await refused(EnvironmentFailedError, "cannot be read", sampling=sampling)
        assert sampler.statistics.restarts == 0


def test_what_stands_for_an_unreadable_task_is_readable_here() -> None:
    assert cloudpickle.loads(cloudpickle.dumps(ReadableHere())) is None


async def test_environment_that_ends_the_process_does_not_end_the_sampler_without_workers() -> None:
    async with in_process(RaisingEnv) as sampler:
        task = {"phase": "step", "at": 1, "error": "exit"}
        await refused(
            EnvironmentFailedError,
            "SystemExit",
            sampling=sampler.sample(uniform, task=task, batch_size=1),
        )
        assert (await sampler.sample(uniform, batch_size=1, task=EPISODE)).is_complete


async def test_row_that_begins_while_a_vectorised_environment_raises_does_begin(
    register: Any,
) -> None:
    """Else its episode would go on with what was in the row before."""
    register("Counting-v0", CountingEnv, vector_entry_point=CountingRowsEnv)
    chance = random.Random(0)

    async def beginning(sampler: AsyncSampler) -> int:
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
        try:
            episodes = await sampler.sample(uniform, batch_size=1)
        except EnvironmentFailedError:
            return 0  # it was being stepped: the exception tells nothing of the row
        assert episodes.observations[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
        return 1

    async with in_process("Counting-v0", rows=8) as sampler:
        num_whole = 0
        for at in range(5):
            for _ in range(10):
                task = {"phase": "step", "at": at}
                failing = asyncio.create_task(sampler.sample(uniform, task=task, batch_size=1))
                num_whole += sum(await asyncio.gather(*(beginning(sampler) for _ in range(6))))
                await refused(EnvironmentFailedError, "refused in step", sampling=failing)
        assert num_whole > 0


async def test_bad_task_of_one_request_leaves_the_others_of_a_vectorised_environment() -> None:
    async with in_process(NAVIGATION, rows=8) as sampler:
        policy = policy_of(sampler)
        for _ in range(5):
            bad = refused(
                EnvironmentFailedError,
                "two finite numbers",
                sampling=sampler.sample(policy, task={"goal": "north"}, batch_size=3),
            )
            good = sampler.sample(policy, task={"goal": (0.1, 0.2)}, batch_size=3)
            _, episodes = await asyncio.gather(bad, good)
            assert episodes.is_complete


@WORKERS
@pytest.mark.parametrize("phase", ["step", "reset_task"])
async def test_vectorised_environment_that_ends_the_process_fails_its_request(
    phase: str, num_workers: int, register: Any
) -> None:
    register("Counting-v0", CountingEnv, vector_entry_point=CountingRowsEnv)
    async with AsyncSampler(
        "Counting-v0", num_workers=num_workers, envs_per_worker=4, max_restarts=0
    ) as sampler:
        task = {"phase": phase, "at": 1, "error": "exit"}
        await refused(
            EnvironmentFailedError,
            "SystemExit",
            sampling=sampler.sample(uniform, task=task, batch_size=1),
        )
        assert (await sampler.sample(uniform, batch_size=6, task={"number": 1.0})).is_complete
        assert sampler.statistics.restarts == 0


# --- numbers that are not finite


@quick_workers
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("place", "step"), [("reset", None), ("step", 1), ("last", 4), ("reward", 1)]
)
async def test_number_that_is_not_finite_is_told(
    place: str, step: int | None, value: float, workers: dict[str, Any]
) -> None:
    task = {"place": place, "value": value}
    async with AsyncSampler(NotFiniteEnv, envs_per_worker=4, seed=0, **workers) as sampler:
        failing = refused(
            NotFiniteError,
            "observation" if place != "reward" else "reward",
            str(value).removeprefix("-"),
            sampling=sampler.sample(uniform, task=task, batch_size=1, seed=7),
        )
        other = sampler.sample(uniform, task=EPISODE, batch_size=6, seed=1)
        found, episodes = await asyncio.gather(failing, other)
    assert (found.task["place"], found.step, found.batch_id) == (place, step, 0)
    assert found.seed == RESET_SEEDS[0]
    assert isinstance(found, ArithmeticError)
    calls = [{"task": EPISODE, "batch_size": 6, "seed": 1}]
    assert_same(episodes, lockstep(NotFiniteEnv, uniform, calls, seed=0)[0])


@WORKERS
async def test_number_that_is_not_finite_is_told_though_the_next_episode_raises(
    num_workers: int,
) -> None:
    async with AsyncSampler(
        NotFiniteThenRaisingEnv, num_workers=num_workers, envs_per_worker=1
    ) as sampler:
        ending = refused(
            NotFiniteError,
            "reward nan",
            sampling=sampler.sample(uniform, batch_size=1, task={"ends with": np.nan}),
        )
        raising = refused(
            EnvironmentFailedError,
            "refused in reset",
            sampling=sampler.sample(uniform, batch_size=1, task={"phase": "reset"}),
        )
        await asyncio.gather(ending, raising)


async def test_exception_after_a_reward_that_is_not_finite_is_told() -> None:
    async with in_process(NotFiniteThenRaisingEnv, rows=1) as sampler:
        await refused(
            EnvironmentFailedError,
            "shape (2,)",
            sampling=sampler.sample(uniform, batch_size=1, task={"shape": "wrong"}),
        )
        assert sampler._engine is not None
        coordinator = sampler._engine._coordinator
        assert coordinator is not None
        # A NaN that is left there would send every later command through the slow test.
        assert np.isfinite(coordinator.lanes[0].arrays.rewards).all()
        assert (await sampler.sample(uniform, batch_size=2, task=EPISODE)).is_complete


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("reset", None),
        ("step", 1),
        ("last", 4),
        ("reward", 1),
    ],
)
def test_lock_step_sampler_tells_a_number_that_is_not_finite(place: str, step: int | None) -> None:
    with BatchSampler(NotFiniteEnv, num_workers=0, batch_size=2) as sampler:
        sampler.reset_task({"place": place})
        with pytest.raises(NotFiniteError, match="nan") as caught:
            sampler.sample(uniform)
    assert (caught.value.batch_id, caught.value.step) == (0, step)


async def test_large_finite_numbers_are_allowed() -> None:
    async with in_process(CountingEnv, env_kwargs={"offset": 3e38}) as sampler:
        assert (await sampler.sample(uniform, batch_size=9)).is_complete


def normal_with(value: float) -> Callable[[Tensor], Distribution]:
    def policy(observations: Tensor) -> Distribution:
        loc = torch.zeros(len(observations), 2)
        loc[0, 1] = value
        return Independent(Normal(loc, 1.0, validate_args=False), 1, validate_args=False)

    return policy


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_action_that_is_not_finite_is_told(value: float) -> None:
    async with in_process(lambda: ActionEnv(Box(-1, 1, (2,)))) as sampler:
        error = await refused(
            NotFiniteError,
            "the policy drew action",
            str(value),
            sampling=sampler.sample(normal_with(value), batch_size=3, seed=7),
        )
        assert (error.step, error.batch_id) == (0, 0)
        assert error.seed == RESET_SEEDS[0]
        assert (await sampler.sample(normal_with(0.0), batch_size=3)).is_complete


async def test_parameters_that_are_not_finite_are_told() -> None:
    policy = policy_of(CartPoleEnv())
    params = {name: value * np.nan for name, value in policy.named_parameters()}
    async with in_process(CARTPOLE) as sampler:
        await refused(NotFiniteError, "nan", sampling=sampler.sample(policy, params))


# --- policies


@pytest.fixture(scope="module")
def cartpole_policy() -> MLPPolicy:
    return policy_of(CartPoleEnv())


def changed(policy: nn.Module, **changes: Any) -> dict[str, Any]:
    params: dict[str, Any] = dict(policy.named_parameters())
    for name, value in changes.items():
        if value is None:
            del params[name.replace("__", ".")]
        else:
            params[name.replace("__", ".")] = value
    return params


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer1__bias": None}, ["lack ['layer1.bias']", "named_parameters"]),
        ({"sigma": torch.zeros(2)}, ["['sigma']", "too many"]),
        ({"layer1__bias": torch.zeros(3)}, ["layer1.bias", "shape (3,)", "(16,)"]),
        ({"layer1__bias": [0.0] * 16}, ["layer1.bias", "list", "torch.Tensor"]),
    ],
)
async def test_parameters_that_do_not_fit_are_told(
    changes: dict[str, Any], words: list[str], cartpole_policy: MLPPolicy
) -> None:
    async with in_process(CARTPOLE) as sampler:
        await refused(
            ParameterError,
            *words,
            sampling=sampler.sample(cartpole_policy, changed(cartpole_policy, **changes)),
        )


async def test_parameters_in_a_list_are_told(cartpole_policy: MLPPolicy) -> None:
    params: Any = list(cartpole_policy.parameters())
    async with in_process(CARTPOLE) as sampler:
        await refused(
            ParameterError,
            "list",
            "dict of parameter name to Tensor",
            sampling=sampler.sample(cartpole_policy, params),
        )


async def test_parameters_for_a_function_without_params_are_told() -> None:
    async with in_process(CARTPOLE) as sampler:
        await refused(
            ParameterError,
            "takes no params",
            "params=None",
            sampling=sampler.sample(uniform, {"bias": torch.zeros(2)}),
        )


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda observations: observations, ["Tensor", "Distribution", "wrap"]),
        (lambda observations: None, ["NoneType", "Distribution"]),
        (
            lambda observations: Categorical(logits=torch.zeros(len(observations), 3)),
            ["Discrete(2)", "over 3 values", "Categorical over 2 actions", "output size"],
        ),
        (
            lambda observations: Normal(torch.zeros(len(observations), 2), 1.0),
            ["Discrete(2)", "Normal", "Categorical over 2 actions"],
        ),
        (lambda observations: Categorical(logits=torch.zeros(2)), ["shape ()", "first axis"]),
        (
            lambda observations: Categorical(logits=torch.zeros(len(observations), 1, 2)),
            ["(1,)", "Categorical over 2 actions"],
        ),
        (
            lambda observations: Gamma(torch.ones(len(observations), 2), torch.ones(2)),
            ["Gamma", "row by row", "Normal"],
        ),
        (lambda observations: 1 / 0, ["policy raised ZeroDivisionError"]),
        (lambda observations: observations @ torch.zeros(3, 3), ["policy raised RuntimeError"]),
    ],
)
async def test_policy_that_does_not_fit_is_told(policy: Any, words: list[str]) -> None:
    async with in_process(CARTPOLE) as sampler:
        await refused(PolicyError, *words, sampling=sampler.sample(policy))


@pytest.mark.parametrize("failing_first", [True, False])
@WORKERS
async def test_policy_that_fails_leaves_the_other_requests(
    num_workers: int, failing_first: bool
) -> None:
    """Also where it had all rows, and the others none yet."""
    async with AsyncSampler(
        CARTPOLE, num_workers=num_workers, envs_per_worker=4, seed=0
    ) as sampler:
        fails = refused(PolicyError, sampling=sampler.sample(dividing, batch_size=4, seed=2))
        other = sampler.sample(uniform, batch_size=5, seed=1)
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*((fails, other) if failing_first else (other, fails)))
    calls = [{"batch_size": 5, "seed": 1}]
    episodes = results[1 if failing_first else 0]
    assert_same(episodes, lockstep(CARTPOLE, uniform, calls, seed=0)[0])


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (1, ["Box", "(1,)", "real actions of shape (2,)"]),
        (3, ["Box", "(3,)", "real actions of shape (2,)"]),
    ],
)
async def test_normal_of_the_wrong_size_is_told(size: int, words: list[str]) -> None:
    def policy(observations: Tensor) -> Distribution:
        return Independent(Normal(torch.zeros(len(observations), size), 1.0), 1)

    async with in_process(lambda: ActionEnv(Box(-1, 1, (2,)))) as sampler:
        await refused(PolicyError, *words, sampling=sampler.sample(policy))


async def test_categorical_for_several_choices_must_have_them_all() -> None:
    async with in_process(lambda: ActionEnv(MultiDiscrete([2, 4]))) as sampler:
        await refused(
            PolicyError,
            "MultiDiscrete",
            "Independent Categorical of shape (2,)",
            sampling=sampler.sample(uniform),
        )


async def test_what_cannot_be_called_is_no_policy() -> None:
    policy: Any = {"weight": 1}
    async with in_process(CARTPOLE) as sampler:
        await refused(PolicyError, "weight", "wanted a callable", sampling=sampler.sample(policy))


async def test_module_that_cannot_be_copied_is_told() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part_of_a_graph = torch.ones(1, requires_grad=True) * 2

        def forward(self, observations: Tensor) -> Distribution:
            return uniform(observations)

    async with in_process(CARTPOLE) as sampler:
        await refused(
            PolicyError, "Holding", "could not be copied", sampling=sampler.sample(Holding())
        )


@WORKERS
async def test_policy_that_fails_leaves_nothing_to_the_next_request(num_workers: int) -> None:
    def failing_later(observations: Tensor) -> Distribution:
        return uniform(observations) if observations[0, 0] < 2 else dividing(observations)

    async with AsyncSampler(
        CountingEnv, num_workers=num_workers, envs_per_worker=4, seed=0
    ) as sampler:
        for policy in (dividing, failing_later):
            await refused(PolicyError, sampling=sampler.sample(policy, batch_size=6, seed=2))
            episodes = await sampler.sample(uniform, batch_size=6, seed=1)
            assert episodes.observations[:, :, 0].T.tolist() == [[0, 1, 2, 3, 4]] * 6
    calls = [{"batch_size": 6, "seed": 1}]
    assert_same(episodes, lockstep(CountingEnv, uniform, calls, seed=0)[0])


async def test_policy_that_ends_the_process_fails_its_sample_alone() -> None:
    def policy(observations: Tensor) -> Distribution:
        raise SystemExit(3)

    async with in_process(CARTPOLE) as sampler:
        await refused(PolicyError, "SystemExit", sampling=sampler.sample(policy))
        assert (await sampler.sample(uniform, batch_size=2)).is_complete


def dividing(observations: Tensor) -> Distribution:
    raise ZeroDivisionError


async def test_exception_of_the_policy_is_the_cause() -> None:
    async with in_process(CARTPOLE) as sampler:
        error = await refused(PolicyError, sampling=sampler.sample(dividing))
    assert isinstance(error.__cause__, ZeroDivisionError)


# --- state and event loops


def test_sampler_of_a_loop_that_is_closed_is_told() -> None:
    """Forgotten without close, and used in a second run."""
    samplers = []

    async def first() -> None:
        sampler = in_process(CARTPOLE)
        await sampler.start()
        samplers.append(sampler)

    async def second() -> None:
        await refused(
            EventLoopError,
            "event loop that is closed now",
            "one sampler in each event loop",
            sampling=samplers[0].sample(uniform),
        )
        await samplers[0].close()

    asyncio.run(first())
    asyncio.run(second())


async def test_sampler_of_another_thread_is_told() -> None:
    async def use() -> None:
        await refused(
            EventLoopError,
            "runs elsewhere",
            "run_coroutine_threadsafe",
            sampling=sampler.sample(uniform),
        )

    async with in_process(CARTPOLE) as sampler:
        await asyncio.to_thread(asyncio.run, use())


async def test_result_that_cannot_be_finished_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: nobody is left to wait for ever."""

    def fail(request: Request, statistics: Statistics) -> None:
        message = "as many tensors as that"
        raise MemoryError(message)

    monkeypatch.setattr(Request, "finished", fail)
    async with in_process(CountingEnv) as sampler:
        found = await refused(
            AsyncMAMLError, "fault in the sampler", sampling=sampler.sample(uniform)
        )
    assert isinstance(found.__cause__, MemoryError)


async def test_sampler_that_is_still_starting_is_told() -> None:
    sampler = in_process(CARTPOLE)
    starting = asyncio.create_task(sampler.start())
    await asyncio.sleep(0)
    await refused(SamplerStateError, "still starting", sampling=sampler.sample(uniform))
    await starting
    await sampler.close()


async def test_sampler_that_could_not_start_is_closed() -> None:
    sampler = in_process(DictEnv)
    with pytest.raises(UnsupportedSpaceError):
        await sampler.start()
    await refused(SamplerStateError, "closed", sampling=sampler.sample(uniform))
    await sampler.close()
