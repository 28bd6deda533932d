"""What connects the coordinator to the rows: a pipe to a worker process, or nothing at all.

A link delivers commands and calls back with what became of them. Both kinds run in the sampler
thread; with `InlineLink` the environments do as well.
"""

import asyncio
import mmap
import os
import pickle
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

import torch

from asyncmaml.sampling.process import WorkerProcess
from asyncmaml.worker.fleet import Fleet
from asyncmaml.worker.layout import Arrays, WorkerLayout, nameless_memory
from asyncmaml.worker.main import Ready, Setup, describe
from asyncmaml.worker.protocol import CLOSE, STEP, STEPPED, FrameReader, Kind, RowFailure, frame

OnStepped = Callable[[int, list[RowFailure]], None]
OnLost = Callable[[], None]
_ATTACH = frame(Kind.ATTACH)
_GROUPS = {reply: group for group, reply in enumerate(STEPPED)}
CLOSE_SECONDS = 2.0
"""How long a worker may take to close its environments before it is killed."""


def layout_of(ready: Ready) -> WorkerLayout:
    """Return where the arrays of such a worker lie."""
    return WorkerLayout(ready.group_sizes, ready.observation_space, ready.action_space)


class Link(ABC):
    """The coordinator's end of one fleet of rows."""

    arrays: list[Arrays]
    """Of each group."""
    on_stepped: OnStepped
    """Called once for each `step`, with the group and its rows that failed."""
    on_lost: OnLost | None = None
    """Called once when the other end is gone; never after `kill`."""
    is_ended = False
    """Whether the other end is gone."""

    def __init__(self) -> None:
        self.known_tasks: set[int] = set()

    @abstractmethod
    def step(self, group: int) -> None:
        """Have a group's rows do their orders; its arrays are the rows' until `on_stepped`."""

    def keep_task(self, number: int, payload: bytes) -> None:
        """Make a pickled task known at the other end, if it is not yet."""
        if number not in self.known_tasks:
            self.known_tasks.add(number)
            self._keep_task(number, payload)

    def forget_task(self, number: int) -> None:
        """Drop a task at the other end; no step that follows may name it."""
        if number in self.known_tasks:
            self.known_tasks.remove(number)
            self._forget_task(number)

    @abstractmethod
    def _keep_task(self, number: int, payload: bytes) -> None:
        """Send the task."""

    @abstractmethod
    def _forget_task(self, number: int) -> None:
        """Send that it can be dropped."""

    @abstractmethod
    async def close(self) -> None:
        """End the other end, gracefully if it is ready for that."""

    @abstractmethod
    def kill(self) -> None:
        """End the other end at once, or let go of it."""


class InlineLink(Link):
    """Rows in the sampler thread itself (`num_workers=0`)."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        # One group: there is nobody who could compute while it steps.
        self._fleet = Fleet.make(setup.maker, setup.num_rows, 1, check_spaces=setup.check_spaces)
        self.ready: Ready = describe(self._fleet)
        try:
            layout = layout_of(self.ready)
        except BaseException:
            self._fleet.close()
            raise
        self.arrays = layout.views(bytearray(layout.num_bytes))
        self._fleet.attach(self.arrays)
        self._loop = asyncio.get_running_loop()
        self._is_open = True

    def step(self, group: int) -> None:
        """Do every row's order soon; see `Link`."""
        # Not at once: between two ticks the loop sees to new requests and cancellations.
        self._loop.call_soon(self._step, group)

    def _step(self, group: int) -> None:
        if self._is_open:
            # The environments' own use of torch is not the sampler's to restrict.
            with torch.inference_mode(False):
                failures = self._fleet.groups[group].step()
            self.on_stepped(group, failures)

    def _keep_task(self, number: int, payload: bytes) -> None:
        self._fleet.tasks[number] = pickle.loads(payload)

    def _forget_task(self, number: int) -> None:
        del self._fleet.tasks[number]

    async def close(self) -> None:
        """See `Link`."""
        self.kill()

    def kill(self) -> None:
        """See `Link`."""
        if self._is_open:
            self._is_open = False
            self._fleet.close()


class ProcessLink(Link):
    """Rows in a worker process, at the other end of a pipe."""

    def __init__(self, process: WorkerProcess) -> None:
        super().__init__()
        self.process = process
        self._pipe = process.pipe
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._failures: list[RowFailure] = []
        self._started: asyncio.Future[Ready | list[RowFailure]] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._is_open = True
        self._loop.add_reader(self._pipe, self._receive)
        if process.exit_descriptor is not None:
            self._loop.add_reader(process.exit_descriptor, self._process_ended)
        process.output.watch(self._loop)

    async def set_up(self, setup: bytes) -> Ready | list[RowFailure] | None:
        """Have the first environment made; None if the process ended over it."""
        self._send(frame(Kind.SETUP, setup))
        ended = self._loop.create_task(self._ended.wait(), name="worker-ended")
        try:
            await asyncio.wait((self._started, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return self._started.result() if self._started.done() else None

    def share_memory(self, layout: WorkerLayout) -> None:
        """Share new arrays with the worker."""
        descriptor = nameless_memory(layout.num_bytes)
        try:
            self.arrays = layout.views(mmap.mmap(descriptor, layout.num_bytes))
            # The pipe is empty here, and takes a message this short whole.
            sent = socket.send_fds(self._pipe, [_ATTACH], [descriptor])
            assert sent == len(_ATTACH)
        finally:
            os.close(descriptor)

    def step(self, group: int) -> None:
        """See `Link`."""
        self._send(STEP[group])

    def _keep_task(self, number: int, payload: bytes) -> None:
        self._send(frame(Kind.TASK, pickle.dumps((number, payload))))

    def _forget_task(self, number: int) -> None:
        self._send(frame(Kind.FORGET, pickle.dumps(number)))

    def has_answered(self) -> bool:
        """Whether something of the worker's waits to be read."""
        try:
            return bool(self._pipe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _send(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._pipe.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the worker is gone; the end of the pipe will say so
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._pipe, self._send_rest)

    def _send_rest(self) -> None:
        try:
            sent = self._pipe.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        else:
            del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._pipe)

    def _receive(self) -> None:
        try:
            data = self._pipe.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        group = _GROUPS.get(data)  # almost always one reply and nothing else
        if group is not None and not self._failures and self._reader.is_between_messages:
            self.on_stepped(group, [])
        elif data:
            for kind, payload in self._reader.feed(data):
                self._handle(kind, payload)
        else:
            self._end()

    def _process_ended(self) -> None:
        """Do as at the end of the pipe, which another process may keep open."""
        while not self.is_ended and self.has_answered():  # its last answer may still be there
            self._receive()
        if not self.is_ended:
            self._end()

    def _end(self) -> None:
        self._stop_reading()
        self._ended.set()
        self.is_ended = True
        if self._is_open and self.on_lost is not None:
            self.on_lost()

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._pipe)
        if self.process.exit_descriptor is not None:
            self._loop.remove_reader(self.process.exit_descriptor)

    def _handle(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.STEPPED:
            failures, self._failures = self._failures, []
            self.on_stepped(payload[0], failures)
        elif kind is Kind.READY:
            self._started.set_result(pickle.loads(payload))
        else:
            assert kind is Kind.FAILED
            failures = pickle.loads(payload)
            if self._started.done():
                self._failures = failures
            else:
                self._started.set_result(failures)

    async def close(self) -> None:
        """See `Link`."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._send(CLOSE)
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._ended.wait()
        finally:
            self._release()

    def kill(self) -> None:
        """See `Link`."""
        if self._is_open:
            self._is_open = False
            self._release()

    def _release(self) -> None:
        self._stop_reading()
        self._loop.remove_writer(self._pipe)
        self.process.discard()
