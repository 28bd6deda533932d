"""Cancels a scenario at each of its awaits, one after the other."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any


@types.coroutine
def _cancelled_at(
    number: int, coroutine: Coroutine[Any, Any, None]
) -> Generator[Any, Any, int | None]:
    """Run a coroutine and cancel its task at one of its awaits.

    Returns:
        How often it awaited, if that was less often; None if it swallowed the cancellation.
    """
    num_awaits = 0
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        try:
            awaited = resume(value)
        except StopIteration:
            return num_awaits if num_awaits <= number else None
        if num_awaits == number:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        num_awaits += 1
        try:
            value = yield awaited
            resume = coroutine.send
        except BaseException as error:
            value, resume = error, coroutine.throw


async def cancel_at_every_await(
    scenario: Callable[[], Coroutine[Any, Any, None]],
    check: Callable[[], Coroutine[Any, Any, None]],
) -> int:
    """Run a scenario again and again, cancelled at its first await, its second, and so on.

    Args:
        scenario: Ends by itself if it is let be.
        check: Awaited after each run.

    Returns:
        How often the scenario awaits.
    """
    number = 0
    while True:

        async def run(number: int = number) -> int | None:
            return await _cancelled_at(number, scenario())

        try:
            num_awaits = await asyncio.create_task(run())
        except asyncio.CancelledError:
            num_awaits = None
        else:
            assert num_awaits is not None, f"await {number} swallowed the cancellation"
        await check()
        if num_awaits is not None:
            return num_awaits
        number += 1
