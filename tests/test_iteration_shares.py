"""What benchmarks/halfcheetah_iteration.py makes of its measurements, held against hand counts."""

import threading
import time

import pytest
from comparison import Limit
from iteration_shares import PARTS, Sampled, TimedIteration, timed_iterations
from measuring import SamplingCpu, SamplingMeter

ROW = {
    "iteration": 2,
    "env_steps": 3000,
    "seconds": 10.0,
    "sampling_seconds": 5.0,
    "adaptation_seconds": 0.5,
    "outer_seconds": 4.0,
    "idle_seconds": 0.5,
}
# 2000 transitions: 4 ms each of the workers, 0.5 of the sampler's thread, 0.5 of the event loop's.
CPU = SamplingCpu(workers=8.0, sampler=1.0, event_loop=1.0, others=7.0)
SAMPLED = Sampled(2000, 5.0, 2, CPU)
ITERATION = TimedIteration(ROW, SAMPLED)
# On two cores 2 / 4 ms = 500 a second.
LIMIT = Limit(raw_us=3900.0, policy_us=100.0, rate=500.0)


def test_sampling_is_counted_over_the_seconds_in_which_the_sampler_had_work() -> None:
    assert SAMPLED.rate == pytest.approx(2000 / 5.0)
    assert SAMPLED.wall_share(LIMIT) == pytest.approx(400 / 500)


def test_cpu_time_of_a_transition_is_that_of_workers_sampler_and_event_loop() -> None:
    assert SAMPLED.cpu_us == pytest.approx((8 + 1 + 1) / 2000 * 1e6)
    assert SAMPLED.us_each(CPU.workers) == pytest.approx(4000)
    assert SAMPLED.cpu_share(LIMIT) == pytest.approx(4000 / 5000)


def test_wall_share_is_the_cpu_share_of_the_cores_time_that_sampling_got() -> None:
    busier = Sampled(2000, 5.0, 2, SamplingCpu(6.0, 0.5, 0.5, 0.0))
    assert busier.cores_share == pytest.approx(7 / (2 * 5.0))
    share = busier.cpu_share(LIMIT) * busier.cores_share
    assert busier.wall_share(LIMIT) == pytest.approx(share)


def test_sampler_waits_while_adaptation_sticks_out_and_while_nothing_runs() -> None:
    # 10 s less 4 s of the outer step; 0.5 s and 0.5 s of the 6 that are left.
    assert ITERATION.waiting_share == pytest.approx(1 / 6)


def test_parts_of_an_iteration_add_up_to_the_whole() -> None:
    assert ITERATION.part("outer_seconds") == pytest.approx(0.4)
    assert sum(map(ITERATION.part, PARTS)) == pytest.approx(1)


def test_transitions_of_an_iteration_are_those_that_it_adds_to_the_runs() -> None:
    # As progress.csv is read: all numbers are floats.
    rows = [
        {"iteration": float(number), "env_steps": steps, "sampling_seconds": 2.0}
        for number, steps in ((1, 1000.0), (2, 3000.0), (3, 4500.0), (4, 9999.0))
    ]
    found = timed_iterations(rows, {2: CPU, 3: SamplingCpu(1.0, 1.0, 1.0, 1.0)}, 2)
    assert [each.sampled.transitions for each in found] == [2000, 1500]
    assert [each.sampled.cpu.workers for each in found] == [8.0, 1.0]


def test_cpu_time_of_a_learners_thread_is_not_samplings() -> None:
    begin, end = threading.Event(), threading.Event()
    computed = threading.Barrier(3)

    def compute(seconds: float) -> None:
        begin.wait()
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            pass
        computed.wait()
        end.wait()

    threads = [
        threading.Thread(target=compute, args=(0.05,), name="asyncmaml-sampler"),
        threading.Thread(target=compute, args=(0.1,), name="asyncmaml-learner"),
    ]
    for thread in threads:
        thread.start()
    meter = SamplingMeter()
    begin.set()
    computed.wait()
    cpu = meter.read()
    end.set()
    for thread in threads:
        thread.join()
    assert 0.05 <= cpu.sampler < 0.1
    assert cpu.event_loop < 0.1
    assert cpu.sampling < 0.1
