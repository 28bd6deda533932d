"""Data that is not what the spaces say: told at the step where it enters."""

from typing import Any

import numpy as np
import pytest
from fakes import CountingEnv, CountingRowsEnv
from faulty import ReturningEnv
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from oracle import uniform
from torch import Tensor, full, ones
from torch.distributions import Distribution, Independent, Normal

from asyncmaml import AsyncSampler, policy_for_spaces
from asyncmaml.errors import EnvironmentFailedError, OutOfSpaceError

pytestmark = pytest.mark.usefixtures("quick_workers")

UNIT = Box(-1, 1, (2,), np.float32)
BYTES = Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("space", "good", "value"),
    [
        (UNIT, np.zeros(2), np.array([0, 1.5])),
        (UNIT, [0, 0], [0, -2]),
        (Discrete(3, start=1), 1, 0),
        (Discrete(3), 2, 3),
        (Box(0, 100, (2,), np.uint8), np.zeros(2, np.uint8), np.full(2, 101, np.uint8)),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
async def test_observation_outside_of_its_space_is_told_where_that_is_checked(
    space: Any, good: Any, value: Any, num_workers: int
) -> None:
    def make() -> ReturningEnv:
        return ReturningEnv(space, good, value)

    arguments: dict[str, Any] = {"num_workers": num_workers, "envs_per_worker": 2, "batch_size": 3}
    async with AsyncSampler(make, **arguments, check_spaces=True) as sampler:
        with pytest.raises(OutOfSpaceError, match=r"step failed.* lies outside of ") as caught:
            await sampler.sample(uniform)
        assert caught.value.step == 1
        assert caught.value.seed is not None
        assert "0 rows busy" in repr(sampler)
    async with AsyncSampler(make, **arguments) as sampler:
        assert (await sampler.sample(uniform)).is_complete


async def test_first_observation_outside_of_its_space_is_told() -> None:
    async with AsyncSampler(
        lambda: ReturningEnv(UNIT, np.zeros(2), np.full(2, 7.0), at=0),
        num_workers=1,
        check_spaces=True,
    ) as sampler:
        with pytest.raises(OutOfSpaceError, match=r"reset failed.* \[7\. 7\.\] lies") as caught:
            await sampler.sample(uniform)
    assert caught.value.step is None


@pytest.mark.parametrize("at", [5, 0])
async def test_last_and_next_observation_are_told_apart(at: int) -> None:
    """The first episode of a row ends in the step in which its second one begins."""

    class OnlySecondEnv(ReturningEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.resets = getattr(self, "resets", -1) + 1
            self.at = at if self.resets == 1 else -1
            return super().reset(seed=seed)

    async with AsyncSampler(
        lambda: OnlySecondEnv(UNIT, np.zeros(2), np.full(2, 7.0), -1),
        num_workers=0,
        envs_per_worker=1,
        check_spaces=True,
    ) as sampler:
        with pytest.raises(OutOfSpaceError) as caught:
            await sampler.sample(uniform, batch_size=3)
    assert caught.value.batch_id == 1
    assert caught.value.step == (4 if at == 5 else None)


class RowsWithSpaceEnv(CountingRowsEnv):
    def __init__(self, num_envs: int, max_episode_steps: int | None = None) -> None:
        super().__init__(num_envs, max_episode_steps)
        self.single_observation_space = Box(0, 3.5, (3,), np.float32)


async def test_vectorised_row_outside_of_its_space_fails_its_request_alone(register: Any) -> None:
    register("Rows-v0", entry_point=CountingEnv, vector_entry_point=RowsWithSpaceEnv)
    async with AsyncSampler("Rows-v0", num_workers=0, check_spaces=True) as sampler:
        with pytest.raises(OutOfSpaceError, match=r"\[4\..* lies outside") as caught:
            await sampler.sample(uniform, batch_size=4)
    assert caught.value.step == 3


def too_large(observations: Tensor) -> Distribution:
    return Independent(Normal(full((len(observations), 2), 9.0), 1e-3 * ones(2)), 1)


async def test_action_outside_of_its_space_is_told_where_none_is_clipped() -> None:
    def make() -> CountingEnv:
        env = CountingEnv()
        env.action_space = Box(-1, 1, (2,), np.float32)
        return env

    async with AsyncSampler(make, num_workers=0, clip_actions=False, check_spaces=True) as sampler:
        with pytest.raises(OutOfSpaceError, match=r"the action \[.*\] lies outside") as caught:
            await sampler.sample(too_large)
        assert caught.value.step == 0
    async with AsyncSampler(make, num_workers=0, check_spaces=True) as sampler:
        assert (await sampler.sample(too_large)).is_complete


# --- always checked


@pytest.mark.parametrize(
    ("space", "good", "value", "words"),
    [
        (BYTES, np.zeros(2, np.uint8), np.array([0.5, 2]), "dtype float64, and as uint8"),
        (BYTES, np.zeros(2, np.uint8), np.array([0, 256]), "dtype int64, and as uint8"),
        (BYTES, [0, 0], [-1, 0], "dtype int64, and as uint8"),
        (BYTES, [0, 0], [np.nan, 0], "dtype float64, and as uint8"),
        (Discrete(3), 0, 0.5, "dtype float64, and as int64"),
        (UNIT, np.zeros(2), np.zeros((1, 2)), r"shape \(1, 2\), .* says \(2,\)"),
        (UNIT, np.zeros(2), 0.0, r"shape \(\), .* says \(2,\)"),
        (UNIT, np.zeros(2), None, r"shape \(\), .* says \(2,\)"),
    ],
)
async def test_observation_that_its_dtype_or_shape_cannot_hold_is_told(
    space: Any, good: Any, value: Any, words: str
) -> None:
    async with AsyncSampler(
        lambda: ReturningEnv(space, good, value), num_workers=0, batch_size=3
    ) as sampler:
        with pytest.raises(EnvironmentFailedError, match=f"(?s)step failed.*{words}") as caught:
            await sampler.sample(uniform)
    assert caught.value.step == 1


@pytest.mark.parametrize("value", [np.array([3, 200]), np.array([3.0, 200.0]), [3, 200]])
async def test_observation_of_another_dtype_that_can_be_held_is_taken(value: Any) -> None:
    async with AsyncSampler(
        lambda: ReturningEnv(BYTES, [0, 0], value), num_workers=0, batch_size=3
    ) as sampler:
        episodes = await sampler.sample(uniform)
    assert episodes.observations[2].tolist() == [[3, 200]] * 3


class NarrowRowsEnv(CountingRowsEnv):
    def step(self, actions: Any) -> Any:
        observations, *rest = super().step(actions)
        return observations[:, :1], *rest


async def test_vectorised_observations_of_another_shape_are_told(register: Any) -> None:
    register("Rows-v0", entry_point=CountingEnv, vector_entry_point=NarrowRowsEnv)
    async with AsyncSampler("Rows-v0", num_workers=0, envs_per_worker=4) as sampler:
        with pytest.raises(EnvironmentFailedError, match=r"shape \(4, 1\), .* says \(4, 3\)"):
            await sampler.sample(uniform, batch_size=4)


async def test_actions_of_a_multi_discrete_space_pass_the_check() -> None:
    def make() -> CountingEnv:
        env = CountingEnv()
        env.action_space = MultiDiscrete([2, 3])
        return env

    policy = policy_for_spaces(make().observation_space, make().action_space)
    async with AsyncSampler(make, num_workers=0, check_spaces=True, batch_size=3) as sampler:
        assert (await sampler.sample(policy)).is_complete
