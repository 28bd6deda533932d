"""The checks of what a caller passes to a sampler, beside those of `option_kinds`."""

import math
import os
from typing import Any

import numpy as np
import torch

from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import OrNone, Whole


def positive_seconds(name: str, value: Any) -> float:
    """Return `value` as a positive number of seconds; infinity is allowed.

    Raises:
        ConfigurationError: It is none.
    """
    number = _real(value)
    if number is not None and number > 0:
        return number
    message = f"{name} is {value!r}; wanted a positive number of seconds"
    raise ConfigurationError(message)


def _real(value: Any) -> float | None:
    """Return a real number, numpy's too, as a float; None for anything else and for NaN."""
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        number = float(value)
        return None if math.isnan(number) else number
    return None


def optional_seed(value: Any) -> int | None:
    """Return a seed as an int of at least 0, or None.

    Raises:
        ConfigurationError: It is none of both.
    """
    seed: int | None = OrNone(Whole(0)).check("seed", value)
    return seed


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
