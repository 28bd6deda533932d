import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from processes import PATIENCE

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


class _Elsewhere:
    """A loop in another thread, and a mailbox of its."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.mailbox = Mailbox(self.loop)
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def elsewhere() -> Iterator[_Elsewhere]:
    other = _Elsewhere()
    yield other
    other.close()


async def test_what_one_pass_posts_arrives_together(
    elsewhere: _Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncmaml.sampling.mailbox.LONGEST_HOLD", PATIENCE)
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    bursts: list[list[int]] = []
    taken: list[int] = []

    def take(number: int) -> None:
        if not taken:
            elsewhere.loop.call_soon(end_of_burst)
        taken.append(number)

    def end_of_burst() -> None:
        bursts.append(taken.copy())
        loop.call_soon_threadsafe(came.set)

    async def post(number: int) -> None:
        elsewhere.mailbox.post_in_pass(loop, take, number)
        if number == 10:  # in the middle the other loop has time enough
            there_and_back = threading.Event()
            elsewhere.loop.call_soon_threadsafe(there_and_back.set)
            assert there_and_back.wait(PATIENCE)
            assert not taken

    await asyncio.gather(*(post(number) for number in range(20)))
    await asyncio.wait_for(came.wait(), PATIENCE)
    assert bursts == [list(range(20))]


async def test_pass_that_never_ends_keeps_nothing_back(elsewhere: _Elsewhere) -> None:
    loop, called = asyncio.get_running_loop(), [threading.Event(), threading.Event()]
    for event in called:  # the second is posted when the first has waited for as long as it may
        elsewhere.mailbox.post_in_pass(loop, event.set)
        assert event.wait(PATIENCE)


async def test_post_takes_what_was_held_before_it_along(elsewhere: _Elsewhere) -> None:
    loop, called, done = asyncio.get_running_loop(), list[int](), threading.Event()
    elsewhere.mailbox.post_in_pass(loop, called.append, 1)
    elsewhere.mailbox.post(called.append, 2)
    elsewhere.mailbox.post(done.set)
    assert done.wait(PATIENCE)
    assert called == [1, 2]


async def test_what_is_held_when_the_loop_ends_can_be_called_still() -> None:
    other, called = _Elsewhere(), list[int]()
    other.loop.call_soon_threadsafe(other.loop.stop)
    other._thread.join()
    other.mailbox.post_in_pass(asyncio.get_running_loop(), called.append, 1)
    other.mailbox.call_all()
    other.loop.close()
    await asyncio.sleep(0)
    assert called == [1]
