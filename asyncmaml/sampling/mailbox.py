"""Calls from one thread into the event loop of another: many of them, one wake.

To wake a loop is to write into a pipe that its thread waits on, and that thread then competes for
the interpreter: several results of one tick must not pay for it one by one.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LONGEST_HOLD = 0.01
"""Seconds that calls wait, at most, for the pass that they were posted in to end."""


class Mailbox:
    """Calls functions in the thread of an event loop, in the order of their posts.

    Args:
        loop: Whose thread calls them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_woken = False
        self._is_holding = False
        self._end_of_hold: asyncio.TimerHandle | None = None

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Have a function called soon; from any thread.

        Raises:
            RuntimeError: The loop is closed.
        """
        # Without a lock: the call is there before the flag is read, and `call_all` lowers the flag
        # before it looks for calls, so whichever comes first, somebody sees this one.
        self._calls.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self.call_all)

    def post_in_pass(
        self, sender: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any
    ) -> None:
        """Have a function called when the sender's loop is through with its pass.

        What one pass of the sender's loop posts arrives together; but where that pass takes more
        than `LONGEST_HOLD`, it does not wait for its end.

        Args:
            sender: The loop that runs in this thread.
            function: Called with `args`, after all that was posted before.
            args: See there.

        Raises:
            RuntimeError: One of the loops is closed.
        """
        self._calls.append((function, args))
        if not self._is_woken and not self._is_holding:
            self._is_holding = True
            sender.call_soon(self._let_go)
            self._loop.call_soon_threadsafe(self._limit_hold)

    def _let_go(self) -> None:
        self._is_holding = False
        if self._calls and not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # who closes the loop calls what is left
                self._loop.call_soon_threadsafe(self.call_all)

    def _limit_hold(self) -> None:
        self._end_of_hold = self._loop.call_later(LONGEST_HOLD, self.call_all)

    def call_all(self) -> None:
        """Call at once what has been posted; in the loop's own thread."""
        if self._end_of_hold is not None:
            self._end_of_hold.cancel()
            self._end_of_hold = None
        self._is_woken = self._is_holding = False
        while self._calls:
            function, args = self._calls.popleft()
            try:
                function(*args)
            except BaseException:
                self._loop.call_soon(self.call_all)  # the others' turn comes all the same
                raise
