"""Whether a worker still gets on with its command, as its shared arrays tell."""

from collections.abc import Callable, Sequence

from asyncmaml.sampling.lane import Lane


class WorkerWatch:
    """Tells when a worker has been at one thing for too long.

    At one thing: at one step of an environment, or at the beginning of an episode in one (making
    it, its task, its reset), as `Arrays.at_work` says. So the limits hold for any number of rows,
    and a worker that is slow but gets on is left alone. Rows that are stepped as one are one thing.

    Args:
        worker: Its number, for messages.
        lanes: Of the worker.
        has_replied: Whether a lane's reply is in and waits for its tick.
        step_timeout: Seconds that one step may take.
        start_timeout: Seconds that the beginning of an episode may take.
    """

    def __init__(
        self,
        worker: int,
        lanes: Sequence[Lane],
        has_replied: Callable[[Lane], bool],
        step_timeout: float,
        start_timeout: float,
    ) -> None:
        self._worker = worker
        self._lanes = lanes
        self._has_replied = has_replied
        self._step_timeout = step_timeout
        self._start_timeout = start_timeout
        self._place: list[int] = []
        self._there_since = 0.0

    def complaint(self, now: float) -> str:
        """Return what is wrong with the worker, if anything; to be asked again and again."""
        under_way = [lane for lane in self._lanes if lane.is_stepping]
        begun = [lane.stepping_since for lane in under_way if not self._has_replied(lane)]
        if not begun:
            return ""
        place = [lane.place_of_work for lane in self._lanes]
        if place != self._place:
            self._place, self._there_since = place, now
        # A command begins when it is sent, or when the group before it has been answered.
        answered = max(lane.answered_at for lane in self._lanes)
        since = max(min(begun), answered, self._there_since)
        begins = any(lane.is_beginning_at_work for lane in under_way)
        limit = self._start_timeout if begins else self._step_timeout
        if now - since < limit:
            return ""
        if begins:
            return (
                f"worker {self._worker} did not begin an episode within {limit} s and was killed; "
                "raise start_timeout if making or resetting an environment may take longer"
            )
        return (
            f"worker {self._worker} did not finish a step within {limit} s and was killed; "
            "raise step_timeout if one may take longer"
        )
