"""The loop of a worker process: read a message, do it, answer.

It must not import torch, asyncio or the user's script: that is what keeps a worker at tens of
MiB and its start at tenths of a second.
"""

import mmap
import os
import pickle
import socket
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncmaml.worker.surroundings import WorkerEnds, settle

if TYPE_CHECKING:
    from asyncmaml.envs.making import EnvMaker
    from asyncmaml.worker.fleet import Fleet
    from asyncmaml.worker.protocol import Kind


@dataclass(frozen=True)
class Setup:
    """What a worker is told first."""

    maker: "EnvMaker"
    num_rows: int | None
    num_groups: int | None
    registered: list[bytes]
    """Registry entries of the parent that a fresh process lacks."""
    check_spaces: bool = False


@dataclass(frozen=True)
class Ready:
    """What a worker answers once its first environment stands."""

    observation_space: Any
    action_space: Any
    group_sizes: tuple[int, ...]
    has_tasks: bool


def describe(fleet: "Fleet") -> Ready:
    """Return what the coordinator must know of the rows."""
    return Ready(
        fleet.observation_space,
        fleet.action_space,
        tuple(group.num_rows for group in fleet.groups),
        fleet.has_tasks,
    )


def run_worker(ends: WorkerEnds) -> None:
    """Serve the coordinator until it says CLOSE or is gone."""
    settle(ends)
    pipe = ends.commands
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
        self._fleet: Fleet | None = None

    def serve(self) -> None:
        from asyncmaml.worker.protocol import FrameReader, Kind

        reader = FrameReader()
        while self._fleet is None:  # an environment that holds data comes in many pieces
            if not (data := self._pipe.recv(1 << 16)):
                return
            for kind, payload in reader.feed(data):
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
        from asyncmaml.worker.rows import UnreadableTask

        fleet = self._fleet
        assert fleet is not None
        if kind is Kind.STEP:
            group = payload[0]
            failures = fleet.groups[group].step()
            if failures:
                self._pipe.sendall(frame(Kind.FAILED, pickle.dumps(failures)))
            self._pipe.sendall(STEPPED[group])
        elif kind is Kind.TASK:
            number, task = pickle.loads(payload)
            try:
                fleet.tasks[number] = pickle.loads(task)
            except Exception as error:  # told by the episodes that need it
                fleet.tasks[number] = UnreadableTask(error)
        else:
            assert kind is Kind.FORGET
            del fleet.tasks[pickle.loads(payload)]

    def _set_up(self, payload: bytes) -> bool:
        """Make the first environment; return whether it stands."""
        import cloudpickle  # a space may be of a class of the user's script

        from asyncmaml.worker.protocol import Kind, RowFailure, frame

        try:
            from asyncmaml.envs.making import register_all
            from asyncmaml.worker.fleet import Fleet

            setup: Setup = pickle.loads(payload)
            register_all(setup.registered)
            self._fleet = Fleet.make(
                setup.maker, setup.num_rows, setup.num_groups, check_spaces=setup.check_spaces
            )
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            summary = "".join(traceback.format_exception_only(error)).strip()
            failure = RowFailure(-1, "constructor", summary, text)
            self._pipe.sendall(frame(Kind.FAILED, pickle.dumps([failure])))
            return False
        self._pipe.sendall(frame(Kind.READY, cloudpickle.dumps(describe(self._fleet))))
        return True

    def _attach(self, descriptor: int) -> None:
        """Map the shared arrays."""
        from asyncmaml.worker.layout import WorkerLayout

        fleet = self._fleet
        assert fleet is not None
        sizes = [group.num_rows for group in fleet.groups]
        layout = WorkerLayout(sizes, fleet.observation_space, fleet.action_space)
        block = mmap.mmap(descriptor, layout.num_bytes)
        os.close(descriptor)
        fleet.attach(layout.views(block))

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
