"""What the limit of a sampler is made of: benchmarks/raw_stepping.py and policy_cost.py."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from policy_cost import _WARM_UP_CALLS, _us_per_call
from raw_stepping import RawForm, drawn_actions
from workloads import Source

from asyncmaml import TrainConfig


def test_raw_actions_are_normal_and_stay_in_the_space() -> None:
    space = Box(-2.0, 2.0, (3,), np.float32)
    actions = np.stack(drawn_actions(space, 1.0, 4000))
    assert actions.dtype == space.dtype
    assert np.abs(actions).max() == 2.0  # one in twenty is beyond, and clipped
    # Of a normal variable 0.683 lie within one standard deviation, of a uniform one 0.5 here.
    assert (np.abs(actions) < 1.0).mean() == pytest.approx(0.683, abs=0.02)


def test_raw_actions_are_uniform_where_no_deviation_is_named() -> None:
    actions = np.stack(drawn_actions(Box(-2.0, 2.0, (3,), np.float32), None, 4000))
    assert (np.abs(actions) < 1.0).mean() == pytest.approx(0.5, abs=0.02)
    assert {type(action) for action in drawn_actions(Discrete(3), None, 9)} == {int}


def test_form_tells_the_script_and_people_how_actions_are_drawn() -> None:
    assert RawForm(128, action_std=0.5).arguments == ["128", "single", "0.5"]
    assert RawForm(128).arguments == ["128", "single"]
    assert RawForm(128, action_std=0.5).in_words == "128 single, actions N(0, 0.5)"


def test_raw_environment_is_the_one_that_the_preset_trains_on() -> None:
    pytest.importorskip("mujoco")
    env = Source.of_preset("halfcheetah-dir").make()
    config = TrainConfig.preset("halfcheetah-dir")
    assert env.spec is not None
    assert env.spec.max_episode_steps == config.max_episode_steps
    assert isinstance(env.action_space, Box)
    assert (env.action_space.high == config.env_kwargs["action_scale"]).all()
    env.close()


def test_a_call_is_timed_once_at_least_however_short_the_time() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    wall_us, cpu_us = _us_per_call(call, 0.0)
    assert calls > _WARM_UP_CALLS
    assert wall_us > 0
    assert cpu_us > 0
