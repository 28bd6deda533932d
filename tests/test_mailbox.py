import asyncio
import threading
from typing import Any

import pytest

from asyncmaml.sampling.mailbox import Mailbox


async def test_calls_come_in_the_order_of_their_posts() -> None:
    mailbox, called = Mailbox(asyncio.get_running_loop()), list[int]()
    done = asyncio.Event()

    def post_all() -> None:
        for number in range(10_000):
            mailbox.post(called.append, number)
        mailbox.post(done.set)

    thread = threading.Thread(target=post_all)
    thread.start()
    await done.wait()
    thread.join()
    assert called == list(range(10_000))


async def test_many_posts_wake_the_loop_once() -> None:
    loop = asyncio.get_running_loop()
    mailbox, wakes = Mailbox(loop), list[Any]()
    call_soon = loop.call_soon_threadsafe

    def counted(*args: Any) -> Any:
        wakes.append(args)
        return call_soon(*args)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
    called: list[int] = []
    for number in range(100):
        mailbox.post(called.append, number)
    await asyncio.sleep(0)
    assert len(called) == 100
    assert len(wakes) == 1


async def test_posts_of_many_threads_all_arrive() -> None:
    mailbox, called = Mailbox(asyncio.get_running_loop()), list[tuple[int, int]]()

    def post(sender: int) -> None:
        for number in range(2_000):
            mailbox.post(called.append, (sender, number))

    await asyncio.gather(*(asyncio.to_thread(post, sender) for sender in range(4)))
    await asyncio.sleep(0)
    for sender in range(4):
        assert [n for s, n in called if s == sender] == list(range(2_000))


async def test_call_that_raises_does_not_hold_up_the_others() -> None:
    loop = asyncio.get_running_loop()
    told: list[Any] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    mailbox, called = Mailbox(loop), list[int]()
    mailbox.post(called.append, 1)
    mailbox.post(int, "no number")
    mailbox.post(called.append, 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert called == [1, 2]
    assert isinstance(told[0], ValueError)


def test_post_to_a_closed_loop_is_an_error() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        Mailbox(loop).post(print)
