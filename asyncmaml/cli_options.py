"""What the values of options are made of, and how the help looks; for all subcommands.

A value that is no good raises `ArgumentTypeError`, which argparse turns into a usage error.
"""

import argparse
import json
import signal
from collections.abc import Callable
from typing import Any

from asyncmaml.option_kinds import Kind


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to stop, and it did so cleanly.

    Attributes:
        signal_number: Which one.
    """

    def __init__(self, signal_number: int = signal.SIGINT) -> None:
        super().__init__()
        self.signal_number = signal_number


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Options side by side with their help, in 80 columns; descriptions as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=80)


def reader(kind: Kind) -> Callable[[str], Any]:
    """Return a type for argparse: what `kind` reads."""

    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except (TypeError, ValueError):
            message = f"wanted {kind.wanted}, got {text!r}"
            raise argparse.ArgumentTypeError(message) from None

    return read


def keyword(text: str) -> tuple[str, Any]:
    """Parse "KEY=VALUE"; the value as JSON, or as text where it is no JSON."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        message = f"wanted KEY=VALUE, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def json_value(text: str) -> Any:
    """Parse JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        message = f"wanted JSON, got {text!r}: {error}"
        raise argparse.ArgumentTypeError(message) from None
