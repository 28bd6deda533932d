"""Who gets the next episode: from the queue of requests to the rows of the lanes.

Idle rows come first, with an even share for each lane; what is left is offered to rows whose own
episode may end in the steps to come, so that they can go on in the same step. Plain state, in the
sampler thread.
"""

import time
from collections import deque
from collections.abc import Iterable

from asyncmaml.sampling.lane import Lane
from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.task_numbers import TaskNumbers


class Dealer:
    """Deals the episodes of all requests to the rows of all lanes.

    Args:
        lanes: All of them.
    """

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes
        self._queue = EpisodeQueue()
        self._task_numbers = TaskNumbers()

    @property
    def num_waiting(self) -> int:
        """Episodes that no row has begun; for any thread, since it changes nothing."""
        # Copied in one go. An offer of a request that is done stands until the lane replies.
        offers = [offer for lane in self._lanes for offer in list(lane.offers)]
        return len(self._queue) + sum(len(ids) for request, ids in offers if not request.is_done)

    def add(self, request: Request) -> None:
        """Queue a request behind the others."""
        if request.task is not None:
            request.task_number = self._task_numbers.take(request.task)
        self._queue.add(request)

    def remove(self, request: Request) -> None:
        """Drop a request: its rows become idle with their next step."""
        if request.may_have_rows:
            self._queue.remove(request)
            for lane in self._lanes:
                lane.disown(request.slot)
        if request.task is not None:
            self._task_numbers.release(request.task, self._lanes)

    def give_back(self, request: Request, ids: range) -> None:
        """Take back episodes that are to be run (again); their request must not be removed."""
        self._queue.give_back(request, ids)

    def reclaim(self, lane: Lane) -> None:
        """Take back the offers that a lane's rows have not taken."""
        for request, ids in reversed(lane.withdraw()):
            if not request.is_done:
                self._queue.give_back(request, ids)

    def deal(self, lanes: list[Lane]) -> None:
        """Give orders and offers to these lanes, which are not stepping."""
        if self._task_numbers.has_unused:
            for lane in lanes:
                self.reclaim(lane)  # its offers may name such a task
            self._task_numbers.forget(lanes, self._lanes)
        queue = self._queue
        if not len(queue) and any(lane.num_idle for lane in self._lanes):
            # An idle row before one that may finish: what stands as an offer is needed now.
            for lane in lanes:
                if lane.offers:
                    self.reclaim(lane)
        if not len(queue):
            return
        # An even share for each lane, also for those that are stepping now: else the first
        # reply would take what belongs on other cores.
        sharing = sum(1 for lane in self._lanes if lane.link is not None and lane.num_idle)
        for lane in lanes:
            idle = lane.num_idle
            if not idle:
                continue
            share = -(-len(queue) // sharing)
            sharing -= 1
            if share:
                self._start(lane, queue.take(min(share, idle)))
        for lane in lanes:
            if not len(queue):
                return
            wanted = lane.active().count
            if lane.num_offers < wanted:
                share = -(-len(queue) // len(self._lanes))
                lane.offer(queue.take(min(share, 2 * wanted - lane.num_offers)))

    def _start(self, lane: Lane, work: Iterable[tuple[Request, range]]) -> None:
        idle = iter(lane.idle_rows())
        for request, ids in work:
            for batch_id, seed in zip(ids, request.seeds(ids).tolist(), strict=True):
                lane.start(next(idle), request, batch_id, seed)


class EpisodeQueue:
    """The episodes that no row has, of all requests: first come, first served.

    A request that came earlier is handed out whole before a later one, and a row never waits
    while any request has an episode left.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._num_unassigned = 0

    def __len__(self) -> int:
        return self._num_unassigned

    def add(self, request: Request) -> None:
        """Append a request that has episodes left."""
        self._requests.append(request)
        self._num_unassigned += request.num_unassigned

    def remove(self, request: Request) -> None:
        """Drop a request, if it is queued."""
        if request in self._requests:
            self._requests.remove(request)
            self._num_unassigned -= request.num_unassigned

    def take(self, count: int) -> list[tuple[Request, range]]:
        """Hand out up to `count` episodes."""
        taken: list[tuple[Request, range]] = []
        while count and self._requests:
            request = self._requests[0]
            if request.begun_at is None:
                request.begun_at = time.perf_counter()
            ids = request.take(count)
            taken.append((request, ids))
            count -= len(ids)
            self._num_unassigned -= len(ids)
            if not request.num_unassigned:
                self._requests.popleft()
        return taken

    def give_back(self, request: Request, ids: range) -> None:
        """Take episodes back; their request keeps its place at the head."""
        if not ids:
            return
        if request not in self._requests:
            self._requests.appendleft(request)
        request.give_back(ids)
        self._num_unassigned += len(ids)
