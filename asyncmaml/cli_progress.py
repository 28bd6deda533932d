"""A progress bar on stderr, for who watches: nothing is written where that is no terminal.

rich redraws it from a thread of its own and asks for the numbers when it does, so the work under
way need not report.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_REDRAWS_PER_SECOND = 8


@dataclass
class Sampled:
    """How far the sampling is."""

    doing: str
    """What it does at the moment."""
    episodes: int = 0
    transitions: int = 0
    steps_per_second: float = 0.0
    busy_share: float = 0.0
    """Of the workers' time, inside of environments."""


@contextmanager
def sampling_bar(num_episodes: int, ask: Callable[[], Sampled]) -> Iterator[None]:
    """Show a bar while the block runs, if stderr is a terminal and rich is installed.

    Args:
        num_episodes: Where the bar ends.
        ask: Called from another thread at every redraw.
    """
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:  # the extra asyncmaml[cli] is a comfort; nobody must have it
        yield
        return
    show = _renderer(num_episodes, ask)
    with Live(
        get_renderable=show,
        console=Console(stderr=True),
        refresh_per_second=_REDRAWS_PER_SECOND,
        transient=True,
    ):
        yield


def _renderer(num_episodes: int, ask: Callable[[], Sampled]) -> "Callable[[], RenderableType]":
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed:,}/{task.total:,} episodes"),
        TextColumn("{task.fields[steps]} steps"),
        TextColumn("{task.fields[rate]}/s"),
        TextColumn("{task.fields[busy]:.0%} busy"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, auto_refresh=False)
    bar = progress.add_task("", total=num_episodes, steps="0", rate="0", busy=0)

    def show() -> Progress:
        now = ask()
        progress.update(
            bar,
            description=now.doing,
            completed=min(now.episodes, num_episodes),
            steps=f"{now.transitions:,}",
            rate=f"{now.steps_per_second:,.0f}",
            busy=now.busy_share,
        )
        return progress

    return show
