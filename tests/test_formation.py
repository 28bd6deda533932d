"""Who acts together in a tick. What is drawn for them is held to what is drawn alone elsewhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from asyncmaml import NormalMLPPolicy
from asyncmaml.sampling.actions import ActionPlan, plan_actions
from asyncmaml.sampling.formation import MAX_STACKED_ROWS, Acting, Alike, Formations, form
from asyncmaml.sampling.requests import Request, Terms
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.streams import EpisodeStreams, Seeds

CPU = torch.device("cpu")
POLICY = NormalMLPPolicy(2, 2, (16,))
SEEDS = Seeds(0)


def a_plan() -> ActionPlan:
    return plan_actions(POLICY(torch.zeros(1, 2)), 1, Box(-1, 1, (2,), np.float32))


def snapshot(policy: Any = POLICY, *, has_acted: bool = True) -> PolicySnapshot:
    params = None if not isinstance(policy, NormalMLPPolicy) else dict(policy.named_parameters())
    made = PolicySnapshot(policy, params, CPU)
    made.plan = a_plan() if has_acted else None
    return made


def request(policy: PolicySnapshot) -> Request:
    terms = Terms(4, 0.95, "cpu", 4, "raise")
    return Request(policy, SEEDS.next_request(None), None, terms, lambda _: None)


def formed(owners: Sequence[int], requests: Sequence[Request]) -> list[Alike]:
    return form(np.array(owners, np.int32), np.arange(len(owners)) + 100, dict(enumerate(requests)))


def where(group: Acting) -> list[int]:
    """Return the places of a group's rows among those of the tick."""
    places: list[int] = np.arange(1000)[group.places].tolist()
    assert places == group.index.tolist()
    assert group.rows.tolist() == [100 + place for place in places]
    return places


def streams_of(group: Acting) -> list[EpisodeStreams]:
    return [group.streams(at) for at in range(group.count)]


def test_requests_with_parameters_of_their_own_share_a_stacked_forward() -> None:
    requests = [request(snapshot()) for _ in range(2)]
    (alike,) = formed([1, 0, 0, 1, 0], requests)
    assert not alike.apart
    assert alike.stack is not None
    assert [where(own) for own in alike.stack.sets] == [[1, 2, 4], [0, 3]]
    assert alike.stack.policies == tuple(each.policy for each in requests)
    together = alike.stack.together
    assert where(together) == [1, 2, 4, 0, 3]
    assert streams_of(together) == [requests[slot].streams for slot in (0, 0, 0, 1, 1)]


def test_sets_of_different_sizes_are_padded_to_one() -> None:
    requests = [request(snapshot()) for _ in range(3)]
    stack = formed([0, 0, 0, 1, 2, 2], requests)[0].stack
    assert stack is not None
    assert stack.most == 3
    places = stack.padded_places(4)
    # Sets begin at 0, 4 and 8.
    assert np.arange(12)[places].tolist() == [0, 1, 2, 4, 8, 9]


def test_full_sets_in_their_order_are_views() -> None:
    requests = [request(snapshot()) for _ in range(2)]
    stack = formed([0, 0, 1, 1], requests)[0].stack
    assert stack is not None
    assert stack.padded_places(2) == slice(0, 4)
    assert stack.together.entries(30) == slice(30, 34)


@pytest.mark.parametrize("has_acted", [True, False])
def test_requests_with_one_snapshot_are_one_set(has_acted: bool) -> None:
    policy = snapshot(has_acted=has_acted)
    requests = [request(policy) for _ in range(3)]
    (alike,) = formed([2, 0, 1, 0], requests)
    assert alike.stack is None
    assert not alike.is_of_one_request
    (own,) = alike.apart
    assert where(own) == [0, 1, 2, 3]
    assert streams_of(own) == [requests[slot].streams for slot in (2, 0, 1, 0)]
    by_request = {group.request: where(group) for group in own.by_request()}
    assert by_request == {requests[0]: [1, 3], requests[1]: [2], requests[2]: [0]}


def test_policy_that_cannot_be_stacked_is_shared_nevertheless() -> None:
    policy = snapshot(lambda observations: POLICY(observations))
    others = snapshot(lambda observations: POLICY(observations))
    requests = [request(each) for each in (policy, others, policy)]
    shared, alone = formed([0, 1, 2], requests)
    assert [where(own) for own in shared.apart] == [[0, 2]]
    assert [where(own) for own in alone.apart] == [[1]]
    assert alone.is_of_one_request


def test_policies_of_different_architecture_have_a_forward_each() -> None:
    wider = NormalMLPPolicy(2, 2, (32,))
    requests = [request(snapshot(policy)) for policy in (POLICY, wider, POLICY, wider)]
    ours, theirs = formed([0, 1, 2, 3, 3], requests)
    for alike, places in ((ours, [[0], [2]]), (theirs, [[1], [3, 4]])):
        assert alike.stack is not None
        assert [where(own) for own in alike.stack.sets] == places


def test_large_sets_have_a_forward_each() -> None:
    requests = [request(snapshot()) for _ in range(3)]
    owners = [0] * (MAX_STACKED_ROWS + 1) + [1, 2, 2]
    (alike,) = formed(owners, requests)
    assert [own.request for own in alike.apart] == requests[:1]
    assert alike.stack is not None
    assert [own.request for own in alike.stack.sets] == requests[1:]


def test_one_small_set_beside_large_ones_is_not_stacked() -> None:
    requests = [request(snapshot()) for _ in range(2)]
    (alike,) = formed([0] * (MAX_STACKED_ROWS + 1) + [1], requests)
    assert alike.stack is None
    assert [own.request for own in alike.sets] == requests


def test_policy_without_a_plan_acts_by_itself() -> None:
    requests = [request(snapshot(has_acted=False)), request(snapshot())]
    first, second = formed([0, 0, 1], requests)
    assert first.is_of_one_request
    assert second.is_of_one_request


@pytest.mark.parametrize("has_acted", [True, False])
def test_formation_is_kept_once_all_plans_are_known(has_acted: bool) -> None:
    formations = Formations()
    requests = {slot: request(snapshot(has_acted=has_acted)) for slot in range(2)}
    owners, rows = np.array([0, 1], np.int32), np.arange(2)
    first = formations.of(owners, rows, requests)
    again = formations.of(owners.copy(), rows.copy(), requests)
    assert (again is first) == has_acted
    assert formations.of(owners, rows + 1, requests) is not first
    assert formations.of(owners[::-1].copy(), rows, requests) is not first


def test_kept_formation_is_that_of_its_tick_when_the_log_is_written_again() -> None:
    formations = Formations()
    requests = {slot: request(snapshot()) for slot in range(2)}
    log = np.array([0, 1, 1], np.int32)
    (kept,) = formations.of(log, np.arange(3) + 100, requests)
    (alone,) = formations.of(log[1:], np.arange(2) + 101, requests)
    log[:] = 0
    assert [where(own) for own in kept.sets] == [[0], [1, 2]]
    assert streams_of(alone.apart[0]) == [requests[1].streams] * 2


def test_no_request_is_remembered_when_its_slot_is_anothers() -> None:
    formations = Formations()
    owners, rows = np.array([0, 0], np.int32), np.arange(2)
    formations.of(owners, rows, {0: request(snapshot())})
    formations.clear()
    other = request(snapshot())
    (alike,) = formations.of(owners, rows, {0: other})
    assert alike.apart[0].request is other
