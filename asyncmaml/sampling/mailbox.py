"""Calls from one thread into the event loop of another: many of them, one wake.

To wake a loop is to write into a pipe that its thread waits on, and that thread then competes for
the interpreter: several results of one tick must not pay for it one by one.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Mailbox:
    """Calls functions in the thread of an event loop, in the order of their posts.

    Args:
        loop: Whose thread calls them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Have a function called soon; from any thread.

        Raises:
            RuntimeError: The loop is closed.
        """
        # Without a lock: the call is there before the flag is read, and `_call_all` lowers the flag
        # before it looks for calls, so whichever comes first, somebody sees this one.
        self._calls.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        self._is_woken = False
        while self._calls:
            function, args = self._calls.popleft()
            try:
                function(*args)
            except BaseException:
                self._loop.call_soon(self._call_all)  # the others' turn comes all the same
                raise
