"""`asyncmaml plot DIR [DIR ...]`: pictures of one run, or the learning curves of several."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from asyncmaml.cli_options import HelpFormatter
from asyncmaml.cli_training_report import files_line
from asyncmaml.errors import ConfigurationError

_DESCRIPTION = """\
Of one run: draw its learning curve, its evaluation if there is one, and for
Navigation2D the paths before and after adaptation, all into its folder.
Of several: draw their learning curves into one picture; runs that differ in the
seed alone become one curve with a band.
"""

_EXAMPLES = """\
examples:
  asyncmaml plot runs/nav
  asyncmaml plot runs/nav-* --output nav.pdf
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand and its options."""
    parser = commands.add_parser(
        "plot",
        help="draw learning curves and trajectories",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="what was an --output of train"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the learning curves go here, as png, pdf or svg; needed for several runs",
    )


def _run(parsed: argparse.Namespace) -> None:
    """Draw what there is."""
    if len(parsed.folders) > 1 and parsed.output is None:
        message = "where the curves of several runs go is not said; name it with --output FILE.png"
        raise ConfigurationError(message)
    from asyncmaml.plots.learning_curves import draw_learning_curves
    from asyncmaml.plots.of_runs import draw_run

    if parsed.output is not None:
        draw_learning_curves(parsed.folders, parsed.output)
        written = [parsed.output]
    else:
        written = asyncio.run(draw_run(parsed.folders[0]))
    print(files_line(written))
