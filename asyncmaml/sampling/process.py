"""A worker process: its start, its end, and the pipe to it.

The one module that knows aiomultiprocess. We take the life of a process from its `Process` and
leave out its constructor, which would start a manager process (90 ms, blocking) whose only use
is to carry the return value of a coroutine; our workers answer over a pipe of their own.
"""

import multiprocessing
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, spawn
from typing import Any

import aiomultiprocess

from asyncmaml.worker.main import run_worker

_preparation_lock = threading.Lock()
_NAME = "asyncmaml-worker-"


@contextmanager
def _main_script_left_out() -> Iterator[None]:
    """Keep the start of a worker from importing the user's script into it.

    Spawn imports what `__main__` says it came from. For a script that imports torch that costs
    a second and 190 MB a worker, and a script without the `__name__` guard would start samplers
    in its workers. Only our own processes are concerned, and `__main__` itself stays as it is.
    """
    with _preparation_lock:
        prepare = spawn.get_preparation_data

        def without_main(name: str) -> dict[str, Any]:
            data = prepare(name)
            if name.startswith(_NAME):
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        spawn.get_preparation_data = without_main
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Have the process start with SIGINT blocked, until it has set its own mind on it.

    Ctrl-C reaches the whole process group; in the middle of its imports a worker would answer
    with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # It unblocks SIGINT when it is first started, which would be inside of our block.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerProcess(aiomultiprocess.Process):  # type: ignore[misc]  # it ships no types
    """One process that runs `run_worker` at the other end of `pipe`.

    Args:
        index: Names the process.
    """

    def __init__(self, index: int) -> None:
        # Deliberately without super().__init__(): see the module's docstring.
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.pipe = ours
        self._their_pipe = theirs
        self.aio_process = multiprocessing.get_context("spawn").Process(
            target=run_worker, args=(theirs,), name=f"{_NAME}{index}", daemon=True
        )

    def start(self) -> None:
        """Start the process; blocks for some 10 ms."""
        # Once our copy is closed, the worker's death ends the pipe.
        with self._their_pipe, _main_script_left_out(), _interrupts_held():
            super().start()

    def discard(self) -> None:
        """Kill the process if it still runs, reap it, and free its descriptors.

        Synchronous to the end: cleanup without an await cannot be cancelled. A killed process
        is gone within milliseconds.
        """
        self.pipe.close()
        self._their_pipe.close()
        process: Any = self.aio_process
        if process.pid is not None:
            process.kill()
            process.join()
        process.close()


def describe_exit(exitcode: int | None) -> str:
    """Say in words how a process ended."""
    if exitcode is None:
        return "is still running"
    if exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        return f"was ended by {name}"
    return f"ended with exit code {exitcode}"
