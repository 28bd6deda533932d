"""The sampler's own thread, with an event loop of its own: coordinator, pool and forward.

The forward runs in this same thread: a hop to a second thread for every tick costs a quarter of
the throughput (DESIGN, measured). Callers hand in requests from their own event loops and await
a future; so a caller that blocks its loop does not stall sampling, and sampling does not hold
the caller's loop.
"""

import asyncio
import concurrent.futures
import threading
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch

from asyncmaml.envs.making import EnvMaker
from asyncmaml.errors import AsyncMAMLError, SamplerStateError
from asyncmaml.intraop import one_intraop_thread
from asyncmaml.sampling.actor import Actor, to_environment
from asyncmaml.sampling.coordinator import Coordinator
from asyncmaml.sampling.lane import Lane, RowTable
from asyncmaml.sampling.links import layout_of
from asyncmaml.sampling.mailbox import Mailbox
from asyncmaml.sampling.pool import PoolSettings, WorkerPool, made_here
from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.statistics import Statistics
from asyncmaml.sampling.trace import Trace
from asyncmaml.sampling.transitions import TransitionLog

_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class Opened:
    """What an engine tells once its workers stand."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    num_rows: int


class Engine:
    """Runs the coordinator in a thread of its own, from `start` to `stop`.

    It holds no reference to the `AsyncSampler`, so that one which is forgotten can be collected.

    Args:
        maker: Makes the environments.
        settings: Of the workers.
        device: Where the forward runs.
        clip_actions: Whether Box actions are clipped on their way to the environment.
        trace: Takes what happens when, and is closed at the end.
    """

    def __init__(
        self,
        maker: EnvMaker,
        settings: PoolSettings,
        device: torch.device,
        clip_actions: bool,
        trace: Trace | None,
    ) -> None:
        self._maker = maker
        self._settings = settings
        self._device = device
        self._clip_actions = clip_actions
        self._trace = trace
        self._coordinator: Coordinator | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailbox: Mailbox | None = None
        self._stop: asyncio.Event | None = None
        self._is_stopping = False
        self.task_env: gymnasium.Env[Any, Any] | None = None
        """Tasks are drawn from it, in the caller's thread; None where the environment has none."""
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it
        self.opened: concurrent.futures.Future[Opened] = concurrent.futures.Future()
        self.closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="asyncmaml-sampler", daemon=True)

    # -- any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; `opened` tells when the workers stand, or why they do not."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Have a request sampled; in the thread of the caller's event loop.

        Where there is nothing to do yet, together with all that this pass of the caller's loop
        hands in: each by itself would have the sampler's thread compete with the caller's for the
        interpreter, for ticks of a few rows.
        """
        coordinator = self._coordinator
        assert coordinator is not None
        with self._lock:
            if self._loop is not None and not self._is_stopping:
                assert self._mailbox is not None
                if coordinator.num_requests:
                    self._mailbox.post(coordinator.submit, request)
                else:
                    caller = asyncio.get_running_loop()
                    self._mailbox.post_in_pass(caller, coordinator.submit, request)
                return
        request.deliver(_closed())

    def cancel(self, request: Request) -> None:
        """Drop a request whose result nobody awaits."""
        assert self._coordinator is not None
        self._call(self._coordinator.cancel, request)

    def stop(self) -> None:
        """Have the thread end its workers and itself; `closed` tells when it has."""
        with self._lock:
            self._is_stopping = True
            if self._loop is not None and self._stop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop.set)

    def stop_and_join(self) -> None:
        """Stop and wait: for a sampler that was forgotten, and for the interpreter's end."""
        self.stop()
        # A collection of garbage may have brought the sampler's own thread here.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _call(self, function: Any, *args: Any) -> bool:
        with self._lock:
            if self._loop is None or self._is_stopping:
                return False
            assert self._mailbox is not None
            self._mailbox.post(function, *args)
            return True

    def statistics(self) -> Statistics:
        """Return a copy of the counts and times so far."""
        coordinator = self._coordinator
        return Statistics() if coordinator is None else coordinator.statistics()

    def counts(self) -> tuple[int, int, int, int]:
        """Return workers, busy rows, idle rows and requests in flight."""
        coordinator = self._coordinator
        if coordinator is None:
            return 0, 0, 0, 0
        lanes = coordinator.lanes
        busy = sum(lane.num_busy for lane in lanes)
        idle = sum(lane.num_rows for lane in lanes) - busy
        return self._settings.num_workers, busy, idle, coordinator.num_requests

    # -- the sampler's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # Not what asyncio's policy says: add_reader on plain descriptors is all we need.
            with (
                one_intraop_thread() as row_block,
                torch.inference_mode(),  # entered once, since it is not free
                asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
            ):
                runner.run(self._main(row_block))
        except BaseException as error:
            if not self.opened.done():
                self.opened.set_exception(error)
        finally:
            try:
                if self._trace is not None:
                    self._trace.close()
            finally:
                self.closed.set_result(None)

    async def _main(self, row_block: int) -> None:
        stop = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._mailbox = Mailbox(self._loop)
            self._stop = stop
            if self._is_stopping:
                stop.set()
        pool = WorkerPool(self._maker, self._settings)
        opening = asyncio.create_task(self._open(pool, row_block), name="open-sampler")
        stopping = asyncio.create_task(stop.wait(), name="stop-sampler")
        asyncio.get_running_loop().set_exception_handler(self._fail)
        try:
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                opening.cancel()
            self._coordinator, opened = await opening
            self.opened.set_result(opened)
            await stopping
        except asyncio.CancelledError:
            if not self.opened.done():
                self.opened.set_exception(_closed())
        finally:
            if self._coordinator is not None:  # also where this loop was broken from inside
                self._coordinator.fail_all(_closed())
            stopping.cancel()
            await pool.close()
            if self.task_env is not None:
                self.task_env.close()
            with self._lock:
                self._is_stopping = True
                self._mailbox.call_all()  # what was handed in meanwhile gets the same error

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Deliver a fault of our own: else every sample() would wait for ever."""
        loop.default_exception_handler(context)
        if self._coordinator is not None:
            error = AsyncMAMLError(f"a fault in the sampler itself: {context['message']}")
            error.__cause__ = context.get("exception")
            self._coordinator.fail_all(error)

    async def _open(self, pool: WorkerPool, row_block: int) -> tuple[Coordinator, Opened]:
        ready = await pool.open()
        if ready.has_tasks:
            # Here and not when it is first asked for: making one may take a while.
            with torch.inference_mode(False), made_here(self._maker.name):
                self.task_env = self._maker.make()
        layout = layout_of(ready)
        num_workers = max(1, self._settings.num_workers)
        num_rows = num_workers * sum(ready.group_sizes)
        table = RowTable(num_rows)
        lanes: list[Lane] = []
        for worker in range(num_workers):
            for group, size in enumerate(ready.group_sizes):
                first_row = lanes[-1].first_row + lanes[-1].num_rows if lanes else 0
                lanes.append(Lane(worker, group, first_row, size, table))
        coordinator = Coordinator(
            lanes,
            table,
            Actor(ready.action_space, num_rows, self._device, row_block),
            to_environment(ready.action_space, self._clip_actions),
            TransitionLog(num_rows, layout.observation, layout.action),
            self._settings.max_restarts,
            self._trace,
        )
        pool.serve(coordinator)
        opened = Opened(
            ready.observation_space,
            ready.action_space,
            num_rows,
        )
        return coordinator, opened


def _closed() -> SamplerStateError:
    return SamplerStateError(
        "the sampler was closed while sample() was under way; await the samples before close()"
    )
