"""`evaluate()`: how well a trained policy adapts to tasks that it was not trained on.

The protocol of Finn et al. (2017), https://arxiv.org/abs/1703.03400, and the code behind it: a
number of held-out tasks, a batch of episodes after every gradient step, a baseline fitted to each
batch, the first step with the step size of training and the following ones with half of it.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncmaml.checkpoint import write_atomically
from asyncmaml.config import TrainConfig
from asyncmaml.errors import ConfigurationError
from asyncmaml.learning.mlp import MLPPolicy
from asyncmaml.learning.policy_files import load_policy
from asyncmaml.option_kinds import Many, OrNone, Real, Whole
from asyncmaml.training.draws import Purpose, draw_number
from asyncmaml.training.estimates import Estimate, estimate
from asyncmaml.training.learner_thread import LearnerThread
from asyncmaml.training.rollouts import AdaptedTask, Plan, Rollouts, done, returns_by_phase
from asyncmaml.training.run_folder import RunFolder
from asyncmaml.training.setup import learner_for, make_sampler
from asyncmaml.training.spans import Clock

RunOrPolicy = str | os.PathLike[str] | MLPPolicy


@dataclass(frozen=True)
class EvaluationReport:
    """Returns after 0, 1, ... gradient steps.

    Attributes:
        environment: Its id.
        seed: Of the tasks and the episodes.
        num_episodes: Of each task after each number of steps.
        step_sizes: Of the gradient steps.
        task_returns: Mean return of each task's episodes, not discounted: a tuple for each number
            of steps, with an entry for each task.
        skipped_tasks: Tasks that failed and are not in it.
    """

    environment: str
    seed: int
    num_episodes: int
    step_sizes: tuple[float, ...]
    task_returns: tuple[tuple[float, ...], ...]
    skipped_tasks: int

    @property
    def returns(self) -> list[Estimate]:
        """Mean over the tasks with its 95 % interval, and s.d. over the tasks, by steps."""
        return [estimate(values) for values in self.task_returns]

    def to_json(self) -> str:
        """Return all of it as JSON; what one task alone does not tell is null."""
        returns = [
            {"steps": steps, **{name: _number(value) for name, value in asdict(one).items()}}
            for steps, one in enumerate(self.returns)
        ]
        content = {
            "environment": self.environment,
            "seed": self.seed,
            "tasks": len(self.task_returns[0]),
            "skipped_tasks": self.skipped_tasks,
            "episodes": self.num_episodes,
            "step_sizes": self.step_sizes,
            "returns": returns,
            "task_returns": self.task_returns,
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"


async def evaluate(
    run: RunOrPolicy,
    config: TrainConfig | None = None,
    *,
    num_tasks: int = 40,
    num_episodes: int = 40,
    num_updates: int = 3,
    step_sizes: Sequence[float] | None = None,
    seed: int = 1,
) -> EvaluationReport:
    """Adapt a policy to held-out tasks and tell its returns after each gradient step.

    The tasks are never those of a training: they are drawn by themselves, by the environment's
    `sample_held_out_tasks` if it has that, and the same seed gives the same ones for every run.
    (A family of two tasks, such as a direction, has no others.)

    Args:
        run: A run's folder, where `evaluation.json` is written, or a policy.
        config: What the policy was trained with; None: the run's.
        num_tasks: Held-out tasks.
        num_episodes: Of each task after each number of steps; also what each step learns from.
        num_updates: Gradient steps.
        step_sizes: Of the gradient steps; None: those of training, then half of the last one.
        seed: Of tasks and episodes.

    Raises:
        ConfigurationError: An argument is out of its range, or there is no run.
        EpisodeError: A task failed and `on_task_error` is "raise", or all tasks failed.
    """
    folder = None if isinstance(run, MLPPolicy) else RunFolder(run)
    policy, config = policy_and_config(run, config)
    rates = _step_sizes(config, num_updates, step_sizes)
    adapted = await adapted_tasks(
        policy,
        config,
        Whole(1).check("num_tasks", num_tasks),
        num_episodes=num_episodes,
        step_sizes=rates,
        seed=seed,
    )
    succeeded = done(adapted)
    report = EvaluationReport(
        config.env_id,
        seed,
        num_episodes,
        rates,
        tuple(map(tuple, returns_by_phase(succeeded))),
        len(adapted) - len(succeeded),
    )
    if folder is not None:
        write_atomically(folder.evaluation, lambda new: new.write_text(report.to_json()))
    return report


async def adapted_tasks(
    policy: MLPPolicy,
    config: TrainConfig,
    num_tasks: int,
    *,
    num_episodes: int,
    step_sizes: tuple[float, ...],
    seed: int,
    purpose: Purpose = Purpose.FINAL_EVALUATION,
    choose: Callable[[list[Any]], list[Any]] | None = None,
    keeps_episodes: bool = False,
) -> list[AdaptedTask]:
    """Adapt a policy to held-out tasks, all at once.

    Args:
        policy: What is adapted; it stays as it is.
        config: The environment, the learner and the workers.
        num_tasks: How many are drawn.
        num_episodes: Of each task after each number of steps.
        step_sizes: One for each gradient step.
        seed: Of tasks and episodes.
        purpose: Decides, with the seed, what is drawn.
        choose: Takes what was drawn and returns what is adapted to; None: all of it.
        keeps_episodes: Whether the tasks' episodes are handed out.
    """
    plan = Plan(
        purpose,
        0,
        Whole(1).check("num_episodes", num_episodes),
        config.gamma,
        len(step_sizes),
        step_sizes,
        skip_failing_tasks=config.on_task_error == "skip",
        keeps_episodes=keeps_episodes,
    )
    learner = learner_for(config, policy)
    sampler = make_sampler(config, Whole(0).check("seed", seed))
    async with AsyncExitStack() as stack:
        thread = await stack.enter_async_context(LearnerThread())
        await stack.enter_async_context(sampler)
        tasks = sampler.sample_tasks(num_tasks, seed=draw_number(purpose, 0), held_out=True)
        tasks = tasks if choose is None else choose(tasks)
        return await Rollouts(sampler, learner, thread).adapt(tasks, plan, Clock())


def policy_and_config(
    run: RunOrPolicy, config: TrainConfig | None = None
) -> tuple[MLPPolicy, TrainConfig]:
    """Return a run's policy and configuration.

    Raises:
        ConfigurationError: There is no run, or the policy comes without a configuration.
    """
    if isinstance(run, MLPPolicy):
        if config is None:
            message = "a policy was given without a config; pass what it was trained with"
            raise ConfigurationError(message)
        return run, config
    folder = RunFolder(run)
    folder.require(folder.config, folder.policy, that="that could be evaluated")
    config = config or TrainConfig.load(folder.config)
    return load_policy(folder.policy, config.device), config


def halving_step_sizes(config: TrainConfig, num_updates: int) -> tuple[float, ...]:
    """Return the step sizes of the paper's test protocol: those of training, then half the last."""
    halved = (config.step_sizes[-1] / 2,) * max(0, num_updates - config.num_updates)
    return config.step_sizes[:num_updates] + halved


def _step_sizes(
    config: TrainConfig, num_updates: int, step_sizes: Sequence[float] | None
) -> tuple[float, ...]:
    num_updates = Whole(0).check("num_updates", num_updates)
    kind = OrNone(Many(Real(0, above=True), "RATES", "one number above 0 for each update", True))
    rates: tuple[float, ...] | None = kind.check("step_sizes", step_sizes)
    if rates is None:
        return halving_step_sizes(config, num_updates)
    if len(rates) == 1:
        return rates * num_updates
    if len(rates) != num_updates:
        message = f"step_sizes are {rates}; wanted one for each of {num_updates} updates"
        raise ConfigurationError(message)
    return rates


def load_report(path: Path) -> EvaluationReport:
    """Read what `evaluate` wrote.

    Raises:
        ConfigurationError: The file holds something else.
    """
    try:
        content = json.loads(path.read_text())
        return EvaluationReport(
            content["environment"],
            content["seed"],
            content["episodes"],
            tuple(content["step_sizes"]),
            tuple(map(tuple, content["task_returns"])),
            content["skipped_tasks"],
        )
    except (ValueError, LookupError, TypeError) as error:
        message = f"{path} holds no evaluation: {error}"
        raise ConfigurationError(message) from error


def _number(value: float) -> float | None:
    return value if value == value else None
