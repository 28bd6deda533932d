"""The one thread that all of the learner's work runs in, so that the event loop stays free."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from asyncmaml.training.spans import Span, noted

Result = TypeVar("Result")


class LearnerThread:
    """Runs functions one after the other, in the order in which they come."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="asyncmaml-learner")

    async def run(self, work: Callable[[], Result], spans: list[Span]) -> Result:
        """Return what `work()` returns; note in `spans` when it ran.

        What runs cannot be stopped: a call that is cancelled first waits for its end, so that
        nobody reads a learner that is being changed. What has not begun is left out.
        """

        def timed() -> Result:
            with noted(spans):
                return work()

        future = self._executor.submit(timed)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not future.cancel():
                await _ended(waiting)
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._executor.shutdown(wait=True)


async def _ended(future: "asyncio.Future[Result]") -> None:
    """Wait for the end of it, whatever comes; who cancels again is answered after it."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    future.exception()  # looked at, or asyncio complains that nobody did
