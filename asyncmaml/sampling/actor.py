"""The device executor: forwards and action drawing for the rows of one tick.

As few forwards as possible, each row's result as if it were alone: rows under the same parameters
share a forward; rows under different parameters of one policy share one too, with the parameters
stacked; policies of different architecture have one each.

A stacked product may run in another kernel than a single one, and a row must not show who shared
its forward. So the first times that a policy is stacked at some size, what it draws is compared
with what separate forwards draw, bit for bit; where that differs, the policy stays separate.
A policy that vouches for itself (`stacks_exactly`) is compared once. One tick of any other may be
the same by chance: it is compared until enough different rows have been.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncmaml.sampling.actions import ActionPlan, draw_actions, plan_actions
from asyncmaml.sampling.formation import Acting, Alike, Stack
from asyncmaml.sampling.noise_store import ActionNoise, NoiseStore
from asyncmaml.sampling.row_places import Places, RowLayout, rows_at
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.stacking import StackedPolicies
from asyncmaml.sampling.transitions import TransitionLog

_STACKED_STEP = 4
"""Each set's rows are padded to a multiple of this in a stacked forward, and to a block at least.

Measured on MKL for 5,896 stacks of layers 2 to 256 wide: from a block of 16 rows on, such a number
gives what whole blocks give a set alone. Fewer do so for some values and not for others, which the
one comparison that decides may not meet.
"""
_ROWS_TO_TRUST = 1024
"""Different rows that must be the same before a policy that does not vouch for itself is trusted.

Of 47 modules (convolutions, attention, layer norms, ten nonlinearities; layers 1 to 64 wide) in
376 sizes of whole blocks, 246 never differed; the others did in 2 % of random rows at the least.
"""

Drawn = tuple[NDArray[Any], NDArray[np.float32]]
Failure = tuple[Acting, BaseException]


class NotFiniteActionError(Exception):
    """A policy's action or its log-probability is NaN or infinite; inside of `sampling` only."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index
        """Which of the request's entries it is."""


class _Evidence:
    """What the comparisons of a policy that was stacked at some size have shown so far."""

    def __init__(self, rows_to_trust: int, *, is_different: bool = False) -> None:
        self.is_different = is_different
        self.is_enough = False
        self._rows_to_trust = rows_to_trust
        self._seen: set[int] = set()
        """Observations under their parameters, hashed: a row seen twice is no more evidence."""

    def add(self, stack: Stack, start: int, log: TransitionLog) -> None:
        """Note that the rows of a tick were the same."""
        for own in stack.sets:
            rows = log.observations[own.entries(start)]
            self._seen.update(hash((id(own.policy), row.tobytes())) for row in rows)
        self.is_enough = len(self._seen) >= self._rows_to_trust
        if self.is_enough:
            self._seen.clear()


class Actor:
    """Draws the actions of rows that stand in the transition log.

    Args:
        space: The action space.
        num_rows: Rows of all lanes, N.
        device: Where the forwards run.
        row_block: Forwards are padded to a multiple of this (`asyncmaml.sampling.row_places`).
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
        self._evidence: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], _Evidence]]
        self._evidence = weakref.WeakKeyDictionary()
        """Whether a policy draws the same when it is stacked, by sets and rows of each."""
        self._ways: weakref.WeakKeyDictionary[Stack, tuple[int, _Evidence]]
        self._ways = weakref.WeakKeyDictionary()
        """What `_way_of` says of the stacks that are kept from tick to tick."""
        self._layouts: weakref.WeakKeyDictionary[PolicySnapshot, RowLayout]
        self._layouts = weakref.WeakKeyDictionary()
        self._plans: weakref.WeakKeyDictionary[nn.Module, ActionPlan]
        self._plans = weakref.WeakKeyDictionary()
        """Of the networks that say of themselves that their parameters do not change it."""

    def act(self, formation: Sequence[Alike], start: int, log: TransitionLog) -> Iterator[Failure]:
        """Draw the actions of a tick into the log; yield the requests that failed, and why.

        A `PolicyError` where the distribution does not fit, told at the first forward; a
        `NotFiniteActionError`; or what the policy raised.

        Args:
            formation: Of the tick's rows.
            start: Where their entries in the log begin.
            log: Of them all.
        """
        for alike in formation:
            if alike.is_of_one_request:
                yield from self._act_alone(alike.apart[0], start, log)
                continue
            try:
                self._act_together(alike, start, log)
            except (Exception, SystemExit):
                # Together they fail as one; each by itself, the culprit alone does.
                for own in alike.sets:
                    for group in own.by_request():
                        yield from self._act_alone(group, start, log)

    def recall(self, policy: PolicySnapshot) -> None:
        """Tell a new snapshot what an earlier one of the same network has shown.

        Without its plan it would need a first forward for itself.
        """
        if policy.plan is None and _has_one_plan(policy.origin):
            policy.plan = self._plans.get(policy.origin)

    def forget(self, policy: PolicySnapshot) -> None:
        """Let go of what is kept for a policy that no request has any more."""
        self._stacked.forget(policy)

    def _act_alone(self, group: Acting, start: int, log: TransitionLog) -> Iterator[Failure]:
        try:
            self._write(group.entries(start), log, self._draw(group, start, log))
        except (Exception, SystemExit) as error:
            yield group, error

    def _act_together(self, alike: Alike, start: int, log: TransitionLog) -> None:
        """Draw for requests of one policy: one forward for each set of parameters, or for all."""
        apart, stack = alike.apart, alike.stack
        if stack is not None and not self._act_stacked(stack, start, log):
            apart = alike.sets
        for own in apart:
            self._write(own.entries(start), log, self._draw(own, start, log))

    def _act_stacked(self, stack: Stack, start: int, log: TransitionLog) -> bool:
        """Draw for many sets of parameters in one forward; False where that is not the same."""
        way = self._ways.get(stack)
        if way is None:
            way = self._ways[stack] = self._way_of(stack)
        size, evidence = way
        if evidence.is_different:
            return False
        try:
            drawn = self._draw_stacked(stack, size, start, log)
        except Exception:
            if evidence.is_enough:
                raise
            evidence.is_different = True  # neither the policy nor vmap can
            return False
        if not evidence.is_enough:
            if not self._is_same_as_apart(drawn, stack, start, log):
                evidence.is_different = True
                return False
            evidence.add(stack, start, log)
        self._write(stack.together.entries(start), log, drawn)
        return True

    def _way_of(self, stack: Stack) -> tuple[int, _Evidence]:
        """Return the rows that each set is padded to, and what is known of such stacks."""
        policy = stack.policies[0]
        origin, layout = policy.origin, self._layout_of(policy)
        assert isinstance(origin, nn.Module)
        vouches = policy.is_single_precision and hasattr(origin, "stacks_exactly")
        stacks_exactly = cast("Callable[[int], bool]", origin.stacks_exactly) if vouches else None
        size = max(self._block, stack.most + -stack.most % _STACKED_STEP)
        if self._is_on_cpu and (stacks_exactly is None or not stacks_exactly(size)):
            size = stack.most + -stack.most % layout.block
        # To compare is not enough where it may be the same by chance, as for tiny layers.
        is_exact = stacks_exactly is None or (stacks_exactly(size) and not layout.needs_places)
        if self._is_on_cpu and not is_exact:
            return size, _Evidence(1, is_different=True)
        shape = len(stack.sets), size
        return size, self._evidence_on(origin, shape, vouches)

    def _evidence_on(self, origin: nn.Module, shape: tuple[int, int], vouches: bool) -> _Evidence:
        of_origin = self._evidence.setdefault(origin, {})
        if shape not in of_origin:
            of_origin[shape] = _Evidence(1 if vouches else _ROWS_TO_TRUST)
        return of_origin[shape]

    def _is_same_as_apart(self, drawn: Drawn, stack: Stack, start: int, log: TransitionLog) -> bool:
        """Return whether separate forwards draw the same."""
        actions, log_probs = drawn
        is_same, first = True, 0
        for own in stack.sets:
            apart = self._draw(own, start, log)
            end = first + own.count
            is_same &= np.array_equal(apart[0], actions[first:end], equal_nan=True)
            is_same &= np.array_equal(apart[1], log_probs[first:end], equal_nan=True)
            first = end
        return bool(is_same)

    def _draw(self, group: Acting, start: int, log: TransitionLog) -> Drawn:
        """Draw the actions of rows under one set of parameters."""
        policy, entries = group.policy, group.entries(start)
        observations = rows_at(log.observations, entries)
        if isinstance(entries, slice):  # a view: the policy may work in place
            observations = observations.copy()
        rows = torch.from_numpy(observations)
        batch, places = self._layout_of(policy)(rows, log.batch_ids[entries])
        distribution = policy(self._on_device(batch))
        plan = policy.plan
        if plan is None:
            plan = policy.plan = plan_actions(distribution, batch.shape[0], self._space)
            if _has_one_plan(policy.origin):
                self._plans[policy.origin] = plan
        noise = self._noise_of(plan, group, entries, log)
        return draw_actions(plan, distribution, noise, places)

    def _draw_stacked(self, stack: Stack, size: int, start: int, log: TransitionLog) -> Drawn:
        """Draw the actions of rows under M sets of parameters, `size` rows of each with padding."""
        together = stack.together
        entries, places = together.entries(start), stack.padded_places(size)
        shape, num_sets = log.observations.shape[1:], len(stack.sets)
        if together.count == num_sets * size:
            observations = rows_at(log.observations, entries)
            if isinstance(entries, slice):  # a view: the policy may work in place
                observations = observations.copy()
        else:
            observations = np.zeros((num_sets * size, *shape), log.observations.dtype)
            observations[places] = rows_at(log.observations, entries)
        stacked = torch.from_numpy(observations.reshape(num_sets, size, *shape))
        distribution = self._stacked(stack.policies, self._on_device(stacked))
        plan = together.policy.plan
        assert plan is not None
        noise = self._noise_of(plan, together, entries, log)
        return draw_actions(plan, distribution, noise, places)

    def _layout_of(self, policy: PolicySnapshot) -> RowLayout:
        layout = self._layouts.get(policy)
        if layout is None:
            layout = self._layouts[policy] = RowLayout(policy, self._block)
        return layout

    def _noise_of(
        self, plan: ActionPlan, group: Acting, entries: Places, log: TransitionLog
    ) -> ActionNoise:
        ids, steps = log.batch_ids[entries], log.steps[entries]
        return self._noise.gather(plan.noise, group.streams, group.rows, ids, steps)

    def _on_device(self, observations: Tensor) -> Tensor:
        return observations if self._is_on_cpu else observations.to(self._device)

    def _write(self, entries: Places, log: TransitionLog, drawn: Drawn) -> None:
        actions, log_probs = drawn
        log.actions[entries] = actions
        log.log_probs[entries] = log_probs
        if not (np.isfinite(log_probs).all() and np.isfinite(actions).all()):
            axes = tuple(range(1, actions.ndim))
            is_finite = np.isfinite(actions).all(axis=axes) & np.isfinite(log_probs)
            index = int(np.flatnonzero(~is_finite)[0])
            message = f"action {actions[index]} with log-probability {log_probs[index]}"
            raise NotFiniteActionError(message, index)


def _has_one_plan(origin: object) -> TypeGuard[nn.Module]:
    return isinstance(origin, nn.Module) and bool(getattr(origin, "accepts_stacked_params", False))


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
        if self._low is not None and self._high is not None:
            # Half the time of np.clip, and the same numbers.
            clipped: NDArray[Any] = np.maximum(actions, self._low)
            np.minimum(clipped, self._high, out=clipped)
            return clipped
        return actions if self._offset is None else actions + self._offset
