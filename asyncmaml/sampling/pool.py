"""The pool of workers: starts them, watches them, replaces those that are lost."""

import asyncio
import itertools
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import cloudpickle
import torch

from asyncmaml.envs.making import EnvMaker, registered_by_user
from asyncmaml.errors import (
    AsyncMAMLError,
    EnvironmentFailedError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from asyncmaml.sampling.coordinator import Coordinator
from asyncmaml.sampling.failures import start_failure, start_late, start_refused, worker_died
from asyncmaml.sampling.lane import Lane
from asyncmaml.sampling.links import InlineLink, Link, ProcessLink, layout_of
from asyncmaml.sampling.output import LOGGER, WorkerOutputMode
from asyncmaml.sampling.process import WorkerProcess
from asyncmaml.sampling.starting import StartMethod
from asyncmaml.sampling.watch import WorkerWatch
from asyncmaml.worker.main import Ready, Setup


@dataclass(frozen=True)
class PoolSettings:
    """How many workers, of which size, and how long they are waited for."""

    num_workers: int
    """0: the rows are in this process."""
    envs_per_worker: int | None
    groups_per_worker: int | None
    step_timeout: float
    start_timeout: float
    max_restarts: int
    start_method: StartMethod = "spawn"
    worker_output: WorkerOutputMode = "pass"
    check_spaces: bool = False


@contextmanager
def made_here(name: str) -> Iterator[None]:
    """Turn what an environment's constructor raises in this process into our own error."""
    try:
        yield
    except AsyncMAMLError:
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        message = f"{name} could not be made: {type(error).__name__}: {error}"
        raise EnvironmentFailedError(message, remote_traceback=text) from error


class WorkerPool:
    """The links of one sampler, and the lanes that the coordinator knows them by.

    Args:
        maker: Makes the environments.
        settings: See `PoolSettings`.
    """

    def __init__(self, maker: EnvMaker, settings: PoolSettings) -> None:
        self._settings = settings
        self._setup = Setup(
            maker,
            settings.envs_per_worker,
            settings.groups_per_worker,
            registered_by_user(),
            settings.check_spaces,
        )
        self._pickled = b""
        self._links: list[Link] = []
        self._lanes: list[list[Lane]] = []
        """Of each worker, one for each group."""
        self._coordinator: Coordinator | None = None
        self._replacements: set[asyncio.Task[None]] = set()
        self._watches: list[WorkerWatch] = []
        self._next_look: asyncio.TimerHandle | None = None
        self._is_closing = False

    async def open(self) -> Ready:
        """Start all workers at once; return what they say of the environment.

        Raises:
            EnvironmentFailedError: The environment could not be made.
            WorkerStartError: A worker ended, or did not answer in time.
        """
        try:
            if not self._settings.num_workers:
                return self._open_inline()
            self._pickled = self._pickled_setup()
            async with asyncio.TaskGroup() as group:
                starts = [
                    group.create_task(self._start_worker(worker), name=f"start-worker-{worker}")
                    for worker in range(self._settings.num_workers)
                ]
        except BaseExceptionGroup as errors:
            self.kill()
            # All workers are alike: the first error speaks for the others.
            raise errors.exceptions[0] from None
        except BaseException:
            self.kill()
            raise
        started = [start.result() for start in starts]
        self._links = [link for link, _ in started]
        return started[0][1]

    def _open_inline(self) -> Ready:
        with torch.inference_mode(False), made_here(self._setup.maker.name):  # see InlineLink
            inline = InlineLink(self._setup)
        self._links.append(inline)
        return inline.ready

    def serve(self, coordinator: Coordinator) -> None:
        """Connect the links to the coordinator's lanes, and watch over them."""
        self._coordinator = coordinator
        groups = len(coordinator.lanes) // len(self._links)
        lanes = iter(coordinator.lanes)
        self._lanes = [[next(lanes) for _ in range(groups)] for _ in self._links]
        for worker, link in enumerate(self._links):
            self._connect(worker, link)
        settings = self._settings
        if settings.num_workers:
            self._watches = [
                WorkerWatch(
                    worker,
                    lanes_of_one,
                    coordinator.has_replied,
                    settings.step_timeout,
                    settings.start_timeout,
                )
                for worker, lanes_of_one in enumerate(self._lanes)
            ]
            self._watch_steps()

    def _connect(self, worker: int, link: Link) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        lanes = self._lanes[worker]
        link.on_stepped = lambda group, failures: coordinator.stepped(lanes[group], failures)
        link.on_lost = lambda: self._lose(worker, None)
        for lane in lanes:
            lane.link = link
        if link.is_ended:  # between its READY and now
            asyncio.get_running_loop().call_soon(self._lose_if_connected, worker, link)

    def _lose_if_connected(self, worker: int, link: Link) -> None:
        if self._lanes[worker][0].link is link:
            self._lose(worker, None)

    async def _start_worker(self, worker: int) -> tuple[ProcessLink, Ready]:
        settings = self._settings
        process = WorkerProcess(worker, settings.start_method, settings.worker_output)
        name, link = self._setup.maker.name, None
        try:
            # A forked worker goes on with what this thread has set.
            with torch.inference_mode(False):
                try:
                    process.start()
                except OSError as error:  # no process, or no descriptor, can be had
                    raise start_refused(error) from error
            link = ProcessLink(process)
            self._links.append(link)  # from here on kill() knows it
            setup = self._pickled
            try:
                async with asyncio.timeout(self._settings.start_timeout):
                    answer = await link.set_up(setup)
            except TimeoutError:
                raise start_late(name, settings.start_timeout, process) from None
            if not isinstance(answer, Ready):
                raise start_failure(name, answer, process)
            try:
                link.share_memory(layout_of(answer))
            except ConnectionError:  # it ended after its READY
                raise start_failure(name, None, process) from None
            except OSError as error:
                raise start_refused(error) from error
        except BaseException:
            if link is not None:
                link.kill()
                if link in self._links:
                    self._links.remove(link)
            else:
                process.discard()
            raise
        return link, answer

    def _pickled_setup(self) -> bytes:
        try:
            pickled: bytes = cloudpickle.dumps(self._setup)
        except Exception as error:
            message = (
                f"the environment {self._setup.maker.name} cannot be sent to a worker: {error}; "
                "make what it needs inside of the function, or use num_workers=0"
            )
            raise WorkerStartError(message) from error
        return pickled

    def _watch_steps(self) -> None:
        """Kill workers that take too long for one thing; called again and again."""
        settings = self._settings
        for worker, watch in enumerate(self._watches):
            complaint = watch.complaint(time.perf_counter())
            link = self._lanes[worker][0].link
            # This thread may have been busy with a forward: look at the pipe before the kill.
            if complaint and isinstance(link, ProcessLink) and not link.has_answered():
                tail = link.process.output.stderr_tail()
                self._lose(worker, WorkerTimeoutError(complaint, stderr_tail=tail))
        shortest = min(settings.step_timeout, settings.start_timeout)
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(min(shortest / 4, 1.0), self._watch_steps)

    def _lose(self, worker: int, error: WorkerDiedError | WorkerTimeoutError | None) -> None:
        """Take a worker out and start another in its place."""
        lanes = self._lanes[worker]
        link = lanes[0].link
        coordinator = self._coordinator
        assert isinstance(link, ProcessLink)
        assert coordinator is not None
        if error is None:
            error = worker_died(worker, link.process)
        # Before anybody hears of it.
        coordinator.counted.restarts += not self._is_closing
        coordinator.lose(lanes, error)
        link.kill()
        self._links.remove(link)
        if not self._is_closing:
            told = "%s; another takes its place, and its episodes are run again"
            LOGGER.warning(told, error, extra={"worker": worker})
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._replace(worker), name=f"replace-worker-{worker}")
            self._replacements.add(task)
            task.add_done_callback(self._replacements.discard)

    async def _replace(self, worker: int) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        for attempt in range(self._settings.max_restarts + 1):
            try:
                link, ready = await self._start_worker(worker)
            except AsyncMAMLError as error:
                if attempt == self._settings.max_restarts:
                    coordinator.fail_all(error)
            else:
                assert list(ready.group_sizes) == [lane.num_rows for lane in self._lanes[worker]]
                self._connect(worker, link)
                coordinator.rejoin()
                return

    async def close(self) -> None:
        """End all workers: those that answer gracefully, the others at once."""
        self._is_closing = True
        if self._next_look is not None:
            self._next_look.cancel()
        for task in self._replacements:
            task.cancel()
        await asyncio.gather(*self._replacements, return_exceptions=True)
        lanes = itertools.chain.from_iterable(self._lanes)
        stepping = {id(lane.link) for lane in lanes if lane.is_stepping}
        try:
            async with asyncio.TaskGroup() as group:
                for link in list(self._links):
                    if id(link) in stepping:
                        link.kill()
                    else:
                        group.create_task(link.close(), name="close-worker")
        finally:
            self.kill()

    def kill(self) -> None:
        """End all workers at once."""
        self._is_closing = True
        for link in self._links:
            link.kill()
        self._links.clear()
        if self._coordinator is not None:
            self._coordinator.release_lanes()
