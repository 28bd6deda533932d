"""Paths in 2D navigation before and after adaptation, as in figure 4 of Finn et al. (2017)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.plots.style import INK, STEP_COLORS, new_figure
from asyncmaml.training.rollouts import AdaptedTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PATHS_PER_STEP = 4
_PANEL_INCHES = 1.95
_FARTHEST = 2.5
"""Times the farthest goal: what is walked beyond is cut off, or all else would be small."""


def draw_trajectories(adapted: Sequence[AdaptedTask], steps: Sequence[int], path: Path) -> None:
    """Draw one panel for each task, in each some paths after each number of gradient steps.

    Args:
        adapted: Tasks with a `goal`, with their episodes.
        steps: Which numbers of gradient steps to draw.
        path: The picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    paths = [[_paths(one.episodes[step]) for step in steps] for one in adapted]
    reach = _reach(paths, [one.task["goal"] for one in adapted])
    with new_figure(_PANEL_INCHES * len(adapted) + 0.55, _PANEL_INCHES + 0.75, path) as figure:
        from matplotlib.ticker import MaxNLocator

        panels = figure.subplots(1, len(adapted), sharex=True, sharey=True, squeeze=False)[0]
        for panel, one, of_task in zip(panels, adapted, paths, strict=True):
            for step, walked in zip(steps, of_task, strict=True):
                _draw_paths(panel, walked, step, label=_label(step))
            _draw_ends(panel, one.task["goal"])
            panel.set_aspect("equal")
            panel.xaxis.set_major_locator(MaxNLocator(3))
            panel.yaxis.set_major_locator(MaxNLocator(3))
            panel.set_xlim(-reach, reach)
            panel.set_ylim(-reach, reach)
            returns = " \N{RIGHTWARDS ARROW} ".join(_minus(one.returns[step]) for step in steps)
            panel.set_title(f"return {returns}", fontsize=8.5)
            panel.set_xlabel("x")
            panel.tick_params(left=panel is panels[0])
        panels[0].set_ylabel("y")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper center", ncols=len(labels), columnspacing=1.6,
            handlelength=1.5,
        )  # fmt: skip


def one_goal_of_each_quadrant(tasks: Sequence[Any]) -> list[Any]:
    """Return the first task of each quadrant, counter-clockwise, so that panels differ.

    Nothing but the goals decides; in a family whose goals lie in fewer quadrants there are fewer.
    """
    found: dict[tuple[bool, bool], Any] = {}
    for task in tasks:
        found.setdefault((bool(task["goal"][0] > 0), bool(task["goal"][1] > 0)), task)
    order = [(True, True), (False, True), (False, False), (True, False)]
    return [found[quadrant] for quadrant in order if quadrant in found]


def _paths(episodes: BatchEpisodes) -> list[NDArray[Any]]:
    """Return the positions `(steps + 1, 2)` of some episodes, from the start to the end."""
    observations, last = episodes.observations.cpu(), episodes.last_observations.cpu()
    lengths = episodes.lengths.tolist()
    return [
        np.concatenate([observations[: lengths[index], index], last[index : index + 1]])
        for index in range(min(_PATHS_PER_STEP, len(lengths)))
    ]


def _reach(paths: Sequence[Sequence[Sequence[NDArray[Any]]]], goals: Sequence[Any]) -> float:
    """Return how far the axes go: to all goals, and to what is walked unless that is far away."""
    walked = max(float(np.abs(walk).max()) for task in paths for step in task for walk in step)
    farthest_goal = max(float(np.abs(goal).max()) for goal in goals)
    reach = max(1.35 * farthest_goal, min(1.03 * walked, _FARTHEST * farthest_goal))
    return math.ceil(reach * 10) / 10


def _draw_paths(panel: "Axes", paths: Sequence[NDArray[Any]], step: int, label: str) -> None:
    color = STEP_COLORS[min(step, len(STEP_COLORS) - 1)]
    for number, path in enumerate(paths):
        panel.plot(
            path[:, 0],
            path[:, 1],
            color=color,
            linewidth=0.8,
            alpha=0.7,
            label=label if number == 0 else None,
            zorder=2 + step,
        )


def _draw_ends(panel: "Axes", goal: Any) -> None:
    panel.plot(
        0, 0, "o", color="white", markeredgecolor=INK, markersize=5, label="start", zorder=10
    )
    panel.plot(
        *goal, "*", color="#D55E00", markeredgecolor="white", markersize=11,
        markeredgewidth=0.7, label="goal", zorder=11,
    )  # fmt: skip


def _label(step: int) -> str:
    if step == 0:
        return "before adaptation"
    return f"after {step} gradient step" + ("s" if step > 1 else "")


def _minus(value: float) -> str:
    return f"{value:.1f}".replace("-", "\N{MINUS SIGN}")
