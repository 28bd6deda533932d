"""The numbers that tasks go by between coordinator and workers. Plain state."""

from collections.abc import Iterable

from asyncmaml.sampling.lane import Lane
from asyncmaml.sampling.requests import Task


class TaskNumbers:
    """Gives equal tasks one number, and says when no worker needs one any more.

    A number is never given twice, so a worker cannot mistake a new task for an old one.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._users: dict[int, int] = {}
        self._next = 0
        self._unused: dict[int, set[Lane]] = {}
        """Numbers that no request names any more, with the lanes whose offers still may."""

    def take(self, task: Task) -> int:
        """Return the number of a task, for one more request."""
        number = self._numbers.get(task.payload)
        if number is None:
            number = self._numbers[task.payload] = self._next
            self._next += 1
        self._users[number] = self._users.get(number, 0) + 1
        return number

    def release(self, task: Task, lanes: Iterable[Lane]) -> None:
        """Note that a request with this task is done."""
        number = self._numbers[task.payload]
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number], self._numbers[task.payload]
            self._unused[number] = {lane for lane in lanes if lane.offers}

    @property
    def has_unused(self) -> bool:
        """Whether there are numbers for workers to forget."""
        return bool(self._unused)

    def forget(self, reclaimed: Iterable[Lane], lanes: Iterable[Lane]) -> None:
        """Have workers drop the tasks that no request, and no offer, names any more.

        Args:
            reclaimed: Lanes that offer nothing now. One that is stepping still may.
            lanes: All of them.
        """
        reclaimed = list(reclaimed)
        for number, naming in list(self._unused.items()):
            naming.difference_update(reclaimed)
            if not naming:
                del self._unused[number]
                for link in {lane.link for lane in lanes}:
                    if link is not None:
                        link.forget_task(number)
