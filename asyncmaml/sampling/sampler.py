"""`AsyncSampler`: what a trainer holds. Its methods run in the caller's thread and event loop."""

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from torch import Tensor

from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.tasks import sample_tasks
from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import ConfigurationError, EventLoopError, SamplerStateError
from asyncmaml.option_kinds import OrNone, Real, Whole
from asyncmaml.sampling.arguments import (
    optional_seed,
    positive_seconds,
    torch_device,
    usable_cores,
)
from asyncmaml.sampling.engine import Engine, Opened
from asyncmaml.sampling.episode_stream import EpisodeStream
from asyncmaml.sampling.mailbox import Mailbox
from asyncmaml.sampling.output import WorkerOutputMode, checked_output_mode
from asyncmaml.sampling.pool import PoolSettings
from asyncmaml.sampling.requests import ON_ERROR, Deliver, OnError, Request, Task, Terms, deliver_to
from asyncmaml.sampling.snapshot import Policy, PolicySnapshot, Snapshots
from asyncmaml.sampling.starting import StartMethod, checked_start_method
from asyncmaml.sampling.statistics import Statistics
from asyncmaml.sampling.streams import EpisodeStreams, Seeds
from asyncmaml.sampling.trace import Trace
from asyncmaml.worker.protocol import MAX_GROUPS

EnvLike = str | EnvSpec | Callable[..., gymnasium.Env[Any, Any]]


class _SamplersTask:
    """The default of `task=`: the one that `reset_task` has set."""

    def __repr__(self) -> str:
        return "<the sampler's task>"


_SAMPLERS_TASK = _SamplersTask()


class AsyncSampler:
    """Samples episodes in a pool of worker processes; every wait is awaitable.

    Use it as `async with AsyncSampler(...) as sampler:`, or call `start()` and `close()`. Calls of
    `sample()` may overlap; each gets exactly the episodes that it would have got alone.

    Args:
        env: A Gymnasium id, an `EnvSpec`, or a callable that makes an environment.
        env_kwargs: Passed to the environment.
        batch_size: Episodes that one `sample()` returns, B.
        num_workers: Worker processes; None: one for each usable core; 0: no process, the
            environments run in the sampler's thread.
        envs_per_worker: Rows of each worker, R; None: 128, or 256 for a natively vectorised
            environment. A row's environment is made when the row is first used.
        groups_per_worker: Groups that a worker's rows are divided into: while one steps, the
            actions of the others are computed. None: 2, or 1 for a natively vectorised one; it is
            always 1 without worker processes.
        seed: The sampler's root seed; None: from the OS.
        device: Where the policy runs.
        max_episode_steps: Replaces the environment's own time limit.
        clip_actions: Clip Box actions to the space on their way to the environment. They are
            recorded as they were drawn.
        vectorized: False: do not use an environment's natively vectorised form.
        step_timeout: Seconds that one step of an environment may take in a worker; where it is
            natively vectorised, one step of all rows.
        start_timeout: Seconds that a worker may take to start and make its first environment, and
            later for making or resetting one.
        max_restarts: Workers that one episode may lose before its `sample()` raises.
        start_method: How worker processes are started: "spawn", "forkserver" or "fork". None of
            them imports the main script. "fork" copies this whole process, with the locks that its
            other threads hold in that moment, and its numeric libraries keep their threads.
        worker_output: What becomes of what environments print in workers. "pass": it is written,
            in whole lines, to this process's `sys.stdout` and `sys.stderr`; "log": each line is
            logged; "capture": it is shown in errors alone. Warnings and log records of workers
            are logged in any case; the logger is `asyncmaml.worker`.
        check_spaces: Raise where an observation, or an action as the environment takes it, lies
            outside of its space; costs some 10 us a step. Shape, a dtype that cannot hold what
            the environment returns, NaN and infinities are told in any case.
        trace: A file that takes what every worker, the sampler's thread and the blocks under
            `span()` did when, for https://ui.perfetto.dev; None: no trace.

    Raises:
        ConfigurationError: An argument is out of its range.
    """

    def __init__(
        self,
        env: EnvLike,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 20,
        num_workers: int | None = None,
        envs_per_worker: int | None = None,
        groups_per_worker: int | None = None,
        seed: int | None = None,
        device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        clip_actions: bool = True,
        vectorized: bool = True,
        step_timeout: float = 60.0,
        start_timeout: float = 60.0,
        max_restarts: int = 3,
        start_method: StartMethod = "spawn",
        worker_output: WorkerOutputMode = "pass",
        check_spaces: bool = False,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        self._maker = EnvMaker.resolve(env, env_kwargs, max_episode_steps, vectorized=vectorized)
        self._batch_size = Whole(1).check("batch_size", batch_size)
        if num_workers is None:
            num_workers = usable_cores()
        self._settings = PoolSettings(
            Whole(0).check("num_workers", num_workers),
            OrNone(Whole(1)).check("envs_per_worker", envs_per_worker),
            OrNone(Whole(1, MAX_GROUPS)).check("groups_per_worker", groups_per_worker),
            positive_seconds("step_timeout", step_timeout),
            positive_seconds("start_timeout", start_timeout),
            Whole(0).check("max_restarts", max_restarts),
            checked_start_method(start_method),
            checked_output_mode(worker_output),
            bool(check_spaces),
        )
        self._device = torch_device(device)
        self._snapshots = Snapshots(self._device)
        self._clip_actions = clip_actions
        self._seeds = Seeds(optional_seed(seed))
        self._task: Task | None = None
        self._trace_path = trace
        self._trace: Trace | None = None
        self._engine: Engine | None = None
        self._opened: Opened | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finalizer: weakref.finalize[[], AsyncSampler] | None = None
        self._is_closed = False

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the sampler's thread and its workers.

        Raises:
            SamplerStateError: It was started before.
            ConfigurationError: The trace cannot be written.
            EnvironmentFailedError: The environment could not be made.
            UnsupportedSpaceError: Its spaces are of a kind that cannot be carried.
            WorkerStartError: A worker ended, or did not answer in time.
        """
        if self._engine is not None or self._is_closed:
            message = f"{self!r} was started before; open a new AsyncSampler to go on"
            raise SamplerStateError(message)
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        if self._trace_path is not None:
            self._trace = Trace(self._trace_path)
        engine = Engine(self._maker, self._settings, self._device, self._clip_actions, self._trace)
        self._engine = engine
        # For a sampler that is forgotten, and for the end of the interpreter.
        self._finalizer = weakref.finalize(self, engine.stop_and_join)
        engine.start()
        try:
            self._opened = await asyncio.wrap_future(engine.opened)
        except BaseException:
            self._is_closed = True
            # Synchronous to the end: cleanup without an await cannot be cancelled.
            engine.stop_and_join()
            self._finalizer.detach()
            raise

    async def close(self) -> None:
        """End the workers and the sampler's thread; samples under way raise. Idempotent.

        Once begun it goes on by itself, even if this await is cancelled.
        """
        self._is_closed = True
        engine = self._engine
        if engine is None:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        engine.stop()
        # Shielded: the future belongs to the engine, which sets it when all has ended.
        await asyncio.shield(asyncio.wrap_future(engine.closed))
        engine.stop_and_join()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # -- sampling -------------------------------------------------------------------------------

    async def sample(
        self,
        policy: Policy,
        params: Mapping[str, Tensor] | None = None,
        *,
        task: Any = _SAMPLERS_TASK,
        batch_size: int | None = None,
        gamma: float = 0.95,
        seed: int | None = None,
        first: int | None = None,
        on_error: OnError = "raise",
    ) -> BatchEpisodes:
        """Sample a batch of episodes.

        Calls are served first come, first served: the episodes of an earlier one are begun before
        those of a later one, and no row waits while any call has an episode left. A call that
        waits for its turn holds the copy of its parameters and nothing else.

        Args:
            policy: `policy(observations, params=None)` that returns a distribution over actions,
                or an `nn.Module` that takes observations only. Observations come as `(N, *O)`.
            params: Replace the policy's own parameters, by name. They are copied at the call: what
                the learner does to them afterwards does not reach episodes under way.
            task: The environment's task; by default the one that `reset_task` has set. None: the
                environment's own, initial task.
            batch_size: Episodes; None: the sampler's.
            gamma: Discount of the returned episodes, in [0, 1].
            seed: Replaces the number of this call in the episodes' seeds. The same sampler seed
                and call seed give the same episodes; where the sampler has no seed of its own, the
                call's seed alone decides.
            first: Return once this many episodes are in, and drop the rest. Each is what it would
                have been, but which ones they are (`episodes.batch_ids`) is a matter of time, and
                episodes that take long are among them less often. None: all.
            on_error: What becomes of an episode whose environment raises or returns a NaN, or that
                loses more than `max_restarts` workers. "raise": the call raises. "retry": the
                environment gets as many more tries, from the episode's own seed. "drop": the
                episode is left out; the call raises if none is left. `episodes.record` counts.

        Returns:
            The episodes, all ended; `episodes.record` tells how they came about.

        Raises:
            SamplerStateError: The sampler is not open, or was closed meanwhile.
            EventLoopError: It was started in another event loop.
            ConfigurationError: An argument is out of its range.
            ParameterError: `params` do not fit the policy.
            PolicyError: The policy raised, or its distribution does not fit the action space.
            EnvironmentFailedError: The environment raised.
            NotFiniteError: An observation, reward or action is NaN or infinite.
            OutOfSpaceError: An observation or action lies outside of its space (`check_spaces`).
            WorkerDiedError: One episode lost more than `max_restarts` workers.
            WorkerTimeoutError: The same, because they did not answer in time.
        """
        engine, _ = self._open()
        size = self._batch_size if batch_size is None else Whole(1).check("batch_size", batch_size)
        terms = self._terms(size, gamma, on_error, first)
        snapshot, streams, task = self._begin(policy, params, task, seed)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[BatchEpisodes] = loop.create_future()
        request = Request(snapshot, streams, task, terms, deliver_to(future, self._mailbox))
        engine.submit(request)
        try:
            return await future
        except BaseException:
            # Cancelled, or the coroutine was closed; where it has failed there is nothing left.
            engine.cancel(request)
            raise

    def stream(
        self,
        policy: Policy,
        params: Mapping[str, Tensor] | None = None,
        *,
        task: Any = _SAMPLERS_TASK,
        batch_size: int | None = None,
        gamma: float = 0.95,
        seed: int | None = None,
        on_error: OnError = "raise",
        ordered: bool = False,
        look_ahead: int | None = None,
    ) -> EpisodeStream:
        """Sample episodes that are handed out one by one: `async for episode in stream`.

        Each is, bit for bit, what `sample()` with the same arguments returns under its batch id
        (`episode.batch_ids`). `stream.update(params)` changes the parameters for episodes that
        are not yet begun; `episode.params_version` tells what one was sampled with.

        Args:
            policy: See `sample`.
            params: See `sample`.
            task: See `sample`.
            batch_size: Episodes after which the stream ends; None: it goes on for ever.
            gamma: See `sample`.
            seed: See `sample`.
            on_error: See `sample`; the stream goes on without an episode that is dropped.
            ordered: In the order of the batch ids; else each as it completes.
            look_ahead: Episodes that may be under way, or in and not yet taken; more are begun as
                these are taken. None: as many as the sampler has rows.

        Raises:
            SamplerStateError: The sampler is not open.
            EventLoopError: It was started in another event loop.
            ConfigurationError: An argument is out of its range.
            ParameterError: `params` do not fit the policy.
        """
        engine, opened = self._open()
        size = OrNone(Whole(1)).check("batch_size", batch_size)
        ahead = opened.num_rows if look_ahead is None else Whole(1).check("look_ahead", look_ahead)
        terms = self._terms(1, gamma, on_error, None)
        snapshot, streams, episode_task = self._begin(policy, params, task, seed)

        def make_request(policy: PolicySnapshot, batch_id: int, deliver: Deliver) -> Request:
            own = streams.starting_at(batch_id)
            return Request(policy, own, episode_task, terms, deliver)

        return EpisodeStream(
            engine,
            self._mailbox,
            make_request,
            self._snapshots.of,
            snapshot,
            batch_size=size,
            ordered=ordered,
            look_ahead=ahead,
            skips_failed=on_error == "drop",
        )

    def _terms(self, size: int, gamma: float, on_error: OnError, first: int | None) -> Terms:
        if on_error not in ON_ERROR:
            message = f"on_error is {on_error!r}; wanted one of {', '.join(ON_ERROR)}"
            raise ConfigurationError(message)
        wanted = size if first is None else Whole(1, size).check("first", first)
        return Terms(size, Real(0, 1).check("gamma", gamma), str(self._device), wanted, on_error)

    def _begin(
        self, policy: Policy, params: Mapping[str, Tensor] | None, task: Any, seed: int | None
    ) -> tuple[PolicySnapshot, EpisodeStreams, Task | None]:
        """Copy what a call was given, and count the call."""
        call_seed = optional_seed(seed)
        snapshot = self._snapshots.of(policy, params)
        own_task = self._task if task is _SAMPLERS_TASK else Task.of(task)
        # Last, since a refused call does not count.
        return snapshot, self._seeds.next_request(call_seed), own_task

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a block that the trace shows in the lane of the calling thread.

        For what the trainer does meanwhile: `with sampler.span("outer update"):`. Without a trace
        it does nothing.
        """
        return nullcontext() if self._trace is None else self._trace.span(name)

    def sample_tasks(
        self, num_tasks: int, *, seed: int | None = None, held_out: bool = False
    ) -> list[Any]:
        """Draw tasks from the environment's distribution.

        The n-th call of a sampler with the same seed draws the same tasks.

        Args:
            num_tasks: How many.
            seed: Replaces the number of this call, as in `sample`.
            held_out: For evaluation: where the environment has `sample_held_out_tasks`, draw them
                by that.

        Raises:
            ConfigurationError: The environment has no tasks.
            SamplerStateError: The sampler is not open.
        """
        engine, _ = self._open(any_loop=True)
        number, call_seed = Whole(1).check("num_tasks", num_tasks), optional_seed(seed)
        if engine.task_env is None:
            message = (
                f"no tasks can be drawn from {self._maker.name}: it has no sample_tasks(num_tasks) "
                "with reset_task(task); add them to the environment, or make the tasks yourself"
            )
            raise ConfigurationError(message)
        tasks_seed = self._seeds.next_tasks(call_seed)
        return sample_tasks(engine.task_env, number, tasks_seed, held_out=held_out)

    async def reset_task(self, task: Any) -> None:
        """Make `task` the default of later calls; None: the environment's own, initial task."""
        self._open()
        self._task = Task.of(task)

    def _open(self, *, any_loop: bool = False) -> tuple[Engine, Opened]:
        """Return the engine if the sampler is open and the caller is in its event loop."""
        if self._engine is None:
            message = (
                "the sampler was not started; use `async with AsyncSampler(...) as sampler:` or "
                "await sampler.start() first"
            )
            raise SamplerStateError(message)
        if self._is_closed or self._opened is None:
            state = "is closed; open a new AsyncSampler"
            if not self._is_closed:
                state = "is still starting; await its start() first"
            message = f"{self!r} {state}"
            raise SamplerStateError(message)
        if not any_loop and asyncio.get_running_loop() is not self._loop:
            assert self._loop is not None
            state = "is closed now" if self._loop.is_closed() else "runs elsewhere"
            message = (
                f"{self!r} was started in an event loop that {state}, and is used from another; "
                "open one sampler in each event loop, or send the call there with "
                "asyncio.run_coroutine_threadsafe"
            )
            raise EventLoopError(message)
        return self._engine, self._opened

    # -- what it is -----------------------------------------------------------------------------

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Of one environment."""
        return self._open(any_loop=True)[1].observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Of one environment."""
        return self._open(any_loop=True)[1].action_space

    @property
    def statistics(self) -> Statistics:
        """Counts and times since the start, as a copy."""
        return self._engine.statistics() if self._engine is not None else Statistics()

    def __repr__(self) -> str:
        name = self._maker.name
        if self._engine is None:
            return f"<AsyncSampler {name} [not started]>"
        if self._is_closed:
            return f"<AsyncSampler {name} [closed]>"
        workers, busy, idle, requests = self._engine.counts()
        return (
            f"<AsyncSampler {name} [{workers} workers, {busy} rows busy, {idle} idle, "
            f"{requests} requests]>"
        )
