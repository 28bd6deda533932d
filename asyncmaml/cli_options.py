"""What the values of options are made of, and how the help looks; for all subcommands.

A value that is no good raises `ArgumentTypeError`, which argparse turns into a usage error.
"""

import argparse
import json
import signal
from typing import Any


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


def whole_number(minimum: int) -> Any:
    """Return a type for argparse: whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        try:
            number = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            number = minimum - 1
        if number < minimum:
            message = f"wanted a whole number of at least {minimum}, got {text!r}"
            raise argparse.ArgumentTypeError(message)
        return number

    return parse


def layer_sizes(text: str) -> tuple[int, ...]:
    """Parse "100,100"; an empty text is no hidden layer."""
    try:
        sizes = tuple(int(size) for size in text.split(",")) if text.strip() else ()
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        message = f"wanted sizes of layers such as 100,100, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return sizes


def rates(text: str) -> tuple[float, ...]:
    """Parse "0.5,0.25": numbers above 0."""
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        numbers = (0.0,)
    if not all(0 < number < float("inf") for number in numbers):
        message = f"wanted numbers above 0 such as 0.5,0.25, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return numbers


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
