"""What a caller hands to the buffer, as numpy arrays, and what is said when it does not fit.

Rows come as arrays, tensors or sequences, one line per transition or episode.
"""

from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncmaml.errors import ConfigurationError, EpisodesError

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = npt.ArrayLike | Tensor
"""One line per transition or episode: an array, a tensor or a sequence."""


def as_array(name: str, values: Any) -> Array:
    """Return the rows as an array; an array itself is returned as it is.

    Raises:
        EpisodesError: The rows differ in shape.
    """
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Tensor):
        values = values.detach()
        # numpy has no bfloat16.
        values = values.float() if values.is_floating_point() else values
        array: Array = values.numpy(force=True)
        return array
    try:
        return np.asarray(values)
    except ValueError as error:
        message = f"{name} must be rows of one shape: {error}"
        raise EpisodesError(message) from None


def as_numbers(name: str, tensor: Any, shape: tuple[int, ...], device: torch.device) -> Array:
    """Return a float64 copy of a tensor of this shape that lies on this device.

    Raises:
        EpisodesError: It is no tensor, or has another shape or device.
    """
    if not isinstance(tensor, Tensor) or tensor.shape != shape:
        found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        fail(f"{name} must be a tensor of shape {shape}, got {found}")
    if tensor.device != device:
        fail(
            f"{name} lie on {tensor.device} but the episodes on {device}; move one of them by to()"
        )
    numbers: Array = tensor.detach().cpu().double().numpy()
    return numbers


def without_idle_rows(batch_ids: Array, *columns: Rows | None) -> list[Any]:
    """Return the batch ids that are not None, and the same rows of each column.

    Raises:
        EpisodesError: A column has another number of rows.
    """
    busy = np.array([batch_id is not None for batch_id in batch_ids])
    chosen: list[Any] = [np.array(batch_ids[busy].tolist())]
    for column in columns:
        rows = None if column is None else as_array("rows", column)
        if rows is not None and rows.shape[:1] != busy.shape:
            fail(f"there are {len(busy)} batch_ids for rows of shape {rows.shape}")
        chosen.append(None if rows is None else rows[busy])
    return chosen


def check_rows(name: str, array: Array, shape: tuple[int, ...], kinds: str = "fiub") -> None:
    """Refuse rows of another shape, or of a numpy kind that is not among `kinds`."""
    if array.shape != shape:
        fail(
            f"{name} must have shape {shape}: a row for each batch id, each shaped as in the "
            f"first call; got {array.shape}"
        )
    if array.dtype.kind not in kinds and array.size:
        wanted = {"iu": "integers", "biu": "booleans"}.get(kinds, "numbers")
        fail(f"{name} must be {wanted}, got type {array.dtype}")


def check_type(name: str, found: np.dtype[Any], kept: np.dtype[Any]) -> None:
    """Refuse a type that cannot be kept without loss; floats are rounded to the kept type."""
    if found.kind not in "fiub" or not (kept.kind == "f" or np.can_cast(found, kept)):
        fail(f"{name} were {kept} in the first call and are {found} now; convert them before")


def check_range(name: str, number: float, low: int, high: float = float("inf")) -> None:
    """Refuse a number outside of `[low, high]`.

    Raises:
        ConfigurationError: It is outside.
    """
    if not low <= number <= high:
        message = f"{name} must lie in [{low}, {high}], got {number!r}"
        raise ConfigurationError(message)


def some(array: Array) -> str:
    """Return the first few entries, for a message."""
    return f"{array.tolist()[:5]}" + (" and more" if array.size > 5 else "")


def fail(message: str) -> NoReturn:
    """Raise an `EpisodesError`."""
    raise EpisodesError(message)
