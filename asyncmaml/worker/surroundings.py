"""What a worker process has around it: its output, its log, its signals, its end.

    worker                                        driver
    stdout, stderr   --- a pipe each --->         passed on, logged or kept: as the user wishes
    log records      --- one JSON text each --->  the logger `asyncmaml.worker`
    lifeline         <--- a pipe, always empty    its end is the driver's end

What the environment writes goes through the pipes, whoever writes it: Python, C, or the
interpreter itself as it crashes.
"""

import contextlib
import faulthandler
import fcntl
import gc
import json
import logging
import os
import signal
import socket
import sys
import warnings
from dataclasses import dataclass
from io import TextIOWrapper
from multiprocessing.connection import Connection
from typing import Any

from asyncmaml.worker.threads import one_numeric_thread

MAX_TEXT = 16 << 10
"""Characters of one log record; more would not pass the socket as one."""
_formatter = logging.Formatter()


@dataclass(frozen=True)
class WorkerEnds:
    """The worker's ends of what connects it with the driver; they travel as descriptors."""

    commands: socket.socket
    """See `asyncmaml.worker.protocol`."""
    stdout: Connection
    stderr: Connection
    records: socket.socket
    """A record is one packet, so whoever writes, from whichever thread: none is torn."""
    lifeline: Connection
    log_level: int
    """Less important records are not sent."""


def settle(ends: WorkerEnds) -> None:
    """Make this process a worker: first of all in it, before numpy is imported."""
    # A fork has its parent's garbage: to collect it here would end what is the parent's to end, the
    # memory of a GPU or a temporary folder.
    gc.freeze()
    _end_with_the_driver(ends.lifeline)
    _redirect(ends)
    faulthandler.enable()  # to the new stderr, so that its words reach the error
    one_numeric_thread()
    _set_signals()
    if hasattr(os, "SCHED_BATCH"):
        # Where all cores are busy, a worker that wakes must not push the coordinator off its
        # core in the middle of a tick: measured, passing actions on took 130 us and not 40.
        with contextlib.suppress(OSError):  # some sandboxes refuse
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _end_with_the_driver(lifeline: Connection) -> None:
    """Have the kernel kill this process once nobody holds the other end of the lifeline.

    The kernel needs neither a thread of ours nor the GIL for that, so it also ends a worker in a
    loop of C. PR_SET_PDEATHSIG would follow the parent's thread, and a fork server's life.
    """
    if not hasattr(fcntl, "F_SETSIG"):  # Linux alone; elsewhere the pipe of commands must do
        return
    descriptor = lifeline.fileno()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 1)  # empty, and not blocked: it ended before the kernel watched
        os._exit(1)


def _redirect(ends: WorkerEnds) -> None:
    for stream, descriptor in ((ends.stdout, 1), (ends.stderr, 2)):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    # Made anew: a forked process has what its parent had, a notebook's for one.
    sys.stdout = sys.__stdout__ = _text_stream(1, is_buffered=True)  # type: ignore[misc]  # final
    sys.stderr = sys.__stderr__ = _text_stream(2, is_buffered=False)  # type: ignore[misc]
    logger = logging.getLogger()
    logger.handlers[:] = [_RecordSender(ends.records)]
    logger.setLevel(ends.log_level)
    warnings.showwarning = _send_warning


def _text_stream(descriptor: int, *, is_buffered: bool) -> TextIOWrapper:
    """Return a stream that keeps nothing back but an unfinished line; without buffer, nothing."""
    # Python's own stderr would keep the last words of a worker that is killed.
    binary = os.fdopen(descriptor, "wb", buffering=-1 if is_buffered else 0, closefd=False)
    return TextIOWrapper(
        binary, "utf-8", "backslashreplace", line_buffering=True, write_through=not is_buffered
    )


def _set_signals() -> None:
    signal.set_wakeup_fd(-1)  # that of the parent's event loop, where this is a fork of it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ctrl-C reaches the whole process group; who ends when is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # blocked since the start; what it starts may have it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _RecordSender(logging.Handler):
    """Sends every record to the driver; waits for it where it is slow."""

    def __init__(self, records: socket.socket) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + _formatter.formatException(record.exc_info)
            packet = _packet(record.name, record.levelno, text, record.pathname, record.lineno)
        except Exception:  # the environment's own objects are formatted here
            self.handleError(record)
            return
        with contextlib.suppress(OSError):  # the driver is gone
            self._records.send(packet)


def _packet(name: str, level: int, text: str, path: str, line: int) -> bytes:
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + f" ... ({len(text) - MAX_TEXT} more characters)"
    # What UTF-8 lacks, a lone surrogate, is written as JSON's own escape is.
    record = json.dumps([name, level, text, path, line], ensure_ascii=False)
    return record.encode(errors="backslashreplace")


def _send_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Log a warning as `logging.captureWarnings` does, but with the place where it arose."""
    text = f"{category.__name__}: {message} ({filename}:{lineno})"
    logger = logging.getLogger("py.warnings")
    if logger.isEnabledFor(logging.WARNING):
        logger.handle(
            logger.makeRecord(logger.name, logging.WARNING, filename, lineno, text, (), None)
        )
