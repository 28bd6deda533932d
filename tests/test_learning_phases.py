"""Phases: what a learner is given of a task's episodes.

Rows of the fault list in MAMLRL.md 3.3 that fail here when put back:
2 (mean of episode means), 3 (arguments written to; NaN without a step), 4 (episodes lose their
tensors), 5 (padding of -mean), 8 (value after a truncated end), 23 (actions as floats).
"""

from typing import Any

import numpy as np
import pytest
import torch

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import EpisodesError, LearningError
from asyncmaml.learning.baseline import LinearFeatureBaseline
from asyncmaml.learning.phases import Phase, make_phase, masked_mean, normalized, stack_phases


def episodes_of(
    rewards: list[list[float]],
    *,
    gamma: float = 0.5,
    terminated: bool = True,
    with_log_probs: bool = True,
) -> BatchEpisodes:
    """Episodes with these rewards; an observation tells its episode."""
    episodes = BatchEpisodes(len(rewards), gamma)
    for step in range(max(map(len, rewards))):
        ids = np.array([b for b, row in enumerate(rewards) if step < len(row)])
        now = np.array([rewards[b][step] for b in ids], np.float32)
        logs = np.full(len(ids), -0.5, np.float32) if with_log_probs else None
        episodes.append(ids[:, None].astype(np.float32), ids, now, ids, logs)
    ids = np.arange(len(rewards))
    ended = np.full(len(rewards), terminated)
    episodes.finish(ids, ids[:, None].astype(np.float32), ended, ~ended)
    return episodes


def phase_of(episodes: BatchEpisodes, **options: Any) -> Phase:
    return make_phase(episodes, LinearFeatureBaseline(), **options)


def test_every_step_weighs_the_same_however_long_its_episode() -> None:
    """Fault 2: the mean over episodes of their means would be 0.5 here."""
    mask = (torch.arange(100).unsqueeze(1) < torch.tensor([5, 100])).float()
    numbers = torch.zeros(100, 2)
    numbers[:5, 0] = 1.0
    assert float(masked_mean(numbers, mask)) == pytest.approx(5 / 105)


def test_a_mean_leaves_its_arguments_alone_and_is_0_without_a_step() -> None:
    """Fault 3."""
    numbers, mask = torch.full((2, 2), float("nan")), torch.zeros(2, 2)
    numbers[0] = 3.0
    before = numbers.clone()
    assert float(masked_mean(numbers, mask)) == 0
    mask[0] = 1
    assert float(masked_mean(numbers, mask)) == 3
    torch.testing.assert_close(numbers, before, equal_nan=True)


def test_a_phase_leaves_the_episodes_as_they_were() -> None:
    """Fault 4."""
    episodes = episodes_of([[1.0, 2.0, 0.0], [3.0]])
    returns, mask = episodes.returns.clone(), episodes.mask.clone()
    first, second = phase_of(episodes), phase_of(episodes)
    for name in ("observations", "actions", "mask", "advantages", "rewards", "log_probs"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert torch.equal(episodes.returns, returns)
    assert torch.equal(episodes.mask, mask)


def test_advantages_are_normalised_over_the_steps_taken_and_0_elsewhere() -> None:
    """Fault 5: by hand, 1, 2, 6 have mean 3 and variance 14 / 3."""
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    advantages = torch.tensor([[1.0, 2.0], [6.0, 100.0]])
    std = (14 / 3) ** 0.5
    expected = torch.tensor([[-2 / std, -1 / std], [3 / std, 0.0]])
    torch.testing.assert_close(normalized(advantages, mask, scale=1.0), expected)


def test_a_phase_holds_what_the_episodes_have() -> None:
    episodes = episodes_of([[1.0, 2.0, 0.0], [3.0]])
    phase = phase_of(episodes)
    assert phase.mean_return == pytest.approx((3 + 3) / 2)
    assert phase.num_transitions == 4
    assert phase.num_rows == 6
    assert torch.equal(phase.rewards, episodes.rewards)
    assert phase.log_probs[:, 1].tolist() == [-0.5, 0, 0]
    assert float((phase.advantages * phase.mask).sum()) == pytest.approx(0, abs=1e-6)
    assert float(phase.advantages.square().sum() / 4) == pytest.approx(1, abs=1e-5)


def test_integer_actions_stay_integers_and_numbers_take_the_dtype() -> None:
    """Fault 23."""
    phase = make_phase(episodes_of([[1.0], [2.0]]), LinearFeatureBaseline(), dtype=torch.float64)
    assert phase.actions.dtype is torch.int64
    for name in ("observations", "mask", "advantages", "rewards", "log_probs"):
        assert getattr(phase, name).dtype is torch.float64


def test_only_a_truncated_end_is_bootstrapped_and_only_if_asked() -> None:
    """Fault 8: the last step's advantage differs by gamma times the baseline's last value."""
    rewards = [[1.0, 2.0, 4.0], [0.0, 3.0, 1.0]]

    def last_advantages(terminated: bool, bootstrap: bool) -> torch.Tensor:
        episodes = episodes_of(rewards, terminated=terminated)
        phase = phase_of(episodes, bootstrap_truncated=bootstrap, normalize=False)
        return phase.advantages[-1]

    plain = last_advantages(terminated=False, bootstrap=False)
    assert torch.equal(last_advantages(terminated=True, bootstrap=True), plain)
    last_values = LinearFeatureBaseline().values_and_last(episodes_of(rewards))[1].float()
    torch.testing.assert_close(
        last_advantages(terminated=False, bootstrap=True), plain + 0.5 * last_values
    )
    assert last_values.abs().min() > 0.1


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 1e6])
@pytest.mark.parametrize("num_steps", [1, 30])
def test_rewards_that_are_all_equal_give_no_advantage(value: float, num_steps: int) -> None:
    """What the baseline leaves over is rounding or its own misfit; normalised it looks real."""
    phase = phase_of(episodes_of([[value] * num_steps] * 4))
    assert not phase.advantages.any()


def test_equal_rewards_of_episodes_of_different_length_do_give_advantages() -> None:
    assert phase_of(episodes_of([[1.0] * 3, [1.0] * 9])).advantages.any()


def test_advantages_that_are_rounding_beside_the_returns_are_0() -> None:
    advantages, mask = torch.tensor([[0.0, 6e-5]]), torch.ones(1, 2)
    assert not normalized(advantages, mask, scale=1000.0).any()
    assert normalized(advantages, mask, scale=1.0).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    with pytest.raises(LearningError, match=r"rewards of .* first at step 1 of episode 0"):
        phase_of(episodes_of([[1.0, bad], [2.0]]))


def test_episodes_without_log_probs_are_refused() -> None:
    with pytest.raises(EpisodesError, match="no log_probs"):
        phase_of(episodes_of([[1.0]], with_log_probs=False))


def test_stacked_phases_are_padded_to_the_longest_and_the_most() -> None:
    phases = [phase_of(episodes_of([[1.0, 2.0, 0.0], [3.0]])), phase_of(episodes_of([[1.0]] * 3))]
    stacked = stack_phases(phases)
    assert stacked.mask.shape == (2, 3, 3)
    assert stacked.observations.shape == (2, 3, 3, 1)
    assert stacked.actions.dtype is torch.int64
    for index, phase in enumerate(phases):
        num_steps, batch_size = phase.mask.shape
        part = stacked.advantages[index]
        assert torch.equal(part[:num_steps, :batch_size], phase.advantages)
        assert int(stacked.mask[index].sum()) == phase.num_transitions
    torch.testing.assert_close(
        masked_mean(stacked.rewards, stacked.mask),
        torch.stack([masked_mean(phase.rewards, phase.mask) for phase in phases]),
    )
