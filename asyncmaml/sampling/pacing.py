"""When a tick waits for more rows: as long as no worker idles for it.

A forward of more rows costs less for each, so a reply is worth holding back while another is about
to come. It is worth nothing any more once the worker that sent it has stepped its other groups and
has nothing to do. Both moments are foreseen from how long each group's steps and the ticks took of
late: a reply is held back if the next one from another worker is expected before the tick would
have to begin to be in time.
"""

from collections import deque

_WEIGHT_OF_THE_LAST = 0.25


class Pace:
    """Foresees the replies of all workers, which do their orders in the order of the sending.

    Clock values are those of one clock, such as `time.perf_counter()`.

    Args:
        num_workers: Workers, W.
    """

    def __init__(self, num_workers: int) -> None:
        self._queues: list[deque[int]] = [deque() for _ in range(num_workers)]
        """The groups whose orders each worker has; it is at the first."""
        self._begun = [0.0] * num_workers
        """When it began that."""
        self._step_seconds = [dict[int, float]() for _ in range(num_workers)]
        """What a step takes, by worker and group."""
        self._tick_seconds = 0.0

    def sent(self, worker: int, group: int, now: float) -> None:
        """Note that a group's orders are on their way."""
        queue = self._queues[worker]
        if not queue:
            self._begun[worker] = now
        queue.append(group)

    def replied(self, worker: int, group: int, began: float, ended: float) -> None:
        """Note a group's reply, and the times between which it stepped."""
        self._queues[worker].remove(group)
        self._begun[worker] = ended  # it went on with what else it has at once
        seconds = self._step_seconds[worker]
        seconds[group] = _averaged(seconds.get(group), ended - began)

    def ticked(self, seconds: float) -> None:
        """Note what a tick with rows took."""
        self._tick_seconds = _averaged(self._tick_seconds or None, seconds)

    def lost(self, worker: int) -> None:
        """Note that a worker is gone."""
        self._queues[worker].clear()

    @property
    def is_anything_under_way(self) -> bool:
        """Whether any worker has orders."""
        return any(self._queues)

    def should_wait(self, waiting: set[int], now: float) -> bool:
        """Whether the replies that are in should wait for another.

        Args:
            waiting: The workers that have sent those.
            now: The clock.
        """
        if not self.may_wait(waiting):
            return False
        last_moment = min(map(self._end, waiting)) - self._tick_seconds
        for worker, queue in enumerate(self._queues):
            if queue and worker not in waiting:
                end = self._end(worker)
                # One that is late by as much again may be at anything, a reset or a hang.
                if end < last_moment and now < 2 * end - self._begun[worker]:
                    return True
        return False

    def may_wait(self, waiting: set[int]) -> bool:
        """Whether all of these workers have other orders, so that one will reply in any case."""
        return all(self._queues[worker] for worker in waiting)

    def _end(self, worker: int) -> float:
        """When a worker that has orders is expected to reply next."""
        step = self._step_seconds[worker].get(self._queues[worker][0], 0.0)
        return self._begun[worker] + step


def _averaged(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT_OF_THE_LAST * (now - before)
