"""The device executor: forwards and action drawing for the rows of one tick.

As few forwards as possible, each row's result as if it were alone: rows under the same parameters
share a forward; rows under different parameters of one policy share one too, with the parameters
stacked; policies of different architecture have one each.

A stacked product may run in another kernel than a single one, and a row must not show who shared
its forward. So the first time that a policy is stacked at some size, what it draws is compared
with what separate forwards draw, bit for bit; where that differs, the policy stays separate.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncmaml.sampling.actions import ActionPlan, draw_actions, plan_actions
from asyncmaml.sampling.intraop import padded
from asyncmaml.sampling.noise_store import ActionNoise, NoiseStore
from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.stacking import StackedPolicies
from asyncmaml.sampling.streams import EpisodeStreams
from asyncmaml.sampling.transitions import TransitionLog

_MAX_STACKED_ROWS = 64
"""Rows under one set of parameters from which a forward of their own costs no more."""

Entries = slice | NDArray[np.intp]
Drawn = tuple[NDArray[Any], NDArray[np.float32]]


Failure = tuple[Request, BaseException]


class NotFiniteActionError(Exception):
    """A policy's action or its log-probability is NaN or infinite; inside of `sampling` only."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index
        """Which of the request's entries it is."""


@dataclass(frozen=True)
class Acting:
    """The rows of one tick that wait for an action from one request's policy."""

    request: Request
    entries: Entries
    """Their entries in the log, N of them."""
    rows: NDArray[np.intp]
    streams: Callable[[int], EpisodeStreams] | None = None
    """Those of the n-th row, where the rows are of several requests with one policy."""


class Actor:
    """Draws the actions of rows that stand in the transition log.

    Args:
        space: The action space.
        num_rows: Rows of all lanes, N.
        device: Where the forwards run.
        row_block: Forwards are padded to a multiple of this (`asyncmaml.sampling.intraop`).
    """

    def __init__(
        self, space: "Space[Any]", num_rows: int, device: torch.device, row_block: int
    ) -> None:
        self._space = space
        self._noise = NoiseStore(num_rows)
        self._device = device
        self._block = row_block
        self._is_on_cpu = device.type == "cpu"
        self._stacked = StackedPolicies()
        self._verdicts: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], bool]]
        self._verdicts = weakref.WeakKeyDictionary()
        """Whether a policy draws the same when it is stacked, by sets and rows of each."""

    def act(self, acting: Sequence[Acting], log: TransitionLog) -> Iterator[Failure]:
        """Draw the actions of these entries into the log; yield the requests that failed, and why.

        A `PolicyError` where the distribution does not fit, told at the first forward; a
        `NotFiniteActionError`; or what the policy raised.
        """
        if len(acting) == 1:
            yield from self._act_alone(acting[0], log)
            return
        alike: dict[tuple[object, ...], list[Acting]] = {}
        for group in acting:
            plan, policy = group.request.plan, group.request.policy
            if plan is None or not policy.can_be_stacked:
                yield from self._act_alone(group, log)
            else:
                alike.setdefault((policy.architecture, plan), []).append(group)
        for groups in alike.values():
            plan = groups[0].request.plan
            assert plan is not None
            try:
                self._act_together(plan, groups, log)
            except (Exception, SystemExit):
                # Together they fail as one; each by itself, the culprit alone does.
                for group in groups:
                    yield from self._act_alone(group, log)

    def forget(self, policy: PolicySnapshot) -> None:
        """Let go of what is kept for a policy that no request has any more."""
        self._stacked.forget(policy)

    def _act_alone(self, group: Acting, log: TransitionLog) -> Iterator[Failure]:
        try:
            self._write(group.entries, log, self._draw(group.request.policy, [group], log))
        except (Exception, SystemExit) as error:
            yield group.request, error

    def _act_together(self, plan: ActionPlan, groups: Sequence[Acting], log: TransitionLog) -> None:
        """Draw for requests of one policy: one forward for each set of parameters, or for all."""
        sets: dict[PolicySnapshot, list[Acting]] = {}
        for group in groups:
            sets.setdefault(group.request.policy, []).append(group)
        apart: dict[PolicySnapshot, list[Acting]] = {}
        small: dict[PolicySnapshot, list[Acting]] = {}
        for policy, members in sets.items():
            is_small = len(sets) > 1 and _count(members) <= _MAX_STACKED_ROWS
            (small if is_small else apart)[policy] = members
        if len(small) == 1 or (small and not self._act_stacked(plan, small, log)):
            apart |= small
        for policy, members in apart.items():
            self._write(_entries(members), log, self._draw(policy, members, log))

    def _act_stacked(
        self, plan: ActionPlan, sets: dict[PolicySnapshot, list[Acting]], log: TransitionLog
    ) -> bool:
        """Draw for many sets of parameters in one forward; False where that is not the same."""
        most = max(map(_count, sets.values()))
        size = most + -most % self._block
        origin = next(iter(sets)).origin
        assert isinstance(origin, nn.Module)
        # To compare once is not enough where it may be the same by chance, as for tiny layers.
        stacks_exactly = getattr(origin, "stacks_exactly", None)
        if self._is_on_cpu and stacks_exactly is not None and not stacks_exactly(size):
            return False
        verdicts = self._verdicts.setdefault(origin, {})
        shape = len(sets), size
        if not verdicts.get(shape, True):
            return False
        try:
            drawn = self._draw_stacked(plan, sets, size, log)
        except Exception:
            if shape in verdicts:
                raise
            verdicts[shape] = False  # neither the policy nor vmap can
            return False
        if shape not in verdicts:
            verdicts[shape] = self._is_same_as_apart(drawn, sets, log)
        if verdicts[shape]:
            members = [member for members in sets.values() for member in members]
            self._write(_entries(members), log, drawn)
        return verdicts[shape]

    def _is_same_as_apart(
        self, drawn: Drawn, sets: dict[PolicySnapshot, list[Acting]], log: TransitionLog
    ) -> bool:
        """Return whether separate forwards draw the same."""
        actions, log_probs = drawn
        is_same, start = True, 0
        for policy, members in sets.items():
            apart = self._draw(policy, members, log)
            stop = start + _count(members)
            is_same &= np.array_equal(apart[0], actions[start:stop], equal_nan=True)
            is_same &= np.array_equal(apart[1], log_probs[start:stop], equal_nan=True)
            start = stop
        return bool(is_same)

    def _draw(self, policy: PolicySnapshot, members: Sequence[Acting], log: TransitionLog) -> Drawn:
        """Draw the actions of rows under one set of parameters."""
        count = _count(members)
        entries = _entries(members)
        observations = log.observation_tensor[entries]
        if count % self._block:
            observations = padded(observations, self._block)
        elif isinstance(entries, slice):  # a view: the policy may work in place
            observations = observations.clone()
        distribution = policy(self._on_device(observations))
        plan = members[0].request.plan
        if plan is None:
            plan = policy.plan = plan_actions(distribution, observations.shape[0], self._space)
        return draw_actions(plan, distribution, self._noise_of(plan, members, log), slice(0, count))

    def _draw_stacked(
        self,
        plan: ActionPlan,
        sets: dict[PolicySnapshot, list[Acting]],
        size: int,
        log: TransitionLog,
    ) -> Drawn:
        """Draw the actions of rows under M sets of parameters, `size` rows of each with padding."""
        members = [member for members in sets.values() for member in members]
        places = [
            np.arange(place * size, place * size + _count(own))
            for place, own in enumerate(sets.values())
        ]
        into = np.concatenate(places)
        shape = log.observations.shape[1:]
        observations = np.zeros((len(sets) * size, *shape), log.observations.dtype)
        observations[into] = log.observations[_entries(members)]
        stacked = torch.from_numpy(observations.reshape(len(sets), size, *shape))
        distribution = self._stacked(list(sets), self._on_device(stacked))
        return draw_actions(plan, distribution, self._noise_of(plan, members, log), into)

    def _noise_of(
        self, plan: ActionPlan, members: Sequence[Acting], log: TransitionLog
    ) -> ActionNoise:
        entries = _entries(members)
        ids, steps = log.batch_ids[entries], log.steps[entries]
        if len(members) == 1:
            own = members[0].request.streams
            streams = members[0].streams or (lambda _: own)
            return self._noise.gather(plan.noise, streams, members[0].rows, ids, steps)
        rows = np.concatenate([member.rows for member in members])
        owners = np.repeat(np.arange(len(members)), [len(member.rows) for member in members])
        return self._noise.gather(
            plan.noise, lambda index: members[owners[index]].request.streams, rows, ids, steps
        )

    def _on_device(self, observations: Tensor) -> Tensor:
        return observations if self._is_on_cpu else observations.to(self._device)

    def _write(self, entries: Entries, log: TransitionLog, drawn: Drawn) -> None:
        actions, log_probs = drawn
        log.actions[entries] = actions
        log.log_probs[entries] = log_probs
        if not (np.isfinite(log_probs).all() and np.isfinite(actions).all()):
            axes = tuple(range(1, actions.ndim))
            is_finite = np.isfinite(actions).all(axis=axes) & np.isfinite(log_probs)
            index = int(np.flatnonzero(~is_finite)[0])
            message = f"action {actions[index]} with log-probability {log_probs[index]}"
            raise NotFiniteActionError(message, index)


def _count(members: Sequence[Acting]) -> int:
    return sum(len(member.rows) for member in members)


def _entries(members: Sequence[Acting]) -> Entries:
    """Return the entries of all members, in their order."""
    if len(members) == 1:
        return members[0].entries
    # Of several requests in one tick, none has a slice: see `Coordinator._act`.
    arrays = [member.entries for member in members if not isinstance(member.entries, slice)]
    assert len(arrays) == len(members)
    return np.concatenate(arrays)


def to_environment(space: "Space[Any]", clip_actions: bool) -> "ActionWriter":
    """Return what writes recorded actions as the environment takes them."""
    if isinstance(space, Discrete | MultiDiscrete) and np.any(space.start):
        return ActionWriter(offset=np.asarray(space.start))
    if isinstance(space, Box) and clip_actions:
        return ActionWriter(low=space.low, high=space.high)
    return ActionWriter()


class ActionWriter:
    """Writes recorded actions as the environment takes them: clipped, or counted from `start`."""

    def __init__(
        self,
        low: NDArray[Any] | None = None,
        high: NDArray[Any] | None = None,
        offset: NDArray[Any] | None = None,
    ) -> None:
        self._low = low
        self._high = high
        self._offset = offset

    def __call__(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions as the environment takes them, shape `(N, *A)`."""
        if self._low is not None:
            clipped: NDArray[Any] = np.clip(actions, self._low, self._high)
            return clipped
        return actions if self._offset is None else actions + self._offset
