"""When a tick waits for more rows: as long as no worker idles for it."""

from asyncmaml.sampling.pacing import Pace

STEP, TICK = 1.0, 0.2


def paced(*steps: float) -> Pace:
    """Return what has seen one step of two groups of each worker, all of its length, and a tick."""
    pace = Pace(len(steps))
    pace.ticked(TICK)
    for worker, seconds in enumerate(steps):
        for group in range(2):
            pace.sent(worker, group, 0.0)
            pace.replied(worker, group, 0.0, seconds)
    return pace


def send_all(pace: Pace, num_workers: int, now: float) -> None:
    for worker in range(num_workers):
        for group in range(2):
            pace.sent(worker, group, now)


def test_reply_waits_for_one_that_comes_before_its_worker_runs_dry() -> None:
    pace = paced(STEP, STEP)
    send_all(pace, 2, 10.0)
    pace.replied(0, 0, 10.0, 10.9)
    # Worker 0 is busy until 11.9, so the tick must begin at 11.7; worker 1 replies at 11.0.
    assert pace.should_wait({0}, 10.9)
    pace.replied(1, 0, 10.0, 11.0)
    assert not pace.should_wait({0, 1}, 11.0)


def test_reply_does_not_wait_for_one_that_comes_too_late() -> None:
    pace = paced(STEP, 2 * STEP)
    send_all(pace, 2, 10.0)
    pace.replied(0, 0, 10.0, 10.9)
    # Worker 1 replies at 12.0: a tick that began then would come 0.3 late for worker 0.
    assert not pace.should_wait({0}, 10.9)


def test_last_moment_leaves_time_for_the_tick() -> None:
    for tick, waits in ((0.05, True), (0.15, False)):
        pace = paced(STEP, 1.8 * STEP)
        for _ in range(50):
            pace.ticked(tick)
        send_all(pace, 2, 10.0)
        pace.replied(0, 0, 10.0, 10.9)  # busy until 11.9; the other replies at 11.8
        assert pace.should_wait({0}, 10.9) == waits


def test_reply_of_a_worker_with_nothing_else_to_do_does_not_wait() -> None:
    pace = paced(STEP, STEP)
    pace.sent(0, 0, 10.0)
    pace.sent(1, 0, 10.0)
    pace.replied(0, 0, 10.0, 10.9)
    assert not pace.should_wait({0}, 10.9)


def test_nobody_waits_for_a_worker_without_orders() -> None:
    pace = paced(STEP, STEP)
    send_all(pace, 1, 10.0)
    pace.replied(0, 0, 10.0, 11.0)
    assert not pace.should_wait({0}, 11.0)


def test_nobody_waits_for_a_worker_that_is_late_by_a_step_or_gone() -> None:
    pace = paced(STEP, STEP, STEP)
    pace.sent(1, 0, 8.0)  # at a reset, or hanging: due at 9.0
    send_all(pace, 1, 10.0)
    pace.replied(0, 0, 10.0, 11.0)
    assert not pace.should_wait({0}, 11.0)
    pace.sent(2, 0, 10.5)
    assert pace.should_wait({0}, 11.0)
    pace.lost(2)
    assert not pace.should_wait({0}, 11.0)


def test_steps_are_foreseen_from_those_of_late() -> None:
    pace = paced(STEP, STEP)
    for _ in range(50):
        pace.sent(1, 0, 0.0)
        pace.replied(1, 0, 0.0, 3 * STEP)
    send_all(pace, 2, 10.0)
    pace.replied(0, 0, 10.0, 10.9)
    assert not pace.should_wait({0}, 10.9)
