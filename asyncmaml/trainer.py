"""`train()`: meta-training as a coroutine.

One iteration: tasks are drawn, all of them are sampled at once, each is adapted to as soon as its
own episodes are in, and the outer update follows when the last one is through. Everything of the
learner's runs in one thread of its own; the event loop only waits. What is drawn depends on the
configuration's seed and the number of the iteration alone, and a run that is stopped falls back
to its last complete iteration: so it can be resumed as if it had never stopped.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncmaml.checkpoint import Checkpoint, Row, write_atomically
from asyncmaml.config import TrainConfig
from asyncmaml.learning.learner import MetaLearner, UpdateReport
from asyncmaml.learning.mlp import MLPPolicy
from asyncmaml.learning.phases import Phase
from asyncmaml.sampling.sampler import AsyncSampler
from asyncmaml.training.draws import Purpose, draw_number
from asyncmaml.training.learner_thread import LearnerThread
from asyncmaml.training.resuming import config_to_train, found_checkpoint
from asyncmaml.training.rollouts import AdaptedTask, Plan, Rollouts, done, returns_by_phase
from asyncmaml.training.run_folder import ProgressFiles, RunFolder
from asyncmaml.training.setup import learner_for, make_policy, make_sampler
from asyncmaml.training.spans import Clock

OnIteration = Callable[[Row], object]


@dataclass(frozen=True)
class TrainResult:
    """What `train()` returns.

    Attributes:
        policy: The trained policy; its parameters are the initialisation that adapts fast.
        history: One row for each iteration; see `train`.
        output: The run's folder, or None.
        config: What it was trained with.
    """

    policy: MLPPolicy
    history: tuple[Row, ...]
    output: Path | None
    config: TrainConfig


async def train(
    config: TrainConfig | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    on_iteration: OnIteration | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> TrainResult:
    """Meta-train a policy; never blocks the event loop, and may be cancelled at any time.

    Each iteration gives a row, which goes to `on_iteration`, to `progress.csv` and to
    TensorBoard (if it is installed): `iteration` from 1; `return_k`, the mean return over the
    tasks after k inner updates, and `return_sd_k`, its standard deviation over the tasks; `tasks`,
    how many there were, those whose environment failed left out; `env_steps` of training so far, of
    all phases; what the learner reports; where the wall time went (`training/spans.py`);
    `sampler_*`, what the sampler's own statistics say of the sampling (`Statistics.scalars()`); and
    `evaluation_return_k` of `evaluation_tasks` on held-out tasks where they were due.

    Args:
        config: What to train; None: what the run in `output` was trained with, to resume it.
        output: The run's folder; None: nothing is written.
        resume: Go on after the last checkpoint in `output`, or start if there is none. The end is
            the same, bit for bit, as if the run had never stopped.
        on_iteration: Called in the event loop with the row of each iteration.
        trace: A file that takes what ran where and when, for https://ui.perfetto.dev.

    Returns:
        The policy and the history. In the folder: `config.json`, `progress.csv`,
        `checkpoint.pt`, `policy.pt`, event files.

    Raises:
        ConfigurationError: A run is in `output` already and `resume` is false, or it was trained
            with another configuration, or another process trains there.
        EpisodeError: A task failed and `on_task_error` is "raise", or all tasks failed.
        CancelledError: Cancelled, when the checkpoint is written.
    """
    folder = None if output is None else RunFolder(output)
    with ExitStack() as claims:
        checkpoint = None
        if folder is not None:
            claims.enter_context(folder.claimed())
            checkpoint = found_checkpoint(folder, config, resume=resume)
        config = config_to_train(config, checkpoint)
        async with AsyncExitStack() as stack:
            thread = await stack.enter_async_context(LearnerThread())
            sampler = await stack.enter_async_context(make_sampler(config, trace=trace))
            learner = learner_for(config, make_policy(config, sampler))
            run = _Run(config, sampler, learner, thread, folder, checkpoint, on_iteration)
            await run.to_the_end()
            return run.result()


class _Run:
    """A run under way; `_kept` is what it was after the last complete iteration."""

    def __init__(
        self,
        config: TrainConfig,
        sampler: AsyncSampler,
        learner: MetaLearner,
        thread: LearnerThread,
        folder: RunFolder | None,
        checkpoint: Checkpoint | None,
        on_iteration: OnIteration | None,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._learner = learner
        self._thread = thread
        self._folder = folder
        self._on_iteration = on_iteration
        self._rollouts = Rollouts(sampler, learner, thread)
        self._history: list[Row] = []
        if checkpoint is not None:
            learner.load_state_dict(checkpoint.learner)
            self._history = list(checkpoint.history)
        self._kept = Checkpoint.of(config, learner.state_dict(), self._history)
        self._saved_iterations = 0
        earlier = self._history[-1]["elapsed_seconds"] if self._history else 0.0
        self._began = time.perf_counter() - earlier

    async def to_the_end(self) -> None:
        """Train until all iterations are complete, with files if there is a folder."""
        if self._folder is None:
            await self._iterations(None)
            return
        self._folder.write_config(self._config)
        files = ProgressFiles(self._folder, self._history)
        try:
            await self._iterations(files)
        finally:
            # Synchronous to the end: cleanup without an await cannot be cancelled.
            try:
                self._save(self._folder)
            finally:
                files.close(self._kept.history)

    async def _iterations(self, files: ProgressFiles | None) -> None:
        while len(self._history) < self._config.iterations:
            row = await self._iteration(len(self._history))
            self._history.append(row)
            # In the learner's thread, too: a parallel copy in this one would give it a team of
            # OpenMP threads of its own, and with more of them than cores every barrier sleeps.
            self._kept = await self._thread.run(self._checkpoint, [])
            if files is not None:
                await self._thread.run(partial(self._write, files, row), [])
            if self._on_iteration is not None:
                self._on_iteration(row)

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint.of(self._config, self._learner.state_dict(), self._history)

    def _write(self, files: ProgressFiles, row: Row) -> None:
        """Add a row, and save if it is time."""
        files.add(row)
        assert self._folder is not None
        if row["iteration"] % self._config.checkpoint_interval == 0:
            self._save(self._folder)

    def _save(self, folder: RunFolder) -> None:
        """Write what is kept, unless it is written already or nothing has come of the run."""
        if self._saved_iterations == self._kept.iterations:
            return
        self._kept.save(folder.checkpoint)
        write_atomically(folder.policy, self._kept_policy().save)
        self._saved_iterations = self._kept.iterations

    def _kept_policy(self) -> MLPPolicy:
        """Return the policy as it was after the last complete iteration."""
        # An outer update that was cut off by an error may have left the learner anywhere.
        self._learner.load_state_dict(self._kept.learner)
        policy = self._learner.policy
        assert isinstance(policy, MLPPolicy)
        return policy

    async def _iteration(self, iteration: int) -> Row:
        """Run one iteration, from the drawing of its tasks to its evaluation."""
        config, clock = self._config, Clock()
        counted = self._sampler.statistics
        tasks = self._sampler.sample_tasks(
            config.tasks_per_iteration, seed=draw_number(Purpose.TRAINING, iteration)
        )
        plan = Plan(
            Purpose.TRAINING,
            iteration,
            config.episodes_per_task,
            config.gamma,
            config.num_updates,
            skip_failing_tasks=config.on_task_error == "skip",
            keeps_phases=True,
        )
        adapted = await self._rollouts.adapt(tasks, plan, clock)
        counted = self._sampler.statistics - counted
        succeeded = done(adapted)
        phases = [one.phases for one in succeeded]
        report = await self._thread.run(partial(self._update, phases), clock.outer)
        times = clock.seconds()
        env_steps = sum(one.env_steps for one in adapted)
        row = self._training_columns(iteration, adapted, report)
        row |= times | {"steps_per_second": env_steps / times["seconds"]}
        # Nothing is in flight or queued by now: those two would say 0 for ever.
        gauges = ("requests_in_flight", "episodes_queued")
        row |= {f"sampler_{name}": v for name, v in counted.scalars().items() if name not in gauges}
        row |= await self._evaluation_columns(iteration)
        row["elapsed_seconds"] = time.perf_counter() - self._began
        return row

    def _update(self, tasks: Sequence[Sequence[Phase]]) -> UpdateReport:
        """Run the outer update; in the learner's thread."""
        with self._sampler.span("outer update"):
            return self._learner.update(tasks)

    def _training_columns(
        self, iteration: int, adapted: Sequence[AdaptedTask], report: UpdateReport
    ) -> Row:
        succeeded = done(adapted)
        before = self._history[-1]["env_steps"] if self._history else 0
        failed = len(adapted) - len(succeeded)
        return {
            "iteration": iteration + 1,
            **_return_columns("return", returns_by_phase(succeeded)),
            "tasks": len(succeeded),
            "env_steps": before + sum(one.env_steps for one in adapted),
            "episodes": sum(one.num_episodes for one in adapted),
            **report.scalars(),
            "skipped_tasks": failed + report.skipped_tasks,
            "reason": report.reason,
        }

    async def _evaluation_columns(self, iteration: int) -> Row:
        """Evaluate on held-out tasks if it is time; the columns are there anyway."""
        config, clock = self._config, Clock()
        interval = config.evaluation_interval
        if not interval or (iteration + 1) % interval:
            nothing: list[list[float]] = [[]] * (config.num_updates + 1)
            return {
                **_return_columns("evaluation_return", nothing),
                "evaluation_tasks": None,
                "evaluation_seconds": 0.0,
            }
        # The same tasks and episodes' seeds each time, so that the curve shows the policy alone.
        tasks = self._sampler.sample_tasks(
            config.evaluation_tasks, seed=draw_number(Purpose.EVALUATION, 0), held_out=True
        )
        plan = Plan(
            Purpose.EVALUATION,
            0,
            config.evaluation_episodes,
            config.gamma,
            config.num_updates,
            skip_failing_tasks=config.on_task_error == "skip",
        )
        succeeded = done(await self._rollouts.adapt(tasks, plan, clock))
        return {
            **_return_columns("evaluation_return", returns_by_phase(succeeded)),
            "evaluation_tasks": len(succeeded),
            "evaluation_seconds": clock.seconds()["seconds"],
        }

    def result(self) -> TrainResult:
        """Return what `train` returns."""
        output = None if self._folder is None else self._folder.path
        return TrainResult(self._kept_policy(), self._kept.history, output, self._config)


def _return_columns(name: str, returns: Sequence[Sequence[float]]) -> Row:
    """Return mean and standard deviation over the tasks after each number of updates."""
    row: Row = {}
    for updates, values in enumerate(returns):
        row[f"{name}_{updates}"] = statistics.fmean(values) if values else None
        row[f"{name}_sd_{updates}"] = statistics.stdev(values) if len(values) > 1 else None
    return row
