"""What a worker says besides its answers: stdout, stderr and log records, on their way to the user.

It is read in the sampler thread as it comes, in pieces and without waiting; a worker that says
more than is read waits in its own write. Nothing of it is kept but an unfinished line and the end
of stderr, which belongs in the error when the worker dies.
"""

import json
import logging
import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, get_args

from asyncmaml.errors import ConfigurationError

if TYPE_CHECKING:
    import asyncio
    from multiprocessing.connection import Connection

WorkerOutputMode = Literal["pass", "log", "capture"]
LOGGER = logging.getLogger("asyncmaml.worker")
_TAIL_BYTES = 8 << 10
_LONGEST_LINE = 64 << 10
_PIECE = 64 << 10
_MAX_PIECES = 64
"""At a worker's end; a process of the environment's may hold the pipe and go on writing."""


def checked_output_mode(value: object) -> WorkerOutputMode:
    """Return `value` if it says what becomes of the workers' output.

    Raises:
        ConfigurationError: It does not.
    """
    known: tuple[WorkerOutputMode, ...] = get_args(WorkerOutputMode)
    for mode in known:
        if value == mode:
            return mode
    message = f"worker_output is {value!r}; wanted one of {', '.join(known)}"
    raise ConfigurationError(message)


class WorkerOutput:
    """Reads one worker's output.

    Args:
        worker: Its number, which every record tells.
        stdout: Our end of the pipe.
        stderr: Likewise.
        records: Our end of the socket.
        mode: `pass`: whole lines are written to `sys.stdout` and `sys.stderr` of this process, as
            they are at that moment, so a notebook or a progress bar sees them. `log`: each line
            becomes a log record, of level INFO and WARNING. `capture`: they are not shown.
    """

    def __init__(
        self,
        worker: int,
        stdout: "Connection",
        stderr: "Connection",
        records: socket.socket,
        mode: WorkerOutputMode,
    ) -> None:
        self._worker = worker
        self._mode = mode
        self._streams = (_Lines(stdout, "stdout"), _Lines(stderr, "stderr"))
        self._records = records
        self._tail = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Read whatever comes, from now on."""
        self._loop = loop
        for stream in self._streams:
            os.set_blocking(stream.descriptor, False)
            loop.add_reader(stream.descriptor, self._read, stream)
        self._records.setblocking(False)
        loop.add_reader(self._records, self._read_record)

    def stderr_tail(self) -> str:
        """Return the end of what the worker has written to stderr, all that is there by now."""
        self._drain()
        text = self._tail.decode(errors="replace")
        if len(self._tail) == _TAIL_BYTES:
            text = text.partition("\n")[2]  # the first line is not whole
        return text.strip()

    def close(self) -> None:
        """Read what is left, and free the descriptors."""
        if self._loop is not None:
            self._drain()
            for stream in self._streams:
                self._loop.remove_reader(stream.descriptor)
                self._tell(stream, stream.rest())
            self._loop.remove_reader(self._records)
            self._loop = None
        for stream in self._streams:
            stream.pipe.close()
        self._records.close()

    def _drain(self) -> None:
        if self._loop is None:
            return
        for stream in self._streams:
            for _ in range(_MAX_PIECES):
                if not self._read(stream):
                    break
        for _ in range(_MAX_PIECES):
            if not self._read_record():
                break

    def _read(self, stream: "_Lines") -> bool:
        """Read a piece; return whether there was one."""
        try:
            data = os.read(stream.descriptor, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            assert self._loop is not None
            self._loop.remove_reader(stream.descriptor)
            return False
        if stream.name == "stderr":
            self._tail += data
            del self._tail[:-_TAIL_BYTES]
        self._tell(stream, stream.feed(data))
        return True

    def _tell(self, stream: "_Lines", lines: bytes) -> None:
        if not lines or self._mode == "capture":
            return
        text = lines.decode(errors="replace")
        if self._mode == "pass":
            # The user's stream: it may be closed, gone, or none at all.
            with suppress(OSError, ValueError, AttributeError):
                getattr(sys, stream.name).write(text)
            return
        level = logging.INFO if stream.name == "stdout" else logging.WARNING
        for line in text.splitlines():
            self._log(stream.name, level, line, "", 0)

    def _read_record(self) -> bool:
        try:
            packet = self._records.recv(_PIECE << 2)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        if not packet:
            assert self._loop is not None
            self._loop.remove_reader(self._records)
            return False
        self._log(*json.loads(packet))
        return True

    def _log(self, name: str, level: int, text: str, path: str, line: int) -> None:
        if not LOGGER.isEnabledFor(level):
            return
        told = f"worker {self._worker}: {text}"
        extra: dict[str, Any] = {"worker": self._worker, "worker_logger": name}
        record = LOGGER.makeRecord(LOGGER.name, level, path, line, told, (), None, extra=extra)
        LOGGER.handle(record)


class _Lines:
    """Cuts a stream into whole lines."""

    def __init__(self, pipe: "Connection", name: str) -> None:
        self.pipe = pipe
        self.descriptor = pipe.fileno()
        self.name = name
        self._unfinished = b""

    def feed(self, data: bytes) -> bytes:
        """Return all lines that are whole by now, or a piece of one that is too long."""
        data = self._unfinished + data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > _LONGEST_LINE:
            end = len(data)
        self._unfinished = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """Return the line that is not finished, as one that is."""
        rest, self._unfinished = self._unfinished, b""
        return rest and rest + b"\n"
