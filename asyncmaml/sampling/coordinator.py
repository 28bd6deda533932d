"""The coordinator: one tick after the other, it turns observations into actions.

A tick takes every lane whose reply is in: record the rewards, hand out episodes to rows that
have none, draw the actions of all rows that wait for one, send them. No tick waits for the
slowest worker: a reply waits for others to share its forward only while its own worker has
another group to step. Everything here runs in the sampler thread and nothing awaits, so the state
is whole between any two calls.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmaml.errors import AsyncMAMLError, WorkerError
from asyncmaml.sampling.actor import Acting, ActionWriter, Actor
from asyncmaml.sampling.failures import in_episode, policy_error, row_error
from asyncmaml.sampling.lane import Lane, RowTable
from asyncmaml.sampling.requests import EpisodeQueue, Request
from asyncmaml.sampling.statistics import Statistics
from asyncmaml.sampling.task_numbers import TaskNumbers
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
        statistics: Counted in place.
    """

    def __init__(
        self,
        lanes: list[Lane],
        table: RowTable,
        actor: Actor,
        write_actions: ActionWriter,
        log: TransitionLog,
        statistics: Statistics,
    ) -> None:
        self.lanes = lanes
        self.statistics = statistics
        self._table = table
        self._all_rows = np.arange(len(table.owners))
        self._actor = actor
        self._write_actions = write_actions
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._queue = EpisodeQueue()
        self._requests: dict[int, Request] = {}
        self._free_slots: list[int] = []
        self._task_numbers = TaskNumbers()
        self._replies: list[tuple[Lane, list[RowFailure]]] = []
        self._tick_is_due = False
        self._under_way = [0] * (1 + max(lane.worker for lane in lanes))
        """Lanes of each worker that have yet to reply."""
        self._busy_until = time.perf_counter()
        self._broken: AsyncMAMLError | None = None
        self._lost_environment_seconds = 0.0

    # -- requests -------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests that are not done."""
        return len(self._requests)

    def submit(self, request: Request) -> None:
        """Take up a request; its result is delivered when its last episode is in."""
        if self._broken is not None:
            request.deliver(self._broken)
            return
        request.slot = self._free_slots.pop() if self._free_slots else len(self._requests)
        self._requests[request.slot] = request
        if request.task is not None:
            request.task_number = self._task_numbers.take(request.task)
        self._queue.add(request)
        self._request_tick()

    def cancel(self, request: Request) -> None:
        """Drop a request whose result nobody awaits; frees its rows at their next step."""
        if self._requests.get(request.slot) is request:
            self._remove(request)

    def fail(self, request: Request, error: BaseException) -> None:
        """Drop a request and deliver an error in place of its result."""
        if self._requests.get(request.slot) is request:
            self._remove(request)
            request.deliver(error)
            # Where its policy failed, its rows are free and no reply of theirs is on its way.
            self._request_tick()

    def fail_all(self, error: AsyncMAMLError) -> None:
        """Deliver an error to every request, and to all that are still to come."""
        self._broken = error
        for request in list(self._requests.values()):
            self.fail(request, error)

    def _remove(self, request: Request) -> None:
        del self._requests[request.slot]
        self._queue.remove(request)
        self._log.forget(request)
        for lane in self.lanes:
            lane.disown(request.slot)
        self._free_slots.append(request.slot)
        policy = request.policy
        if all(other.policy is not policy for other in self._requests.values()):
            self._actor.forget(policy)
        if request.task is not None:
            self._task_numbers.release(request.task, self.lanes)

    # -- lanes ----------------------------------------------------------------------------------

    def stepped(self, lane: Lane, failures: list[RowFailure]) -> None:
        """Take a lane's reply; the next tick works on it."""
        lane.answered_at = time.perf_counter()
        self._replies.append((lane, failures))
        under_way = self._under_way
        under_way[lane.worker] -= 1
        if under_way[lane.worker]:
            # The worker has another group to step meanwhile, so nothing is lost by waiting for
            # more rows to share the forward: one group of each that works, or one without work.
            if len(self._replies) < len(under_way) - under_way.count(0):
                return
            self._request_tick()
        elif any(under_way):
            self._request_tick()
        else:  # no other reply can be on its way
            self._tick()

    def lose(self, lanes: list[Lane], error: WorkerError, max_attempts: int) -> None:
        """Give the episodes of a lost worker to other rows, to be run again from their seeds.

        Args:
            lanes: Their worker is gone.
            error: Delivered to a request one of whose episodes has lost `max_attempts` workers.
            max_attempts: Workers that one episode may lose. Counted where the worker was at this
                episode, or at none that is known; the others of its episodes just run again.
        """
        answered = [lane for lane, _ in self._replies]
        self._replies = [reply for reply in self._replies if reply[0] not in lanes]
        lost: dict[tuple[int, int], int | None] = {}
        culprits: set[tuple[int, int]] = set()
        for lane in lanes:
            self._under_way[lane.worker] -= lane.is_stepping and lane not in answered
            if lane.pending is not None:
                self._log.drop(lane.pending)
            culprits |= lane.under_the_worker()
            self._reclaim(lane)
            self._lost_environment_seconds += float(lane.arrays.busy_seconds[0])
            lost |= lane.reset()
        for slot, batch_id in lost:
            if slot in self._requests:
                self._give_back(self._requests[slot], range(batch_id, batch_id + 1))
        # Where it is not known which episode it was, it may have been any of them.
        for slot, batch_id in culprits or lost.keys():
            loser = self._requests.get(slot)
            if loser is None:  # cancelled, or an earlier episode of this loop has failed it
                continue
            attempts = loser.attempts[batch_id] = loser.attempts.get(batch_id, 0) + 1
            if attempts > max_attempts:
                step = lost.get((slot, batch_id))
                self.fail(loser, in_episode(error, loser, batch_id, step))
        self._request_tick()

    def environment_seconds(self) -> float:
        """Return the time spent in environments so far."""
        # Any thread may ask: a link that is read twice could be gone in between.
        links = [(lane.link, lane.group) for lane in self.lanes]
        running = sum(
            float(link.arrays[group].busy_seconds[0]) for link, group in links if link is not None
        )
        return self._lost_environment_seconds + running

    def has_replied(self, lane: Lane) -> bool:
        """Whether a lane's reply is in and waits for the next tick."""
        return any(reply[0] is lane for reply in self._replies)

    def release_lanes(self) -> None:
        """Let go of the shared arrays; what they count is kept."""
        self._lost_environment_seconds = self.environment_seconds()
        for lane in self.lanes:
            lane.link = None

    def rejoin(self) -> None:
        """Give orders to lanes that have become available."""
        self._request_tick()

    def _give_back(self, request: Request, ids: range) -> None:
        if self._requests.get(request.slot) is request:
            self._queue.give_back(request, ids)

    # -- the tick -------------------------------------------------------------------------------

    def _request_tick(self) -> None:
        # One pass of the loop later: replies that are already on their way join this tick.
        if not self._tick_is_due:
            self._tick_is_due = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_is_due = False
        statistics = self.statistics
        began = time.perf_counter()
        statistics.waiting_seconds += began - self._busy_until
        replies, self._replies = self._replies, []
        for lane, failures in replies:
            self._collect(lane, failures)
        lanes = [lane for lane in self.lanes if lane.is_available]
        if self._task_numbers.has_unused:
            for lane in lanes:
                self._reclaim(lane)  # its offers may name such a task
            self._task_numbers.forget(lanes, self.lanes)
        self._deal(lanes)
        acting = [lane for lane in lanes if lane.active().count]
        gathered = acted = time.perf_counter()
        if acting:
            rows = self._gather(acting)
            gathered = time.perf_counter()
            self._act(rows, acting)
            acted = time.perf_counter()
            self._scatter(acting)
            statistics.ticks += 1
        sent = time.perf_counter()  # a worker's time does not include the forward
        for lane in lanes:
            if lane.begin_step(sent):
                self._under_way[lane.worker] += 1
            elif lane.pending is not None:  # the policy of all its rows has failed
                self._log.drop(lane.pending)
                lane.pending = None
        ended = time.perf_counter()
        statistics.gather_seconds += gathered - began
        statistics.forward_seconds += acted - gathered
        statistics.scatter_seconds += ended - acted
        self._busy_until = ended

    def _collect(self, lane: Lane, failures: list[RowFailure]) -> None:
        """Record what a lane's step brought, and see to the rows whose episode ended."""
        arrays = lane.arrays
        pending, lane.pending = lane.pending, None
        if pending is not None:
            rows = lane.acting
            self._log.complete(pending, arrays.rewards[rows.local])
            self._table.steps[rows.table] += 1
            self.statistics.transitions += rows.count
        lane.end_step()
        if arrays.outcomes.any():
            self._settle(lane, failures)

    def _reclaim(self, lane: Lane) -> None:
        """Take back the offers that a lane's rows have not taken."""
        for request, ids in reversed(lane.withdraw()):
            self._give_back(request, ids)

    def _settle(self, lane: Lane, failures: list[RowFailure]) -> None:
        """See to the rows whose episode ended or failed."""
        arrays, table = lane.arrays, self._table
        settled = np.flatnonzero(arrays.outcomes)
        outcomes = arrays.outcomes[settled]
        rows = lane.first_row + settled
        failed = {(failure.row, failure.of_next): failure for failure in failures}
        for local in [local for local, of_next in failed if not of_next]:
            request = self._requests.get(int(table.owners[lane.first_row + local]))
            if request is not None:
                self._fail_row(request, lane.first_row + local, failed[local, False])
        # Of a request that has failed, the rows belong to nobody by now.
        ended = (outcomes & _ENDED).astype(np.bool_) & (table.owners[rows] != NOBODY)
        if ended.any():
            last = arrays.last_observations[settled[ended]]
            self._end_episodes(rows[ended], outcomes[ended], last)
        has_next = (outcomes & _NEXT).astype(np.bool_)
        for local in settled[~has_next].tolist():
            lane.stop(local)
        takers = settled[has_next]
        for request, ids in lane.claim(len(takers)):
            mine, takers = takers[: len(ids)], takers[len(ids) :]
            if self._requests.get(request.slot) is request:
                lane.go_on(mine, request, ids)
            else:
                for local in mine.tolist():
                    lane.stop(local)
        for local in [local for local, of_next in failed if of_next]:
            request = self._requests.get(int(table.owners[lane.first_row + local]))
            if request is not None:
                self._fail_row(request, lane.first_row + local, failed[local, True])

    def _end_episodes(
        self, rows: NDArray[np.intp], outcomes: NDArray[np.uint8], last: NDArray[Any]
    ) -> None:
        """Note the ends of episodes, and deliver the requests that are complete."""
        table = self._table
        owners = table.owners[rows]
        for slot in np.unique(owners).tolist():
            request = self._requests[slot]
            mine = owners == slot
            ids, lengths = table.batch_ids[rows[mine]], table.steps[rows[mine]]
            request.end_episodes(ids, lengths, outcomes[mine], last[mine])
            self.statistics.episodes += len(ids)
            if request.num_unfinished == 0:
                # Off the books last: what is on them gets an error, should one of these raise.
                self._log.empty_one(request)
                request.finish()
                self._remove(request)
                request.deliver(request.episodes)

    def _fail_row(self, request: Request, row: int, failure: RowFailure) -> None:
        batch_id, step = int(self._table.batch_ids[row]), int(self._table.steps[row])
        # The reward of the step that failed was counted when the reply came in.
        self.fail(request, row_error(request, batch_id, step - 1, failure))

    def _deal(self, lanes: list[Lane]) -> None:
        """Hand out episodes: to idle rows first, then as offers to rows that may finish."""
        queue = self._queue
        if not len(queue) and any(lane.num_idle for lane in self.lanes):
            # An idle row before one that may finish: what stands as an offer is needed now.
            for lane in lanes:
                if lane.offers:
                    self._reclaim(lane)
        if not len(queue):
            return
        # An even share for each lane, also for those that are stepping now: else the first
        # reply would take what belongs on other cores.
        sharing = sum(1 for lane in self.lanes if lane.link is not None and lane.num_idle)
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
                share = -(-len(queue) // len(self.lanes))
                lane.offer(queue.take(min(share, 2 * wanted - lane.num_offers)))

    def _start(self, lane: Lane, work: Iterable[tuple[Request, range]]) -> None:
        idle = iter(lane.idle_rows())
        for request, ids in work:
            for batch_id, seed in zip(ids, request.seeds(ids).tolist(), strict=True):
                lane.start(next(idle), request, batch_id, seed)

    def _gather(self, lanes: list[Lane]) -> NDArray[np.intp]:
        """Enter the waiting rows of these lanes into the log; return the rows."""
        log, table = self._log, self._table
        actives = [lane.active() for lane in lanes]
        rows: slice | NDArray[np.intp] = actives[0].table
        if len(lanes) > 1:
            rows = np.concatenate([self._all_rows[active.table] for active in actives])
        count = sum(active.count for active in actives)
        if not log.has_room(count):
            pending = [lane.pending for lane in self.lanes if lane.pending is not None]
            log.empty(self._requests.values(), pending)
        stop = log.append(table.owners[rows], table.batch_ids[rows], table.steps[rows])
        for lane, active in zip(lanes, actives, strict=True):
            start, stop = stop, stop + active.count
            lane.pending = Pending(start, stop)
            lane.acting = active
            log.observations[start:stop] = lane.arrays.observations[active.local]
        return self._all_rows[rows]

    def _act(self, rows: NDArray[np.intp], lanes: list[Lane]) -> None:
        """Draw the actions of the entries just made."""
        first, last = lanes[0].pending, lanes[-1].pending
        assert first is not None
        assert last is not None
        start, stop = first.start, last.stop
        owners = self._log.owners[start:stop]
        requests = self._requests
        first_request = requests[int(owners[0])]
        together = Acting(first_request, slice(start, stop), rows)
        if len(requests) == 1 or (owners == owners[0]).all():
            acting = [together]
        else:
            slots = np.unique(owners).tolist()
            policy = first_request.policy
            if all(requests[slot].policy is policy and requests[slot].plan for slot in slots):
                # As if it were one request's, but for where the noise comes from.
                shared = replace(
                    together, streams=lambda index: requests[int(owners[index])].streams
                )
                if not list(self._actor.act([shared], self._log)):
                    return
            # Together they fail as one; each by itself, the culprit alone does.
            acting = []
            for slot in slots:
                mine = np.flatnonzero(owners == slot)
                acting.append(Acting(requests[slot], start + mine, rows[mine]))
        for request, error in self._actor.act(acting, self._log):
            entries = next(group.entries for group in acting if group.request is request)
            self.fail(request, policy_error(request, self._log, entries, error))

    def _scatter(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            pending = lane.pending
            assert pending is not None
            actions = self._write_actions(self._log.actions[pending.start : pending.stop])
            lane.arrays.actions[lane.acting.local] = actions
