"""The checks of what a caller passes to a sampler."""

import math
import os
from typing import Any, SupportsIndex

import torch

from asyncmaml.errors import ConfigurationError


def whole_number(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return `value` as an int from `minimum` to `maximum`.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = value.__index__()
        if number >= minimum and (maximum is None or number <= maximum):
            return number
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    message = f"{name} is {value!r}; wanted a whole number {limits}"
    raise ConfigurationError(message)


def positive_seconds(name: str, value: Any) -> float:
    """Return `value` as a positive number of seconds; infinity is allowed.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(value, int | float) and not math.isnan(value) and value > 0:
        return float(value)
    message = f"{name} is {value!r}; wanted a positive number of seconds"
    raise ConfigurationError(message)


def fraction(name: str, value: Any) -> float:
    """Return `value` as a number in [0, 1].

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(value, int | float) and 0 <= value <= 1:
        return float(value)
    message = f"{name} is {value!r}; wanted a number between 0 and 1"
    raise ConfigurationError(message)


def optional_seed(value: Any) -> int | None:
    """Return a seed as an int of at least 0, or None.

    Raises:
        ConfigurationError: It is none of both.
    """
    return None if value is None else whole_number("seed", value, 0)


def torch_device(value: str | torch.device) -> torch.device:
    """Return the device of that name.

    Raises:
        ConfigurationError: torch does not know it, or it is not there.
    """
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        message = f"device is {value!r}, which torch cannot use here: {error}"
        raise ConfigurationError(message) from error
    return device


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
