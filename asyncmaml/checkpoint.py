"""Checkpoints: a run as it was after an iteration, in one file that loads without pickle.

The random numbers of a run have no state (`training/draws.py`): with the configuration's seed and
the number of the iteration all streams are where they were.
"""

import os
import pickle
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from asyncmaml.config import TrainConfig
from asyncmaml.errors import ConfigurationError

_FORMAT = 1
Row = dict[str, Any]
"""What is told of one iteration: a number, a text or None under each name."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after some iterations.

    Attributes:
        config: What it is trained with.
        iterations: How many are complete.
        learner: `MetaLearner.state_dict()`: policy, optimizer, whatever the learner needs.
        history: One row for each complete iteration.
    """

    config: TrainConfig
    iterations: int
    learner: dict[str, Any]
    history: tuple[Row, ...]

    @classmethod
    def of(cls, config: TrainConfig, learner: dict[str, Any], history: list[Row]) -> Self:
        """Return all that as it is now; a learner's state is a copy already."""
        return cls(config, len(history), learner, tuple(history))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; whoever reads it, even after a crash, finds the old one or this one."""
        content = {
            "format": _FORMAT,
            "config": self.config.to_json(),
            "iterations": self.iterations,
            "learner": self.learner,
            "history": list(self.history),
        }
        write_atomically(path, lambda new: torch.save(content, new))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Self:
        """Read what `save` wrote; the learner's tensors come to `device`.

        Raises:
            ConfigurationError: The file holds something else.
        """
        try:
            content = torch.load(path, map_location=device, weights_only=True)
            found = content["format"]
            if found != _FORMAT:
                message = (
                    f"{os.fspath(path)} is a checkpoint of format {found}, this version reads "
                    f"format {_FORMAT}; resume with the version that wrote it"
                )
                raise ConfigurationError(message)
            return cls(
                TrainConfig.from_json(content["config"], os.fspath(path)),
                content["iterations"],
                content["learner"],
                tuple(content["history"]),
            )
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError) as error:
            message = f"{os.fspath(path)} holds no checkpoint: {error}"
            raise ConfigurationError(message) from error


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Replace a file as a whole: `write` fills a new one beside it, which then takes its name.

    Synced before it is renamed, and the directory after it: a power failure leaves no file that
    is empty or half written.
    """
    path = Path(path)
    # Not mkstemp: its file is its owner's alone, and what mode others are to get nobody can ask.
    name = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        write(name)
        _sync(name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    _sync(path.parent)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
