"""Meta-World's benchmarks, on a fake of the package and, where it is installed, on itself.

Fault 25 of the list in MAMLRL.md 3.3 fails here when put back. The package is in no other extra,
since it pins MuJoCo: install `asyncmaml[metaworld]` in an environment of its own, without
constraints.txt, and run this file there.
"""

import asyncio
import importlib
import importlib.util
import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_metaworld
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from oracle import assert_same, policy_of
from processes import run_script

from asyncmaml import AsyncSampler, BatchSampler, TrainConfig, evaluate, train
from asyncmaml.cli import main
from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.tasks import sample_tasks
from asyncmaml.errors import ConfigurationError, MissingExtraError

ML1, ML10 = "asyncmaml/MetaWorldML1-v0", "asyncmaml/MetaWorldML10-v0"
IS_INSTALLED = importlib.util.find_spec("metaworld") is not None
ADAPTER = "asyncmaml.envs.meta_world"


@pytest.fixture(scope="module", params=["fake", "real"] if IS_INSTALLED else ["fake"])
def metaworld(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the package that the adapter works with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, ADAPTER, raising=False)
        if request.param == "fake":
            patch.setitem(sys.modules, "metaworld", fake_metaworld)
        yield importlib.import_module("metaworld")
        sys.modules.pop(ADAPTER, None)


@pytest.fixture
def fake(metaworld: Any) -> Any:
    """Return the fake, for what would take Meta-World itself minutes."""
    if metaworld is not fake_metaworld:
        pytest.skip("told of the fake alone: Meta-World needs half a minute for an ML10")
    fake_metaworld.tasks_set.clear()
    fake_metaworld.open_envs.clear()
    return fake_metaworld


def made(env_id: str = ML1, **settings: Any) -> Any:
    return EnvMaker.resolve(env_id, settings).make().unwrapped


def keys(tasks: list[Any]) -> set[tuple[Any, ...]]:
    """Return tasks of ours, or Meta-World's own, as a set."""
    if tasks and not isinstance(tasks[0], dict):
        tasks = [{"env_name": t.env_name, **pickle.loads(t.data)} for t in tasks]
    return {(task["env_name"], *map(float, task["rand_vec"])) for task in tasks}


def walk(env: Any, num_steps: int) -> list[Any]:
    """Return observations and rewards of an episode of some actions."""
    numbers = np.random.default_rng(0)
    walked = [env.reset(seed=1)[0]]
    for _ in range(num_steps):
        observation, reward, *_ = env.step(numbers.uniform(-1, 1, 4).astype(np.float32))
        walked.append(np.append(observation, reward))
    return walked


# --- Which tasks.


def test_tasks_are_drawn_from_the_split_that_was_asked_for(metaworld: Any) -> None:
    benchmark = metaworld.ML1("reach-v3", seed=3)
    train_tasks, test_tasks = keys(benchmark.train_tasks), keys(benchmark.test_tasks)
    assert not train_tasks & test_tasks
    env = made(benchmark_seed=3)
    # More than there are, so that all of a split are drawn and none of the other.
    assert keys(sample_tasks(env, 120, seed=0)) == train_tasks
    assert keys(sample_tasks(env, 120, seed=0, held_out=True)) == test_tasks
    assert keys(sample_tasks(made(benchmark_seed=3, split="test"), 120, seed=0)) == test_tasks


def test_id_of_the_fake_serves_the_test_tasks_as_that_of_release_3_1_1(
    fake: Any, register: Any
) -> None:
    fake.register_ids()
    envs = gymnasium.make_vec("Meta-World/ML1-train", num_envs=1, env_name="reach-v3", seed=3)
    assert keys(envs.get_attr("tasks")[0]) == keys(fake.ML1("reach-v3", seed=3).test_tasks)  # type: ignore[attr-defined]


def test_environments_come_equally_often_and_no_task_twice_before_all_have_come(fake: Any) -> None:
    env = made(ML10)
    drawn = sample_tasks(env, 14, seed=0)
    times = Counter(task["env_name"] for task in drawn)
    assert sorted(times.values()) == [4, 5, 5]
    assert set(times) == {"reach-v3", "push-v3", "door-open-v3"}
    assert len(keys(drawn)) == 14
    assert keys(sample_tasks(env, 24, seed=0)) == keys(fake.ML10(seed=0).train_tasks)
    assert len({sample_tasks(env, 1, seed)[0]["env_name"] for seed in range(20)}) == 3
    held_out = sample_tasks(env, 8, seed=0, held_out=True)
    assert keys(held_out) == keys(fake.ML10(seed=0).test_tasks)


def test_tasks_are_plain_data_drawn_by_the_seed_alone(metaworld: Any) -> None:
    drawn, again = (sample_tasks(made(), 5, seed=2) for _ in range(2))
    assert drawn == again == json.loads(json.dumps(drawn))
    assert pickle.dumps(drawn) == pickle.dumps(again)
    assert drawn != sample_tasks(made(), 5, seed=3)
    drawn[0]["rand_vec"].clear()
    assert sample_tasks(made(), 5, seed=2) == again


def test_env_name_is_the_environment_of_ml1(metaworld: Any) -> None:
    (task,) = sample_tasks(made(env_name="push-v3"), 1, seed=0)
    assert task["env_name"] == "push-v3"


async def test_training_takes_train_tasks_and_evaluation_test_tasks(fake: Any) -> None:
    config = TrainConfig(
        env_id=ML10,
        hidden_sizes=(4,),
        tasks_per_iteration=3,
        episodes_per_task=2,
        iterations=2,
        num_workers=0,
        evaluation_interval=0,
    )
    result = await train(config)
    of_train, of_test = keys(fake.ML10(seed=0).train_tasks), keys(fake.ML10(seed=0).test_tasks)
    assert keys(fake.tasks_set) <= of_train
    assert len(keys(fake.tasks_set)) > 3
    # Drawing them sets the first task of the split in the environment that draws.
    fake.tasks_set.clear()
    await evaluate(result.policy, config, num_tasks=3, num_episodes=2)
    assert keys(fake.tasks_set) - keys([fake.ML10(seed=0).train_tasks[0]]) <= of_test
    assert len(keys(fake.tasks_set) & of_test) == 3


# --- What a task is.


def test_task_survives_resets_and_is_the_same_after_another_one(metaworld: Any) -> None:
    env, fresh = made(), made()
    first, second = sample_tasks(env, 2, seed=0)
    env.reset_task(first)
    walks = [walk(env, 5), walk(env, 5)]
    env.reset_task(second)
    of_second = walk(env, 5)
    env.reset_task(first)
    fresh.reset_task(first)
    for walked in (walks[1], walk(env, 5), walk(fresh, 5), walk(made(task=first), 5)):
        for found, wanted in zip(walked, walks[0], strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert not all(map(np.array_equal, of_second, walks[0]))


def test_goal_is_hidden(metaworld: Any) -> None:
    env = made()
    task = sample_tasks(env, 1, seed=0)[0]
    # The goal comes last, and in this environment all else of the observation comes first.
    elsewhere = task | {"rand_vec": [*task["rand_vec"][:3], 0.05, 0.85, 0.15]}
    walks = []
    for each in (task, elsewhere):
        env.reset_task(each)
        walks.append(walk(env, 5))
    for left, right in zip(*walks, strict=True):
        np.testing.assert_array_equal(left[:39], right[:39])
        np.testing.assert_array_equal(left[36:39], 0)
    assert [step[-1] for step in walks[0][1:]] != [step[-1] for step in walks[1][1:]]


def test_without_a_task_it_has_the_first_of_its_split(metaworld: Any) -> None:
    benchmark = metaworld.ML1("reach-v3", seed=0)
    for split in ("train", "test"):
        (first,) = keys(getattr(benchmark, f"{split}_tasks")[:1])
        env, given = made(split=split), made()
        given.reset_task({"env_name": "reach-v3", "rand_vec": [*first[1:]]})
        for found, wanted in zip(walk(env, 3), walk(given, 3), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_without_a_task_no_benchmark_of_many_environments_is_made(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fake, "ML10")
    for split in ("train", "test"):
        env = made(ML10, split=split, benchmark_seed=5)
        env.reset()
        ((name, *_),) = keys(fake.tasks_set[-1:])
        assert name == "reach-v3"


def bad_tasks(good: dict[str, Any]) -> list[Any]:
    vectors = [None, "x", good["rand_vec"][:-1], [good["rand_vec"]], [np.nan] * 6, ["x"] * 6]
    return [
        None,
        {},
        "reach-v3",
        [good],
        {"env_name": "reach-v3"},
        good | {"more": 1},
        good | {"env_name": "reach-v9"},
        good | {"env_name": ["reach-v3"]},
        *(good | {"rand_vec": vector} for vector in vectors),
    ]


def test_bad_task_is_refused_and_the_old_one_kept(metaworld: Any) -> None:
    env = made()
    good = sample_tasks(env, 1, seed=0)[0]
    env.reset_task(good)
    wanted = walk(env, 3)
    for task in bad_tasks(good):
        with pytest.raises(ConfigurationError, match=r"(?s)MetaWorld cannot set the task .*sample"):
            env.reset_task(task)
    np.testing.assert_array_equal(np.concatenate(walk(env, 3)), np.concatenate(wanted))


@pytest.mark.parametrize(
    ("env_id", "settings", "message"),
    [
        (ML1, {"benchmark": "MT10"}, "benchmark of MetaWorld is 'MT10'; wanted one of ML1"),
        (ML1, {"env_name": "reach-v9"}, "env_name of MetaWorld is 'reach-v9'; wanted one of"),
        (ML1, {"split": "valid"}, "split of MetaWorld is 'valid'; wanted one of train, test"),
        (ML1, {"benchmark_seed": -1}, "benchmark_seed of MetaWorld is -1; wanted"),
        (ML1, {"max_envs": 0}, "max_envs of MetaWorld is 0; wanted"),
        (ML1, {"task": 3}, "MetaWorld cannot set the task 3"),
        (ML10, {"env_name": "reach-v3"}, "ML10 has environments of its own; leave out env_name"),
    ],
)
def test_bad_setting_is_refused(
    fake: Any, env_id: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made(env_id, **settings)


# --- Episodes.


def test_episode_is_truncated_where_meta_world_truncates_it(metaworld: Any) -> None:
    env = made()
    env.reset(seed=0)
    limit = metaworld.SawyerXYZEnv.max_path_length
    action = np.zeros(4, np.float32)
    ends = [env.step(action)[2:4] for _ in range(limit)]
    assert ends == [(False, False)] * (limit - 1) + [(False, True)]
    with pytest.raises(ValueError, match="reset the env manually"):
        env.step(action)
    env.reset()
    observation, reward, *_, info = env.step(action)
    assert env.observation_space.contains(observation)
    assert isinstance(reward, float)
    assert info["success"] in (0, 1)


def test_step_before_the_reset_after_a_task_is_refused(fake: Any) -> None:
    env = made()
    action = np.zeros(4, np.float32)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(action)
    env.reset()
    env.step(action)
    env.reset_task(sample_tasks(env, 1, seed=0)[0])
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(action)


def test_environment_of_the_task_is_stepped_and_so_many_are_kept(fake: Any) -> None:
    env = made(ML10, max_envs=2, reward_function_version="v1")
    worths = {"reach-v3": 1, "push-v3": 10, "door-open-v3": 100}
    for task in sample_tasks(env, 30, seed=0):
        env.reset_task(task)
        env.reset()
        reward = env.step(np.zeros(4, np.float32))[1]
        assert worths[task["env_name"]] - 2 < reward <= worths[task["env_name"]]
        assert len(fake.open_envs) <= 2
    assert {each.reward_function_version for each in fake.open_envs} == {"v1"}
    env.close()
    assert not fake.open_envs


def test_environments_of_the_last_tasks_are_kept_and_used_again(fake: Any) -> None:
    env = made(ML10, max_envs=2)
    reach, push, door = (
        next(task for task in sample_tasks(env, 24, seed=0) if task["env_name"] == name)
        for name in ("reach-v3", "push-v3", "door-open-v3")
    )
    env.reset_task(push)
    of_reach, of_push = fake.open_envs
    for task in (reach, push, reach):
        env.reset_task(task)
    assert fake.open_envs == [of_reach, of_push]
    env.reset_task(door)
    assert of_reach in fake.open_envs  # the older one of the two, and used last
    assert of_push not in fake.open_envs


async def test_tasks_sampled_at_once_are_those_of_the_lock_step_sampler(fake: Any) -> None:
    policy = policy_of(made())
    settings: dict[str, Any] = {"num_workers": 0, "seed": 4, "batch_size": 3}
    async with AsyncSampler(ML10, envs_per_worker=4, **settings) as sampler:
        tasks = sampler.sample_tasks(4)
        calls = [
            sampler.sample(policy, task=task, seed=number) for number, task in enumerate(tasks)
        ]
        found = await asyncio.gather(*calls)
    with BatchSampler(ML10, **settings) as lock_step:
        assert lock_step.sample_tasks(4) == tasks
        for number, task in enumerate(tasks):
            lock_step.reset_task(task)
            assert_same(found[number], lock_step.sample(policy, seed=number))
    assert found[0].lengths.tolist() == [6, 6, 6]


def test_command_line_samples_the_split_that_it_names(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"sample {ML10} --workers 0 --tasks 2 --episodes 2 --seed 0 -k split=test --json"
    assert main(asked.split()) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 4
    train_tasks = keys(fake.ML10(seed=0).train_tasks)
    assert not keys(fake.tasks_set) & train_tasks


@pytest.mark.skipif(
    not IS_INSTALLED, reason="asyncmaml[metaworld] is not installed; see the top of this file"
)
async def test_meta_world_itself_comes_from_workers_as_from_lock_step() -> None:
    settings: dict[str, Any] = {"seed": 4, "batch_size": 3, "max_episode_steps": 20}
    async with AsyncSampler(ML1, num_workers=2, envs_per_worker=2, **settings) as sampler:
        policy = policy_of(sampler)
        tasks = sampler.sample_tasks(2) + sampler.sample_tasks(1, held_out=True)
        calls = [
            sampler.sample(policy, task=task, seed=number) for number, task in enumerate(tasks)
        ]
        found = await asyncio.gather(*calls)
    with BatchSampler(ML1, num_workers=0, **settings) as lock_step:
        for number, task in enumerate(tasks):
            lock_step.reset_task(task)
            assert_same(found[number], lock_step.sample(policy, seed=number))


# --- Without the package.


def test_without_meta_world_the_ids_are_there_and_the_error_names_the_extra(tmp_path: Path) -> None:
    output = run_script(
        tmp_path / "script.py",
        """
        import sys
        sys.modules["metaworld"] = None
        import gymnasium
        import asyncmaml.envs
        from asyncmaml.envs.making import EnvMaker

        for name in ("ML1", "ML10", "ML25", "ML45"):
            env_id = f"asyncmaml/MetaWorld{name}-v0"
            for make in (lambda: gymnasium.make(env_id), EnvMaker.resolve(env_id).make):
                try:
                    make()
                except ImportError as error:
                    print(type(error).__name__, error)
        """,
    )
    wanted = (
        f"{MissingExtraError.__name__} the Meta-World family needs Meta-World, which is not "
        "installed; run pip install 'asyncmaml[metaworld]'"
    )
    assert output.splitlines() == [wanted] * 8
