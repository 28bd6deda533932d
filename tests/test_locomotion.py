"""The MuJoCo families: rewards recomputed from a second simulation, scaled actions, settings."""

from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from asyncmaml.envs.making import EnvMaker
from asyncmaml.errors import ConfigurationError

mujoco = pytest.importorskip("mujoco")

CHEETAHS = ("HalfCheetahDir", "HalfCheetahVel")
ANTS = ("AntDir", "AntVel", "AntGoal")
TIMESTEP = 0.01  # of both models


def made(name: str, **settings: Any) -> Any:
    return EnvMaker.resolve(f"asyncmaml/{name}-v0", settings).make().unwrapped


@cache
def shared(name: str) -> Any:
    return made(name)


class Replay:
    """A second simulation of the same model, stepped with torques of our own.

    Attributes:
        trail: The root's x and y after each physics step.
    """

    def __init__(self, env: Any) -> None:
        self._model = env.model
        self.data = mujoco.MjData(env.model)
        mujoco.mj_copyData(self.data, env.model, env.data)
        self.trail = [self.data.qpos[:2].copy()]

    def step(self, torques: NDArray[Any], num_steps: int) -> None:
        self.data.ctrl[:] = torques
        for _ in range(num_steps):
            mujoco.mj_step(self._model, self.data)
            self.trail.append(self.data.qpos[:2].copy())
        mujoco.mj_rnePostConstraint(self._model, self.data)

    def contacts(self) -> float:
        return float((np.clip(self.data.cfrc_ext, -1, 1) ** 2).sum())


def actions_of(env: Any, num_steps: int, reach: float) -> NDArray[np.float32]:
    numbers = np.random.default_rng(1)
    shape = (num_steps, *env.action_space.shape)
    return numbers.uniform(-reach, reach, shape).astype(np.float32)


@pytest.mark.parametrize("name", CHEETAHS)
@pytest.mark.parametrize("frame_skip", [5, 1])
def test_half_cheetahs_are_paid_by_velocity_less_torques(name: str, frame_skip: int) -> None:
    env = shared(name) if frame_skip == 5 else made(name, frame_skip=frame_skip)
    direction, wanted = -1.0, 0.7
    env.reset_task({"direction": direction, "velocity": wanted})
    env.reset(seed=0)
    replay = Replay(env)
    for action in actions_of(env, 20, reach=1.0):
        _, reward, terminated, truncated, info = env.step(action)
        replay.step(action, frame_skip)
        before, after = replay.trail[-frame_skip - 1][0], replay.trail[-1][0]
        velocity = (after - before) / (TIMESTEP * frame_skip)
        task = direction * velocity if name == "HalfCheetahDir" else -abs(velocity - wanted)
        cost = 0.05 * sum(float(torque) ** 2 for torque in action)
        assert reward == pytest.approx(task - cost, abs=1e-9)
        assert info["reward_forward"] == pytest.approx(task, abs=1e-9)
        assert (terminated, truncated) == (False, False)


@pytest.mark.parametrize("name", ANTS)
def test_ants_are_paid_by_task_and_survival_less_torques_and_contacts(name: str) -> None:
    """The velocity is that of the torso's frame, which lags behind the state by a little."""
    env = shared(name)
    goal, wanted = np.array([1.0, -2.0]), 1.3
    env.reset_task({"direction": -1.0, "velocity": wanted, "goal": goal})
    env.reset(seed=0)
    replay = Replay(env)
    before, touched = replay.data.xpos[1, 0], 0.0
    for action in actions_of(env, 40, reach=1.0):
        _, reward, terminated, _, info = env.step(action)
        assert not terminated
        replay.step(action, 5)
        after = replay.data.xpos[1, 0]
        velocity, before = (after - before) / 0.05, after
        by_state = (replay.trail[-1][0] - replay.trail[-6][0]) / 0.05
        assert velocity == pytest.approx(by_state, abs=0.1)
        task = {
            "AntDir": -velocity,
            "AntVel": 1.0 - abs(velocity - wanted),
            "AntGoal": 4.0 - np.abs(replay.trail[-1] - goal).sum(),
        }[name]
        costs = 0.005 * float((action.astype(float) ** 2).sum()) + 5e-4 * replay.contacts()
        touched += replay.contacts()
        assert reward == pytest.approx(task + 0.05 - costs, abs=1e-9)
        assert info["reward_survive"] == 0.05
    assert touched > 1.0  # the ant has fallen onto its feet


@pytest.mark.parametrize("name", ANTS)
def test_ant_out_of_its_height_ends_the_episode_and_is_not_paid_for_survival(name: str) -> None:
    for env, height, ended in (
        (shared(name), 0.6, False),
        (shared(name), 1.3, True),
        (made(name, healthy_z_range=(0.7, 1.0)), 0.6, True),
        (made(name, terminate_when_unhealthy=False, healthy_reward=0.0), 1.3, False),
    ):
        env.reset(seed=0)
        position = env.init_qpos.copy()
        position[2] = height
        env.set_state(position, env.init_qvel)
        _, _, terminated, truncated, info = env.step(np.zeros(8, np.float32))
        assert (terminated, truncated) == (ended, False)
        assert info["reward_survive"] == (0.05 if env is shared(name) and not ended else 0.0)


@pytest.mark.parametrize("name", [*CHEETAHS, *ANTS])
def test_parts_of_the_reward_add_up_to_it(name: str) -> None:
    env = shared(name)
    env.reset(seed=3)
    for action in actions_of(env, 10, reach=2.0):
        _, reward, _, _, info = env.step(action)
        parts = [value for key, value in info.items() if key.startswith("reward_")]
        assert len(parts) == (2 if name in CHEETAHS else 4)
        assert reward == pytest.approx(sum(parts), abs=1e-12)


@pytest.mark.parametrize("name", [*CHEETAHS, *ANTS])
def test_observation_is_gymnasiums_without_the_position(name: str) -> None:
    env = shared(name)
    env.reset(seed=0)
    assert env.observation_space.shape == ((17,) if name in CHEETAHS else (105,))
    observations = []
    for shift in (0.0, 5.0):
        position = env.init_qpos.copy()
        position[: 1 if name in CHEETAHS else 2] += shift
        env.set_state(position, env.init_qvel + 0.1)
        observations.append(env._get_obs())
    np.testing.assert_array_equal(*observations)


@pytest.mark.parametrize("name", [*CHEETAHS, *ANTS])
def test_episode_is_truncated_after_200_steps(name: str) -> None:
    assert gymnasium.spec(f"asyncmaml/{name}-v0").max_episode_steps == 200


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("HalfCheetahDir", {"direction": 1.0}),
        ("HalfCheetahVel", {"velocity": 2.0}),
        ("AntVel", {"velocity": 3.0}),
        ("AntGoal", {"goal": [3.0, 3.0]}),
    ],
)
def test_without_a_task_it_is_the_documented_one(name: str, task: dict[str, Any]) -> None:
    rewards = []
    for env in (made(name), made(name, task=task)):
        env.reset(seed=0)
        rewards.append(env.step(np.zeros(env.action_space.shape, np.float32))[1])
    assert rewards[0] == rewards[1]


# --- Actions.


@pytest.mark.parametrize("name", ["HalfCheetahDir", "AntDir"])
def test_scaled_actions_are_clipped_and_mapped_to_the_actuators_range(name: str) -> None:
    env = made(name, action_scale=10.0)
    assert env.action_space.low.tolist() == [-10.0] * env.action_space.shape[0]
    assert env.action_space.high.tolist() == [10.0] * env.action_space.shape[0]
    env.reset(seed=0)
    action = np.zeros(env.action_space.shape, np.float32)
    action[:5] = (5.0, -2.5, 10.0, 25.0, -25.0)
    info = env.step(action)[4]
    assert env.data.ctrl[:5].tolist() == [0.5, -0.25, 1.0, 1.0, -1.0]
    weight = 0.05 if name == "HalfCheetahDir" else 0.005
    assert info["reward_ctrl"] == pytest.approx(-weight * (0.25 + 0.0625 + 3.0))


def test_unscaled_actions_reach_the_actuators_as_they_are() -> None:
    env = shared("HalfCheetahDir")
    env.reset(seed=0)
    action = actions_of(env, 1, reach=1.0)[0]
    env.step(action)
    assert env.data.ctrl.tolist() == action.tolist()


def test_scaled_actions_are_clipped_last(tmp_path: Path) -> None:
    """Fault 18 of the source: mapped to the range by rounding arithmetic, they may leave it."""
    low, high = -0.5, 0.3
    assert (high + low) / 2 + (high - low) / 2 > high
    gymnasiums = Path(gymnasium.__file__).parent / "envs/mujoco/assets/half_cheetah.xml"
    model = gymnasiums.read_text()
    assert 'ctrlrange="-1 1"' in model
    path = tmp_path / "half_cheetah.xml"
    path.write_text(model.replace('ctrlrange="-1 1"', f'ctrlrange="{low} {high}"'))
    env = made("HalfCheetahDir", xml_file=str(path), action_scale=3.0)
    env.reset(seed=0)
    env.step(np.array([3, 4, -3, -4, 0, 1.5], np.float32))
    assert env.data.ctrl[:4].tolist() == [high, high, low, low]
    np.testing.assert_allclose(env.data.ctrl[4:], [-0.1, 0.1])


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 6)])
def test_action_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"HalfCheetahDir cannot step: .* \(6,\), got"):
        shared("HalfCheetahDir").step(np.zeros(shape, np.float32))


# --- Settings.


def test_costs_bonus_and_gymnasiums_own_settings_are_taken() -> None:
    env = made(
        "AntVel",
        bonus=2.0,
        ctrl_cost_weight=0.5,
        contact_cost_weight=0.0,
        healthy_reward=1.0,
        include_cfrc_ext_in_observation=False,
        reset_noise_scale=0.0,
        task={"velocity": 0.0},
    )
    assert env.reset(seed=0)[0].shape == (27,)
    np.testing.assert_array_equal(env.data.qpos, env.init_qpos)
    _, reward, _, _, info = env.step(np.full(8, 0.5, np.float32))
    assert reward == pytest.approx(2.0 - abs(info["x_velocity"]) + 1.0 - 0.5 * 8 * 0.25)


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("HalfCheetahDir", {"action_scale": 0.0}, "action_scale of HalfCheetahDir, .* is 0.0"),
        ("AntDir", {"action_scale": "10"}, "action_scale of AntDir, .* is '10'; wanted a finite"),
        (
            "HalfCheetahVel",
            {"low": 1.0, "high": 0.0},
            r"HalfCheetahVel draws velocities .*high=0.0",
        ),
        ("HalfCheetahVel", {"high": np.inf}, "high of HalfCheetahVel's velocities is inf"),
        ("HalfCheetahVel", {"low": "0"}, "low of HalfCheetahVel's velocities is '0'; wanted"),
        ("AntVel", {"frame_skip": 0}, "frame_skip of AntVel, .* is 0; wanted a whole"),
        ("AntVel", {"frame_skip": True}, "frame_skip of AntVel, .* is True; wanted a whole"),
        ("AntVel", {"bonus": np.nan}, "bonus of AntVel, .* is nan; wanted a finite"),
        ("AntGoal", {"low": 1.0, "high": 0.0}, "AntGoal draws goals"),
        ("AntDir", {"forward_reward_weight": 2.0}, "task's reward takes"),
        ("AntDir", {"exclude_current_positions_from_observation": False}, "position never is"),
        ("AntDir", {"task": {"direction": 0.5}}, "AntDir cannot set the task"),
    ],
)
def test_bad_settings_are_refused(name: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        made(name, **settings)
