"""What `asyncmaml train` and `asyncmaml evaluate` print: lines of 80 columns."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncmaml.cli_progress import return_text

if TYPE_CHECKING:
    from asyncmaml.evaluation import EvaluationReport
    from asyncmaml.training.estimates import Estimate

_COLUMNS: tuple[tuple[str, str, int, int | None], ...] = (
    # of the row, heading, width, digits after the point; None: as many as a return needs
    ("iteration", "iter", 5, 0),
    ("return_0", "before", 9, None),
    ("return_K", "after", 9, None),
    ("kl", "KL", 8, 4),
    ("pre_kl", "pre-KL", 8, 4),
    ("seconds", "seconds", 9, 2),
    ("sampling_seconds", "sample", 8, 2),
    ("adaptation_seconds", "adapt", 7, 2),
    ("outer_seconds", "outer", 7, 2),
    ("idle_seconds", "idle", 6, 2),
)


def iteration_heading() -> str:
    """Return the line over those of the iterations."""
    return "".join(f"{heading:>{width}}" for _, heading, width, _ in _COLUMNS)


def iteration_lines(row: Mapping[str, Any], num_updates: int) -> list[str]:
    """Return an iteration's numbers in a line, and what is unusual about it below."""
    cells = {**row, "return_K": row[f"return_{num_updates}"]}
    lines = [
        "".join(f"{_cell(cells.get(name), digits):>{width}}" for name, _, width, digits in _COLUMNS)
    ]
    if row["reason"]:
        what = "" if row["accepted"] else "the policy stays as it was: "
        lines.append(f"      {what}{row['reason']}")
    if row["skipped_tasks"]:
        lines.append(f"      {row['skipped_tasks']:.0f} tasks were skipped")
    if row["evaluation_return_0"] is not None:
        before, after = row["evaluation_return_0"], row[f"evaluation_return_{num_updates}"]
        lines.append(
            f"      held-out tasks: {return_text(before)} before, {return_text(after)} after "
            "adaptation "
            f"({row['evaluation_seconds']:.1f} s)"
        )
    return lines


def _cell(value: float | None, digits: int | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return return_text(value) if digits is None else f"{value:,.{digits}f}"


def evaluation_lines(report: "EvaluationReport") -> list[str]:
    """Return the table of returns by gradient steps."""
    num_tasks = len(report.task_returns[0])
    digits = 2 if max(abs(one.mean) for one in report.returns) >= 1 else 3
    rates = ", ".join(f"{rate:g}" for rate in report.step_sizes) or "none"
    lines = [
        f"{report.environment}: {num_tasks} held-out tasks, {report.num_episodes} episodes each, "
        f"seed {report.seed}",
        f"step sizes: {rates}",
        "",
        f"{'gradient steps':<16}{'return':>10}   {'sd over tasks':>13}   "
        f"{'95 % interval of the mean':>26}",
        *(_evaluation_line(steps, one, digits) for steps, one in enumerate(report.returns)),
    ]
    if report.skipped_tasks:
        lines.append(f"{report.skipped_tasks} tasks failed and are not in it")
    return lines


def _evaluation_line(steps: int, one: "Estimate", digits: int) -> str:
    low, high = f"{one.low:,.{digits}f}", f"{one.high:,.{digits}f}"
    interval = "-" if math.isnan(one.low) else f"{low} .. {high}"
    sd = "-" if math.isnan(one.sd) else f"{one.sd:,.{digits}f}"
    sign = " " if sd == "-" else "\N{PLUS-MINUS SIGN}"
    return f"{steps:<16}{one.mean:>10,.{digits}f}   {sign}{sd:>12}   {interval:>26}"


def files_line(names: Sequence[Any]) -> str:
    """Return what was written."""
    return "wrote " + ", ".join(map(str, names))
