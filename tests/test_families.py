"""The contract of every registered family of tasks; a new one is found by itself."""

import copy
import ctypes.util
import math
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.typing import ArrayLike, NDArray
from oracle import assert_same, policy_of
from processes import run_script

import asyncmaml.envs  # noqa: F401  (registers the families)
from asyncmaml import AsyncSampler, BatchSampler
from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.tasks import sample_tasks
from asyncmaml.errors import ConfigurationError, MissingExtraError

Env = gymnasium.Env[Any, Any]

# Meta-World comes with an extra of its own, and where objects lie is part of its tasks:
# test_meta_world.py has its contract.
FAMILIES = sorted(
    env_id
    for env_id in gymnasium.registry
    if env_id.startswith("asyncmaml/") and "MetaWorld" not in env_id
)
MUJOCO = [env_id for env_id in FAMILIES if "Cheetah" in env_id or "Ant" in env_id]
VECTORISED = [env_id for env_id in FAMILIES if gymnasium.spec(env_id).vector_entry_point]

# Of these a task says how states follow each other; of all others, what is rewarded.
TASKS_OF_DYNAMICS = {"asyncmaml/TabularMDP-v0"}

# Settings under which the two forms are compared on top of the defaults.
MORE_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "asyncmaml/Bandit-v0": [{"k": 3, "distribution": "gaussian", "std": 0.5}],
    "asyncmaml/TabularMDP-v0": [{"num_states": 3, "num_actions": 2, "reward_std": 0.0}],
    "asyncmaml/Navigation2D-v0": [{"action_scale": 0.1}],
}


@cache
def env_of(env_id: str) -> Env:
    """Return the environment that the tests of this module share."""
    return EnvMaker.resolve(env_id).make()


@cache
def two_tasks(env_id: str) -> tuple[Any, Any]:
    """Return two tasks that differ."""
    first, *others = sample_tasks(env_of(env_id), 20, seed=0)
    return first, next(task for task in others if pickle.dumps(task) != pickle.dumps(first))


def set_task(env: Env, task: Any) -> None:
    env.get_wrapper_attr("reset_task")(task)


def walk(env: Env, seed: int, num_steps: int = 6) -> list[tuple[Any, ...]]:
    """Return the first observation, and what the steps with some actions return."""
    env.action_space.seed(seed)
    walked: list[tuple[Any, ...]] = [(env.reset(seed=seed)[0],)]
    for _ in range(num_steps):
        walked.append(env.step(env.action_space.sample())[:4])
        if walked[-1][2] or walked[-1][3]:
            break
    return walked


def rewards_of(env: Env) -> list[float]:
    """Return the rewards of a few episodes of some actions."""
    return [step[1] for seed in range(12) for step in walk(env, seed)[1:]]


def observations_of(walked: list[tuple[Any, ...]]) -> list[Any]:
    return [step[0] for step in walked]


def test_every_family_of_the_contract_is_registered() -> None:
    names = "Bandit TabularMDP Navigation2D HalfCheetahDir HalfCheetahVel AntDir AntVel AntGoal"
    assert {f"asyncmaml/{name}-v0" for name in names.split()} <= set(FAMILIES)
    assert set(VECTORISED) >= set(FAMILIES) - set(MUJOCO)


@pytest.mark.parametrize("env_id", FAMILIES)
def test_task_survives_resets(env_id: str) -> None:
    env = env_of(env_id)
    first, second = two_tasks(env_id)
    set_task(env, first)
    rewards = rewards_of(env)
    assert rewards_of(env) == rewards
    set_task(env, second)
    assert rewards_of(env) != rewards
    set_task(env, first)
    assert rewards_of(env) == rewards


@pytest.mark.parametrize("env_id", FAMILIES)
def test_first_task_may_be_given_to_the_constructor(env_id: str) -> None:
    task = two_tasks(env_id)[0]
    set_task(env_of(env_id), task)
    made = EnvMaker.resolve(env_id, {"task": task}).make()
    assert rewards_of(made) == rewards_of(env_of(env_id))


@pytest.mark.parametrize("env_id", FAMILIES)
def test_first_observation_does_not_depend_on_the_task(env_id: str) -> None:
    env = env_of(env_id)
    starts = []
    for task in two_tasks(env_id):
        set_task(env, task)
        starts.append(env.reset(seed=4)[0])
    np.testing.assert_array_equal(*starts)


@pytest.mark.parametrize("env_id", sorted(set(FAMILIES) - TASKS_OF_DYNAMICS))
def test_no_observation_depends_on_the_task(env_id: str) -> None:
    env = env_of(env_id)
    walks = []
    for task in two_tasks(env_id):
        set_task(env, task)
        walks.append([walk(env, seed) for seed in range(12)])
    rewards = [[step[1] for walked in each for step in walked[1:]] for each in walks]
    assert rewards[0] != rewards[1]
    for walked, other in zip(*walks, strict=True):
        length = min(len(walked), len(other))  # one of them may have reached its goal
        np.testing.assert_array_equal(
            observations_of(walked)[:length], observations_of(other)[:length]
        )


@pytest.mark.parametrize("env_id", FAMILIES)
def test_observations_fit_the_space_and_are_the_callers_own(env_id: str) -> None:
    env = env_of(env_id)
    observation, _ = env.reset(seed=0)
    kept = observation.copy()
    assert env.observation_space.contains(observation)
    observation, reward, *_ = env.step(env.action_space.sample())
    assert env.observation_space.contains(observation)
    assert isinstance(reward, float)
    np.testing.assert_array_equal(kept, env.reset(seed=0)[0])


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("env_id", FAMILIES)
async def test_episodes_are_the_same_for_any_number_of_workers_and_in_lock_step(
    env_id: str,
) -> None:
    policy = policy_of(env_of(env_id), hidden_sizes=(8,))
    task = two_tasks(env_id)[1]
    settings: dict[str, Any] = {"batch_size": 5, "seed": 11, "max_episode_steps": 7}
    with BatchSampler(env_id, num_workers=0, num_envs=2, **settings) as lockstep:
        lockstep.reset_task(task)
        wanted = lockstep.sample(policy)
    for workers in (0, 2):
        async with AsyncSampler(  # from a fork server since that is quicker, and nothing else
            env_id, num_workers=workers, envs_per_worker=2, start_method="forkserver", **settings
        ) as sampler:
            assert_same(await sampler.sample(policy, task=task), wanted)


@pytest.mark.parametrize("env_id", FAMILIES)
def test_tasks_are_drawn_by_the_seed_alone(env_id: str) -> None:
    env = env_of(env_id)
    first, again, other = (pickle.dumps(sample_tasks(env, 40, seed)) for seed in (5, 5, 6))
    assert first == again != other


# --- The distributions of tasks, as documented.


def distance_to(cdf: Callable[[NDArray[Any]], NDArray[Any]], values: ArrayLike) -> float:
    """Return Kolmogorov and Smirnov's distance times the root of the number of values."""
    ordered = np.sort(np.ravel(values))
    steps = np.arange(len(ordered) + 1) / len(ordered)
    wanted = cdf(ordered)
    distance = max(np.abs(steps[1:] - wanted).max(), np.abs(steps[:-1] - wanted).max())
    return float(distance * math.sqrt(len(ordered)))


def is_uniform(values: ArrayLike, low: float, high: float) -> bool:
    """Tell whether the values may be uniform; one seed in a thousand would be refused."""
    return distance_to(lambda ordered: np.clip((ordered - low) / (high - low), 0, 1), values) < 1.95


def is_normal(values: ArrayLike, mean: float, deviation: float) -> bool:
    """Tell whether the values may be normal; one seed in a thousand would be refused."""

    def cdf(ordered: NDArray[Any]) -> NDArray[Any]:
        scaled = ((ordered - mean) / (deviation * math.sqrt(2))).tolist()
        return np.array([(1 + math.erf(each)) / 2 for each in scaled])

    return distance_to(cdf, values) < 1.95


def values(tasks: list[dict[str, Any]], key: str) -> NDArray[Any]:
    assert all(list(task) == [key] for task in tasks)
    return np.array([task[key] for task in tasks])


def is_flat_dirichlet(tasks: list[dict[str, Any]]) -> bool:
    """Tell by the first of 10 numbers, Beta(1, 9), in each line, and the second given the first."""
    lines = np.array([task["transitions"] for task in tasks]).reshape(-1, 10)
    first, rest = lines[:, 0], lines[:, 1] / (1 - lines[:, 0])
    np.testing.assert_allclose(lines.sum(axis=1), 1)
    return (
        distance_to(lambda ordered: 1 - (1 - ordered) ** 9, first) < 1.95
        and distance_to(lambda ordered: 1 - (1 - ordered) ** 8, rest) < 1.95
    )


def are_directions(tasks: list[dict[str, Any]]) -> bool:
    directions = values(tasks, "direction")
    deviation = math.sqrt(len(tasks))
    return set(directions.tolist()) == {-1.0, 1.0} and bool(abs(directions.sum()) < 3.3 * deviation)


DISTRIBUTIONS: dict[str, Callable[[list[dict[str, Any]]], bool]] = {
    "asyncmaml/Bandit-v0": lambda tasks: (
        values(tasks, "mean").shape[1:] == (10,) and is_uniform(values(tasks, "mean"), 0, 1)
    ),
    "asyncmaml/TabularMDP-v0": lambda tasks: (
        is_flat_dirichlet(tasks)
        and is_normal([task["rewards_mean"] for task in tasks], 1, 1)
        and tasks[0]["transitions"].shape == (10, 5, 10)
        and tasks[0]["rewards_mean"].shape == (10, 5)
    ),
    "asyncmaml/Navigation2D-v0": lambda tasks: all(
        is_uniform(column, -0.5, 0.5) for column in values(tasks, "goal").T
    ),
    "asyncmaml/HalfCheetahDir-v0": are_directions,
    "asyncmaml/AntDir-v0": are_directions,
    "asyncmaml/HalfCheetahVel-v0": lambda tasks: is_uniform(values(tasks, "velocity"), 0, 2),
    "asyncmaml/AntVel-v0": lambda tasks: is_uniform(values(tasks, "velocity"), 0, 3),
    "asyncmaml/AntGoal-v0": lambda tasks: all(
        is_uniform(column, -3, 3) for column in values(tasks, "goal").T
    ),
}


@pytest.mark.parametrize("env_id", FAMILIES)
def test_tasks_are_drawn_from_the_documented_distribution(env_id: str) -> None:
    num_tasks = 100 if env_id in TASKS_OF_DYNAMICS else 2000
    assert DISTRIBUTIONS[env_id](sample_tasks(env_of(env_id), num_tasks, seed=0))


@pytest.mark.parametrize(
    "wrong", [np.linspace(0, 0.9, 2000), np.full(2000, 0.5), np.random.default_rng(0).random(2000)]
)
def test_other_distributions_would_be_noticed(wrong: NDArray[Any]) -> None:
    assert not (is_uniform(wrong, 0, 1) and is_normal(wrong, 0.5, 1 / math.sqrt(12)))


# --- Bad tasks.


def bad_tasks(good: dict[str, Any]) -> list[Any]:
    """Return a good task with each of its values spoilt, and what is no task at all."""
    spoilt: list[Any] = [None, {}, 3, "x", [good]]
    for key, value in good.items():
        for wrong in (
            "x",
            None,
            np.full(np.shape(value), np.nan),
            np.full(np.shape(value), np.inf),
            np.zeros((*np.shape(value), 1)),
            np.zeros((7, 7)),
        ):
            spoilt.append(good | {key: wrong})
        spoilt.append({other: good[other] for other in good if other != key})
    return spoilt


@pytest.mark.parametrize("env_id", FAMILIES)
def test_bad_task_is_refused_by_name_and_the_old_one_kept(env_id: str) -> None:
    env = env_of(env_id)
    good = two_tasks(env_id)[0]
    set_task(env, good)
    rewards = rewards_of(env)
    name = env_id.removeprefix("asyncmaml/").removesuffix("-v0")
    for task in bad_tasks(good):
        with pytest.raises(
            ConfigurationError, match=rf"(?s){name} cannot set the task .*sample_tasks"
        ):
            set_task(env, task)
    assert rewards_of(env) == rewards


@pytest.mark.parametrize("env_id", VECTORISED)
def test_rows_refuse_a_bad_task_and_keep_theirs(env_id: str) -> None:
    maker = EnvMaker.resolve(env_id)
    rows = maker.make_rows(2)
    assert rows is not None
    first, second = two_tasks(env_id)
    rows.reset_task(first)
    for task in bad_tasks(second):
        with pytest.raises(ConfigurationError, match=r"(?s)cannot set the task .*sample_tasks"):
            rows.reset_task(task, np.array([True, False]))
    single = maker.make()
    set_task(single, first)
    single.action_space.seed(0)
    actions = np.stack([single.action_space.sample()] * 2)
    for seed in range(10):
        rows.reset(seed=[seed, seed])
        single.reset(seed=seed)
        assert rows.step(actions)[1].tolist() == [single.step(actions[0])[1]] * 2


# --- The two forms.


@pytest.mark.parametrize(
    ("env_id", "settings"),
    [(env_id, each) for env_id in VECTORISED for each in [{}, *MORE_SETTINGS.get(env_id, [])]],
    ids=str,
)
@pytest.mark.parametrize("max_episode_steps", [1, 7])
def test_forms_agree_bit_for_bit_over_ragged_episodes(
    env_id: str, settings: dict[str, Any], max_episode_steps: int
) -> None:
    """Rows are reset by mask, also amid an episode and without a seed; others wait for a while."""
    numbers = np.random.default_rng(0)
    maker = EnvMaker.resolve(env_id, settings, max_episode_steps)
    num_rows = 6
    rows = maker.make_rows(num_rows)
    assert rows is not None
    singles = [maker.make() for _ in range(num_rows)]
    for row, single in enumerate(singles):
        single.action_space.seed(row)
    tasks = sample_tasks(singles[0], 20, seed=1)
    running = np.zeros(num_rows, np.bool_)
    lengths, steps = set(), np.zeros(num_rows, np.int64)
    for tick in range(60):
        starting = numbers.random(num_rows) < np.where(running, 0.05, 0.7)
        if tick == 0:
            starting[:] = True
        if starting.any():
            seeds = [int(each) if tick == 0 or each % 4 else None for each in tickets(numbers)]
            wanted = {}
            for row in np.flatnonzero(starting).tolist():
                task = tasks[numbers.integers(len(tasks))]
                rows.reset_task(task, np.arange(num_rows) == row)
                set_task(singles[row], task)
                wanted[row] = singles[row].reset(seed=seeds[row])[0]
            observed, _ = rows.reset(seed=seeds, options={"reset_mask": starting})
            for row, observation in wanted.items():
                np.testing.assert_array_equal(observed[row], observation)
            running |= starting
            steps[starting] = 0
        actions = np.stack([single.action_space.sample() for single in singles])
        stepped = rows.step(actions)
        steps += 1
        for row in np.flatnonzero(running).tolist():
            alone = singles[row].step(actions[row])
            for by_row, by_single in zip(stepped[:4], alone[:4], strict=True):
                np.testing.assert_array_equal(by_row[row], by_single)
        ended = running & (stepped[2] | stepped[3])
        lengths |= set(steps[ended].tolist())
        running &= ~ended
    assert max_episode_steps in lengths or lengths == {1}


def tickets(numbers: np.random.Generator) -> list[int]:
    return numbers.integers(2**31, size=6).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("env_id", VECTORISED)
def test_restored_rows_have_the_task_of_their_constructor(env_id: str) -> None:
    first, second = two_tasks(env_id)
    rows = EnvMaker.resolve(env_id, {"task": first}).make_rows(2)
    single = EnvMaker.resolve(env_id, {"task": first}).make()
    assert rows is not None
    rows.reset_task(second)
    rows.restore_task(np.array([False, True]))
    single.action_space.seed(0)
    rewards = []
    for seed in range(30):
        action = single.action_space.sample()
        rows.reset(seed=[seed, seed])
        single.reset(seed=seed)
        rewards.append([*rows.step(np.stack([action] * 2))[1].tolist(), single.step(action)[1]])
    of_second, of_first, alone = np.transpose(rewards)
    np.testing.assert_array_equal(of_first, alone)
    assert (of_second != of_first).any()


# --- Gymnasium and MuJoCo.


@pytest.mark.filterwarnings(
    "ignore:.*(infinity|symmetric and normalized|maximum and minimum values are equal)"
)
@pytest.mark.parametrize("env_id", FAMILIES)
def test_gymnasium_finds_nothing_wrong(env_id: str) -> None:
    check_env(env_of(env_id).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", FAMILIES)
def test_gymnasium_makes_and_steps_it_without_a_warning(env_id: str) -> None:
    env = gymnasium.make(env_id)
    env.reset(seed=0)
    env.step(env.action_space.sample())
    env.close()


@pytest.mark.parametrize("env_id", MUJOCO)
def test_mujoco_families_can_be_rendered(env_id: str) -> None:
    env = env_of(env_id)
    assert "rgb_array" in env.metadata["render_modes"]
    assert env.metadata["render_fps"] == 20


@pytest.mark.parametrize("env_id", MUJOCO)
def test_copy_has_the_settings_and_the_task(env_id: str) -> None:
    env = EnvMaker.resolve(env_id, {"frame_skip": 2, "action_scale": 4.0}).make().unwrapped
    env.reset_task(two_tasks(env_id)[1])  # type: ignore[attr-defined]
    for copied in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert type(copied) is type(env)
        assert rewards_of(copied) == rewards_of(env)


def test_without_mujoco_the_ids_are_there_and_the_error_names_the_extra(tmp_path: Path) -> None:
    output = run_script(
        tmp_path / "script.py",
        f"""
import sys
sys.modules["mujoco"] = None
import gymnasium
import asyncmaml.envs
from asyncmaml.envs.making import EnvMaker

assert set({FAMILIES}) <= set(gymnasium.registry)
for env_id in {FAMILIES}:
    ours = EnvMaker.resolve(env_id).make
    for make in (lambda: gymnasium.make(env_id, disable_env_checker=True), ours):
        try:
            make()
        except ImportError as error:
            print(env_id, type(error).__name__, "asyncmaml[mujoco]" in str(error))
""",
    )
    wanted = [f"{env_id} {MissingExtraError.__name__} True" for env_id in MUJOCO for _ in "12"]
    assert output.splitlines() == wanted


def test_mujoco_families_are_made_without_a_line_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    script = f"""
import os
import gymnasium
import asyncmaml.envs

for env_id in {MUJOCO}:
    gymnasium.make(env_id, disable_env_checker=True).reset(seed=0)
print(os.listdir())
"""
    assert run_script(tmp_path / "script.py", script) == "[]\n"


@pytest.mark.slow
@pytest.mark.skipif(ctypes.util.find_library("EGL") is None, reason="no EGL to render without one")
def test_mujoco_families_are_rendered_to_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "MUJOCO_GL", "egl")
    script = """
import gymnasium
import asyncmaml.envs
from asyncmaml.envs.making import EnvMaker

for env_id in ("asyncmaml/AntGoal-v0", "asyncmaml/HalfCheetahDir-v0"):
    settings = {"render_mode": "rgb_array", "width": 64, "height": 48}
    env = EnvMaker.resolve(env_id, settings).make()
    env.reset(seed=0)
    frame = env.render()
    print(env.render_mode, frame.shape, frame.std() > 1)
    env.close()
"""
    output = run_script(tmp_path / "script.py", script, warnings="default")
    assert output == "rgb_array (48, 64, 3) True\n" * 2
