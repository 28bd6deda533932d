"""The command `asyncmaml`: finds the subcommand, and turns errors into text and an exit code.

Exit codes: 0 done, 1 an error that is told in one message, 2 a wrong command line, 130 Ctrl-C,
143 a SIGTERM that ended a training cleanly.

A subcommand is a module with a function `add_parser(commands)` that is listed below; the function
sets `run`, which takes the parsed arguments. Nothing here, nor at the top of such a module, may
import torch: `asyncmaml --help` takes a twentieth of a second without it and two with it.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from asyncmaml import __version__, cli_evaluate, cli_plot, cli_render, cli_sample, cli_train
from asyncmaml.cli_options import HelpFormatter
from asyncmaml.errors import AsyncMAMLError

_COMMANDS: tuple[Callable[["argparse._SubParsersAction[Any]"], None], ...] = (
    cli_train.add_parser,
    cli_evaluate.add_parser,
    cli_plot.add_parser,
    cli_render.add_parser,
    cli_sample.add_parser,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: Without the program's name; None: those of the process.

    Raises:
        SystemExit: The command line is wrong (2), or asked for help or the version (0).
    """
    parsed = _parser().parse_args(arguments)
    code = 0
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except* KeyboardInterrupt as interrupts:
        print("asyncmaml: interrupted", file=sys.stderr)
        number = getattr(_first(interrupts), "signal_number", signal.SIGINT)
        code = 128 + number  # as shells count
    except* BrokenPipeError:
        # Who read our output has gone; what is left must not fail when Python flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except* (AsyncMAMLError, OSError) as errors:
        _tell(_first(errors))
        code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncmaml",
        description="Meta-reinforcement learning on environments sampled many at once.",
        epilog="`asyncmaml COMMAND --help` tells a command's options.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncmaml {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for add_parser in _COMMANDS:
        add_parser(commands)
    return parser


def _first(error: BaseException) -> BaseException:
    """The first error of nested groups: samples that run together fail for the same reason."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _tell(error: BaseException) -> None:
    """Print the notes (a worker's traceback, for one) and then the message, to be seen last."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    for note in getattr(error, "__notes__", ()):
        print(f"{note}\n", file=sys.stderr)
    print(f"asyncmaml: error: {message}", file=sys.stderr)
