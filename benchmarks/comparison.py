"""One workload: its contenders in turn, repeat after repeat, beside the limits of the machine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from contenders import Contender
from measuring import Measurement, Spread
from policy_cost import PolicyCost, measure_policy
from raw_stepping import RawForm, RawMeasurement, RawStepping
from torch import nn
from workloads import SOURCES, Source

import asyncmaml
from asyncmaml.sampling.arguments import usable_cores

_POLICY_SHARE = 0.05  # of a measurement's seconds, for each way of drawing
_LEAST_POLICY_SECONDS = 0.03


@dataclass(frozen=True)
class Limit:
    """What the environments and the policy cost by themselves."""

    raw_us: float
    """CPU time of a raw step."""
    policy_us: float
    """CPU time of the batched policy, a row."""
    rate: float
    """Transitions a second: all cores do nothing else, or no worker ever waits."""

    @classmethod
    def of_cores(cls, raw: RawMeasurement, policy: PolicyCost) -> Self:
        """Return it where every usable core does raw steps and the policy, and nothing else."""
        raw_us, policy_us = raw.cpu_us, policy.cpu_us_per_row
        return cls(raw_us, policy_us, usable_cores() / (raw_us + policy_us) * 1e6)

    @property
    def cpu_us(self) -> float:
        """CPU time a transition."""
        return self.raw_us + self.policy_us


@dataclass(frozen=True)
class Target:
    """A ratio that was promised.

    Args:
        text: Names it.
        wanted: The ratio.
        value: Computes it for one repeat.
        is_at_most: Whether less is better.
    """

    text: str
    wanted: float
    value: Callable[["Result", int], float]
    is_at_most: bool = False

    def is_met(self, found: float) -> bool:
        """Compare with what is wanted."""
        return found <= self.wanted if self.is_at_most else found >= self.wanted


@dataclass
class Workload:
    """What is measured, and what came of it in each repeat.

    Args:
        key: Of `SOURCES`.
        title: For people.
        contenders: The first one is ours, which the limit is told for.
        baseline: Label of the contender that ratios are taken to; None: no ratios.
        targets: Promised ratios.
        raw_forms: Forms of the environment whose raw steps are measured, one of each kind for
            which there is a contender; empty: none, steps cost nothing.
        num_raw_processes: Processes that step raw environments.
        sleeps: Whether a step's time is sleep: then CPU time says nothing.
    """

    key: str
    title: str
    contenders: list[Contender]
    baseline: str | None
    targets: list[Target]
    raw_forms: tuple[RawForm, ...] = (RawForm(),)
    num_raw_processes: int = field(default_factory=usable_cores)
    sleeps: bool = False

    @property
    def source(self) -> Source:
        """Where its environments come from."""
        return SOURCES[self.key]


class Result:
    """The measurements of a workload; a list's index is the repeat."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        labels = [contender.label for contender in workload.contenders]
        self.measurements: dict[str, list[Measurement]] = {label: [] for label in labels}
        self.policy_costs: dict[str, list[PolicyCost]] = {label: [] for label in labels}
        self.raw: dict[RawForm, list[RawMeasurement]] = {form: [] for form in workload.raw_forms}

    @property
    def num_repeats(self) -> int:
        """Repeats that were measured."""
        return min(map(len, self.policy_costs.values()))

    def over_repeats(self, value: Callable[[int], float]) -> Spread:
        """Return the spread of what `value` computes for each repeat."""
        return Spread.of(value(repeat) for repeat in range(self.num_repeats))

    def rate(self, label: str, repeat: int) -> float:
        """Return a contender's transitions a second."""
        return self.measurements[label][repeat].rate

    def limit(self, contender: Contender, repeat: int) -> Limit | None:
        """Return the limit for a contender: its form of the environment, its rows a forward."""
        if not self.raw:
            return None
        raw = self.raw_of(contender.is_vectorized)[repeat]
        limit = Limit.of_cores(raw, self.policy_costs[contender.label][repeat])
        if self.workload.sleeps:
            never_waiting = self.workload.num_raw_processes / raw.wall_us * 1e6
            return replace(limit, rate=never_waiting)
        return limit

    def raw_of(self, is_vectorized: bool) -> list[RawMeasurement]:
        """Return the raw steps of one kind; of several forms, the one with most rows."""
        forms = [form for form in self.raw if form.is_vectorized == is_vectorized]
        return self.raw[max(forms, key=lambda form: form.num_rows)]

    def cpu_share(self, contender: Contender, repeat: int) -> float:
        """Return the share of the limit that a contender reaches in CPU time."""
        limit = self.limit(contender, repeat)
        assert limit is not None
        return limit.cpu_us / self.measurements[contender.label][repeat].cpu_us

    def rate_share(self, contender: Contender, repeat: int) -> float:
        """Return the share of the limit that a contender reaches in wall time."""
        limit = self.limit(contender, repeat)
        assert limit is not None
        return self.rate(contender.label, repeat) / limit.rate


def run_workload(
    workload: Workload, repeats: int, seconds: float, report: Callable[[str], None]
) -> Result:
    """Open all contenders, and measure them in turn `repeats` times.

    In turn, so that a machine that drifts does it to all of them alike.
    """
    env = workload.source.make()
    torch.manual_seed(0)
    policy = asyncmaml.policy_for_spaces(env.observation_space, env.action_space)
    env.close()
    policy_seconds = max(_LEAST_POLICY_SECONDS, _POLICY_SHARE * seconds)
    result = Result(workload)
    with ExitStack() as stack:
        for contender in sorted(workload.contenders, key=lambda contender: not contender.forks):
            report(f"{workload.key}: opening {contender.label}")
            stack.enter_context(_opened(contender, policy))
        raw_stepping = {
            form: stack.enter_context(RawStepping(workload.key, workload.num_raw_processes, form))
            for form in workload.raw_forms
        }
        for processes in raw_stepping.values():
            processes.measure(0.0)  # warm up
        for repeat in range(repeats):
            for contender in workload.contenders:
                measured = contender.measure(seconds)
                result.measurements[contender.label].append(measured)
                progress = f"{workload.key} {repeat + 1}/{repeats}: {contender.label}"
                report(f"{progress}, {measured.rate:,.0f}/s, {measured.cpu_us:.1f} us CPU")
            for form, processes in raw_stepping.items():
                result.raw[form].append(processes.measure(seconds))
            for label, measurements in result.measurements.items():
                num_rows = max(1, round(measurements[-1].rows_per_forward))
                cost = measure_policy(policy, env, num_rows, policy_seconds)
                result.policy_costs[label].append(cost)
    return result


@contextmanager
def _opened(contender: Contender, policy: nn.Module) -> Iterator[None]:
    contender.open(policy)
    try:
        yield
    finally:
        contender.close()
