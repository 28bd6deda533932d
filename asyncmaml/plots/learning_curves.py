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
from asyncmaml.plots.style import BEFORE, COLORS, new_figure
from asyncmaml.training.estimates import student_quantile
from asyncmaml.training.resuming import MAY_CHANGE
from asyncmaml.training.run_folder import RunFolder, read_progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What makes no other experiment of it: runs that differ in nothing else are averaged.
_REPEATS = {"seed", *MAY_CHANGE}


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
    environments = sorted({title_of(run.config.env_id) for runs in groups.values() for run in runs})
    is_alone = len(groups) == 1
    with new_figure(5.0, 3.3, path) as figure:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        for color, (name, runs) in zip(_colors(len(groups)), groups.items(), strict=True):
            _draw_group(axes, name, runs, color, is_alone=is_alone)
        axes.set_title(_title(environments, groups), loc="left", fontsize=8.5)
        axes.set_xlabel("iteration")
        axes.set_ylabel("return")
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center",
            ncols=3 if is_alone else 2, handlelength=1.7, columnspacing=1.4,
        )  # fmt: skip


def _title(environments: Sequence[str], groups: Mapping[str, Sequence[Run]]) -> str:
    """Return what is drawn, and what the lines and bands are."""
    numbers = {len(runs) for runs in groups.values()}
    of_one, of_many = "95 % interval over tasks", "\N{PLUS-MINUS SIGN} 1 s.d. over runs"
    bands = of_one if numbers == {1} else of_many
    if 1 in numbers and len(numbers) > 1:
        bands = f"{of_many}, or 95 % over the tasks of one run"
    parts = [", ".join(environments), f"bands: {bands}"]
    if len(groups) > 1:
        parts.insert(1, "dashed: before adaptation, solid: after")
    return "; ".join(parts) if len(parts) == 2 else "\n".join(parts)


def _read(folder: RunFolder) -> Run:
    folder.require(folder.config, folder.progress, that="that could be drawn")
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
                num_tasks = _num_tasks(runs[0].config, rows[0], name)
                reach = rows[0][f"{name}_sd_{updates}"] / num_tasks**0.5
                reach *= student_quantile(num_tasks - 1)
            found.iterations.append(iteration)
            found.middle.append(middle)
            found.low.append(middle - reach)
            found.high.append(middle + reach)
    return found


def _num_tasks(config: TrainConfig, row: Row, name: str) -> int:
    """Return how many tasks a return is the mean of: fewer than configured if some failed."""
    if name == "evaluation_return":
        counted, configured = row.get("evaluation_tasks"), config.evaluation_tasks
    else:
        counted, configured = row.get("tasks"), config.tasks_per_iteration
    # Runs of before that column was written have none.
    return configured if counted is None else int(counted)


def _draw_group(
    axes: "Axes", name: str, runs: Sequence[Run], color: str, *, is_alone: bool
) -> None:
    """Draw before (dashed) and after (solid), and the held-out tasks as points."""
    last = min(run.config.num_updates for run in runs)
    before, after = curve(runs, "return", 0), curve(runs, "return", last)
    for line, style, shade, label in (
        (before, "--", BEFORE if is_alone else color, "before adaptation" if is_alone else None),
        (after, "-", color, f"after {last} gradient step" + ("s" if last > 1 else "")),
    ):
        runs_text = f"{len(runs)} run" + ("s" if len(runs) > 1 else "")
        shown = label if is_alone or label is None else f"{name} ({runs_text})"
        axes.plot(line.iterations, line.middle, style, color=shade, label=shown)
        axes.fill_between(line.iterations, line.low, line.high, color=shade, alpha=0.16, lw=0)
    held_out = curve(runs, "evaluation_return", last)
    if held_out.iterations:
        axes.plot(
            held_out.iterations, held_out.middle, "o", color=color, markersize=4.5,
            markeredgecolor="white", markeredgewidth=0.7,
            label="held-out tasks" if is_alone else None, zorder=4,
        )  # fmt: skip


def _colors(number: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(number)]
