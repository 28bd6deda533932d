"""The model behind benchmarks/simulate_scaling.py, held against what can be told by hand."""

import random

import numpy as np
import pytest
import torch
from calibration import measure_looks
from simulation import (
    Costs,
    Fleet,
    Prediction,
    Simulation,
    StepCost,
    coordinator_bound,
    saturation,
    simulate,
    worker_bound,
)
from tick_costs import Ticks, fit

from asyncmaml.sampling.pacing import Pace

NOTHING = Costs(
    tick=0,
    tick_lane=0,
    tick_row=0,
    known_lane=0,
    wake=0,
    take_up=0,
    receive=0,
    send=0,
    worker_wake=0,
    command=0,
)
ALL = Costs(
    tick=100,
    tick_lane=10,
    tick_row=1,
    known_lane=0.5,
    wake=20,
    take_up=8,
    receive=4,
    send=2,
    worker_wake=16,
    command=32,
)


def test_one_worker_with_one_group_takes_turns_with_the_coordinator() -> None:
    found = simulate(ALL, StepCost(50), Fleet(1, 20))
    # Command and 20 steps: 32 + 1000. Until the next one: 20 to wake, 8 + 4 for the reply,
    # 100 + 10 + 20 + 0.5 for the tick, 2 to send, 16 until the worker runs.
    worker, coordinator, between = 32 + 1000, 20 + 8 + 4 + 100 + 10 + 20 + 0.5 + 2, 16
    period = worker + coordinator + between
    assert found.rate == pytest.approx(20 / period * 1e6)
    assert found.worker_share == pytest.approx(worker / period)
    assert found.coordinator_share == pytest.approx(coordinator / period)
    assert found.rows_per_tick == 20


def test_with_two_groups_the_coordinators_part_is_hidden_behind_long_steps() -> None:
    fleet = Fleet(1, 20, 2)
    found = simulate(ALL, StepCost(50), fleet)
    # The worker does 32 + 500 for each group and always has the next command.
    assert found.rate == pytest.approx(20 / (2 * (32 + 500)) * 1e6, rel=0.02)
    assert found.rate == pytest.approx(worker_bound(ALL, StepCost(50), fleet), rel=0.02)
    assert found.worker_share == pytest.approx(1.0, abs=0.02)


def test_two_groups_are_of_no_use_where_steps_cost_nothing() -> None:
    step = StepCost(0)
    whole = simulate(ALL, step, Fleet(1, 20))
    halves = simulate(ALL, step, Fleet(1, 20, 2))
    assert halves.rate < whole.rate


def test_coordinator_bounds_many_workers() -> None:
    costs = Costs(**(vars(NOTHING) | {"tick": 100.0, "tick_row": 1.0}))
    fleet = Fleet(64, 4)
    found = simulate(costs, StepCost(0), fleet)
    # All replies are in when a tick ends, so the next one has all 256 rows.
    assert found.rate == pytest.approx(256 / (100 + 256) * 1e6)
    assert found.rate == pytest.approx(coordinator_bound(costs, fleet))
    assert found.coordinator_share == pytest.approx(1.0)
    assert found.rows_per_tick == 256


def test_free_coordinator_leaves_workers_no_wait() -> None:
    for workers in (1, 3, 40):
        found = simulate(NOTHING, StepCost(30), Fleet(workers, 5))
        assert found.rate == pytest.approx(workers / 30 * 1e6)
        assert found.worker_share == pytest.approx(1.0)
        assert found.coordinator_share == 0


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 2, 8, 32])
def test_no_bound_is_passed(workers: int, groups: int) -> None:
    fleet, step = Fleet(workers, 16, groups), StepCost(40, 30)
    found = simulate(ALL, step, fleet)
    # Of 16 * 200 random steps a lane, the mean is within a few percent.
    assert found.rate < 1.05 * worker_bound(ALL, step, fleet)
    assert found.rate < 1.01 * coordinator_bound(ALL, fleet)
    assert 0 < found.worker_share <= 1
    assert 0 < found.coordinator_share <= 1.0001


def test_transitions_of_a_time_are_those_the_workers_had_time_for() -> None:
    step = StepCost(40, 25)
    for fleet in (Fleet(4, 8), Fleet(16, 8, 2), Fleet(3, 7, 3)):
        found = simulate(ALL, step, fleet, steps_per_lane=800)
        lanes = len(fleet.group_sizes)
        per_row = 40 + 32 * lanes / fleet.rows_per_worker
        busy = found.rate * per_row / 1e6 / fleet.num_workers
        assert found.worker_share == pytest.approx(busy, rel=0.03)


def test_same_costs_give_the_same_prediction() -> None:
    arguments = ALL, StepCost(40, 25), Fleet(8, 8, 2)
    assert simulate(*arguments) == simulate(*arguments)
    assert simulate(*arguments, seed=1) != simulate(*arguments)


def test_steps_of_rows_have_the_mean_and_deviation_asked_for() -> None:
    generator = np.random.default_rng(0)
    drawn = [StepCost(40, 20).of_rows(9, generator) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(9 * 40, rel=0.01)
    assert np.std(drawn) == pytest.approx(3 * 20, rel=0.02)
    assert StepCost(40).of_rows(9, generator) == 360


def test_rows_are_divided_among_groups_as_the_workers_do() -> None:
    assert Fleet(1, 7, 2).group_sizes == [4, 3]
    assert Fleet(1, 2, 8).group_sizes == [1, 1]
    assert Fleet(1, 128, 1).group_sizes == [128]


def test_saturation_is_the_first_fleet_whose_workers_wait() -> None:
    shares = {8: 0.99, 16: 0.97, 32: 0.88, 64: 0.4}
    found = {Fleet(count, 4): Prediction(1.0, share, 1.0, 1.0) for count, share in shares.items()}
    assert saturation(found) == 32
    assert saturation(found, 0.5) == 64
    assert saturation(found, 0.3) is None


def test_fit_finds_the_costs_that_measurements_were_made_of() -> None:
    generator = np.random.default_rng(0)
    parts = np.column_stack([np.ones(12), generator.integers(1, 60, (12, 3))])
    costs = np.array([150.0, 12.0, 1.2, 0.9])
    np.testing.assert_allclose(fit(parts, parts @ costs), costs)


def test_fit_gives_no_negative_cost() -> None:
    parts = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    found = fit(parts, np.array([10.0, 9.0, 8.0]))
    assert found[1] == 0
    assert found[0] == pytest.approx((1 / 10 + 1 / 9 + 1 / 8) / (1 / 100 + 1 / 81 + 1 / 64))


class ChancePace(Pace):
    """Has a reply wait where that may be, and chance says so."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self._chance = random.Random(1)

    def should_wait(self, waiting: set[int], now: float) -> bool:
        return self._chance.random() < 0.7 and self.may_wait(waiting)


@pytest.mark.parametrize(("workers", "groups"), [(1, 1), (1, 2), (3, 1), (3, 2), (2, 4)])
async def test_model_makes_a_tick_when_the_coordinator_does(workers: int, groups: int) -> None:
    generator = random.Random(0)
    lanes = workers * groups
    with torch.inference_mode():
        coordinator = Ticks(lanes, 1, 16, lanes_per_worker=groups, pace=ChancePace(workers))
        model = Simulation(
            NOTHING,
            StepCost(1),
            Fleet(workers, groups, groups),
            np.random.default_rng(),
            ChancePace(workers),
        )
        await coordinator.begin()
        model.begin()
        stepping, found = set(range(lanes)), []
        for _ in range(200):
            lane = generator.choice(sorted(stepping))
            stepping.remove(lane)
            coordinator.step([lane])
            has_ticked = await coordinator.reply([lane])
            is_due = model.take(lane, 0.0, 0.0, 0.0)
            assert is_due == has_ticked
            if is_due:
                model.tick(0.0)
                stepping = set(range(lanes))
            found.append(has_ticked)
        coordinator.close()
    assert any(found)
    assert all(found) == (groups == 1)


async def test_looks_at_the_pipes_are_measured_on_links_as_they_are() -> None:
    look, reply = await measure_looks()
    assert look + reply > 0
