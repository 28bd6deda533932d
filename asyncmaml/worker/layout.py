"""The shared arrays of one worker: one block of memory without a name, a part for each group.

The memory is an unlinked file, known by descriptor alone: it cannot be left behind, whoever dies.
Whose turn it is to read or write is said by the messages (`asyncmaml.worker.protocol`).
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from asyncmaml.errors import UnsupportedSpaceError

_ALIGNMENT = 64  # a cache line: the two sides never write to the same one


def record_type(space: "Space[Any]", role: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype in which values of a space are carried and recorded.

    Floats become float32 and integer actions int64; other observations keep their dtype.

    Raises:
        UnsupportedSpaceError: The space is none of `Box`, `Discrete`, `MultiDiscrete`.
    """
    if isinstance(space, Discrete):
        return (), np.dtype(np.int64)
    if isinstance(space, Box):
        floating = np.issubdtype(space.dtype, np.floating)
        return space.shape, np.dtype(np.float32) if floating else np.dtype(space.dtype)
    if isinstance(space, MultiDiscrete) and role == "action" and len(space.shape) == 1:
        return space.shape, np.dtype(np.int64)
    kinds = "Box and Discrete" if role == "observation" else "Box, Discrete and MultiDiscrete"
    message = (
        f"the environment's {role} space is {space}; the sampler carries {kinds} {role}s: "
        f"wrap the environment so that its {role}s are of one of these "
        f"(gymnasium.wrappers.FlattenObservation, for one)"
    )
    raise UnsupportedSpaceError(message)


@dataclass(frozen=True)
class Arrays:
    """The views that both sides have of one group's part; R rows each."""

    observations: NDArray[Any]
    """What the next action answers to, shape `(R, *O)`; after a start, the first observation."""
    last_observations: NDArray[Any]
    """Where an episode has just ended: its true last observation, shape `(R, *O)`."""
    actions: NDArray[Any]
    """As the environment takes them, shape `(R, *A)`."""
    rewards: NDArray[np.float32]
    orders: NDArray[np.uint8]
    outcomes: NDArray[np.uint8]
    start_seed: NDArray[np.int64]
    start_task: NDArray[np.int64]
    offer_seed: NDArray[np.int64]
    """Episodes for rows whose own ends in this step, taken in the order of rows; `(2 R,)`."""
    offer_task: NDArray[np.int64]
    offers: NDArray[np.int64]
    """The first offer that stands, and the end: shape `(2,)`."""
    at_work: NDArray[np.int64]
    """The row that the worker is at, or R more than the number of the offer that it begins; -1
    between commands, and where the rows are stepped as one. Shape `(1,)`; outlives the worker."""
    busy_seconds: NDArray[np.float64]
    """Time spent in environments since the start, shape `(1,)`."""
    step_times: NDArray[np.float64]
    """When the last command was begun and done, by `time.perf_counter`, shape `(2,)`."""


@dataclass(frozen=True)
class Layout:
    """Shapes and dtypes of the shared arrays of one group of rows."""

    num_rows: int
    observation: tuple[tuple[int, ...], np.dtype[Any]]
    action: tuple[tuple[int, ...], np.dtype[Any]]

    def _fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        rows = (self.num_rows,)
        observation = (rows + self.observation[0], self.observation[1])
        byte, long = np.dtype(np.uint8), np.dtype(np.int64)
        return {
            "observations": observation,
            "last_observations": observation,
            "actions": (rows + self.action[0], self.action[1]),
            "rewards": (rows, np.dtype(np.float32)),
            "orders": (rows, byte),
            "outcomes": (rows, byte),
            "start_seed": (rows, long),
            "start_task": (rows, long),
            "offer_seed": ((2 * self.num_rows,), long),
            "offer_task": ((2 * self.num_rows,), long),
            "offers": ((2,), long),
            "at_work": ((1,), long),
            "busy_seconds": ((1,), np.dtype(np.float64)),
            "step_times": ((2,), np.dtype(np.float64)),
        }

    @property
    def num_bytes(self) -> int:
        """Size of the group's part of the block."""
        return sum(_padded_bytes(shape, dtype) for shape, dtype in self._fields().values())

    def views(self, block: mmap.mmap | bytearray, offset: int) -> Arrays:
        """Return the arrays that lie in the block from `offset` on."""
        views: dict[str, NDArray[Any]] = {}
        for name, (shape, dtype) in self._fields().items():
            views[name] = np.ndarray(shape, dtype, block, offset)
            offset += _padded_bytes(shape, dtype)
        return Arrays(**views)


class WorkerLayout:
    """Where the arrays of each group lie in the block of one worker; the same on both sides.

    Args:
        group_sizes: Rows of each group.
        observation_space: Of one environment.
        action_space: Of one environment.

    Raises:
        UnsupportedSpaceError: See `record_type`.
    """

    def __init__(
        self,
        group_sizes: Sequence[int],
        observation_space: "Space[Any]",
        action_space: "Space[Any]",
    ) -> None:
        self.observation = record_type(observation_space, "observation")
        self.action = record_type(action_space, "action")
        self._groups = [Layout(size, self.observation, self.action) for size in group_sizes]

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return sum(group.num_bytes for group in self._groups)

    def views(self, block: mmap.mmap | bytearray) -> list[Arrays]:
        """Return the arrays of each group."""
        views, offset = [], 0
        for group in self._groups:
            views.append(group.views(block, offset))
            offset += group.num_bytes
        return views


def _padded_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT or _ALIGNMENT


def nameless_memory(num_bytes: int) -> int:
    """Return the descriptor of new, zeroed memory that has no name in any file system."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("asyncmaml", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
