"""Returns against the number of gradient steps, as in figure 5 of Finn et al. (2017)."""

from pathlib import Path

from asyncmaml.evaluation import EvaluationReport
from asyncmaml.plots.style import AFTER, BEFORE, new_figure


def draw_gradient_steps(report: EvaluationReport, path: Path) -> None:
    """Draw each task's return thinly, and the mean with its 95 % interval over it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    estimates = report.returns
    steps = range(len(estimates))
    means = [one.mean for one in estimates]
    reaches = [one.high - one.mean if one.high == one.high else 0.0 for one in estimates]
    num_tasks = len(report.task_returns[0])
    with new_figure(3.9, 3.2, path) as figure:
        axes = figure.subplots()
        for number, returns in enumerate(zip(*report.task_returns, strict=True)):
            label = "each task" if number == 0 else None
            axes.plot(steps, returns, color=BEFORE, alpha=0.35, linewidth=0.6, label=label)
        axes.errorbar(
            steps,
            means,
            reaches,
            color=AFTER,
            marker="o",
            markersize=5,
            capsize=3.5,
            label=f"mean of {num_tasks} tasks, 95 % interval",
            zorder=3,
        )
        axes.set_xticks(steps)
        axes.margins(x=0.06)
        axes.set_xlabel("gradient steps")
        axes.set_ylabel("return")
        axes.set_title(f"{title_of(report.environment)}, held-out tasks", loc="left")
        axes.grid(axis="x", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def title_of(env_id: str) -> str:
    """Return an environment's id without its namespace and version."""
    return env_id.rpartition("/")[2].rpartition("-v")[0] or env_id
