"""The results as one picture: a panel for each workload, a bar for each contender."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison import Result
from contenders import Contender
from measuring import Spread
from reporting import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind tell apart.
_COLOURS = {
    "AsyncSampler": "#0072B2",
    "BatchSampler": "#56B4E9",
    "SyncVectorEnv": "#E69F00",
    "AsyncVectorEnv": "#D55E00",
}
_POLICY_COLOUR = "#999999"
_INK = "#333333"
_BAR_INCHES = 0.24
_PANEL_INCHES = 0.72


def draw(results: Sequence[Result], facts: dict[str, Any], path: Path) -> None:
    """Write the picture, a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ticking = [result for result in results if not result.raw]
    panels = [result for result in results if result.raw]
    counts = [len(result.workload.contenders) for result in panels]
    if ticking:
        counts.append(3 * len(ticking))
    height = sum(_BAR_INCHES * count + _PANEL_INCHES for count in counts) + 0.5
    with plt.rc_context({"font.size": 8, "axes.titlesize": 9, "font.family": "sans-serif"}):
        figure, axes = plt.subplots(
            len(counts),
            squeeze=False,
            figsize=(7.0, height),
            layout="constrained",
            height_ratios=counts,
        )
        for index, result in enumerate(panels):
            _draw_rates(axes[index, 0], result)
        if ticking:
            _draw_ticks(axes[-1, 0], ticking)
        note = (
            f"{facts['cores']} cores, {facts['cpu']}; Python {facts['python']}, torch "
            f"{facts['torch']}, gymnasium {facts['gymnasium']}; medians, lines from least to "
            f"greatest of {results[0].num_repeats} repeats"
        )
        figure.supxlabel(note, fontsize=6.5, color=_INK)
        figure.savefig(path, dpi=200)
        plt.close(figure)


def _draw_rates(axes: "Axes", result: Result) -> None:
    spreads = {
        contender: Spread.of(m.rate for m in result.measurements[contender.label])
        for contender in result.workload.contenders
    }
    ordered = sorted(spreads.items(), key=lambda item: item[1].median)
    _draw_bars(
        axes,
        [contender.label for contender, _ in ordered],
        [spread for _, spread in ordered],
        [_COLOURS[contender.family] for contender, _ in ordered],
    )
    # The limits are told between the title and the axes.
    title = f"{result.workload.title}: transitions/s"
    axes.set_title(title, loc="left", fontweight="bold", pad=12)
    limits = {
        contender.is_vectorized: _median_limit(result, contender)
        for contender in reversed(result.workload.contenders)
    }
    right = max(spread.greatest for spread in spreads.values())
    for is_vectorized, limit in limits.items():
        form = "" if len(limits) == 1 else " vectorised" if is_vectorized else " single"
        style = "--" if is_vectorized or len(limits) == 1 else ":"
        axes.axvline(limit, color=_INK, linestyle=style, linewidth=1)
        axes.annotate(
            f"limit{form} {short(limit)}",
            (limit, 1.0),  # the top of the line
            xycoords=("data", "axes fraction"),
            xytext=(0, 1.5),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=_INK,
        )
        right = max(right, limit)
    axes.set_xlim(0, right * 1.08)


def _median_limit(result: Result, contender: Contender) -> float:
    limits = [result.limit(contender, repeat) for repeat in range(result.num_repeats)]
    return Spread.of(limit.rate for limit in limits if limit is not None).median


def _draw_ticks(axes: "Axes", results: Sequence[Result]) -> None:
    labels: list[str] = []
    spreads: list[Spread] = []
    colours: list[str] = []
    for result in reversed(results):
        contender = result.workload.contenders[0]
        costs = result.policy_costs[contender.label]
        measurements = result.measurements[contender.label]
        busy = [m.busy_us_per_tick for m in measurements if m.busy_us_per_tick is not None]
        actions = "discrete" if result.workload.key == "Null" else "Box"
        labels += [
            f"our forward and draw, {actions}",
            f"policy(obs).sample(), {actions}",
            f"{contender.label}, {actions}",
        ]
        spreads += [
            Spread.of(cost.own_us for cost in costs),
            Spread.of(cost.users_us for cost in costs),
            Spread.of(busy),
        ]
        colours += [_POLICY_COLOUR, _POLICY_COLOUR, _COLOURS[contender.family]]
    _draw_bars(axes, labels, spreads, colours)
    title = "Environment that costs nothing: us a tick (less is better)"
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlim(0, max(spread.greatest for spread in spreads) * 1.12)


def _draw_bars(
    axes: "Axes", labels: Sequence[str], spreads: Sequence[Spread], colours: Sequence[str]
) -> None:
    from matplotlib.ticker import MaxNLocator

    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.least for spread in spreads]
    above = [spread.greatest - spread.median for spread in spreads]
    axes.barh(
        range(len(labels)),
        medians,
        color=colours,
        height=0.72,
        xerr=[below, above],
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": _INK},
    )
    for index, spread in enumerate(spreads):
        axes.annotate(
            short(spread.median),
            (spread.greatest, index),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: _round(value))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_ylim(-0.6, len(labels) - 0.4)


def _round(value: float) -> str:
    """Return a short number without zeros behind the point."""
    return re.sub(r"\.(\d*?)0+(?=[kM]|$)", lambda found: f".{found[1]}".rstrip("."), short(value))
