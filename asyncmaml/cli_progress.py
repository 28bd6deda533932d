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


@dataclass
class Trained:
    """How far the training is."""

    doing: str
    """What it does at the moment."""
    iterations: int = 0
    before: float | None = None
    """Return before adaptation, of the last iteration."""
    after: float | None = None
    """And after it."""
    kl: float | None = None
    steps_per_second: float = 0.0
    seconds_left: float | None = None


@contextmanager
def sampling_bar(num_episodes: int, ask: Callable[[], Sampled]) -> Iterator[None]:
    """Show a bar while the block runs, if stderr is a terminal and rich is installed.

    Args:
        num_episodes: Where the bar ends.
        ask: Called from another thread at every redraw.
    """
    with _live(lambda: _renderer(num_episodes, ask)):
        yield


@contextmanager
def training_bar(iterations: int, ask: Callable[[], Trained]) -> Iterator[None]:
    """Show a bar while the block runs, as `sampling_bar` does; lines printed go above it."""
    with _live(lambda: _training_renderer(iterations, ask)):
        yield


@contextmanager
def _live(make_renderer: "Callable[[], Callable[[], RenderableType]]") -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:  # the extra asyncmaml[cli] is a comfort; nobody must have it
        yield
        return
    with Live(
        get_renderable=make_renderer(),
        console=Console(stderr=True),
        refresh_per_second=_REDRAWS_PER_SECOND,
        transient=True,
        # What goes to a file must not come onto the terminal instead.
        redirect_stdout=sys.stdout.isatty(),
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


def _training_renderer(
    iterations: int, ask: Callable[[], Trained]
) -> "Callable[[], RenderableType]":
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TextColumn("{task.fields[told]}"),
    )
    progress = Progress(*columns, auto_refresh=False)
    bar = progress.add_task("", total=iterations, told="")

    def show() -> Progress:
        now = ask()
        progress.update(
            bar,
            description=now.doing,
            completed=min(now.iterations, iterations),
            told=_told(now),
        )
        return progress

    return show


def return_text(value: float) -> str:
    """Return a return as text, so that three digits count."""
    return f"{value:,.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}"


def _told(now: Trained) -> str:
    """The last iteration in a few words; nothing before the first."""
    if now.before is None or now.after is None:
        return ""
    parts = [f"{return_text(now.before)} \N{RIGHTWARDS ARROW} {return_text(now.after)}"]
    if now.kl is not None:
        parts.append(f"KL {now.kl:.4f}")
    parts.append(f"{now.steps_per_second:,.0f} steps/s")
    if now.seconds_left is not None:
        minutes, seconds = divmod(round(now.seconds_left), 60)
        parts.append(f"ETA {minutes // 60}:{minutes % 60:02}:{seconds:02}")
    return "  ".join(parts)
