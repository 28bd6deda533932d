"""A lane: one group of rows at the other end of a link, as the coordinator sees it.

Rows are numbered through all lanes: row r of a lane is `first_row + r` in the arrays of
`RowTable`. A lane's shared arrays are the coordinator's only while the lane is not stepping.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from asyncmaml.sampling.links import Link
from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.transitions import NOBODY, Pending
from asyncmaml.worker.layout import Arrays
from asyncmaml.worker.protocol import NO_TASK, Order

_IDLE, _STEP, _START = int(Order.IDLE), int(Order.STEP), int(Order.START)


class RowTable:
    """Which episode each of the N rows is in, and at which step."""

    def __init__(self, num_rows: int) -> None:
        self.owners = np.full(num_rows, NOBODY, np.int32)
        """The slot of the episode's request."""
        self.batch_ids = np.zeros(num_rows, np.int64)
        self.steps = np.zeros(num_rows, np.int64)

    def begin(self, rows: int | NDArray[np.intp], request: Request, batch_ids: int | range) -> None:
        """Put rows at the start of episodes."""
        self.owners[rows] = request.slot
        self.batch_ids[rows] = batch_ids
        self.steps[rows] = 0


@dataclass(frozen=True)
class Rows:
    """Some of a lane's rows. Where it is all of them, indexing makes views and copies nothing."""

    count: int
    local: slice | NDArray[np.intp]
    """As they are counted within the lane."""
    table: slice | NDArray[np.intp]
    """As they are counted through all lanes."""

    @classmethod
    def none(cls) -> Self:
        """Return no rows."""
        return cls(0, slice(0, 0), slice(0, 0))

    @classmethod
    def where(cls, mask: NDArray[np.bool_], first_row: int) -> Self:
        """Return the rows of a lane where the mask is true."""
        if mask.all():
            return cls(len(mask), slice(None), slice(first_row, first_row + len(mask)))
        local = np.flatnonzero(mask)
        return cls(len(local), local, first_row + local)


class Lane:
    """One group of rows, and what they were last told.

    Args:
        worker: The number of its link.
        group: Its number at its link.
        first_row: Number of its row 0 in `table`.
        num_rows: Rows, R.
        table: Of all lanes.
    """

    def __init__(
        self, worker: int, group: int, first_row: int, num_rows: int, table: RowTable
    ) -> None:
        self.worker = worker
        self.group = group
        self.first_row = first_row
        self.num_rows = num_rows
        self._table = table
        self.link: Link | None = None
        """None while a lost worker is being replaced."""
        self.is_stepping = False
        self.stepping_since = 0.0
        self.answered_at = 0.0
        self.pending: Pending | None = None
        self.acting = Rows.none()
        """The rows of the entries in `pending`. Not what `active()` says later: a request that is
        cancelled leaves its rows at once, but not the step under way."""
        self.offers: deque[tuple[Request, range]] = deque()
        """Episodes that its rows may take; they belong to no other lane meanwhile."""
        self.num_offers = 0
        self._orders = np.full(num_rows, _IDLE, np.uint8)
        self._has_changed = True
        self._has_starts = False
        self._active = Rows.none()
        self._num_idle = num_rows

    @property
    def arrays(self) -> Arrays:
        """The shared arrays; only while the lane is not stepping."""
        assert self.link is not None
        return self.link.arrays[self.group]

    @property
    def is_available(self) -> bool:
        """Whether it can be given orders now."""
        return self.link is not None and not self.is_stepping

    @property
    def num_busy(self) -> int:
        """Rows with an episode; for any thread, since it changes nothing."""
        return int(np.count_nonzero(self._orders))

    @property
    def num_idle(self) -> int:
        """Rows without an episode."""
        self.active()
        return self._num_idle

    def active(self) -> Rows:
        """Return the rows that are in an episode and wait for actions."""
        if self._has_changed:
            self._active = Rows.where(self._orders == _STEP, self.first_row)
            self._num_idle = self.num_rows - int(np.count_nonzero(self._orders))
            self._has_changed = False
        return self._active

    def idle_rows(self) -> list[int]:
        """Return the rows without an episode."""
        idle: list[int] = np.flatnonzero(self._orders == _IDLE).tolist()
        return idle

    def begin_step(self, now: float) -> bool:
        """Send the orders, if there are any; return whether there were."""
        if not self._orders.any():
            return False
        assert self.link is not None
        self.arrays.orders[:] = self._orders
        self.is_stepping = True
        self.stepping_since = now
        self.link.step(self.group)
        return True

    def end_step(self) -> None:
        """Note that the reply is in: rows that were to start are in their episodes now."""
        self.is_stepping = False
        if self._has_starts:
            self._orders[self._orders == _START] = _STEP
            self._has_starts = False
            self._has_changed = True

    def start(self, row: int, request: Request, batch_id: int, seed: int) -> None:
        """Have an idle row begin an episode with the next step."""
        self._order(row, _START)
        self._has_starts = True
        self.arrays.start_seed[row] = seed
        self.arrays.start_task[row] = self._tell_task(request)
        self._table.begin(self.first_row + row, request, batch_id)

    def go_on(self, rows: NDArray[np.intp], request: Request, ids: range) -> None:
        """Note that rows have taken these offers and are in their episodes."""
        if (self._orders[rows] != _STEP).any():
            self._orders[rows] = _STEP
            self._has_changed = True
        self._table.begin(self.first_row + rows, request, ids)

    def stop(self, row: int) -> None:
        """Make a row idle."""
        self._order(row, _IDLE)
        self._table.owners[self.first_row + row] = NOBODY

    def _order(self, row: int, order: int) -> None:
        if self._orders[row] != order:
            self._orders[row] = order
            self._has_changed = True

    def offer(self, more: list[tuple[Request, range]]) -> None:
        """Offer more episodes to the rows whose own end in the steps to come."""
        arrays = self.arrays
        self.offers.extend(more)
        end = 0
        for request, ids in self.offers:
            start, end = end, end + len(ids)
            arrays.offer_seed[start:end] = request.seeds(ids)
            arrays.offer_task[start:end] = self._tell_task(request)
        arrays.offers[:] = 0, end
        self.num_offers = end

    def claim(self, count: int) -> list[tuple[Request, range]]:
        """Note that rows have taken the next offers; return them in the order of the rows."""
        claimed = []
        self.num_offers -= count
        self.arrays.offers[0] += count
        while count:
            request, ids = self.offers.popleft()
            if len(ids) > count:
                self.offers.appendleft((request, ids[count:]))
            claimed.append((request, ids[:count]))
            count -= len(ids[:count])
        return claimed

    def withdraw(self) -> list[tuple[Request, range]]:
        """Offer nothing any more; return what was left."""
        left = list(self.offers)
        self.offers.clear()
        self.num_offers = 0
        self.arrays.offers[:] = 0
        return left

    def _tell_task(self, request: Request) -> int:
        task, number = request.task, request.task_number
        if task is None:
            return NO_TASK
        assert self.link is not None
        self.link.keep_task(number, task.payload)
        return number

    def disown(self, slot: int) -> None:
        """Make the rows of a request idle; takes effect with the next step."""
        mine = slice(self.first_row, self.first_row + self.num_rows)
        owners: NDArray[Any] = self._table.owners[mine]
        gone = owners == slot
        if gone.any():
            owners[gone] = NOBODY
            self._orders[gone] = _IDLE
            self._has_changed = True

    @property
    def place_of_work(self) -> int:
        """What the worker is at; see `Arrays.at_work`."""
        return int(self.arrays.at_work[0])

    @property
    def is_beginning_at_work(self) -> bool:
        """Whether what the worker is at is the beginning of an episode."""
        at = self.place_of_work
        return at >= self.num_rows or (at >= 0 and self._orders[at] == _START)

    def take_from_the_worker(self) -> set[tuple[int, int]]:
        """Return slot and batch id of the episode that a lost worker was at, if it was at one.

        Where that was an offer it is one no more.
        """
        at = self.place_of_work
        if at < 0:
            return set()
        if at < self.num_rows:
            row = self.first_row + at
            return {(int(self._table.owners[row]), int(self._table.batch_ids[row]))}
        offer = at - self.num_rows - int(self.arrays.offers[0])
        for index, (request, ids) in enumerate(self.offers):
            if offer < len(ids):
                self.offers[index] = request, ids[offer + 1 :]
                self.offers.insert(index, (request, ids[:offer]))
                # Who is done has given its slot away; the culprit is known all the same.
                slot = NOBODY if request.is_done else request.slot
                return {(slot, ids[offer])}
            offer -= len(ids)
        return set()

    def reset(self) -> dict[tuple[int, int], int | None]:
        """Forget the link and all orders.

        Returns:
            The episodes lost, by slot and batch id: the step under way; None before the first.
        """
        mine = slice(self.first_row, self.first_row + self.num_rows)
        owners, ids = self._table.owners[mine], self._table.batch_ids[mine]
        steps = self._table.steps[mine]
        lost = {
            (int(owners[row]), int(ids[row])): int(steps[row])
            if self._orders[row] == _STEP
            else None
            for row in np.flatnonzero(owners != NOBODY)
        }
        owners[:] = NOBODY
        self._orders[:] = _IDLE
        self._has_starts = False
        self._has_changed = True
        self.link = None
        self.is_stepping = False
        self.pending = None
        return lost
