"""`Rollouts`: many tasks sampled at once, each adapted to as soon as its own episodes are in."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import EpisodeError, LearningError
from asyncmaml.intraop import one_intraop_thread
from asyncmaml.learning.learner import MetaLearner
from asyncmaml.learning.phases import Phase
from asyncmaml.sampling.sampler import AsyncSampler
from asyncmaml.training.draws import Purpose, draw_number
from asyncmaml.training.learner_thread import LearnerThread
from asyncmaml.training.spans import Clock, noted

_LOG = logging.getLogger("asyncmaml")
TASK_ERRORS = (EpisodeError, LearningError)
"""What one task can be at fault for; everything else ends the run in any case."""


@dataclass(frozen=True)
class Plan:
    """How the tasks of one iteration, or of one evaluation, are sampled and adapted to.

    Attributes:
        purpose: What for; with `iteration` it decides what is drawn.
        iteration: From 0.
        episodes: B, of each task and phase.
        gamma: Discount per step.
        num_updates: Inner updates of each task, K; there are K + 1 phases.
        step_sizes: Of the updates; None: the learner's own.
        skip_failing_tasks: Go on without a task that fails, or raise its error.
        keeps_phases: Whether the phases are handed out, for the outer update.
        keeps_episodes: Whether the episodes are.
    """

    purpose: Purpose
    iteration: int
    episodes: int
    gamma: float
    num_updates: int
    step_sizes: tuple[float, ...] | None = None
    skip_failing_tasks: bool = False
    keeps_phases: bool = False
    keeps_episodes: bool = False


@dataclass
class AdaptedTask:
    """What came of one task; the lists have an entry for each phase."""

    task: Any
    returns: list[float] = field(default_factory=list)
    """Mean return of the phase's episodes, not discounted."""
    env_steps: int = 0
    num_episodes: int = 0
    phases: list[Phase] = field(default_factory=list)
    episodes: list[BatchEpisodes] = field(default_factory=list)
    params: dict[str, Tensor] | None = None
    """After the last update; None: the policy's own."""
    error: BaseException | None = None
    """Why there is less than planned, for a task that failed."""


class Rollouts:
    """Samples through one sampler and adapts in the learner's thread; both overlap."""

    def __init__(self, sampler: AsyncSampler, learner: MetaLearner, thread: LearnerThread) -> None:
        self._sampler = sampler
        self._learner = learner
        self._thread = thread

    async def adapt(self, tasks: Sequence[Any], plan: Plan, clock: Clock) -> list[AdaptedTask]:
        """Return what came of each task, in the order of the tasks.

        Raises:
            EpisodeError: A task's environment failed, or gave a NaN.
            LearningError: Nothing could be learned from a task.
        """
        try:
            async with asyncio.TaskGroup() as group:
                adaptations = [
                    group.create_task(self._adapt(index, task, plan, clock), name=f"task-{index}")
                    for index, task in enumerate(tasks)
                ]
        except BaseExceptionGroup as errors:
            # The others were cancelled; whoever called gets the error itself, and its notes.
            raise errors.exceptions[0] from None
        return [adaptation.result() for adaptation in adaptations]

    async def _adapt(self, index: int, task: Any, plan: Plan, clock: Clock) -> AdaptedTask:
        adapted = AdaptedTask(task)
        try:
            await self._roll_out(index, adapted, plan, clock)
        except TASK_ERRORS as error:
            where = f"task {index} of iteration {plan.iteration + 1}"
            if not plan.skip_failing_tasks:
                error.add_note(f"raised by {where} ({plan.purpose.name.lower()}): {task!r}")
                raise
            _LOG.warning("%s is skipped: %s", where, error)
            adapted.error = error
        return adapted

    async def _roll_out(self, index: int, adapted: AdaptedTask, plan: Plan, clock: Clock) -> None:
        params: dict[str, Tensor] | None = None
        for update in range(plan.num_updates + 1):
            with noted(clock.sampling):
                episodes = await self._sampler.sample(
                    self._learner.policy,
                    params,
                    task=adapted.task,
                    batch_size=plan.episodes,
                    gamma=plan.gamma,
                    seed=draw_number(plan.purpose, plan.iteration, index, update),
                )
            adapted.returns.append(float(episodes.episode_returns.mean()))
            adapted.env_steps += episodes.num_transitions
            adapted.num_episodes += episodes.batch_size
            if plan.keeps_episodes:
                adapted.episodes.append(episodes)
            is_last = update == plan.num_updates
            if is_last and not plan.keeps_phases:
                return
            work = partial(self._learn, episodes, params, update, plan)
            phase, params = await self._thread.run(work, clock.adaptation)
            if not is_last:
                adapted.params = params
            if plan.keeps_phases:
                adapted.phases.append(phase)

    def _learn(
        self,
        episodes: BatchEpisodes,
        params: dict[str, Tensor] | None,
        update: int,
        plan: Plan,
    ) -> tuple[Phase, dict[str, Tensor] | None]:
        """Make the phase and, unless it is the last one, adapt; in the learner's thread."""
        # By one core: the sampler has work for all of them meanwhile, and torch's threads would
        # wait for each other after every operation until each has had its turn.
        with self._sampler.span("adapt"), one_intraop_thread():
            phase = self._learner.phase(episodes)
            if update == plan.num_updates:
                return phase, None
            step_size = None if plan.step_sizes is None else plan.step_sizes[update]
            return phase, self._learner.adapt(phase, params, update=update, step_size=step_size)


def done(adapted: Sequence[AdaptedTask]) -> list[AdaptedTask]:
    """Return the tasks that did not fail.

    Raises:
        EpisodeError, LearningError: All of them failed; the error of the first.
    """
    succeeded = [one for one in adapted if one.error is None]
    if not succeeded and adapted:
        error = adapted[0].error
        assert error is not None
        error.add_note(f"all {len(adapted)} tasks failed; this is the error of the first")
        raise error
    return succeeded


def returns_by_phase(adapted: Sequence[AdaptedTask]) -> list[list[float]]:
    """Return for each phase the returns of the tasks."""
    return [list(column) for column in zip(*(one.returns for one in adapted), strict=True)]
