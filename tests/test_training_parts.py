"""What training is made of: numbers of draws, spans of time, estimates, the learner's thread."""

import asyncio
import itertools
import math
import random
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import PATIENCE, until

from asyncmaml.errors import ConfigurationError
from asyncmaml.training.draws import Purpose, draw_number
from asyncmaml.training.estimates import estimate, student_quantile
from asyncmaml.training.learner_thread import LearnerThread
from asyncmaml.training.spans import Clock, Span, noted, seconds_of, seconds_of_both, union

# ---- draws ----


@given(st.sets(st.tuples(*[st.integers(0, 999)] * 3, st.sampled_from(Purpose)), max_size=20))
def test_everything_that_is_drawn_has_a_number_of_its_own(
    places: set[tuple[int, int, int, Purpose]],
) -> None:
    numbers = {draw_number(purpose, *rest) for *rest, purpose in places}
    assert len(numbers) == len(places)


def test_more_tasks_than_numbers_are_refused() -> None:
    for task, update in ((2**20, 0), (0, 2**10)):
        with pytest.raises(ConfigurationError, match="has no number of its own"):
            draw_number(Purpose.TRAINING, 0, task, update)


# ---- spans ----

spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda s: (s[0], s[0] + s[1]))
)


def covered(of: list[Span]) -> set[int]:
    return {second for begin, end in of for second in range(int(begin), int(end))}


@given(spans)
def test_seconds_of_spans_are_those_that_any_of_them_covers(of: list[Span]) -> None:
    assert seconds_of(of) == len(covered(of))
    apart = union(of)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(apart))


@given(spans, spans)
def test_seconds_of_both_are_those_that_each_of_them_covers(
    first: list[Span], second: list[Span]
) -> None:
    assert seconds_of_both(first, second) == len(covered(first) & covered(second))


def test_hidden_adaptation_counts_as_sampling_and_the_parts_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 0 1 2 3 4 5 6 7 8 9 10   sampling 1-4, adaptation 3-6 (1 s of it hidden), outer 7-9
    monkeypatch.setattr("time.perf_counter", lambda: 10.0)
    clock = Clock(0.0, [(1, 3), (2, 4)], [(3, 5), (5, 6)], [(7, 9)])
    assert clock.seconds() == {
        "seconds": 10.0,
        "sampling_seconds": 3.0,
        "adaptation_seconds": 2.0,
        "outer_seconds": 2.0,
        "idle_seconds": 3.0,
        "overlap_seconds": 1.0,
    }


def test_span_of_a_block_that_raises_is_noted() -> None:
    noted_spans: list[Span] = []
    with pytest.raises(KeyError), noted(noted_spans):
        raise KeyError
    ((begin, end),) = noted_spans
    assert begin <= end


# ---- estimates ----


@pytest.mark.parametrize(  # from the table of any textbook
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (39, 2.023), (10**6, 1.960)],
)
def test_quantile_of_students_t_is_that_of_the_table(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=2e-3)


def test_estimate_of_three_values_matches_hand_calculation() -> None:
    # mean 2, sd 1, standard error 1/sqrt(3) = 0.5774; times 4.303
    one = estimate([1.0, 2.0, 3.0])
    assert (one.mean, one.sd) == (2.0, 1.0)
    assert [one.low, one.high] == pytest.approx([-0.484, 4.484], abs=1e-3)


def test_one_value_tells_no_spread() -> None:
    one = estimate([3.0])
    assert one.mean == 3.0
    assert all(math.isnan(value) for value in (one.sd, one.low, one.high))


def test_interval_holds_the_mean_in_95_of_100_samples() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(2000):
        one = estimate([draw.gauss(5, 2) for _ in range(5)])
        held += one.low <= 5 <= one.high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)  # 3 standard errors


# ---- the learner's thread ----


async def test_work_runs_in_order_in_one_thread_that_is_not_the_callers() -> None:
    done: list[int] = []
    spans: list[Span] = []
    async with LearnerThread() as thread:

        def work(number: int) -> int:
            done.append(number)
            return threading.get_ident()

        threads = await asyncio.gather(
            *(thread.run(partial(work, number), spans) for number in range(5))
        )
    assert done == [0, 1, 2, 3, 4]
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads
    assert len(spans) == 5


async def test_error_of_the_work_reaches_who_awaits_it() -> None:
    async with LearnerThread() as thread:
        with pytest.raises(KeyError):
            await thread.run({}.popitem, [])
        assert await thread.run(lambda: 3, []) == 3


async def test_cancelled_call_waits_for_what_runs_and_drops_what_does_not() -> None:
    begun, gate = threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> None:
        begun.set()
        assert gate.wait(PATIENCE)
        done.append("first")

    async with LearnerThread() as thread:
        running = asyncio.create_task(thread.run(first, []))
        await until(begun.is_set)
        waiting = asyncio.create_task(thread.run(lambda: done.append("second"), []))
        await asyncio.sleep(0)
        for call in (running, waiting):
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not running.done()
        running.cancel()  # impatient, and answered all the same when the work is over
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert done == ["first"]
        assert await thread.run(lambda: 3, []) == 3
