"""Environments made from ids, specs and callables, here and in another process."""

import copy
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import TimeLimit
from processes import PATIENCE, ROOT

from asyncmaml.envs import tasks
from asyncmaml.envs.extras import metaworld_required, mujoco_required
from asyncmaml.envs.making import EnvMaker, quiet_mujoco, register_all, registered_by_user
from asyncmaml.envs.navigation import Navigation2DEnv, Navigation2DVectorEnv
from asyncmaml.envs.rows import RowVectorEnv, steps_by_row
from asyncmaml.errors import ConfigurationError, MissingExtraError, UnknownEnvironmentError

NAVIGATION = "asyncmaml/Navigation2D-v0"


@pytest.fixture(autouse=True)
def registry_is_put_back() -> Iterator[None]:
    entries = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(entries)


def run_script(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an empty directory of its own."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    directory = tmp_path / "working"
    directory.mkdir()
    return subprocess.run(
        [sys.executable, path],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )


def register(env_id: str, entry_point: Any) -> None:
    gymnasium.register(env_id, entry_point)


# --- EnvMaker


@pytest.mark.parametrize("env", ["CartPole-v1", gymnasium.spec("CartPole-v1")])
def test_environment_is_made_without_checker_and_order_enforcement(env: Any) -> None:
    made = EnvMaker.resolve(env).make()
    assert isinstance(made, TimeLimit)
    assert isinstance(made.env, CartPoleEnv)


def test_spec_that_was_passed_is_left_as_it_was() -> None:
    spec = gymnasium.spec("CartPole-v1")
    before = copy.deepcopy(spec)
    EnvMaker.resolve(spec, {"sutton_barto_reward": True}, max_episode_steps=3).make()
    assert spec == before == gymnasium.spec("CartPole-v1")


def test_env_kwargs_go_before_those_of_the_spec() -> None:
    spec = copy.deepcopy(gymnasium.spec(NAVIGATION))
    spec.kwargs.update(low=-0.1, high=0.2)
    env = EnvMaker.resolve(spec, {"high": 0.3}).make().unwrapped
    assert isinstance(env, Navigation2DEnv)
    assert (env._low, env._high) == (-0.1, 0.3)


@pytest.mark.parametrize("env", ["CartPole-v1", CartPoleEnv])
def test_max_episode_steps_truncates(env: Any) -> None:
    made = EnvMaker.resolve(env, max_episode_steps=np.int64(3)).make()  # type: ignore[arg-type]
    made.reset(seed=0)
    assert [made.step(step % 2)[3] for step in range(3)] == [False, False, True]


def test_lambda_is_called_with_the_keywords() -> None:
    maker = EnvMaker.resolve(lambda high: Navigation2DEnv(high=high), {"high": 0.2})
    env = maker.make()
    assert isinstance(env, Navigation2DEnv)
    assert env._high == 0.2
    assert "lambda" in maker.name


def test_module_before_the_id_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mazes_of_ours.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Maze-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    maker = EnvMaker.resolve("mazes_of_ours:Maze-v0")
    assert maker.name == "Maze-v0"
    assert isinstance(maker.make().unwrapped, CartPoleEnv)


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("CartPoll-v1", "CartPole-v1"),
        ("asyncmaml/Navigation3D-v0", "asyncmaml/Navigation2D-v0"),
        ("CartPole-v7", "versioned environments"),
        ("not_a_module_of_ours:Maze-v0", "not_a_module_of_ours"),
        ("a:b:c", "module:Id-v0"),
        ("", "module:Id-v0"),
    ],
)
def test_unknown_id_is_told_with_what_is_near(env_id: str, hint: str) -> None:
    with pytest.raises(UnknownEnvironmentError) as caught:
        EnvMaker.resolve(env_id)
    assert repr(env_id) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("env", [None, 7, ["CartPole-v1"], Navigation2DEnv()])
def test_what_is_no_environment_is_refused(env: Any) -> None:
    with pytest.raises(UnknownEnvironmentError, match="pass a Gymnasium id"):
        EnvMaker.resolve(env)


@pytest.mark.parametrize("env_kwargs", [[("high", 1)], {1: 2}, "high"])
def test_bad_env_kwargs_are_refused(env_kwargs: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"env_kwargs is .* pass a dict"):
        EnvMaker.resolve("CartPole-v1", env_kwargs)


@pytest.mark.parametrize("limit", [0, -1, 2.5, True, "9"])
def test_bad_max_episode_steps_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        EnvMaker.resolve("CartPole-v1", max_episode_steps=limit)


@pytest.mark.parametrize("result", [None, object(), Navigation2DVectorEnv(1)])
def test_callable_that_returns_no_environment_is_refused(result: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"returned .* where a gymnasium.Env was wanted"):
        EnvMaker.resolve(lambda: result).make()


def test_gymnasium_warns_of_an_old_id_once_and_in_the_parent() -> None:
    with pytest.warns(DeprecationWarning, match="out of date"):
        maker = EnvMaker.resolve("CartPole-v0")
    maker.make()
    maker.make()


def test_maker_travels_by_cloudpickle() -> None:
    for env in (NAVIGATION, lambda: Navigation2DEnv()):
        travelled = pickle.loads(cloudpickle.dumps(EnvMaker.resolve(env, max_episode_steps=3)))
        assert isinstance(travelled.make().unwrapped, Navigation2DEnv)


# --- the natively vectorised form


def test_vectorised_form_gets_keywords_and_time_limit() -> None:
    rows = EnvMaker.resolve(NAVIGATION, {"high": 0.2}, max_episode_steps=5).make_rows(3)
    assert isinstance(rows, Navigation2DVectorEnv)
    assert (rows.num_envs, rows.max_episode_steps) == (3, 5)
    np.testing.assert_allclose(rows._goals, 0.2)


def test_vectorised_form_of_a_spec_without_time_limit_has_none() -> None:
    spec = copy.deepcopy(gymnasium.spec(NAVIGATION))
    spec.max_episode_steps = None
    rows = EnvMaker.resolve(spec).make_rows(2)
    assert rows is not None
    assert rows.max_episode_steps is None


def test_vectorised_form_is_refused_where_rows_are_not_independent() -> None:
    assert gymnasium.spec("CartPole-v1").vector_entry_point is not None
    assert EnvMaker.resolve("CartPole-v1").make_rows(2) is None


def test_vectorised_form_is_refused_where_it_would_lack_something() -> None:
    wrapped = copy.deepcopy(gymnasium.spec(NAVIGATION))
    wrapped.additional_wrappers = (gymnasium.wrappers.ClipAction.wrapper_spec(),)
    assert EnvMaker.resolve(wrapped).make_rows(2) is None
    assert EnvMaker.resolve(Navigation2DEnv).make_rows(2) is None
    assert EnvMaker.resolve("Acrobot-v1").make_rows(2) is None
    assert EnvMaker.resolve(NAVIGATION, vectorized=False).make_rows(2) is None


def test_class_says_by_its_metadata_that_its_rows_are_independent() -> None:
    class Plain(VectorEnv[Any, Any, Any]):
        metadata = {"autoreset_mode": AutoresetMode.DISABLED, "row_seeds": True}  # noqa: RUF012

    class Shared(VectorEnv[Any, Any, Any]):
        metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    assert steps_by_row(Plain)
    assert not steps_by_row(Shared)
    assert not steps_by_row(lambda num_envs: Plain())


def test_rows_without_tasks_say_so() -> None:
    class Taskless(RowVectorEnv):
        def reset(self, **_: Any) -> Any: ...
        def step(self, actions: Any) -> Any: ...

    space = gymnasium.spaces.Discrete(2)
    with pytest.raises(ConfigurationError, match="Taskless was given the task 3 but has no tasks"):
        Taskless(1, space, space, None).reset_task(3)


# --- the user's registrations


def test_registrations_of_the_user_reach_a_process_that_lacks_them() -> None:
    class Maze(Navigation2DEnv):
        pass

    register("Maze-v0", Maze)
    register("Pole-v0", "gymnasium.envs.classic_control:CartPoleEnv")
    entries = registered_by_user()
    ids = {pickle.loads(entry).id for entry in entries}
    assert {"Maze-v0", "Pole-v0"} <= ids
    assert not {"CartPole-v1", NAVIGATION} & ids
    del gymnasium.registry["Maze-v0"]
    register_all(entries)
    assert isinstance(gymnasium.make("Maze-v0").unwrapped, Navigation2DEnv)


def test_registration_that_is_already_there_stays() -> None:
    register("Maze-v0", Navigation2DEnv)
    entries = registered_by_user()
    gymnasium.registry["Maze-v0"] = spec = gymnasium.spec("CartPole-v1")
    register_all(entries)
    assert gymnasium.registry["Maze-v0"] is spec


def test_registration_that_cannot_travel_is_left_out() -> None:
    class Stubborn:
        def __call__(self) -> Navigation2DEnv:
            return Navigation2DEnv()

        def __reduce__(self) -> str:
            raise TypeError

    register("Stubborn-v0", Stubborn())
    register("Maze-v0", Navigation2DEnv)
    ids = {pickle.loads(entry).id for entry in registered_by_user()}
    assert "Stubborn-v0" not in ids
    assert "Maze-v0" in ids
    register_all([b"this is no pickle"])


def test_registration_by_a_name_in_main_travels_by_value(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import pickle, subprocess, sys
        import cloudpickle, gymnasium
        from asyncmaml.envs.making import EnvMaker, registered_by_user
        from asyncmaml.envs.navigation import Navigation2DEnv

        class Maze(Navigation2DEnv):
            pass

        gymnasium.register("Maze-v0", "__main__:Maze")
        made = cloudpickle.dumps((registered_by_user(), EnvMaker.resolve("Maze-v0")))
        worker = '''if True:
            import pickle, sys, gymnasium
            from asyncmaml.envs.making import register_all
            entries, maker = pickle.loads(sys.stdin.buffer.read())
            register_all(entries)
            print(gymnasium.make("Maze-v0", disable_env_checker=True).unwrapped, maker.make())
        '''
        subprocess.run([sys.executable, "-c", worker], input=made, check=True)
        """,
    )
    assert done.stdout == "<Maze<Maze-v0>> <Maze<Maze-v0>>\n"


# --- MuJoCo's log


@pytest.mark.parametrize("env", ["'HalfCheetah-v5'", "make"])
def test_half_cheetah_is_made_without_a_line_or_a_file(tmp_path: Path, env: str) -> None:
    """Also where a callable is the first to import MuJoCo; what a simulation says is heard."""
    pytest.importorskip("mujoco")
    done = run_script(
        tmp_path,
        f"""
        import os, sys
        import gymnasium
        from asyncmaml.envs.making import EnvMaker

        def make():
            import mujoco
            return gymnasium.make("HalfCheetah-v5")

        maker = EnvMaker.resolve({env})
        assert "mujoco" not in sys.modules
        env = maker.make()
        maker.make()
        assert os.listdir() == [], os.listdir()

        import mujoco
        assert mujoco.get_mju_user_warning() is None
        heard = []
        mujoco.set_mju_user_warning(heard.append)
        env.reset(seed=0)
        env.unwrapped.data.qvel[:] = 1e12
        env.step(env.action_space.sample())
        assert "unstable" in heard[0], heard
        maker.make()
        assert "settotalmass" in heard[1], heard
        """,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_mujoco_is_not_imported_for_an_environment_that_does_not_need_it(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import sys
        from asyncmaml.envs.making import EnvMaker
        finders = list(sys.meta_path)
        maker = EnvMaker.resolve("asyncmaml/Navigation2D-v0")
        maker.make(), maker.make_rows(2)
        assert sys.meta_path == finders
        print([name for name in ("mujoco", "torch", "asyncio") if name in sys.modules])
        """,
    )
    assert done.stdout == "[]\n"


class FakeMujoco:
    """As much of MuJoCo as its log needs."""

    def __init__(self) -> None:
        self.handler: Any = None

    def get_mju_user_warning(self) -> Any:
        return self.handler

    def set_mju_user_warning(self, handler: Any) -> None:
        self.handler = handler


def test_other_messages_of_mujoco_become_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", mujoco := FakeMujoco())
    block = quiet_mujoco()
    block.__enter__()
    mujoco.handler("compiler attribute 'a' is deprecated and will be removed")
    mujoco.handler("mesh is open")
    with pytest.warns(RuntimeWarning, match="MuJoCo: mesh is open"):
        block.__exit__(None, None, None)
    assert mujoco.handler is None


def test_last_block_out_gives_mujoco_its_handler_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", mujoco := FakeMujoco())
    outer, inner = quiet_mujoco(), quiet_mujoco()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert mujoco.handler is not None
    inner.__exit__(None, None, None)
    assert mujoco.handler is None


# --- tasks


def test_tasks_are_sampled_by_seed_and_set_through_wrappers() -> None:
    env = EnvMaker.resolve(NAVIGATION).make()
    first, again = tasks.sample_tasks(env, 3, 5), tasks.sample_tasks(env, 3, 5)
    assert tasks.has_tasks(env)
    assert len(first) == 3
    np.testing.assert_equal(first, again)
    tasks.reset_task(env, {"goal": (0.0, 0.25)})
    assert env.step(np.zeros(2, np.float32))[1] == -0.25


def test_environment_without_tasks_says_so() -> None:
    env = EnvMaker.resolve("CartPole-v1").make()
    assert not tasks.has_tasks(env)
    with pytest.raises(ConfigurationError, match="it has no sample_tasks"):
        tasks.sample_tasks(env, 2, 0)
    with pytest.raises(ConfigurationError, match="has neither reset_task"):
        tasks.reset_task(env, 1)


@pytest.mark.parametrize("returned", [None, [], [1, 2, 3], np.zeros((2, 2))])
def test_wrong_number_or_kind_of_tasks_is_refused(returned: Any) -> None:
    class Wrong(Navigation2DEnv):
        def sample_tasks(self, num_tasks: int) -> Any:
            return returned

    with pytest.raises(ConfigurationError, match="must return a list of 2 tasks and returned"):
        tasks.sample_tasks(Wrong(), 2, 0)


def test_set_task_is_taken_where_there_is_no_reset_task() -> None:
    class MetaWorldLike(CartPoleEnv):
        task = None

        def set_task(self, task: Any) -> None:
            self.task = task

    env = EnvMaker.resolve(MetaWorldLike, max_episode_steps=5).make()
    tasks.reset_task(env, "reach")
    assert env.get_wrapper_attr("task") == "reach"


def test_missing_mujoco_is_told_with_its_extra_and_another_package_as_it_is() -> None:
    mujoco, other = (ModuleNotFoundError(f"No module named '{name}'") for name in ("mujoco", "gtk"))
    with (
        pytest.raises(MissingExtraError, match=r"^Ant needs MuJoCo, .* 'asyncmaml\[mujoco\]'$"),
        mujoco_required("Ant"),
    ):
        raise mujoco
    with pytest.raises(ModuleNotFoundError, match="gtk"), mujoco_required("Ant"):
        raise other


@pytest.mark.parametrize(
    ("module", "package"),
    [("metaworld", "Meta-World"), ("mujoco", "MuJoCo"), ("packaging", "packaging")],
)
def test_missing_part_of_meta_world_is_told_with_the_extra_of_meta_world(
    module: str, package: str
) -> None:
    missing, other = (ModuleNotFoundError(f"No module named '{name}'") for name in (module, "gtk"))
    wanted = rf"^Arm needs {package}, .* 'asyncmaml\[metaworld\]'$"
    with pytest.raises(MissingExtraError, match=wanted), metaworld_required("Arm"):
        raise missing
    with pytest.raises(ModuleNotFoundError, match="gtk"), metaworld_required("Arm"):
        raise other
