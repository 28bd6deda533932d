"""Who acts together in one tick: rows under one set of parameters, and sets in one forward.

Rows stay in their episodes for many steps, so most ticks are formed as an earlier one was. What
is in here says nothing of observations or steps, only of places among the tick's rows; it holds
for every tick with the same rows of the same requests, and is kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.row_places import Places
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.streams import EpisodeStreams

MAX_STACKED_ROWS = 64
"""Rows under one set of parameters from which a forward of their own costs no more."""
_MAX_KEPT = 64


@dataclass(frozen=True, eq=False)
class Acting:
    """The rows of one tick that wait for an action under one set of parameters."""

    policy: PolicySnapshot
    index: NDArray[np.intp]
    """Of the rows among those of the tick, N of them."""
    rows: NDArray[np.intp]
    owners: NDArray[np.int32]
    """The slot of each row's request."""
    requests: Mapping[int, Request]
    """Those, by slot."""

    @property
    def count(self) -> int:
        """N."""
        return len(self.rows)

    @property
    def request(self) -> Request:
        """The first of its requests."""
        return next(iter(self.requests.values()))

    @cached_property
    def places(self) -> Places:
        """The index, as a slice where it can be one."""
        return _as_slice(self.index)

    def entries(self, start: int) -> Places:
        """Return the rows' entries in the log, where the tick's begin at `start`."""
        places = self.places
        if isinstance(places, slice):
            return slice(start + places.start, start + places.stop)
        return start + places

    def streams(self, at: int) -> EpisodeStreams:
        """Return those of the n-th row."""
        return self.requests[int(self.owners[at])].streams

    def by_request(self) -> Iterator["Acting"]:
        """Yield the rows of each request."""
        for slot, request in self.requests.items():
            mine = np.flatnonzero(self.owners == slot)
            part = self.index[mine], self.rows[mine], self.owners[mine]
            yield Acting(self.policy, *part, {slot: request})


def _as_slice(places: NDArray[np.intp]) -> Places:
    """Return the places as a slice where they follow each other: it makes views, not copies."""
    first, count = int(places[0]), len(places)
    if int(places[-1]) == first + count - 1 and (np.diff(places) == 1).all():
        return slice(first, first + count)
    return places


@dataclass(frozen=True, eq=False)
class Stack:
    """Rows under M sets of parameters of one policy, which share one forward if they can."""

    sets: list[Acting]
    _places: dict[int, Places] = field(default_factory=dict)
    """By the size that each set is padded to."""

    @cached_property
    def policies(self) -> tuple[PolicySnapshot, ...]:
        """Of each set."""
        return tuple(own.policy for own in self.sets)

    @cached_property
    def most(self) -> int:
        """Rows of the largest set."""
        return max(own.count for own in self.sets)

    @cached_property
    def together(self) -> Acting:
        """All rows, set by set."""
        sets = self.sets
        return Acting(
            self.policies[0],
            np.concatenate([own.index for own in sets]),
            np.concatenate([own.rows for own in sets]),
            np.concatenate([own.owners for own in sets]),
            {slot: request for own in sets for slot, request in own.requests.items()},
        )

    def padded_places(self, size: int) -> Places:
        """Return where the rows lie when each set is padded to `size` of them."""
        if size not in self._places:
            counts = np.array([own.count for own in self.sets])
            shifts = np.arange(len(counts)) * size - (counts.cumsum() - counts)
            self._places[size] = _as_slice(np.repeat(shifts, counts) + np.arange(counts.sum()))
        return self._places[size]


@dataclass(frozen=True, eq=False)
class Alike:
    """Sets of parameters of one policy."""

    apart: list[Acting]
    """Those that take a forward each."""
    stack: Stack | None
    """Those that may share one."""

    @classmethod
    def of(cls, sets: list[Acting]) -> Self:
        """Find which sets may share a forward."""
        small = [own for own in sets if own.count <= MAX_STACKED_ROWS]
        if len(small) < 2:
            return cls(sets, None)
        return cls([own for own in sets if own.count > MAX_STACKED_ROWS], Stack(small))

    @property
    def sets(self) -> list[Acting]:
        """All of them."""
        return self.apart if self.stack is None else self.apart + self.stack.sets

    @property
    def is_of_one_request(self) -> bool:
        """Whether there is nobody else to act together with."""
        return self.stack is None and len(self.apart) == len(self.apart[0].requests) == 1


def form(
    owners: NDArray[np.int32], rows: NDArray[np.intp], requests: Mapping[int, Request]
) -> list[Alike]:
    """Find which rows of a tick act together; see `Formations.of`."""
    alike: dict[object, list[Acting]] = {}
    for own in _by_policy(owners, rows, requests):
        policy = own.policy
        # A policy's first forward tells its plan, and whether it can act at all.
        can_be_stacked = policy.plan is not None and policy.can_be_stacked
        kind = (policy.architecture, policy.plan) if can_be_stacked else policy
        alike.setdefault(kind, []).append(own)
    return [Alike.of(sets) for sets in alike.values()]


def _by_policy(
    owners: NDArray[np.int32], rows: NDArray[np.intp], requests: Mapping[int, Request]
) -> Iterator[Acting]:
    slots = np.flatnonzero(np.bincount(owners)).tolist()
    slots_of: dict[PolicySnapshot, dict[int, Request]] = {}
    for slot in slots:
        request = requests[slot]
        slots_of.setdefault(request.policy, {})[slot] = request
    if len(slots_of) == 1:
        policy, own = next(iter(slots_of.items()))
        yield Acting(policy, np.arange(len(rows)), rows, owners.copy(), own)
        return
    number_of_slot = np.zeros(slots[-1] + 1, np.intp)
    for number, own in enumerate(slots_of.values()):
        number_of_slot[list(own)] = number
    numbers = number_of_slot[owners]
    order = np.argsort(numbers, kind="stable")
    sorted_rows, sorted_owners = rows[order], owners[order]
    bounds = [0, *np.bincount(numbers).cumsum().tolist()]
    for (first, end), (policy, own) in zip(pairwise(bounds), slots_of.items(), strict=True):
        mine = slice(first, end)
        yield Acting(policy, order[mine], sorted_rows[mine], sorted_owners[mine], own)


class Formations:
    """Who acts together in the ticks of late, as long as no request comes or goes."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bytes, bytes], list[Alike]] = {}

    def clear(self) -> None:
        """Forget them: slots may stand for other requests now."""
        self._kept.clear()

    def of(
        self,
        owners: NDArray[np.int32],
        rows: NDArray[np.intp],
        requests: Mapping[int, Request],
    ) -> list[Alike]:
        """Return how rows act.

        Args:
            owners: The slots of their requests, shape `(N,)`.
            rows: Shape `(N,)`.
            requests: By slot.
        """
        key = owners.tobytes(), rows.tobytes()
        found = self._kept.get(key)
        if found is None:
            found = form(owners, rows, requests)
            # Once their plans are known, more policies can act together.
            if all(own.policy.plan is not None for alike in found for own in alike.sets):
                if len(self._kept) >= _MAX_KEPT:
                    self._kept.clear()
                self._kept[key] = found
        return found
