"""How a process is started: by which method, and what must not happen to it meanwhile.

Three methods. `spawn`: a fresh interpreter, 0.15 s. `forkserver`: a fork of a small server that
has numpy and gymnasium loaded. `fork`: a copy of this whole process with its torch, its open files
and the locks that other threads held in that moment.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any, Literal, get_args

from asyncmaml.errors import ConfigurationError

StartMethod = Literal["spawn", "forkserver", "fork"]
_PRELOADED = "asyncmaml.worker.preload"

_lock = threading.RLock()


def _renew_lock() -> None:
    # Another thread may have held it in the moment of the fork; here it would never let go.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def checked_start_method(value: object) -> StartMethod:
    """Return `value` if a process can be started that way here.

    Raises:
        ConfigurationError: It cannot.
    """
    here = multiprocessing.get_all_start_methods()
    known: list[StartMethod] = [name for name in get_args(StartMethod) if name in here]
    for method in known:
        if value == method:
            return method
    message = f"start_method is {value!r}; wanted one of {', '.join(known)}"
    raise ConfigurationError(message)


@contextmanager
def safe_start(method: StartMethod) -> Iterator[Any]:
    """Yield multiprocessing's context of that method; start processes in this block.

    One thread at a time is in such a block. What starts in it does not import the user's script,
    is not hit by Ctrl-C before it has made up its mind on it, and may belong to a daemon.
    """
    with ExitStack() as stack:
        stack.enter_context(_lock)
        if method == "forkserver":
            _run_fork_server()
        stack.enter_context(_main_script_left_out())
        stack.enter_context(_interrupts_held())
        stack.enter_context(_children_allowed())
        yield multiprocessing.get_context(method)


def _run_fork_server() -> None:
    server: Any = forkserver._forkserver
    if server._preload_modules == ["__main__"]:
        # The default would run the user's script in the server.
        multiprocessing.set_forkserver_preload([_PRELOADED])
    # Here, since it would keep the mask of signals that comes next.
    try:
        server.ensure_running()
    except ChildProcessError:  # it is the server of the process that this one was forked from
        os.close(server._forkserver_alive_fd)
        server._forkserver_pid = server._forkserver_alive_fd = None
        server.ensure_running()


@contextmanager
def _main_script_left_out() -> Iterator[None]:
    """Keep the start of a process from importing the user's script into it.

    Spawn imports what `__main__` says it came from. For a script that imports torch that costs
    a second and 190 MB a worker, and a script without the `__name__` guard would start samplers
    in its workers. Only what this thread starts is concerned, and `__main__` stays as it is.
    """
    prepare, thread = spawn.get_preparation_data, threading.get_ident()

    def without_main(name: str) -> dict[str, Any]:
        data = prepare(name)
        if threading.get_ident() == thread:
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


@contextmanager
def _children_allowed() -> Iterator[None]:
    """Let a daemonic process have children: a sampler may be opened in a worker of some pool.

    multiprocessing forbids it because they would be orphaned when the daemon is terminated. Ours
    end with whoever has started them, however it ends.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    is_daemon = config.pop("daemon", None)
    try:
        yield
    finally:
        if is_daemon is not None:
            config["daemon"] = is_daemon
