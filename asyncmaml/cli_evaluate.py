"""`asyncmaml evaluate DIR`: the returns of a run's policy after 0, 1, 2, ... gradient steps."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from asyncmaml.cli_options import HelpFormatter, reader
from asyncmaml.cli_training_report import evaluation_lines, files_line
from asyncmaml.errors import MissingExtraError
from asyncmaml.option_kinds import RATES, Whole

_DESCRIPTION = """\
Adapt a run's policy to held-out tasks and tell its returns after each gradient
step, by the protocol of Finn et al. (2017): the first step with the step size of
training, the following ones with half of it.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand and its options."""
    parser = commands.add_parser(
        "evaluate",
        help="tell how well a run adapts to new tasks",
        description=_DESCRIPTION,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="what was the --output of asyncmaml train")
    add("--tasks", type=reader(Whole(1)), default=40, metavar="N", help="default: 40")
    add(
        "--episodes",
        type=reader(Whole(1)),
        default=40,
        metavar="N",
        help="of each task after each number of steps; default: 40",
    )
    add("--updates", type=reader(Whole(0)), default=3, metavar="N", help="default: 3")
    add(
        "--step-sizes",
        type=reader(RATES),
        metavar="RATES",
        help="one for each step, such as 0.5,0.25,0.25, or one for all; default: see above",
    )
    add(
        "--seed",
        type=reader(Whole(0)),
        default=1,
        metavar="N",
        help="of tasks and episodes; the same for all runs that are to be compared; default: 1",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


def _run(parsed: argparse.Namespace) -> None:
    """Evaluate, print and draw."""
    from asyncmaml.evaluation import evaluate

    report = asyncio.run(
        evaluate(
            parsed.folder,
            num_tasks=parsed.tasks,
            num_episodes=parsed.episodes,
            num_updates=parsed.updates,
            step_sizes=parsed.step_sizes,
            seed=parsed.seed,
        )
    )
    if parsed.json:
        print(report.to_json(), end="")
    else:
        print(*evaluation_lines(report), "", sep="\n")
    from asyncmaml.plots.of_runs import draw_evaluation

    written: list[Path] = [parsed.folder / "evaluation.json"]
    try:
        written.append(draw_evaluation(parsed.folder))
    except MissingExtraError as error:
        last = f"{files_line(written)}; no picture: {error}"
    else:
        last = files_line(written)
    if not parsed.json:
        print(last)
