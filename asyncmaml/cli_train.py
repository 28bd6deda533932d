"""`asyncmaml train PRESET`: meta-trains a policy, evaluates it and draws what came out."""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncmaml.cli_config import add_config_flags, config_of
from asyncmaml.cli_options import HelpFormatter, Interrupted
from asyncmaml.cli_progress import Trained, training_bar
from asyncmaml.cli_training_report import (
    evaluation_lines,
    files_line,
    iteration_heading,
    iteration_lines,
)
from asyncmaml.config import TrainConfig
from asyncmaml.errors import MissingExtraError
from asyncmaml.presets import PRESETS

_DESCRIPTION = """\
Meta-train a policy that adapts to a new task in a few gradient steps. Ctrl-C and
SIGTERM stop it with a checkpoint, from which --resume goes on, bit for bit.
Flags replace what the preset says; defaults are for what it does not say.
"""

_EXAMPLES = """\
examples:
  asyncmaml train navigation-2d --output runs/nav --iterations 30
  asyncmaml train --output runs/nav --resume --iterations 60
  asyncmaml train halfcheetah-dir --output runs/cheetah --learner promp --seed 2
  asyncmaml train --config 2d-navigation.yaml --output runs/yaml -k action_scale=0.1

presets:
"""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand and its options."""
    width = max(map(len, PRESETS))
    presets = "".join(f"  {name:<{width}}  {one.about}\n" for name, one in PRESETS.items())
    parser = commands.add_parser(
        "train",
        help="meta-train a policy",
        usage="asyncmaml train PRESET --output DIR [--resume] [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + presets,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("preset", metavar="PRESET", nargs="?", choices=sorted(PRESETS), help="see below")
    add("--output", type=Path, required=True, metavar="DIR", help="the run's folder")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="instead of a preset: a config.json, or a YAML file of pytorch-maml-rl",
    )
    add(
        "--resume",
        action="store_true",
        help="go on after the last checkpoint in --output; start if there is none",
    )
    add(
        "--no-evaluation",
        action="store_true",
        help="end without the evaluation on 40 held-out tasks and its pictures",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="what ran where and when, for https://ui.perfetto.dev",
    )
    add("--quiet", action="store_true", help="print no line for each iteration")
    add_config_flags(parser)


def _run(parsed: argparse.Namespace) -> None:
    """Train, evaluate and draw."""
    config = config_of(parsed)
    progress = _Progress(config, quiet=parsed.quiet)
    with training_bar(config.iterations, progress.ask):
        # Here, under the bar: torch takes a second or two.
        from asyncmaml.evaluation import evaluate

        received = asyncio.run(_train(config, parsed, progress))
        if received is not None:
            go_on = f"asyncmaml train --output {parsed.output} --resume"
            if (parsed.output / "config.json").is_file():  # else it had not begun
                print(f"the run is kept; `{go_on}` goes on with it", file=sys.stderr)
            raise Interrupted(received)
        if parsed.no_evaluation:
            return
        progress.doing = "evaluating"
        report = asyncio.run(evaluate(parsed.output))
        progress.doing = "drawing"
        written = asyncio.run(_draw(parsed.output))
    print("", *evaluation_lines(report), "", written, sep="\n")


async def _train(
    config: TrainConfig, parsed: argparse.Namespace, progress: "_Progress"
) -> int | None:
    """Train until it is done, or until a signal comes; return the signal, once all is written."""
    from asyncmaml.trainer import train

    loop = asyncio.get_running_loop()
    training = loop.create_task(
        train(
            config,
            parsed.output,
            resume=parsed.resume,
            on_iteration=progress.add,
            trace=parsed.trace,
        ),
        name="train",
    )
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        progress.doing = "stopping"
        training.cancel()
        release()  # a second signal ends the process at once

    def release() -> None:
        for one in _SIGNALS:
            loop.remove_signal_handler(one)

    for one in _SIGNALS:
        loop.add_signal_handler(one, stop, one)
    try:
        progress.doing = "training"
        await training
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        release()
    return received[0] if received else None


async def _draw(folder: Path) -> str:
    """Draw the run's pictures; return what to say about it."""
    from asyncmaml.plots.of_runs import draw_run

    try:
        return files_line(await draw_run(folder))
    except MissingExtraError as error:
        return f"no pictures: {error}"


class _Progress:
    """What the bar is told, and the lines above it."""

    def __init__(self, config: TrainConfig, *, quiet: bool) -> None:
        self.doing = "loading torch"
        self._config = config
        self._quiet = quiet
        self._row: Mapping[str, Any] | None = None
        self._first: tuple[int, float] | None = None
        self._began = time.monotonic()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the row of an iteration."""
        if self._row is None:
            # A resumed run begins later than at 0.
            self._first = row["iteration"] - 1, row["seconds"] + row["evaluation_seconds"]
            self._began = time.monotonic() - self._first[1]
            if not self._quiet:
                print(iteration_heading())
        self._row = row
        if not self._quiet:
            print(*iteration_lines(row, self._config.num_updates), sep="\n", flush=True)

    def ask(self) -> Trained:
        """Return how far it is; called from the bar's thread."""
        row = self._row
        if row is None or self._first is None:
            return Trained(self.doing)
        done = row["iteration"] - self._first[0]
        pace = (time.monotonic() - self._began) / done
        kl = row.get("kl")
        return Trained(
            self.doing,
            row["iteration"],
            row["return_0"],
            row[f"return_{self._config.num_updates}"],
            kl if kl == kl else None,
            row["steps_per_second"],
            pace * (self._config.iterations - row["iteration"]),
        )
