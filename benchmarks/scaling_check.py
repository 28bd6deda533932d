"""Samplers whose environments sleep, measured and predicted: is the model right?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from contenders import AsyncContender
from measuring import Measurement, Spread
from reporting import in_words, plain_table
from simulation import Costs, Fleet, Prediction, StepCost, simulate
from workloads import SOURCES

import asyncmaml

# Rows and groups of a worker: as users have them, and so few that the coordinator saturates.
_CHECKS = ((8, 2), (8, 1), (1, 1))


@dataclass(frozen=True)
class Check:
    """A sampler that was measured, and what the model says of it, repeat by repeat.

    How long the environments' steps took is known from the same repeat: it is what the model is
    given, and a sleep takes longer on a machine that has other things to do.
    """

    fleet: Fleet
    measurements: list[Measurement]
    predictions: list[Prediction]

    @property
    def rates(self) -> Spread:
        """Transitions a second, measured."""
        return Spread.of(each.rate for each in self.measurements)

    def predicted(self, name: str) -> float:
        """Return the median of one of the predictions' numbers."""
        return Spread.of(getattr(each, name) for each in self.predictions).median

    def errors(self) -> Spread:
        """Return the predicted rate over the measured one, less one."""
        pairs = zip(self.predictions, self.measurements, strict=True)
        return Spread.of(predicted.rate / measured.rate - 1 for predicted, measured in pairs)

    def shares(self) -> Spread:
        """Return the workers' share of the time inside of environments."""
        return Spread.of(
            _environment_seconds(each) / each.reading.wall_seconds / self.fleet.num_workers
            for each in self.measurements
        )

    def coordinator_shares(self) -> Spread:
        """Return the share of the time that the coordinator spent in ticks, measured."""
        return Spread.of(
            (each.busy_us_per_tick or 0.0) * each.rate / each.rows_per_forward / 1e6
            for each in self.measurements
        )

    def others(self) -> Spread:
        """Return the cores that other processes took meanwhile."""
        return Spread.of(
            each.reading.others_cpu_seconds / each.reading.wall_seconds
            for each in self.measurements
        )


def check(
    costs: Costs, step: StepCost, num_workers: Sequence[int], repeats: int, seconds: float
) -> list[Check]:
    """Measure samplers whose environments sleep, in turn, and predict them."""
    source = SOURCES["Sleeping"]
    env = source.make()
    torch.manual_seed(0)
    policy = asyncmaml.policy_for_spaces(env.observation_space, env.action_space)
    found = []
    for rows, groups in _CHECKS:
        fleets = [Fleet(workers, rows, groups) for workers in num_workers]
        contenders = [
            AsyncContender(
                source, fleet.num_workers, rows, episodes_per_row=4, groups_per_worker=groups
            )
            for fleet in fleets
        ]
        measured: dict[Fleet, list[Measurement]] = {fleet: [] for fleet in fleets}
        # One after the other: the workers of samplers that wait cost nothing.
        for contender in contenders:
            contender.open(policy)
        try:
            for _ in range(repeats):
                for fleet, contender in zip(fleets, contenders, strict=True):
                    measured[fleet].append(contender.measure(seconds))
        finally:
            for contender in contenders:
                contender.close()
        for fleet in fleets:
            predictions = []
            for each in measured[fleet]:
                mean = _environment_seconds(each) / each.transitions * 1e6
                seen = StepCost(mean, step.deviation)
                predictions.append(simulate(costs, seen, fleet, steps_per_lane=400))
            found.append(Check(fleet, measured[fleet], predictions))
    return found


def _environment_seconds(measurement: Measurement) -> float:
    assert measurement.environment_seconds is not None
    return measurement.environment_seconds


def show_checks(checks: Sequence[Check]) -> None:
    """Print predicted beside measured."""
    rows = []
    for each in checks:
        fleet, rates = each.fleet, each.rates
        rows.append(
            [
                f"{fleet.num_workers} x {fleet.rows_per_worker} in {fleet.num_groups}",
                f"{rates.median:.0f} ({rates.least:.0f}..{rates.greatest:.0f})",
                f"{each.predicted('rate'):.0f}",
                in_words(each.errors(), "{:+.0%}"),
                in_words(each.shares(), "{:.2f}"),
                f"{each.predicted('worker_share'):.2f}",
                in_words(each.coordinator_shares(), "{:.2f}"),
                f"{each.predicted('coordinator_share'):.2f}",
                in_words(each.others(), "{:.1f}"),
            ]
        )
    header = (
        "workers x rows in groups",
        "measured /s",
        "predicted /s",
        "error",
        "busy share",
        "predicted",
        "coordinator",
        "predicted",
        "others' cores",
    )
    print(plain_table("\nPredicted and measured, steps that sleep 1 ms", header, rows, range(1, 9)))
    errors = [abs(each.errors().median) for each in checks]
    mean = sum(errors) / len(errors)
    print(f"  mean error of the throughput {mean:.1%}, greatest {max(errors):.1%}")
