"""The loop of a worker process: read a message, do it, answer.

It must not import torch, asyncio or the user's script: that is what keeps a worker at tens of
MiB and its start at tenths of a second.
"""

import mmap
import os
import pickle
import signal
import socket
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

# Each worker has one core's worth of work. Set before numpy is first imported, because numeric
# libraries read these once; a number that the user has set stands.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

if TYPE_CHECKING:
    from asyncmaml.envs.making import EnvMaker
    from asyncmaml.worker.protocol import Kind
    from asyncmaml.worker.rows import Rows


@dataclass(frozen=True)
class Setup:
    """What a worker is told first."""

    maker: "EnvMaker"
    num_rows: int | None
    registered: list[bytes]
    """Registry entries of the parent that a fresh process lacks."""


@dataclass(frozen=True)
class Ready:
    """What a worker answers once its first environment stands."""

    observation_space: Any
    action_space: Any
    num_rows: int
    has_tasks: bool
    is_vectorized: bool


def describe(rows: "Rows") -> Ready:
    """Return what the coordinator must know of the rows."""
    from asyncmaml.worker.rows import VectorRows

    return Ready(
        rows.observation_space,
        rows.action_space,
        rows.num_rows,
        rows.has_tasks,
        isinstance(rows, VectorRows),
    )


def run_worker(pipe: socket.socket) -> None:
    """Serve the coordinator until it says CLOSE or is gone."""
    # Ctrl-C reaches the whole process group; who ends when is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # blocked since the start; what it starts may have it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    pipe.setblocking(True)
    server = _Server(pipe)
    with pipe:
        try:
            server.serve()
        except (BrokenPipeError, ConnectionResetError):
            return  # the parent is gone: nobody is left to tell
        finally:
            server.close()


class _Server:
    """Answers the coordinator's messages, one after the other."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._rows: Rows | None = None

    def serve(self) -> None:
        from asyncmaml.worker.protocol import FrameReader, Kind

        reader = FrameReader()
        for kind, payload in reader.feed(self._pipe.recv(1 << 16)):
            assert kind is Kind.SETUP
            if not self._set_up(payload):
                return
        # Nothing but ATTACH can follow READY; plain recv would lose the descriptor beside it.
        data, descriptors, _, _ = socket.recv_fds(self._pipe, 1 << 16, 1)
        if not data:
            return
        self._attach(descriptors[0])
        for kind, _ in reader.feed(data):
            assert kind is Kind.ATTACH
        while data := self._pipe.recv(1 << 16):
            for kind, payload in reader.feed(data):
                if kind is Kind.CLOSE:
                    return
                self._answer(kind, payload)

    def _answer(self, kind: "Kind", payload: bytes) -> None:
        from asyncmaml.worker.protocol import STEPPED, Kind, frame

        rows = self._rows
        assert rows is not None
        if kind is Kind.STEP:
            failures = rows.step()
            if failures:
                self._pipe.sendall(frame(Kind.FAILED, pickle.dumps(failures)))
            self._pipe.sendall(STEPPED)
        elif kind is Kind.TASK:
            number, task = pickle.loads(payload)
            rows.keep_task(number, pickle.loads(task))
        else:
            assert kind is Kind.FORGET
            rows.forget_task(pickle.loads(payload))

    def _set_up(self, payload: bytes) -> bool:
        """Make the first environment; return whether it stands."""
        from asyncmaml.worker.protocol import Kind, RowFailure, frame

        try:
            from asyncmaml.envs.making import register_all
            from asyncmaml.worker.rows import make_rows

            setup: Setup = pickle.loads(payload)
            register_all(setup.registered)
            self._rows = make_rows(setup.maker, setup.num_rows)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            summary = "".join(traceback.format_exception_only(error)).strip()
            failure = RowFailure(-1, "constructor", summary, text)
            self._pipe.sendall(frame(Kind.FAILED, pickle.dumps([failure])))
            return False
        self._pipe.sendall(frame(Kind.READY, pickle.dumps(describe(self._rows))))
        return True

    def _attach(self, descriptor: int) -> None:
        """Map the shared arrays."""
        from asyncmaml.worker.layout import Layout

        assert self._rows is not None
        layout = Layout.of(self._rows)
        block = mmap.mmap(descriptor, layout.num_bytes)
        os.close(descriptor)
        self._rows.attach(layout.views(block))

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
