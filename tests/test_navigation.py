"""2D navigation: the dynamics by hand, and the two forms of it against each other."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from asyncmaml.envs import navigation
from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.navigation import Navigation2DEnv, Navigation2DVectorEnv
from asyncmaml.envs.rows import RowVectorEnv
from asyncmaml.errors import ConfigurationError

BAD_TASKS = [
    None,
    {},
    {"goal": 0.1},
    {"goal": [0.1, 0.2, 0.3]},
    {"goal": [0.1, np.nan]},
    {"goal": "x"},
]


def action(x: float, y: float) -> NDArray[np.float32]:
    return np.array([x, y], np.float32)


def made(**env_kwargs: Any) -> gymnasium.Env[Any, Any]:
    return EnvMaker.resolve("asyncmaml/Navigation2D-v0", env_kwargs).make()


def made_rows(num_rows: int, **env_kwargs: Any) -> RowVectorEnv:
    rows = EnvMaker.resolve("asyncmaml/Navigation2D-v0", env_kwargs).make_rows(num_rows)
    assert rows is not None
    return rows


def test_constants_are_those_of_finn_et_al() -> None:
    env = made()
    assert (navigation.LONGEST_MOVE, navigation.GOAL_TOLERANCE) == (0.1, 0.01)
    assert env.get_wrapper_attr("_max_episode_steps") == 100
    np.testing.assert_array_equal(env.action_space.high, action(0.1, 0.1))  # type: ignore[attr-defined]
    goals = np.array([task["goal"] for task in env.get_wrapper_attr("sample_tasks")(2000)])
    assert -0.5 <= goals.min() < -0.49
    assert 0.49 < goals.max() <= 0.5


def test_step_moves_by_the_action_and_rewards_minus_the_distance_after_it() -> None:
    env = Navigation2DEnv(task={"goal": (0.35, 0.45)})
    env.reset(seed=0)
    # From the origin to (0.05, 0.05): 0.3 and 0.4 away, so 0.5 in all.
    observation, reward, terminated, truncated, info = env.step(action(0.05, 0.05))
    np.testing.assert_allclose(observation, [0.05, 0.05])
    assert reward == pytest.approx(-0.5)
    assert (terminated, truncated, info) == (False, False, {})
    assert observation.dtype == np.float32
    assert type(reward) is float
    assert type(terminated) is bool


def test_action_is_clipped_on_each_axis() -> None:
    env = Navigation2DEnv()
    env.reset()
    observation, *_ = env.step(action(-7.0, 0.03))
    np.testing.assert_array_equal(observation, action(-0.1, 0.03))


def test_action_scale_multiplies_before_the_clip() -> None:
    env = Navigation2DEnv(action_scale=0.1)
    env.reset()
    np.testing.assert_allclose(env.step(action(0.5, -3.0))[0], [0.05, -0.1])
    np.testing.assert_array_equal(env.action_space.high, [1.0, 1.0])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("x", "y", "ended"), [(0.0099, 0.0099, True), (0.0101, 0.0, False), (0.0, -0.0101, False)]
)
def test_termination_is_a_box_around_the_goal(x: float, y: float, ended: bool) -> None:
    env = Navigation2DEnv(task={"goal": (0.05, 0.05)})
    env.reset()
    assert env.step(action(0.05 + x, 0.05 + y))[2] is ended


def test_goal_is_never_in_the_observation() -> None:
    observations = []
    for goal in ((0.3, 0.4), (-0.2, 0.1)):
        env = Navigation2DEnv(task={"goal": goal})
        observations.append([env.reset()[0], *(env.step(action(0.1, 0.0))[0] for _ in range(5))])
    np.testing.assert_array_equal(observations[0], observations[1])


def test_episode_is_truncated_at_100_steps() -> None:
    env, rows = made(), made_rows(1)
    env.reset()
    rows.reset()
    ends = [(env.step(action(0, 0))[3], rows.step(np.zeros((1, 2)))[3].item()) for _ in range(100)]
    assert ends == [(False, False)] * 99 + [(True, True)]


def test_rows_without_a_time_limit_are_never_truncated() -> None:
    rows = Navigation2DVectorEnv(2, max_episode_steps=None)
    assert not any(rows.step(np.zeros((2, 2)))[3].any() for _ in range(150))


def test_task_survives_the_reset() -> None:
    env = made()
    env.reset(seed=1)
    env.get_wrapper_attr("reset_task")({"goal": (0.0, 0.3)})
    env.reset(seed=2)
    assert env.step(action(0.0, 0.0))[1] == pytest.approx(-0.3)


def test_reset_task_leaves_the_point_where_it_is() -> None:
    env = Navigation2DEnv()
    env.reset()
    env.step(action(0.1, 0.0))
    env.reset_task({"goal": (0.1, 0.2)})
    assert env.step(action(0.0, 0.0))[1] == pytest.approx(-0.2)


def test_without_a_task_the_goal_is_the_corner() -> None:
    env, rows = Navigation2DEnv(high=0.4), Navigation2DVectorEnv(1, high=0.4)
    assert env.step(action(0.1, 0.1))[1] == pytest.approx(-0.3 * np.sqrt(2))
    assert rows.step(np.full((1, 2), 0.1))[1].item() == pytest.approx(-0.3 * np.sqrt(2))


def test_same_seed_samples_the_same_tasks() -> None:
    first, second = Navigation2DEnv(), Navigation2DEnv()
    first.reset(seed=3)
    second.reset(seed=3)
    goals = [[task["goal"] for task in env.sample_tasks(5)] for env in (first, second)]
    np.testing.assert_array_equal(goals[0], goals[1])
    assert goals[0][0].dtype == np.float32


@pytest.mark.parametrize("task", BAD_TASKS)
def test_bad_task_is_refused_and_the_old_one_kept(task: Any) -> None:
    env, rows = Navigation2DEnv(), Navigation2DVectorEnv(2)
    with pytest.raises(ConfigurationError, match=r"Navigation2D cannot set the task .* pass"):
        env.reset_task(task)
    with pytest.raises(ConfigurationError, match="two finite numbers"):
        rows.reset_task(task, np.array([True, False]))
    np.testing.assert_array_equal(env._goal, [[0.5, 0.5]])
    np.testing.assert_array_equal(rows._goals, np.full((2, 2), 0.5))


@pytest.mark.parametrize(
    "settings",
    [
        {"low": 1.0, "high": 0.0},
        {"high": np.inf},
        {"low": "0"},
        {"action_scale": 0.0},
        {"action_scale": "0.1"},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Navigation2D"):
        Navigation2DEnv(**settings)
    with pytest.raises(ConfigurationError, match="Navigation2D"):
        Navigation2DVectorEnv(2, **settings)


# The checker recommends bounded observations and actions in [-1, 1].
@pytest.mark.filterwarnings("ignore:.*(infinity|symmetric and normalized):UserWarning")
def test_gymnasium_finds_nothing_wrong() -> None:
    check_env(made().unwrapped)


def test_single_and_vectorised_form_agree_bit_for_bit_over_ragged_episodes() -> None:
    """Against Gymnasium's own vector environment too, with a task for each row and episode."""
    num_rows, num_ticks = 7, 300
    numbers = np.random.default_rng(0)
    settings = {"action_scale": 0.7, "low": -0.3, "high": 0.3}
    spec = EnvMaker.resolve("asyncmaml/Navigation2D-v0", settings, max_episode_steps=23)
    rows = spec.make_rows(num_rows)
    assert rows is not None
    singles = [spec.make() for _ in range(num_rows)]
    sync = SyncVectorEnv([spec.make] * num_rows, autoreset_mode=AutoresetMode.DISABLED)
    goals = np.full((num_rows, 2), 0.3, np.float32)
    lengths: list[int] = []
    steps = np.zeros(num_rows, np.int64)

    starting = np.ones(num_rows, np.bool_)
    for _ in range(num_ticks):
        if starting.any():
            seeds = [int(numbers.integers(1000)) if row else None for row in starting]
            for row in np.flatnonzero(starting):
                goals[row] = numbers.uniform(-0.3, 0.3, 2)
                task = {"goal": goals[row].copy()}
                rows.reset_task(task, np.arange(num_rows) == row)
                singles[row].get_wrapper_attr("reset_task")(task)
                sync.envs[row].get_wrapper_attr("reset_task")(task)
                singles[row].reset(seed=seeds[row])
            observed, info = rows.reset(seed=seeds, options={"reset_mask": starting})
            expected, _ = sync.reset(seed=seeds, options={"reset_mask": starting})
            np.testing.assert_array_equal(observed, expected)
            assert info == {}
            steps[starting] = 0
        # Half of the rows walk to their goals and end early.
        actions = numbers.normal(0, 0.1, (num_rows, 2)).astype(np.float32)
        actions[::2] += (goals - observed)[::2]
        by_rows, by_sync = rows.step(actions), sync.step(actions)
        by_single = [single.step(row) for single, row in zip(singles, actions, strict=True)]
        for part in range(4):  # observation, reward, terminated, truncated
            np.testing.assert_array_equal(by_rows[part], [single[part] for single in by_single])
            np.testing.assert_array_equal(by_rows[part], by_sync[part])
        observed = by_rows[0]
        steps += 1
        starting = by_rows[2] | by_rows[3]
        lengths += steps[starting].tolist()
    assert 23 in lengths
    assert min(lengths) < 10


def test_reset_touches_the_masked_rows_only() -> None:
    rows = Navigation2DVectorEnv(3, max_episode_steps=2)
    rows.step(np.full((3, 2), 0.1, np.float32))
    observations, _ = rows.reset(
        seed=[None, 5, None], options={"reset_mask": np.array([False, True, False])}
    )
    np.testing.assert_allclose(observations, [[0.1, 0.1], [0.0, 0.0], [0.1, 0.1]])
    assert rows.step(np.zeros((3, 2)))[3].tolist() == [True, False, True]


def test_task_is_given_to_the_masked_rows_only() -> None:
    rows = Navigation2DVectorEnv(3, task={"goal": (0.0, 0.3)})
    rows.reset_task({"goal": (0.4, 0.0)}, np.array([False, False, True]))
    np.testing.assert_allclose(rows.step(np.zeros((3, 2)))[1], [-0.3, -0.3, -0.4])


def test_idle_rows_are_stepped_without_warnings_whatever_the_action() -> None:
    rows = Navigation2DVectorEnv(2, max_episode_steps=1)
    rows.reset()
    for value in (np.nan, np.inf, -np.inf, np.finfo(np.float32).max):
        rows.step(np.array([[value, value], [0.05, 0.0]], np.float32))
    observations, _ = rows.reset(options={"reset_mask": np.array([True, False])})
    np.testing.assert_allclose(observations, [[0.0, 0.0], [0.2, 0.0]])


def test_what_was_returned_is_the_callers_own() -> None:
    rows = Navigation2DVectorEnv(2)
    first, _ = rows.reset()
    second = rows.step(np.full((2, 2), 0.1, np.float32))
    kept = [array.copy() for array in second[:4]]
    rows.step(np.full((2, 2), 0.1, np.float32))
    rows.reset()
    first += 1  # nor does writing into it reach the environment
    np.testing.assert_array_equal(rows.reset()[0], np.zeros((2, 2)))
    for array, copied in zip(second[:4], kept, strict=True):
        np.testing.assert_array_equal(array, copied)
