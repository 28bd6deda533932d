"""Predicts how a sampler scales to hundreds of workers, and where its coordinator saturates.

    python benchmarks/simulate_scaling.py            # some 2 minutes
    python benchmarks/simulate_scaling.py --quick    # within one
    python benchmarks/simulate_scaling.py --costs runs/simulate_scaling/costs.json --no-check

What a tick, a pipe and an environment's step cost is measured on this machine, and a model of
discrete events (`simulation`) tells what follows for 8 to 512 workers, each with a core of its
own. The model is held against samplers of 1 to 8 workers whose environments sleep: these need no
cores, so that few cores can do what many would.
"""

import argparse
import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration import measure_costs, measure_step
from reporting import machine_facts, plain_table, short
from scaling_check import check, show_checks
from simulation import (
    Costs,
    Fleet,
    Prediction,
    StepCost,
    coordinator_bound,
    saturation,
    simulate,
    worker_bound,
)
from tick_costs import TickCost
from workloads import SOURCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_WORKERS = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Plan:
    """Environments, and how each worker has them."""

    title: str
    source: str
    rows: int
    num_groups: int
    measured_rows: int
    """Rows of the worker in which the step is measured."""


PLANS = (
    Plan("1 ms simulator, 16 rows", "Sleeping", 16, 2, 4),
    Plan("HalfCheetah, 32 rows", "HalfCheetah", 32, 2, 16),
    Plan("HalfCheetah, 128 rows", "HalfCheetah", 128, 2, 16),
    Plan("CartPole, 128 rows", "CartPole", 128, 2, 64),
)


def show_costs(costs: Costs, ticks: Sequence[TickCost], steps: dict[str, StepCost]) -> None:
    """Print what was measured."""
    rows = [[name.replace("_", " "), f"{value:.2f}"] for name, value in vars(costs).items()]
    print(plain_table("\nCosts", ("of", "us"), rows, range(1, 2)))
    steps_table = [
        [name, f"{step.mean:.1f}", f"{step.deviation:.1f}"] for name, step in steps.items()
    ]
    header: tuple[str, ...] = ("step of one row", "mean us", "deviation")
    print(plain_table("\nSteps", header, steps_table, range(1, 3)))
    if not ticks:
        return
    values = (costs.tick, costs.tick_lane, costs.tick_row, costs.known_lane)
    fitted = [
        [
            str(each.num_lanes),
            str(each.lanes_in_tick),
            str(each.rows),
            f"{each.us:.0f}",
            f"{sum(part * value for part, value in zip(each.parts, values, strict=True)):.0f}",
        ]
        for each in ticks
    ]
    header = ("groups", "in the tick", "rows each", "measured us", "fitted us")
    print(plain_table("\nTicks of the coordinator, CPU time", header, fitted, range(5)))


def predict(
    costs: Costs, step: StepCost, plan: Plan, num_workers: Sequence[int], steps_per_lane: int
) -> dict[Fleet, Prediction]:
    """Simulate fleets of all sizes."""
    fleets = [Fleet(workers, plan.rows, plan.num_groups) for workers in num_workers]
    return {fleet: simulate(costs, step, fleet, steps_per_lane=steps_per_lane) for fleet in fleets}


def show_predictions(
    costs: Costs, steps: dict[str, StepCost], predictions: dict[Plan, dict[Fleet, Prediction]]
) -> None:
    """Print a table of all plans."""
    rows = []
    for plan, of_fleets in predictions.items():
        step = steps[plan.source]
        for fleet, found in of_fleets.items():
            rows.append(
                [
                    plan.title,
                    str(fleet.num_workers),
                    short(found.rate),
                    f"{found.worker_share:.2f}",
                    f"{found.coordinator_share:.2f}",
                    f"{found.rows_per_tick:.0f}",
                    short(worker_bound(costs, step, fleet)),
                    short(coordinator_bound(costs, fleet)),
                ]
            )
    header = (
        "environment",
        "workers",
        "transitions/s",
        "workers busy",
        "coordinator",
        "rows a tick",
        "workers' bound",
        "coordinator's",
    )
    title = "\nPredicted, a core for each worker and one for the coordinator, 2 groups"
    print(plain_table(title, header, rows, range(1, 8)))
    for plan, of_fleets in predictions.items():
        last = max(fleet.num_workers for fleet in of_fleets)
        first = saturation(of_fleets)
        where = f"from {first} workers on" if first else f"not up to {last} workers"
        best = short(max(found.rate for found in of_fleets.values()))
        print(f"  {plan.title}: the coordinator holds the workers up {where}; at most {best}/s")


def draw(predictions: dict[Plan, dict[Fleet, Prediction]], path: Path) -> None:
    """Write a picture: throughput and busy share over the number of workers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 8, "axes.titlesize": 9}):
        figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.4), layout="constrained")
        colours = ("#0072B2", "#D55E00", "#E69F00", "#009E73")
        for colour, (plan, found) in zip(colours, predictions.items(), strict=False):
            workers = [fleet.num_workers for fleet in found]
            rates = [each.rate for each in found.values()]
            ideal = [rates[0] / workers[0] * count for count in workers]
            axes[0].plot(workers, rates, "o-", color=colour, markersize=3, label=plan.title)
            axes[0].plot(workers, ideal, ":", color=colour, linewidth=0.8)
            shares = [each.worker_share for each in found.values()]
            axes[1].plot(workers, shares, "o-", color=colour, markersize=3)
        _label(axes[0], "transitions/s (dotted: as the smallest fleet)")
        axes[0].set_yscale("log")
        axes[0].legend(frameon=False)
        _label(axes[1], "share of the time that a worker is busy")
        axes[1].set_ylim(0, 1.02)
        figure.savefig(path, dpi=200)
        plt.close(figure)


def _label(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("workers")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.grid(alpha=0.2)


async def _calibrate(
    plans: Sequence[Plan], seconds: float
) -> tuple[Costs, list[TickCost], dict[str, StepCost]]:
    costs, ticks = await measure_costs()
    steps: dict[str, StepCost] = {}
    for plan in plans:
        if plan.source not in steps:
            source = SOURCES[plan.source]
            steps[plan.source] = await measure_step(source, plan.measured_rows, seconds)
    return costs, ticks, steps


def _loaded(path: Path) -> tuple[Costs, dict[str, StepCost]]:
    content: dict[str, Any] = json.loads(path.read_text())
    steps = {name: StepCost(**values) for name, values in content["steps"].items()}
    return Costs(**content["costs"]), steps


def main() -> None:
    arguments = _parse()
    began = time.perf_counter()
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    plans = [plan for plan in PLANS if plan.source != "HalfCheetah" or find_spec("mujoco")]
    ticks: list[TickCost] = []
    if arguments.costs is not None:
        costs, steps = _loaded(arguments.costs)
        plans = [plan for plan in plans if plan.source in steps]
    else:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            costs, ticks, steps = runner.run(_calibrate(plans, arguments.seconds))
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    written = []
    if arguments.costs is None:
        content = {
            "machine": facts,
            "costs": dataclasses.asdict(costs),
            "steps": {name: dataclasses.asdict(step) for name, step in steps.items()},
        }
        (output / "costs.json").write_text(json.dumps(content, indent=1) + "\n")
        written.append("costs.json")
    show_costs(costs, ticks, steps)
    if not arguments.no_check:
        num_workers = (1, 2, 4, 8)
        repeats = arguments.repeats
        show_checks(check(costs, steps["Sleeping"], num_workers, repeats, arguments.seconds))
    steps_per_lane = 50 if arguments.quick else 200
    predictions = {
        plan: predict(costs, steps[plan.source], plan, _NUM_WORKERS, steps_per_lane)
        for plan in plans
    }
    show_predictions(costs, steps, predictions)
    if find_spec("matplotlib") is None:
        print("\nno chart: install the extra asyncmaml[plot] for it")
    else:
        draw(predictions, output / "scaling.png")
        written.append("scaling.png")
    seconds = time.perf_counter() - began
    print(f"\nwrote {' and '.join(written) or 'nothing'} to {output} after {seconds:.0f} s")


def _parse() -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="within a minute, less exact")
    parser.add_argument("--costs", type=Path, help="costs.json of an earlier run; not measured")
    parser.add_argument("--no-check", action="store_true", help="predict only")
    parser.add_argument("--repeats", type=int, help="of the check: 5, or 2 with --quick")
    parser.add_argument("--seconds", type=float, help="of each measurement; 1.5 or 0.4")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/simulate_scaling"),
        help="folder for costs.json and scaling.png",
    )
    arguments = parser.parse_args()
    if arguments.repeats is None:
        arguments.repeats = 2 if arguments.quick else 5
    if arguments.seconds is None:
        arguments.seconds = 0.4 if arguments.quick else 1.5
    if arguments.repeats < 1 or arguments.seconds <= 0:
        parser.error("--repeats must be 1 or more, --seconds above 0")
    return arguments


if __name__ == "__main__":
    main()
