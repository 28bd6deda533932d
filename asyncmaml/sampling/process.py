"""A worker process: its start, its end, and what connects us with it.

The one module that knows aiomultiprocess. We take the life of a process from its `Process` and
leave out its constructor, which would start a manager process (90 ms, blocking) whose only use
is to carry the return value of a coroutine; our workers answer over a pipe of their own.
"""

import errno
import multiprocessing
import os
import signal
import socket
import weakref
from contextlib import ExitStack
from multiprocessing import connection
from typing import Any

import aiomultiprocess

from asyncmaml.sampling.output import LOGGER, WorkerOutput, WorkerOutputMode
from asyncmaml.sampling.starting import StartMethod, safe_start
from asyncmaml.worker.main import run_worker
from asyncmaml.worker.surroundings import WorkerEnds


class WorkerProcess(aiomultiprocess.Process):  # type: ignore[misc]  # it ships no types
    """One process that runs `run_worker` at the other end of `pipe`.

    Args:
        worker: The number of the worker; one that replaces another has the same.
        start_method: See `asyncmaml.sampling.starting`.
        output: What becomes of its output; see `WorkerOutput`.
    """

    def __init__(self, worker: int, start_method: StartMethod, output: WorkerOutputMode) -> None:
        # Deliberately without super().__init__(): see the module's docstring.
        self._worker = worker
        self._start_method: StartMethod = start_method
        self._output_mode: WorkerOutputMode = output
        self.aio_process: Any = None
        self.exit_descriptor: int | None = None
        """Readable once the process has ended; None where the kernel offers no such thing.

        A process that the environment has left behind may hold the worker's end of every pipe,
        multiprocessing's sentinel with them."""
        self._closing = ExitStack()
        """Frees what is ours, in reverse order."""

    def start(self) -> None:
        """Start the process; blocks for some 10 ms.

        Raises:
            OSError: No descriptor or no process can be had.
        """
        # Once our copies of its ends are closed, the worker's death ends the pipe.
        with safe_start(self._start_method) as context, ExitStack() as theirs:
            ends = self._connect(theirs)
            self.aio_process = context.Process(
                target=run_worker,
                args=(ends,),
                name=f"asyncmaml-worker-{self._worker}",
                daemon=True,
            )
            _started_here.add(self)
            super().start()
            self._open_exit_descriptor()

    def _open_exit_descriptor(self) -> None:
        if not hasattr(os, "pidfd_open"):  # Linux alone
            return
        try:
            self.exit_descriptor = os.pidfd_open(self.aio_process.pid)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return  # it has ended already, or a sandbox refuses: the end of the pipe must do
        self._closing.callback(os.close, self.exit_descriptor)

    def _connect(self, theirs: ExitStack) -> WorkerEnds:
        """Make both ends of everything; ours end with `discard`, the worker's with `theirs`."""
        ours = self._closing
        self.pipe, commands = socket.socketpair()
        ours.enter_context(self.pipe)
        theirs.enter_context(commands)
        self.pipe.setblocking(False)
        read_stdout, stdout = multiprocessing.Pipe(duplex=False)
        ours.enter_context(read_stdout)
        theirs.enter_context(stdout)
        read_stderr, stderr = multiprocessing.Pipe(duplex=False)
        ours.enter_context(read_stderr)
        theirs.enter_context(stderr)
        read_records, records = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.enter_context(read_records)
        theirs.enter_context(records)
        lifeline, our_lifeline = multiprocessing.Pipe(duplex=False)
        theirs.enter_context(lifeline)
        ours.enter_context(our_lifeline)
        self.output = WorkerOutput(
            self._worker, read_stdout, read_stderr, read_records, self._output_mode
        )
        level = LOGGER.getEffectiveLevel()
        return WorkerEnds(commands, stdout, stderr, records, lifeline, level)

    def wait_for_exit(self, seconds: float) -> None:
        """Wait until the process has ended, if it is about to."""
        if self.exit_descriptor is None or self._start_method == "forkserver":
            self.aio_process.join(seconds)  # a fork server tells the exit code by a pipe of its own
        else:
            connection.wait([self.exit_descriptor], seconds)

    def discard(self) -> None:
        """Kill the process if it still runs, reap it, and free its descriptors.

        Synchronous to the end: cleanup without an await cannot be cancelled. A killed process
        is gone within milliseconds.
        """
        process = self.aio_process
        if process is not None and process.pid is not None:
            # Asked first: a fork server reaps its children, and the number may be another's by now.
            if process.exitcode is None:
                process.kill()
            process.join()
            self.output.close()
            # Frees the sentinel. Not `process.close()`: at the end of the interpreter
            # multiprocessing joins its children, and may be about to join this one.
            process._popen.close()
        self.let_go()

    def let_go(self) -> None:
        """Close our ends."""
        _started_here.discard(self)
        self._closing.close()


_started_here: "weakref.WeakSet[WorkerProcess]" = weakref.WeakSet()


def _let_go_of_all() -> None:
    """Close, in a process forked from this one, its copies of our ends.

    A copy would keep the workers alive when we end. What is forked may itself be a worker.
    """
    for process in list(_started_here):
        process.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def describe_exit(exitcode: int | None) -> str:
    """Say in words how a process ended."""
    if exitcode is None:
        return "is still running"
    if exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        # Of its own killings the kernel tells nobody but its log.
        why = " (out of memory, perhaps)" if name == "SIGKILL" else ""
        return f"was ended by {name}{why}"
    return f"ended with exit code {exitcode}"
