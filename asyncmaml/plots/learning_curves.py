"""Returns before and after adaptation against the iteration, of one run or of several."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncmaml.checkpoint import Row
from asyncmaml.config import TrainConfig, options
from asyncmaml.plots.gradient_steps import title_of
from asyncmaml.plots.style import BEFORE, COLORS, legend_above, new_figure
from asyncmaml.training.estimates import student_quantile
from asyncmaml.training.run_folder import RunFolder, read_progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What makes no other experiment of it: runs that differ in nothing else are averaged.
_REPEATS = {
    "seed",
    "iterations",
    "num_workers",
    "envs_per_worker",
    "device",
    "on_task_error",
    "evaluation_interval",
    "evaluation_tasks",
    "evaluation_episodes",
    "checkpoint_interval",
}


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    config: TrainConfig
    rows: Sequence[Row]


@dataclass(frozen=True)
class Curve:
    """A line with its band; entries belong together."""

    iterations: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]


def draw_learning_curves(folders: Sequence[str | Path], path: Path) -> None:
    """Draw the curves of some runs; those that differ in the seed alone become one.

    The band of several runs is one standard deviation over the runs; of one run it is the 95 %
    interval of the mean over the tasks of the iteration.

    Raises:
        ConfigurationError: A folder holds no run.
        MissingExtraError: matplotlib is not installed.
    """
    groups = grouped([_read(RunFolder(folder)) for folder in folders])
    environments = {run.config.env_id for runs in groups.values() for run in runs}
    with new_figure(5.2, 3.2, path) as figure:
        axes = figure.subplots()
        for color, (name, runs) in zip(_colors(len(groups)), groups.items(), strict=True):
            _draw_group(axes, name, runs, color, is_alone=len(groups) == 1)
        axes.set_xlabel("iteration")
        axes.set_ylabel("return")
        axes.margins(x=0.01)
        if len(environments) == 1:
            axes.text(
                1, 1.02, title_of(*environments), transform=axes.transAxes, ha="right", va="bottom"
            )
        legend_above(axes, columns=3 if len(groups) == 1 else 2)


def _read(folder: RunFolder) -> Run:
    config = TrainConfig.load(folder.config)
    return Run(config, read_progress(folder.progress))


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Put repeats together; a group's name tells what distinguishes it from the others."""
    names = [option.name for option in options() if option.name not in _REPEATS]
    values = {name: [repr(getattr(run.config, name)) for run in runs] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    groups = defaultdict(list)
    for index, run in enumerate(runs):
        groups[", ".join(f"{name}={values[name][index]}" for name in differing)].append(run)
    return dict(groups)


def curve(runs: Sequence[Run], name: str, updates: int) -> Curve:
    """Return the curve of the column `{name}_{updates}`, as far as all runs have come."""
    rows_of: Mapping[float, list[Row]] = defaultdict(list)
    for run in runs:
        for row in run.rows:
            if row[f"{name}_{updates}"] is not None:
                rows_of[row["iteration"]].append(row)
    found = Curve([], [], [], [])
    for iteration, rows in sorted(rows_of.items()):
        if len(rows) == len(runs):
            values = [row[f"{name}_{updates}"] for row in rows]
            middle = statistics.fmean(values)
            reach = statistics.stdev(values) if len(runs) > 1 else 0.0
            if len(runs) == 1 and rows[0][f"{name}_sd_{updates}"] is not None:
                num_tasks = runs[0].config.tasks_per_iteration
                reach = rows[0][f"{name}_sd_{updates}"] / num_tasks**0.5
                reach *= student_quantile(num_tasks - 1)
            found.iterations.append(iteration)
            found.middle.append(middle)
            found.low.append(middle - reach)
            found.high.append(middle + reach)
    return found


def _draw_group(
    axes: "Axes", name: str, runs: Sequence[Run], color: str, *, is_alone: bool
) -> None:
    """Draw before (dashed) and after (solid), and the held-out tasks as points."""
    last = min(run.config.num_updates for run in runs)
    before, after = curve(runs, "return", 0), curve(runs, "return", last)
    band = f"{len(runs)} runs, ± 1 s.d." if len(runs) > 1 else "95 % interval"
    suffix = f" ({name})" if name else ""
    for line, style, shade, label in (
        (before, "--", BEFORE if is_alone else color, "before adaptation"),
        (after, "-", color, f"after {last} step" + ("s" if last > 1 else "")),
    ):
        shown = label if is_alone else (f"{label}{suffix}" if style == "-" else None)
        axes.plot(line.iterations, line.middle, style, color=shade, label=shown)
        axes.fill_between(line.iterations, line.low, line.high, color=shade, alpha=0.16, linewidth=0)
    held_out = curve(runs, "evaluation_return", last)
    if held_out.iterations:
        axes.plot(
            held_out.iterations, held_out.middle, "o", color=color, markersize=4,
            markeredgecolor="white", markeredgewidth=0.6,
            label="the same, held-out tasks" if is_alone else None, zorder=4,
        )  # fmt: skip
    axes.set_title("")
    if is_alone:
        axes.plot([], [], " ", label=f"band: {band}")


def _colors(number: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(number)]
