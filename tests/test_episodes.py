"""`BatchEpisodes` against hand calculations and against plain Python lists."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import ConfigurationError, EpisodesError

Rewards = list[list[float]]


def filled(rewards: Rewards, gamma: float = 0.5, log_probs: bool = False) -> BatchEpisodes:
    """Unfinished episodes of these rewards; observation (episode, step), action = step."""
    episodes = BatchEpisodes(len(rewards), gamma)
    for step in range(max(map(len, rewards))):
        ids = [index for index, episode in enumerate(rewards) if step < len(episode)]
        episodes.append(
            np.array([[index, step] for index in ids], np.float64),
            np.full(len(ids), step),
            [rewards[index][step] for index in ids],
            ids,
            np.full(len(ids), -1.0) if log_probs else None,
        )
    return episodes


def finished(
    rewards: Rewards, terminated: list[bool], truncated: list[bool], gamma: float = 0.5
) -> BatchEpisodes:
    episodes = filled(rewards, gamma)
    ids = np.arange(len(rewards))
    episodes.finish(ids, np.ones((len(ids), 2)), terminated, truncated)
    return episodes


def snapshot(episodes: BatchEpisodes) -> list[Any]:
    names = ("observations", "actions", "rewards", "lengths", "terminated", "last_observations")
    return [getattr(episodes, name).tolist() for name in names]


# ---- padded tensors ----


def test_tensors_are_padded_time_first() -> None:
    episodes = filled([[1, 2, 3], [4]])
    assert len(episodes) == 3
    assert episodes.rewards.tolist() == [[1, 4], [2, 0], [3, 0]]
    assert episodes.mask.tolist() == [[1, 1], [1, 0], [1, 0]]
    assert episodes.observations[:, 0].tolist() == [[0, 0], [0, 1], [0, 2]]
    assert episodes.observations[1:, 1].tolist() == [[0, 0], [0, 0]]
    assert episodes.lengths.tolist() == [3, 1]
    assert episodes.episode_returns.tolist() == [6, 4]
    assert episodes.num_transitions == 4


def test_floats_become_float32_and_everything_else_keeps_its_type() -> None:
    episodes = BatchEpisodes(2)
    episodes.append(np.full((2, 3, 3), 255, np.uint8), [1, 0], np.ones(2, np.float64), [0, 1])
    assert episodes.observations.dtype == torch.uint8
    assert episodes.actions.dtype == torch.int64
    assert episodes.rewards.dtype == episodes.mask.dtype == torch.float32
    episodes = BatchEpisodes(1)
    episodes.append(np.zeros((1, 2), np.float64), np.array([[True]]), [1], [0])
    assert episodes.observations.dtype == episodes.returns.dtype == torch.float32
    assert episodes.actions.dtype == torch.bool
    assert episodes.lengths.dtype == torch.int64
    assert episodes.terminated.dtype == episodes.truncated.dtype == torch.bool


def test_rows_may_be_tensors_of_any_float_type() -> None:
    episodes = BatchEpisodes(2)
    observations = torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16, requires_grad=True)
    episodes.append(observations, torch.tensor([3, 4]), torch.ones(2), torch.tensor([1, 0]))
    assert episodes.observations.tolist() == [[[2.5], [1.5]]]
    assert episodes.actions.tolist() == [[4, 3]]


def test_rows_may_be_strided_or_byte_swapped() -> None:
    episodes = BatchEpisodes(2)
    observations = np.arange(8, dtype=np.float32).reshape(2, 4)[:, ::2]
    episodes.append(observations, np.array([1, 2], ">i4"), np.ones(2), [0, 1])
    assert episodes.observations.tolist() == [[[0, 2], [4, 6]]]
    assert episodes.actions.tolist() == [[1, 2]]


def test_rows_without_a_batch_id_are_skipped() -> None:
    episodes = BatchEpisodes(2)
    episodes.append(np.eye(3), [7, 8, 9], [1, 2, 3], [1, None, 0])
    episodes.append(np.eye(3), [7, 8, 9], [1, 2, 3], [None, None, None])
    assert episodes.actions.tolist() == [[9, 7]]
    assert episodes.rewards.tolist() == [[3, 1]]


def test_storage_grows_beyond_its_first_capacity() -> None:
    episodes = BatchEpisodes(1, capacity_hint=1)
    for step in range(9):
        episodes.append([[float(step)]], [step], [step], [0])
    assert episodes.actions[:, 0].tolist() == list(range(9))


def test_observations_without_numbers_are_carried() -> None:
    episodes = BatchEpisodes(2)
    episodes.append(np.zeros((2, 0)), [1, 2], [3, 4], [0, 1])
    assert episodes.observations.shape == (1, 2, 0)


Call = list[tuple[int, float]]


@settings(max_examples=40)
@given(
    st.integers(1, 5).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(
                st.lists(
                    st.tuples(st.integers(0, size - 1), st.integers(-9, 9).map(float)),
                    max_size=size,
                    unique_by=lambda row: row[0],
                ),
                max_size=12,
            ),
            st.integers(1, 4),
        )
    )
)
def test_any_interleaving_of_appends_equals_lists_of_rewards(
    case: tuple[int, list[Call], int],
) -> None:
    size, calls, capacity = case
    naive: Rewards = [[] for _ in range(size)]
    episodes = BatchEpisodes(size, 0.5, capacity_hint=capacity)
    for call in calls:
        ids, rewards = [row[0] for row in call], [row[1] for row in call]
        episodes.append(np.array(rewards).reshape(-1, 1), ids, rewards, ids)
        for index, reward in call:
            naive[index].append(reward)
        if any(naive):
            _ = episodes.rewards  # hand a tensor out now and then
    assert len(episodes) == max(map(len, naive))
    assert episodes.num_transitions == sum(map(len, naive))
    if not any(naive):
        return
    for index, expected in enumerate(naive):
        padding = [0.0] * (len(episodes) - len(expected))
        returns = [
            sum(0.5**k * reward for k, reward in enumerate(expected[step:]))
            for step in range(len(expected))
        ]
        assert episodes.rewards[:, index].tolist() == expected + padding
        assert episodes.observations[:, index, 0].tolist() == expected + padding
        assert episodes.actions[:, index].tolist() == [index] * len(expected) + [0] * len(padding)
        assert episodes.mask[:, index].tolist() == [1.0] * len(expected) + padding
        assert episodes.returns[:, index].tolist() == pytest.approx(returns + padding)


def test_append_does_the_same_number_of_calls_for_any_number_of_rows() -> None:
    def count_calls(num_rows: int) -> int:
        episodes = BatchEpisodes(num_rows)
        columns = np.zeros((num_rows, 4), np.float32), np.zeros(num_rows, np.int64)
        rewards, ids = np.zeros(num_rows), np.arange(num_rows)
        episodes.append(*columns, rewards, ids)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        previous = sys.getprofile()
        sys.setprofile(count)
        episodes.append(*columns, rewards, ids)
        sys.setprofile(previous)
        return calls

    assert count_calls(4) == count_calls(400) > 0


# ---- store and finish ----


def test_stored_steps_equal_appended_steps_in_whatever_order_they_came() -> None:
    appended = finished([[1, 2, 3], [4, 5]], [True, False], [False, True])
    stored = BatchEpisodes(2, 0.5)
    steps, ids = np.array([2, 1, 0, 1, 0]), np.array([0, 1, 1, 0, 0])
    rewards = np.array([3, 5, 4, 2, 1])
    stored.store(steps, ids, np.stack([ids, steps], 1).astype(np.float32), steps, rewards)
    stored.finish([1, 0], np.ones((2, 2)), [False, True], [True, False], lengths=[2, 3])
    assert snapshot(stored) == snapshot(appended)
    assert stored.is_complete


def test_episode_that_is_stored_counts_as_empty_until_it_is_finished() -> None:
    episodes = BatchEpisodes(1)
    episodes.store([0], [0], [[1.0]], [0], [1])
    assert len(episodes) == 0
    episodes.finish([0], [[2.0]], [True], [False], lengths=[1])
    assert len(episodes) == 1


def test_what_an_earlier_longer_try_left_becomes_padding() -> None:
    episodes = filled([[1, 2, 3], [4, 5, 6]], log_probs=True)
    before = episodes.rewards
    episodes.finish([1], [[0, 0]], [True], [False], lengths=[1])
    assert episodes.rewards.tolist() == [[1, 4], [2, 0], [3, 0]]
    assert episodes.observations[1:, 1].tolist() == [[0, 0], [0, 0]]
    assert episodes.log_probs.tolist() == [[-1, -1], [-1, 0], [-1, 0]]
    assert before.tolist() == [[1, 4], [2, 5], [3, 6]]


def test_finish_keeps_how_and_where_each_episode_ended() -> None:
    episodes = filled([[1], [2], [3]])
    assert not episodes.is_complete
    episodes.finish([2, 0], [[5, 6], [7, 8]], [True, True], [False, True])
    assert episodes.terminated.tolist() == [True, False, True]
    assert episodes.truncated.tolist() == [True, False, False]
    assert episodes.last_observations.tolist() == [[7, 8], [0, 0], [5, 6]]
    episodes.append([[1, 1]], [1], [1], [1])
    episodes.finish([1], [[9, 9]], [False], [True])
    assert episodes.is_complete


# ---- selecting ----


def test_selected_episodes_are_what_they_were() -> None:
    episodes = finished([[1, 2, 3], [4], [5, 6]], [True, False, True], [False, True, False])
    selected = episodes.select([2, 0])
    assert selected.batch_ids.tolist() == [2, 0]
    assert selected.rewards.tolist() == [[5, 1], [6, 2], [0, 3]]
    assert selected.observations[:, 0].tolist() == [[2, 0], [2, 1], [0, 0]]
    assert selected.lengths.tolist() == [2, 3]
    assert selected.terminated.tolist() == [True, True]
    assert selected.returns[0].tolist() == [5 + 0.5 * 6, 1 + 0.5 * 2 + 0.25 * 3]
    assert len(episodes.select([1])) == 1


def test_selected_episodes_and_the_original_do_not_disturb_each_other() -> None:
    episodes = filled([[1], [2]])
    selected = episodes.select([1])
    selected.append([[9, 9]], [9], [9], [0])
    assert episodes.rewards.tolist() == [[1, 2]]
    assert selected.rewards.tolist() == [[2], [9]]
    episodes.append([[7, 7]], [7], [7], [1])
    assert selected.rewards.tolist() == [[2], [9]]


@pytest.mark.parametrize("indices", [[], [3], [-1], [0.5], [0, 0]])
def test_selection_that_does_not_fit_is_refused(indices: list[Any]) -> None:
    with pytest.raises(EpisodesError):
        filled([[1], [2], [3]]).select(indices)


def test_batch_ids_count_from_where_the_part_of_a_request_begins() -> None:
    episodes = BatchEpisodes(2, first_batch_id=7)
    episodes.append([[1.0], [2.0]], [0, 0], [3, 4], [0, 1])
    assert episodes.batch_ids.tolist() == [7, 8]
    assert episodes.rewards.tolist() == [[3, 4]]


# ---- what was handed out ----


def test_tensor_that_was_handed_out_never_changes() -> None:
    episodes = filled([[1, 2], [3]])
    names = ["observations", "actions", "rewards", "mask", "returns", "lengths"]
    names += ["terminated", "last_observations", "episode_returns"]
    tensors = [getattr(episodes, name) for name in names]
    copies = [tensor.clone() for tensor in tensors]
    episodes.append([[8, 8], [9, 9]], [8, 9], [8, 9], [0, 1])
    episodes.store([0], [0], [[7, 7]], [7], [7])
    episodes.finish([0, 1], [[7, 7], [7, 7]], [True, True], [False, False])
    assert episodes.rewards.tolist() == [[7, 3], [2, 9], [8, 0]]
    for tensor, expected in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, expected)


def test_tensors_are_computed_once_until_something_is_added() -> None:
    episodes = filled([[1, 2], [3]])
    for name in ("observations", "rewards", "mask", "returns", "lengths", "episode_returns"):
        first = getattr(episodes, name)
        assert getattr(episodes, name) is first
    episodes.append([[1, 1]], [1], [1], [1])
    assert episodes.returns.tolist() == [[2, 3.5], [2, 1]]


def test_tensors_on_the_cpu_lie_on_the_storage_itself() -> None:
    episodes = filled([[1, 2]])
    address = episodes.observations.data_ptr()
    episodes.finish([0], [[1, 1]], [True], [False])
    assert episodes.observations.data_ptr() == address


def test_buffer_moved_to_a_device_and_the_original_do_not_disturb_each_other() -> None:
    episodes = filled([[1], [2]])
    episodes.task = {"goal": 1}
    moved = episodes.to("meta")
    assert episodes.to("cpu") is episodes
    assert moved.device.type == moved.rewards.device.type == "meta"
    assert moved.lengths.device.type == moved.returns.device.type == "meta"
    assert moved.task == {"goal": 1}
    moved.append([[1, 1]], [1], [5], [0])
    episodes.append([[1, 1]], [1], [6], [1])
    back = moved.to("cpu")
    assert back.rewards.tolist() == [[1, 2], [5, 0]]
    assert episodes.rewards.tolist() == [[1, 2], [0, 6]]


# ---- returns and advantages ----


def test_returns_of_two_episodes_match_hand_calculation() -> None:
    # gamma 0.5: 3;  2 + 0.5 * 3 = 3.5;  1 + 0.5 * 3.5 = 2.75.  The other: 4, then padding.
    episodes = filled([[1, 2, 3], [4]])
    assert episodes.returns.tolist() == [[2.75, 4], [3.5, 0], [3, 0]]


def test_returns_bootstrap_where_the_episode_goes_on_and_nowhere_else() -> None:
    # The value 8 of what follows: 2 + 0.5 * 8 = 6;  1 + 0.5 * 6 = 4.  Terminated: 2 and 2.
    rewards: Rewards = [[1, 2], [1, 2], [1, 2], [1, 2]]
    episodes = filled(rewards)
    episodes.finish([0, 1, 2], np.ones((3, 2)), [True, False, True], [False, True, True])
    returns = episodes.discounted_returns(torch.tensor([torch.nan, 8.0, torch.inf, 8.0]))
    assert returns.tolist() == [[2, 4, 2, 4], [2, 6, 2, 6]]
    assert episodes.returns.tolist() == [[2] * 4, [2] * 4]


def test_advantages_after_termination_match_hand_calculation() -> None:
    # gamma 0.5, tau 0.5, V = 1, 3.  delta_1 = 2 - 3 = -1;  delta_0 = 1 + 0.5 * 3 - 1 = 1.5.
    # A_1 = -1;  A_0 = 1.5 + 0.25 * -1 = 1.25.
    episodes = finished([[1, 2]], [True], [False])
    values = torch.tensor([[1.0], [3.0]])
    assert episodes.gae(values, 0.5).tolist() == [[1.25], [-1]]
    assert episodes.gae(values, 0.5, last_values=torch.tensor([100.0])).tolist() == [[1.25], [-1]]


def test_advantages_after_truncation_match_hand_calculation() -> None:
    # With V = 4 after the end: delta_1 = 2 + 0.5 * 4 - 3 = 1;  A_0 = 1.5 + 0.25 * 1 = 1.75.
    episodes = finished([[1, 2]], [False], [True])
    values = torch.tensor([[1.0], [3.0]])
    assert episodes.gae(values, 0.5).tolist() == [[1.25], [-1]]
    assert episodes.gae(values, 0.5, last_values=torch.tensor([4.0])).tolist() == [[1.75], [1]]


def test_advantages_of_ragged_episodes_bootstrap_at_their_own_ends() -> None:
    # Second episode, one step, V = 2 and 6 after it: 3 + 0.5 * 6 - 2 = 4.
    episodes = finished([[1, 2], [3]], [True, False], [False, True])
    values = torch.tensor([[1.0, 2.0], [3.0, 77.0]])
    advantages = episodes.gae(values, 0.5, last_values=torch.tensor([4.0, 6.0]))
    assert advantages.tolist() == [[1.25, 4], [-1, 0]]


def test_values_in_the_padding_do_not_leak() -> None:
    episodes = finished([[1, 2, 3], [4]], [True, True], [False, False])
    clean = torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, 0.0]])
    dirty = clean.clone()
    dirty[1:, 1] = torch.tensor([torch.nan, torch.inf])
    advantages = episodes.gae(dirty, 0.9)
    assert torch.equal(advantages, episodes.gae(clean, 0.9))
    assert advantages[1:, 1].tolist() == [0, 0]


def test_empty_episode_beside_others_has_no_returns_and_no_advantages() -> None:
    episodes = BatchEpisodes(2, 0.5)
    episodes.append([[1.0], [1.0]], [0, 0], [1, 2], [None, 0])
    last_values = torch.tensor([4.0, 4.0])
    assert episodes.discounted_returns(last_values).tolist() == [[4, 0]]
    assert episodes.gae(torch.ones(1, 2), last_values=last_values).tolist() == [[3, 0]]


def test_advantages_with_tau_one_are_returns_minus_values() -> None:
    episodes = finished([[1, 2, 3], [4, 5]], [True, True], [False, False], gamma=0.9)
    values = torch.randn(3, 2, 1, generator=torch.Generator().manual_seed(0))
    expected = (episodes.returns - values[..., 0]) * episodes.mask
    assert torch.allclose(episodes.gae(values), expected, atol=1e-6)


def test_second_call_gives_the_same_advantages_and_leaves_the_values_alone() -> None:
    episodes = finished([[1, 2], [3]], [True, True], [False, False])
    values = torch.ones(2, 2, requires_grad=True)
    first = episodes.gae(values)
    assert torch.equal(first, episodes.gae(values))
    assert not first.requires_grad
    assert values.tolist() == [[1, 1], [1, 1]]
    assert episodes.mask.tolist() == [[1, 1], [1, 0]]


# ---- keeping ----


def test_saved_episodes_come_back_whole(tmp_path: Path) -> None:
    episodes = filled([[1, 2], [3]], gamma=0.75, log_probs=True)
    episodes.finish([1], [[4, 5]], [False], [True])
    episodes.save(tmp_path / "episodes")
    loaded = BatchEpisodes.load(tmp_path / "episodes")
    assert snapshot(loaded) == snapshot(episodes)
    assert loaded.select([1]).batch_ids.tolist() == [1]
    assert torch.equal(loaded.log_probs, episodes.log_probs)
    assert (loaded.gamma, loaded.batch_size, repr(loaded)) == (0.75, 2, repr(episodes))
    loaded.append([[9, 9]], [9], [9], [0], [-2.0])
    assert loaded.rewards.tolist() == [[1, 3], [2, 0], [9, 0]]
    with pytest.raises(EpisodesError, match="finished already"):
        loaded.append([[9, 9]], [9], [9], [1], [-2.0])


def test_steps_of_unfinished_episodes_are_saved_too(tmp_path: Path) -> None:
    """They lie beyond what can be read yet."""
    episodes = BatchEpisodes(2)
    episodes.store([0, 1], [0, 0], np.ones((2, 2), np.float32), [1, 2], [1, 2])
    episodes.finish([0], np.ones((1, 2)), [True], [False], lengths=[2])
    numbers = np.arange(5)
    rows = np.stack((numbers, numbers), 1).astype(np.float32)
    episodes.store(numbers, np.ones(5, int), rows, numbers, numbers)
    episodes.save(tmp_path / "episodes")
    loaded = BatchEpisodes.load(tmp_path / "episodes")
    for each in (episodes, loaded):
        each.finish([1], np.ones((1, 2)), [True], [False], lengths=[5])
    assert snapshot(loaded) == snapshot(episodes)
    assert loaded.rewards[:, 1].tolist() == [0, 1, 2, 3, 4]
    assert loaded.mask[:, 1].tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04"])
def test_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(EpisodesError, match=r"other\.npz holds no episodes"):
        BatchEpisodes.load(path)


def test_archive_of_another_kind_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", weights=np.ones(2))
    with pytest.raises(EpisodesError, match="holds no episodes"):
        BatchEpisodes.load(tmp_path / "other.npz")
    np.savez(tmp_path / "newer.npz", format=99)
    with pytest.raises(EpisodesError, match="format that this version cannot read"):
        BatchEpisodes.load(tmp_path / "newer.npz")


def test_repr_counts_episodes_steps_and_transitions() -> None:
    episodes = filled([[1.0] * 1200, [1.0] * 34, [1.0]])
    episodes.finish([1], [[0, 0]], [True], [False])
    expected = "<BatchEpisodes 3 episodes, 1200 steps, 1,235 transitions, 1 finished>"
    assert repr(episodes) == expected


# ---- errors ----

ROW: dict[str, Any] = {
    "observations": np.ones((2, 2)),
    "actions": np.array([1, 2]),
    "rewards": np.ones(2),
    "batch_ids": np.array([0, 1]),
}
END: dict[str, Any] = {
    "batch_ids": np.array([0, 1]),
    "last_observations": np.ones((2, 2)),
    "terminated": np.array([True, False]),
    "truncated": np.array([False, True]),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_ids": [0, 3]}, r"must lie in 0\.\.2, got \[3\]"),
        ({"batch_ids": [-1, 0]}, r"must lie in 0\.\.2, got \[-1\]"),
        ({"batch_ids": [1, 1]}, r"must differ, got \[1\] more than once"),
        ({"batch_ids": [0, 2]}, r"episodes \[2\] are finished already"),
        ({"batch_ids": [0.0, 1.0]}, "batch_ids must be integers, got type float64"),
        ({"batch_ids": [[0, 1]]}, "batch_ids must have shape"),
        ({"batch_ids": [0]}, r"observations must have shape \(1, 2\).* got \(2, 2\)"),
        ({"batch_ids": [0, 1, None]}, r"3 batch_ids for rows of shape \(2, 2\)"),
        ({"observations": np.ones((2, 3))}, r"observations must have shape \(2, 2\)"),
        ({"observations": [[1, 2], [3]]}, "observations must be rows of one shape"),
        ({"actions": np.ones((2, 1), np.int64)}, r"actions must have shape \(2,\)"),
        ({"actions": np.array([0.5, 1.5])}, "actions were int64 .* are float64 now"),
        ({"rewards": np.ones((2, 1))}, r"rewards must have shape \(2,\)"),
        ({"rewards": ["a", "b"]}, "rewards were float32"),
        ({"log_probs": np.ones(2)}, "log_probs must come in every call or in none"),
    ],
)
def test_append_that_does_not_fit_tells_why_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    episodes = filled([[1], [2], [3, 4]])
    episodes.finish([2], [[0, 0]], [True], [False])
    before = snapshot(episodes)
    with pytest.raises(EpisodesError, match=message):
        episodes.append(**(ROW | change))
    assert snapshot(episodes) == before
    assert episodes.num_transitions == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": np.ones((2, 1))}, "rewards must have shape"),
        ({"observations": np.array(["a", "b"])}, "observations must be numbers"),
        ({"actions": 1}, "actions must have shape"),
    ],
)
def test_first_append_that_does_not_fit_leaves_the_buffer_empty(
    change: dict[str, Any], message: str
) -> None:
    episodes = BatchEpisodes(2)
    with pytest.raises(EpisodesError, match=message):
        episodes.append(**(ROW | change))
    assert len(episodes) == 0
    episodes.append(np.ones((2, 5)), np.ones((2, 3)), [1, 2], [0, 1])  # any shape is still free
    assert episodes.actions.shape == (1, 2, 3)


def test_log_probs_that_are_left_out_once_are_an_error() -> None:
    episodes = filled([[1], [2]], log_probs=True)
    with pytest.raises(EpisodesError, match="left out this time"):
        episodes.append(**ROW)
    assert episodes.log_probs.tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [0, -1]}, r"steps must be 0 or more, got \[-1\]"),
        ({"steps": [0.0, 1.0]}, "steps must be integers"),
        ({"steps": [0]}, "steps must have shape"),
        ({"batch_ids": [0, 3]}, r"must lie in 0\.\.2"),
        ({"observations": np.ones((2, 3))}, "observations must have shape"),
    ],
)
def test_store_that_does_not_fit_tells_why_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    episodes = filled([[1], [2], [3, 4]])
    before = snapshot(episodes)
    with pytest.raises(EpisodesError, match=message):
        episodes.store(**({"steps": [0, 0]} | ROW | change))
    assert snapshot(episodes) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_ids": [0, 4]}, r"must lie in 0\.\.3"),
        ({"batch_ids": [0, 0]}, "must differ"),
        ({"batch_ids": [0, 2]}, r"episodes \[2\] are finished already"),
        ({"batch_ids": [0, 3]}, r"must lie between 1 and .* stored, \[1, 0\], got \[1, 0\]"),
        ({"batch_ids": [0]}, "terminated must have shape"),
        ({"lengths": [0, 1]}, "must lie between 1"),
        ({"lengths": [1, 3]}, "must lie between 1"),
        ({"lengths": [1.0, 1.0]}, "lengths must be integers"),
        ({"last_observations": np.ones((2, 3))}, "last_observations must have shape"),
        ({"last_observations": np.array([["a"] * 2] * 2)}, "last_observations must be numbers"),
        ({"terminated": [True]}, "terminated must have shape"),
        ({"truncated": [0.5, 0.5]}, "truncated must be booleans"),
    ],
)
def test_finish_that_does_not_fit_tells_why_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    episodes = BatchEpisodes(4)
    episodes.append(np.ones((3, 2)), [1, 2, 3], [1, 2, 3], [0, 1, 2])
    episodes.append(np.ones((1, 2)), [1], [1], [1])
    episodes.finish([2], [[0, 0]], [True], [False])
    before = snapshot(episodes)
    with pytest.raises(EpisodesError, match=message):
        episodes.finish(**(END | change))
    assert snapshot(episodes) == before
    assert not episodes.is_complete


READS: list[Callable[[BatchEpisodes], Any]] = [
    lambda episodes: episodes.observations,
    lambda episodes: episodes.mask,
    lambda episodes: episodes.returns,
    lambda episodes: episodes.log_probs,
    lambda episodes: episodes.lengths,
    lambda episodes: episodes.episode_returns,
    lambda episodes: episodes.gae(torch.zeros(0, 2)),
    lambda episodes: episodes.save("nowhere"),
]


@pytest.mark.parametrize("read", READS)
def test_reading_without_a_transition_is_an_error(read: Callable[[BatchEpisodes], Any]) -> None:
    with pytest.raises(EpisodesError, match="no transition yet"):
        read(BatchEpisodes(2))


def test_log_probs_that_were_never_recorded_cannot_be_read() -> None:
    with pytest.raises(EpisodesError, match="no log_probs were recorded"):
        _ = filled([[1]]).log_probs


def test_values_of_the_wrong_shape_or_device_are_refused() -> None:
    episodes = filled([[1, 2], [3]])
    with pytest.raises(EpisodesError, match=r"values must .* shape \(2, 2\), got \(2, 1\)"):
        episodes.gae(torch.ones(2, 1))
    with pytest.raises(EpisodesError, match="got ndarray"):
        episodes.gae(np.ones((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(EpisodesError, match="values lie on meta but the episodes on cpu"):
        episodes.gae(torch.ones(2, 2, device="meta"))
    with pytest.raises(EpisodesError, match=r"last_values must .* shape \(2,\)"):
        episodes.discounted_returns(torch.ones(2, 1))


def test_numbers_out_of_range_are_configuration_errors() -> None:
    with pytest.raises(ConfigurationError, match="batch_size"):
        BatchEpisodes(0)
    with pytest.raises(ConfigurationError, match="gamma"):
        BatchEpisodes(1, 1.5)
    with pytest.raises(ConfigurationError, match="capacity_hint"):
        BatchEpisodes(1, capacity_hint=0)
    with pytest.raises(ConfigurationError, match="tau"):
        filled([[1]]).gae(torch.ones(1, 1), tau=-1)
