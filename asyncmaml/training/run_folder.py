"""`RunFolder`: the files of a run, and what goes into each."""

import csv
import fcntl
import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncmaml.checkpoint import Checkpoint, Row, write_atomically
from asyncmaml.config import TrainConfig
from asyncmaml.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class RunFolder:
    """Where a run is kept: its configuration, progress, checkpoint, policy and pictures.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def config(self) -> Path:
        """The configuration, JSON."""
        return self.path / "config.json"

    @property
    def progress(self) -> Path:
        """A row for each iteration, CSV."""
        return self.path / "progress.csv"

    @property
    def checkpoint(self) -> Path:
        """For `resume`."""
        return self.path / "checkpoint.pt"

    @property
    def policy(self) -> Path:
        """For `asyncmaml.load_policy`."""
        return self.path / "policy.pt"

    @property
    def evaluation(self) -> Path:
        """What `evaluate` found, JSON."""
        return self.path / "evaluation.json"

    def picture(self, name: str) -> Path:
        """Return where the picture of that name goes."""
        return self.path / f"{name}.png"

    def require(self, *files: Path, that: str = "") -> None:
        """Refuse a folder that lacks one of its files.

        Args:
            files: Of this folder.
            that: What they are needed for, such as "that could be drawn".

        Raises:
            ConfigurationError: One is not there.
        """
        for file in files:
            if not file.is_file():
                run = f"run {that}" if that else "run"
                message = (
                    f"{self.path} holds no {run}: there is no {file.name} in it; name the folder "
                    "that was the --output of asyncmaml train"
                )
                raise ConfigurationError(message)

    def load_checkpoint(self, device: str = "cpu") -> Checkpoint:
        """Read the checkpoint.

        Raises:
            ConfigurationError: There is none, or it holds something else.
        """
        self.require(self.checkpoint)
        return Checkpoint.load(self.checkpoint, device)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Make the folder, and let no other process train into it meanwhile.

        Raises:
            ConfigurationError: Another process does.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # For appending: where it is a link, what it leads to is left as it is.
        with open(self.path / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = (
                    f"another process trains into {self.path}; wait for its end, or name another "
                    "folder"
                )
                raise ConfigurationError(message) from None
            yield

    def write_config(self, config: TrainConfig) -> None:
        """Replace the configuration."""
        write_atomically(self.config, config.save)


class ProgressFiles:
    """`progress.csv` and TensorBoard's event file; open from the first row to `close`.

    Args:
        folder: Where they lie.
        history: The rows that are there already; what a killed run wrote after its last
            checkpoint is replaced by them.
    """

    def __init__(self, folder: RunFolder, history: Sequence[Row]) -> None:
        self._path = folder.progress
        self._rows: list[Row] = []
        self._names: list[str] = []
        self._rewrite(history)
        self._events = _event_writer(folder.path, len(history))

    def add(self, row: Row) -> None:
        """Append a row."""
        if row.keys() <= set(self._names):
            with open(self._path, "a", newline="") as file:
                file.write(self._lines([row]))
            self._rows.append(row)
        else:
            # The first row of all, or of a run that another version has begun.
            self._rewrite([*self._rows, row])
        if self._events is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._events.add_scalar(_tag(name), value, row["iteration"])
            self._events.flush()

    def close(self, history: Sequence[Row]) -> None:
        """Close the event file; leave exactly the rows of `history` in the CSV."""
        self._rewrite(history)
        if self._events is not None:
            self._events.close()

    def _rewrite(self, history: Sequence[Row]) -> None:
        self._rows = list(history)
        self._names = list(dict.fromkeys(name for row in history for name in row))
        text = ",".join(self._names) + "\n" + self._lines(history) if history else ""
        write_atomically(self._path, lambda new: new.write_text(text))

    def _lines(self, rows: Sequence[Row]) -> str:
        """Return rows as CSV without a header; a column that a row has not is empty."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._names, lineterminator="\n")
        writer.writerows(rows)
        return text.getvalue()


def read_progress(path: Path) -> list[Row]:
    """Read a `progress.csv`; numbers as floats, cells without one as None.

    Raises:
        ConfigurationError: It has no rows.
    """
    with open(path, newline="") as file:
        rows = [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]
    if not rows:
        message = f"{path} has no iterations yet; train at least one"
        raise ConfigurationError(message)
    return rows


def _number(text: Any) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return text or None


def _tag(name: str) -> str:
    """Return the name under which TensorBoard shows a column: in groups."""
    if name.startswith("sampler_"):
        return f"sampler/{name.removeprefix('sampler_')}"
    for group in ("evaluation_return", "return", "evaluation"):
        if name.startswith(f"{group}_") and not name.endswith("_seconds"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return f"time/{name}" if name.endswith(("seconds", "_per_second")) else f"training/{name}"


def _event_writer(path: Path, iterations: int) -> "SummaryWriter | None":
    """Return TensorBoard's writer, if it is installed; the CSV has the same numbers."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the extra asyncmaml[tensorboard]
        return None
    # What an earlier process wrote of iterations that are now done again is hidden.
    return SummaryWriter(str(path), purge_step=iterations + 1 if iterations else None)
