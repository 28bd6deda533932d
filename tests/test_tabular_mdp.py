"""Tabular MDPs and their oracles: by hand, by enumeration and by count."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.oracles import (
    finite_horizon_value_iteration,
    policy_values,
    reference_returns,
    value_iteration,
)
from asyncmaml.envs.tabular_mdp import TabularMDPEnv, TabularMDPVectorEnv
from asyncmaml.errors import ConfigurationError

# Two states: action 0 stays, action 1 goes to the other one.
STAY_OR_GO = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
REWARDS = np.array([[0.0, -1.0], [2.0, 5.0]])
TASK = {"transitions": STAY_OR_GO, "rewards_mean": REWARDS}


def random_mdp(num_states: int, num_actions: int, seed: int) -> dict[str, NDArray[Any]]:
    env = TabularMDPEnv(num_states, num_actions)
    env.reset(seed=seed)
    return env.sample_tasks(1)[0]


def tables_of(task: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    return task["transitions"], task["rewards_mean"]


def returns_of_random_policy(task: dict[str, NDArray[Any]], num_rows: int) -> NDArray[Any]:
    rows = TabularMDPVectorEnv(num_rows, task=task)
    rows.reset(seed=0)
    numbers = np.random.default_rng(0)
    total = np.zeros(num_rows)
    for _ in range(10):
        total += rows.step(numbers.integers(0, 5, num_rows))[1]
    return total


def test_it_can_be_constructed_with_the_sources_sizes() -> None:
    """Fault 18 of the source: `np.zeros(10, 5)` in its constructor raises."""
    env = TabularMDPEnv()
    assert env.observation_space.shape == (10,)
    assert env.action_space.n == 5  # type: ignore[attr-defined]
    assert env.reset()[0].tolist() == [1.0] + [0.0] * 9
    env.step(np.int64(4))


def test_steps_follow_the_tables() -> None:
    env = TabularMDPEnv(2, 2, reward_std=0.0, task=TASK)
    assert env.reset(seed=0)[0].tolist() == [1.0, 0.0]
    found = [env.step(np.int64(action)) for action in (0, 1, 0, 1, 1)]
    assert [step[0].argmax() for step in found] == [0, 1, 1, 0, 1]
    assert [step[1] for step in found] == [0.0, -1.0, 2.0, 5.0, -1.0]
    assert all(step[2:] == (False, False, {}) for step in found)
    assert all(step[0].sum() == 1.0 and step[0].dtype == np.float32 for step in found)


def test_next_states_come_as_often_as_the_table_says() -> None:
    probabilities = np.array([0.0, 0.5, 0.2, 0.3, 0.0])
    transitions = np.tile(probabilities, (5, 2, 1))
    rows = TabularMDPVectorEnv(
        4000, 10, 5, 2, task={"transitions": transitions, "rewards_mean": np.zeros((5, 2))}
    )
    rows.reset(seed=0)
    counts = np.zeros(5)
    for _ in range(3):
        counts += rows.step(np.ones(4000, np.int64))[0].sum(axis=0)
    assert counts[[0, 4]].tolist() == [0, 0]
    deviations = np.sqrt(probabilities * (1 - probabilities) * 12000)
    assert (np.abs(counts - 12000 * probabilities) <= 3 * deviations).all()


def test_rewards_are_normal_around_their_means() -> None:
    rows = TabularMDPVectorEnv(4000, 10, 2, 2, task=TASK)
    rows.reset(seed=0)
    rewards = rows.step(np.ones(4000, np.int64))[1]
    assert abs(rewards.mean() + 1.0) < 3 / math.sqrt(4000)
    assert abs(rewards.std() - 1.0) < 3 / math.sqrt(8000)


def test_reward_says_nothing_of_the_next_state() -> None:
    rows = TabularMDPVectorEnv(4000)
    rows.reset(seed=0)
    observations, rewards, *_ = rows.step(np.zeros(4000, np.int64))
    states = observations.argmax(axis=1)
    for noise in (rewards, np.abs(rewards)):  # its sign and its size are made of two numbers
        assert abs(np.corrcoef(states, noise)[0, 1]) < 3 / math.sqrt(4000)


def test_observation_shows_the_state_and_nothing_of_the_task() -> None:
    """A task that changes amid an episode is seen in rewards alone, where states follow alike."""
    env = TabularMDPEnv(2, 2, reward_std=0.0, task=TASK)
    seen = []
    for rewards in (REWARDS, -REWARDS):
        env.reset(seed=1)
        env.reset_task(TASK | {"rewards_mean": rewards})
        seen.append([env.step(np.int64(action))[:2] for action in (1, 0, 1)])
    assert [step[0].tolist() for step in seen[0]] == [step[0].tolist() for step in seen[1]]
    assert [step[1] for step in seen[0]] == [-step[1] for step in seen[1]]


def test_episode_is_truncated_after_ten_steps() -> None:
    env = EnvMaker.resolve("asyncmaml/TabularMDP-v0").make()
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(10)] == [(False, False)] * 9 + [(False, True)]


def test_rows_without_a_time_limit_are_never_truncated() -> None:
    rows = TabularMDPVectorEnv(2, max_episode_steps=None)
    rows.reset(seed=0)
    assert not any(rows.step(np.zeros(2, np.int64))[3].any() for _ in range(30))


def test_what_was_returned_is_the_callers_own() -> None:
    rows = TabularMDPVectorEnv(3)
    first, _ = rows.reset(seed=0)
    stepped = rows.step(np.zeros(3, np.int64))[:4]
    kept = [array.copy() for array in (first, *stepped)]
    rows.step(np.ones(3, np.int64))
    for array, copied in zip((first, *stepped), kept, strict=True):
        np.testing.assert_array_equal(array, copied)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_states": 0},
        {"num_states": "3"},
        {"num_actions": 2.5},
        {"num_actions": True},
        {"reward_std": -0.1},
        {"reward_std": np.inf},
        {"reward_std": "1"},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    wanted = f"{next(iter(settings))} of TabularMDP is .*; wanted"
    with pytest.raises(ConfigurationError, match=wanted):
        TabularMDPEnv(**settings)


@pytest.mark.parametrize(
    "line", [[0.5, 0.4], [1.1, -0.1], [np.nan, 1.0]], ids=["sum", "negative", "nan"]
)
def test_lines_of_a_task_are_probabilities(line: list[float]) -> None:
    transitions = STAY_OR_GO.copy()
    transitions[1, 0] = line
    with pytest.raises(ConfigurationError, match="each line adds up to 1"):
        TabularMDPEnv(2, 2, task=TASK | {"transitions": transitions})


def test_tasks_kept_as_float32_are_accepted() -> None:
    task = {key: table.astype(np.float32) for key, table in random_mdp(10, 5, seed=0).items()}
    TabularMDPEnv(task=task)


# --- Oracles.


def test_values_of_two_steps_match_hand_calculation() -> None:
    # One step: max(0, -1) = 0 and max(2, 5) = 5. Two steps: max(0 + 0, -1 + 5) = 4 by going, and
    # max(2 + 5, 5 + 0) = 7 by staying. Half discounted: max(0, -1 + 2.5) and max(2 + 2.5, 5).
    values, actions = finite_horizon_value_iteration(STAY_OR_GO, REWARDS, 2)
    assert values.tolist() == [[4, 7], [0, 5], [0, 0]]
    assert actions.tolist() == [[1, 0], [0, 1]]
    halved, _ = finite_horizon_value_iteration(STAY_OR_GO, REWARDS, 2, 0.5)
    assert halved.tolist() == [[1.5, 5], [0, 5], [0, 0]]


@pytest.mark.parametrize("discount", [1.0, 0.7])
def test_no_policy_is_better_than_value_iterations(discount: float) -> None:
    """Every policy of 2 states, 2 actions and 3 steps, rolled out by hand: 64 of them."""
    task = random_mdp(2, 2, seed=3)
    transitions, rewards = tables_of(task)
    returns = []
    for actions in itertools.product([0, 1], repeat=6):
        state, total = np.array([1.0, 0.0]), 0.0
        for step in range(3):
            chosen = actions[2 * step : 2 * step + 2]
            total += discount**step * sum(state[s] * rewards[s, a] for s, a in enumerate(chosen))
            state = sum(state[s] * transitions[s, a] for s, a in enumerate(chosen))
        returns.append(total)
    values, _ = finite_horizon_value_iteration(transitions, rewards, 3, discount)
    assert values[0, 0] == pytest.approx(max(returns), abs=1e-12)


def test_values_without_an_end_solve_bellmans_equation_within_the_tolerance() -> None:
    # Going to and fro pays (-1 + 0.5 * 5) / (1 - 0.25) = 2 from state 0 on and 5 + 0.5 * 2 = 6
    # from state 1 on; staying there would pay 2 + 0.5 * 6 = 5 at most.
    values, actions = value_iteration(STAY_OR_GO, REWARDS, 0.5, 1e-6)
    np.testing.assert_allclose(values, [2, 6], atol=5e-7)
    assert actions.tolist() == [1, 1]
    endless, _ = finite_horizon_value_iteration(*tables_of(random_mdp(10, 5, seed=1)), 400, 0.95)
    values, _ = value_iteration(*tables_of(random_mdp(10, 5, seed=1)), 0.95, 1e-6)
    np.testing.assert_allclose(values, endless[0], atol=1e-6)


def test_values_of_a_policy_are_those_of_its_best_actions() -> None:
    task = random_mdp(4, 3, seed=0)
    values, actions = finite_horizon_value_iteration(*tables_of(task), 1)
    policy = np.eye(3)[actions[0]]
    np.testing.assert_allclose(policy_values(*tables_of(task), policy, 1), values)


def test_reference_returns_are_what_the_environment_pays() -> None:
    task = random_mdp(10, 5, seed=2)
    reference = reference_returns(task)
    returns = returns_of_random_policy(task, 4000)
    assert abs(returns.mean() - reference.random) < 3 * returns.std() / math.sqrt(4000)

    _, actions = finite_horizon_value_iteration(*tables_of(task), 10)
    rows = TabularMDPVectorEnv(4000, task=task)
    observations, _ = rows.reset(seed=0)
    total = np.zeros(4000)
    for step in range(10):
        observations, rewards, *_ = rows.step(actions[step, observations.argmax(axis=1)])
        total += rewards
    assert abs(total.mean() - reference.optimal) < 3 * total.std() / math.sqrt(4000)
    assert reference.score(reference.random) == 0.0
    assert reference.score(reference.optimal) == 1.0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: reference_returns({"goal": (0, 1)}), "no reference returns"),
        (lambda: value_iteration(STAY_OR_GO, REWARDS, 1.0), "use finite_horizon"),
        (lambda: value_iteration(STAY_OR_GO[0], REWARDS), r"\(S, A, S\)"),
        (lambda: finite_horizon_value_iteration(STAY_OR_GO, REWARDS, 0), "horizon .* is 0;"),
        (lambda: finite_horizon_value_iteration(STAY_OR_GO, REWARDS, True), "horizon .* is True;"),
        (lambda: finite_horizon_value_iteration(STAY_OR_GO, REWARDS, 3, 2), "discount .* is 2;"),
        (lambda: policy_values(STAY_OR_GO, REWARDS, np.ones(2), 3), r"one shape \(S, A\)"),
    ],
)
def test_arguments_of_oracles_are_checked(call: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        call()
