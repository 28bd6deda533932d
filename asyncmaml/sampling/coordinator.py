"""The coordinator: one tick after the other, it turns observations into actions.

A tick takes every lane whose reply is in: record the rewards, hand out episodes to rows that
have none, draw the actions of all rows that wait for one, send them. No tick waits for the
slowest worker: a reply waits for others to share its forward only as long as its own worker does
not idle for it (`asyncmaml.sampling.pacing`). Everything here runs in the sampler thread and
nothing awaits, so the state is whole between any two calls.
"""

import asyncio
import time
from collections import Counter, deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import AsyncMAMLError, EpisodeError, WorkerError
from asyncmaml.sampling.actor import ActionWriter, Actor
from asyncmaml.sampling.dealing import Dealer
from asyncmaml.sampling.failures import in_episode, policy_error, row_error
from asyncmaml.sampling.formation import Formations
from asyncmaml.sampling.lane import Lane, RowTable
from asyncmaml.sampling.pacing import Pace
from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.statistics import HISTOGRAM_BINS, Statistics
from asyncmaml.sampling.trace import Trace
from asyncmaml.sampling.transitions import NOBODY, Pending, TransitionLog
from asyncmaml.worker.protocol import Outcome, RowFailure

_ENDED, _NEXT = int(Outcome.TERMINATED | Outcome.TRUNCATED), int(Outcome.NEXT)


class Coordinator:
    """Hands out episodes to the rows of all lanes and streams what comes back into requests.

    Args:
        lanes: Their rows are those of `table`.
        table: Which episode each row is in.
        actor: Draws actions.
        write_actions: Turns recorded actions into what the environment takes.
        log: Takes the transitions of a tick.
        max_attempts: Times that one episode may be begun again.
        trace: Takes what happens when; None: nobody wants to know.
        pace: Says which replies wait for others; None: one of its own.
    """

    def __init__(
        self,
        lanes: list[Lane],
        table: RowTable,
        actor: Actor,
        write_actions: ActionWriter,
        log: TransitionLog,
        max_attempts: int,
        trace: Trace | None,
        pace: Pace | None = None,
    ) -> None:
        self.lanes = lanes
        self.counted = Statistics()
        """What is counted here and in the pool; `statistics()` tells the rest as well."""
        self._table = table
        self._all_rows = np.arange(len(table.owners))
        self._actor = actor
        self._write_actions = write_actions
        self._log = log
        self._max_attempts = max_attempts
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._dealer = Dealer(lanes)
        self._formations = Formations()
        self._requests: dict[int, Request] = {}
        self._free_slots: list[int] = []
        self._users: Counter[PolicySnapshot] = Counter()
        """Requests of each policy."""
        self._replies: list[tuple[Lane, list[RowFailure]]] = []
        self._tick_is_due = False
        self._is_in_tick = False
        self._results: deque[tuple[Request, BatchEpisodes | BaseException]] = deque()
        """What is to be delivered when the tick is over."""
        num_workers = 1 + max(lane.worker for lane in lanes)
        self._pace = Pace(num_workers) if pace is None else pace
        self._opened_at = self._busy_until = time.perf_counter()
        self._released_at: float | None = None
        self._broken: AsyncMAMLError | None = None
        self._lost_seconds = [0.0] * num_workers
        """In environments, of the workers that are gone."""

    # -- requests -------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests that are not done."""
        return len(self._requests)

    def submit(self, request: Request) -> None:
        """Take up a request; its result is delivered when its last episode is in."""
        if self._broken is not None:
            self._deliver(request, self._broken)
            return
        request.slot = self._free_slots.pop() if self._free_slots else len(self._requests)
        request.statistics = self.statistics()
        self._requests[request.slot] = request
        self._users[request.policy] += 1
        self._actor.recall(request.policy)
        self._dealer.add(request)
        self._request_tick()

    def cancel(self, request: Request) -> None:
        """Drop a request whose result nobody awaits; frees its rows at their next step."""
        if self._requests.get(request.slot) is request:
            self._remove(request)

    def fail(self, request: Request, error: BaseException) -> None:
        """Drop a request and deliver an error in place of its result."""
        if self._requests.get(request.slot) is request:
            self._remove(request)
            self._deliver(request, error)
            # Where its policy failed, its rows are free and no reply of theirs is on its way.
            self._request_tick()

    def fail_all(self, error: AsyncMAMLError) -> None:
        """Deliver an error to every request, and to all that are still to come."""
        self._broken = error
        for request in list(self._requests.values()):
            self.fail(request, error)

    def _complete(self, request: Request) -> None:
        """Deliver a request whose last episode is in."""
        # Off the books last: what is on them gets an error, should one of these raise.
        self._log.empty_one(request)
        result = request.finished(self.statistics())
        self._remove(request)
        self.counted.requests += 1
        self._deliver(request, result)

    def _deliver(self, request: Request, result: BatchEpisodes | BaseException) -> None:
        # After the tick: who awaits it wakes up and wants the interpreter, and the workers
        # should have their orders by then.
        self._results.append((request, result))
        if not self._is_in_tick:
            self._deliver_all()

    def _deliver_all(self) -> None:
        while self._results:
            request, result = self._results.popleft()
            request.deliver(result)

    def _remove(self, request: Request) -> None:
        request.is_done = True
        del self._requests[request.slot]
        self._formations.clear()  # its slot may be another's next
        self._dealer.remove(request)
        if request.may_have_rows:
            self._log.forget(request)
        self._free_slots.append(request.slot)
        self._users[request.policy] -= 1
        if not self._users[request.policy]:
            del self._users[request.policy]
            self._actor.forget(request.policy)
        if self._trace is not None:
            ended = time.perf_counter()
            self._trace.request(id(request), request.called_at, request.begun_at, ended)

    # -- lanes ----------------------------------------------------------------------------------

    def stepped(self, lane: Lane, failures: list[RowFailure]) -> None:
        """Take a lane's reply; the next tick works on it."""
        now = lane.answered_at = time.perf_counter()
        began, ended = lane.arrays.step_times.tolist()
        if self._trace is not None:
            self._trace.step(lane.worker, lane.group, began, ended)
        self._replies.append((lane, failures))
        self._pace.replied(lane.worker, lane.group, began, ended)
        if not self._pace.is_anything_under_way:  # no other reply can be on its way
            self._tick()
        elif not self._pace.should_wait({lane.worker for lane, _ in self._replies}, now):
            self._request_tick()

    def lose(self, lanes: list[Lane], error: WorkerError) -> None:
        """Give the episodes of a lost worker to other rows, to be run again from their seeds.

        Args:
            lanes: Their worker is gone.
            error: For an episode that has lost too many workers. That is counted where the worker
                was at this episode, or at none that is known; the others just run again.
        """
        self._replies = [reply for reply in self._replies if reply[0] not in lanes]
        lost: dict[tuple[int, int], int | None] = {}
        culprits: set[tuple[int, int]] = set()
        for lane in lanes:
            self._pace.lost(lane.worker)
            if lane.pending is not None:
                self._log.drop(lane.pending)
            culprits |= lane.take_from_the_worker()
            self._dealer.reclaim(lane)
            self._lost_seconds[lane.worker] += float(lane.arrays.busy_seconds[0])
            lost |= lane.reset()
        lost |= dict.fromkeys(culprits - lost.keys())
        for (slot, batch_id), step in lost.items():
            loser = self._requests.get(slot)
            if loser is None:  # cancelled, or an earlier episode of this loop has failed it
                continue
            # Where it is not known which episode it was, it may have been any of them.
            if not culprits or (slot, batch_id) in culprits:
                told = in_episode(error, loser, batch_id, step, self._max_attempts + 1)
                self._retry_or_fail(loser, batch_id, told, may_retry=True)
            else:
                self._dealer.give_back(loser, range(batch_id, batch_id + 1))
        self._request_tick()

    def _retry_or_fail(
        self, request: Request, batch_id: int, error: EpisodeError, *, may_retry: bool
    ) -> None:
        """Do with an episode whose environment or worker has failed as its request says."""
        if may_retry and request.may_retry(batch_id, self._max_attempts):
            self._dealer.give_back(request, range(batch_id, batch_id + 1))
        elif request.terms.on_error == "drop":
            request.failures.append(error)
            if request.is_complete:
                self._complete(request)
        else:
            self.fail(request, error)

    def statistics(self) -> Statistics:
        """Return all counts and times so far; for any thread, since it changes nothing."""
        now = self.counted.copy()
        until = self._released_at or time.perf_counter()
        if not self._is_in_tick:  # the wait that is under way
            now.waiting_seconds += max(0.0, until - self._busy_until)
        now.wall_seconds = until - self._opened_at
        now.requests_in_flight = len(self._requests)
        now.episodes_queued = self._dealer.num_waiting
        now.worker_seconds = list(self._lost_seconds)
        for lane in self.lanes:
            link = lane.link  # read once: it could be gone in between
            if link is not None:
                now.worker_seconds[lane.worker] += float(link.arrays[lane.group].busy_seconds[0])
        return now

    def has_replied(self, lane: Lane) -> bool:
        """Whether a lane's reply is in and waits for the next tick."""
        return any(reply[0] is lane for reply in self._replies)

    def release_lanes(self) -> None:
        """Let go of the shared arrays; what they count is kept."""
        last = self.statistics()
        self._released_at = self._opened_at + last.wall_seconds
        self._lost_seconds = last.worker_seconds
        # A tick may be due still: of lanes that are gone it finds nothing to collect.
        self._replies.clear()
        for lane in self.lanes:
            lane.link = None

    def rejoin(self) -> None:
        """Give orders to lanes that have become available."""
        self._request_tick()

    # -- the tick -------------------------------------------------------------------------------

    def _request_tick(self) -> None:
        # One pass of the loop later: replies that are already on their way join this tick.
        if not self._tick_is_due:
            self._tick_is_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_is_due = False
        self._is_in_tick = True
        try:
            self._work()
        finally:
            self._is_in_tick = False
            self._deliver_all()

    def _work(self) -> None:
        began = time.perf_counter()
        self.counted.waiting_seconds += began - self._busy_until
        self._busy_until = began
        replies, self._replies = self._replies, []
        for lane, failures in replies:
            self._collect(lane, failures)
        recorded = time.perf_counter()
        lanes = [lane for lane in self.lanes if lane.is_available]
        self._dealer.deal(lanes)
        acting = [lane for lane in lanes if lane.active().count]
        rows = self._gather(acting) if acting else self._all_rows[:0]
        gathered = time.perf_counter()
        if acting:
            self._act(rows, acting)
        acted = time.perf_counter()
        if acting:
            self._scatter(acting)
        sent = time.perf_counter()  # a worker's time does not include the forward
        for lane in lanes:
            if lane.begin_step(sent):
                self._pace.sent(lane.worker, lane.group, sent)
            elif lane.pending is not None:  # the policy of all its rows has failed
                self._log.drop(lane.pending)
                lane.pending = None
        self._count((began, recorded, gathered, acted, time.perf_counter()), len(rows))

    def _count(self, marks: tuple[float, float, float, float, float], num_rows: int) -> None:
        """Count a tick: when it began, had recorded, gathered, drawn actions, and ended."""
        began, recorded, gathered, acted, ended = marks
        counted = self.counted
        counted.record_seconds += recorded - began
        counted.gather_seconds += gathered - recorded
        counted.forward_seconds += acted - gathered
        counted.scatter_seconds += ended - acted
        self._busy_until = ended
        if num_rows:
            self._pace.ticked(ended - began)
            counted.ticks += 1
            counted.ticks_by_rows[min(num_rows.bit_length(), HISTOGRAM_BINS) - 1] += 1
        if self._trace is not None:
            self._trace.tick(marks, num_rows)
            self._trace.count(ended, requests=self.num_requests, queued=self._dealer.num_waiting)

    def _collect(self, lane: Lane, failures: list[RowFailure]) -> None:
        """Record what a lane's step brought, and see to the rows whose episode ended."""
        arrays = lane.arrays
        pending, lane.pending = lane.pending, None
        if pending is not None:
            rows = lane.acting
            self._log.complete(pending, arrays.rewards[rows.local])
            self._table.steps[rows.table] += 1
            self.counted.transitions += rows.count
        lane.end_step()
        if arrays.outcomes.any():
            self._settle(lane, failures)

    def _settle(self, lane: Lane, failures: list[RowFailure]) -> None:
        """See to the rows whose episode ended or failed."""
        arrays, table = lane.arrays, self._table
        settled = np.flatnonzero(arrays.outcomes)
        outcomes = arrays.outcomes[settled]
        rows = lane.first_row + settled
        failed = {(failure.row, failure.of_next): failure for failure in failures}
        for (local, of_next), failure in failed.items():
            if not of_next:
                self._fail_row(lane, local, failure)
        # Of a request that has failed, the rows belong to nobody by now.
        ended = ((outcomes & _ENDED) > 0) & (table.owners[rows] != NOBODY)
        if ended.any():
            last = arrays.last_observations[settled[ended]]
            self._end_episodes(rows[ended], outcomes[ended], last)
        has_next = (outcomes & _NEXT) > 0
        takers = settled[has_next]
        if len(takers) < len(settled):
            for local in settled[~has_next].tolist():
                lane.stop(local)
        for request, ids in lane.claim(len(takers)):
            mine, takers = takers[: len(ids)], takers[len(ids) :]
            if request.is_done:
                for local in mine.tolist():
                    lane.stop(local)
            else:
                lane.go_on(mine, request, ids)
        for (local, of_next), failure in failed.items():
            if of_next:
                self._fail_row(lane, local, failure)

    def _end_episodes(
        self, rows: NDArray[np.intp], outcomes: NDArray[np.uint8], last: NDArray[Any]
    ) -> None:
        """Note the ends of episodes, and deliver the requests that are complete."""
        table = self._table
        owners = table.owners[rows]
        complete = []
        for slot in sorted(set(owners.tolist())):  # a few, for which np.unique costs ten times
            request = self._requests[slot]
            mine = owners == slot
            ids, lengths = table.batch_ids[rows[mine]], table.steps[rows[mine]]
            self.counted.episodes += request.end_episodes(ids, lengths, outcomes[mine], last[mine])
            if request.is_complete:
                complete.append(request)
        if len(complete) > 1:
            self._empty_log()  # in one go, rather than look through it for each
        for request in complete:
            self._complete(request)

    def _fail_row(self, lane: Lane, local: int, failure: RowFailure) -> None:
        row = lane.first_row + local
        request = self._requests.get(int(self._table.owners[row]))
        if request is None:
            return
        batch_id, step = int(self._table.batch_ids[row]), int(self._table.steps[row])
        lane.stop(local)
        # The reward of the step that failed was counted when the reply came in.
        error = row_error(request, batch_id, step - 1, failure)
        may_retry = request.terms.on_error == "retry"
        self._retry_or_fail(request, batch_id, error, may_retry=may_retry)

    def _gather(self, lanes: list[Lane]) -> NDArray[np.intp]:
        """Enter the waiting rows of these lanes into the log; return the rows."""
        log, table = self._log, self._table
        actives = [lane.active() for lane in lanes]
        rows: slice | NDArray[np.intp] = actives[0].table
        if len(lanes) > 1:
            rows = np.concatenate([self._all_rows[active.table] for active in actives])
        count = sum(active.count for active in actives)
        if not log.has_room(count):
            self._empty_log()
        stop = log.append(table.owners[rows], table.batch_ids[rows], table.steps[rows])
        for lane, active in zip(lanes, actives, strict=True):
            start, stop = stop, stop + active.count
            lane.pending = Pending(start, stop)
            lane.acting = active
            log.observations[start:stop] = lane.arrays.observations[active.local]
        return self._all_rows[rows]

    def _empty_log(self) -> None:
        pending = [lane.pending for lane in self.lanes if lane.pending is not None]
        self._log.empty(self._requests, pending)

    def _act(self, rows: NDArray[np.intp], lanes: list[Lane]) -> None:
        """Draw the actions of the entries just made."""
        first, last = lanes[0].pending, lanes[-1].pending
        assert first is not None
        assert last is not None
        start, log = first.start, self._log
        formation = self._formations.of(log.owners[start : last.stop], rows, self._requests)
        for group, error in self._actor.act(formation, start, log):
            request = group.request  # the only one: who fails does so by itself
            self.fail(request, policy_error(request, log, group.entries(start), error))

    def _scatter(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            pending = lane.pending
            assert pending is not None
            actions = self._write_actions(self._log.actions[pending.start : pending.stop])
            lane.arrays.actions[lane.acting.local] = actions
