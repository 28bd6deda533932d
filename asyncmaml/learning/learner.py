"""The contract of a meta-learner, and what all of them share.

A learner is one file: a subclass of `MetaLearner` with an `update`. It takes tensors and gives
tensors; who samples the episodes, and when, it does not know. An iteration with K inner updates:

    pre = learner.phase(episodes of theta)            one call for each of M tasks
    theta_1 = learner.adapt(pre)
    post = learner.phase(episodes of theta_1)         and so on, K times
    report = learner.update([(pre, ..., post), ...])  theta moves, in place
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import ConfigurationError, LearningError, OffPolicyError
from asyncmaml.learning import policies
from asyncmaml.learning.adaptation import adapt, distribution_of, trainable_names
from asyncmaml.learning.baseline import LinearFeatureBaseline
from asyncmaml.learning.groups import STACK_BELOW_ROWS, TaskGroup, group_tasks
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.mlp_products import is_plain_mlp
from asyncmaml.learning.objectives import find_objective, likelihood_ratio
from asyncmaml.learning.phases import Phase, make_phase, masked_mean
from asyncmaml.learning.task_threads import ForEach, at_once, in_turn
from asyncmaml.option_kinds import Flag, Many, Real, Whole

NOT_APPLICABLE = float("nan")
NO_GRADIENT = "the gradient is 0: no advantage tells one action from another"
# Rounding of parameters to float32 alone: 2e-6 on average at a standard deviation of 1, 2e-5 at
# 0.1, 2e-4 at 0.01; and eight times as much at most (17 numbers in, 6 out, 2 x 100).
RATIO_TOLERANCE = 1e-4
LARGEST_TO_MEAN = 100
# 0 is good: with it nothing adapts, which one may want to compare with.
_STEP_SIZES = Many(
    Real(0), "RATES", "one finite number of at least 0 for each update, such as (0.1, 0.05)"
)


@dataclass(frozen=True)
class UpdateReport:
    """What an outer update did; NaN where a figure does not apply.

    Attributes:
        accepted: Whether the parameters moved.
        reason: Why they did not, or why tasks were left out; "" if all went well.
        loss_before: The outer loss at the old parameters, mean over tasks.
        loss_after: At the new ones; at the last that were tried, if none was accepted.
        kl: KL(old || new) of the adapted policies on their own episodes, mean over tasks.
        pre_kl: The same of the policy before adaptation, on the episodes of phase 0.
        gradient_norm: Euclidean, of the outer loss.
        backtracks: How often the step was shortened.
        skipped_tasks: Tasks left out since nothing could be learned from them.
    """

    accepted: bool
    reason: str = ""
    loss_before: float = NOT_APPLICABLE
    loss_after: float = NOT_APPLICABLE
    kl: float = NOT_APPLICABLE
    pre_kl: float = NOT_APPLICABLE
    gradient_norm: float = NOT_APPLICABLE
    backtracks: int = 0
    skipped_tasks: int = 0

    def scalars(self) -> dict[str, float]:
        """Return every figure under its name, for a logger."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(value) for name, value in named.items() if name != "reason"}


class MetaLearner(ABC):
    """Adapts a policy to a task, and learns from many tasks' phases.

    Args:
        policy: Its parameters are theta; `update` moves them in place.
        step_sizes: alpha of each of the K inner updates.
        objective: The inner one, a name in `objectives.OBJECTIVES`.
        gae_lambda: Of the advantages.
        bootstrap_truncated: Whether the baseline stands for what a truncated episode did not see.
        stack_below_rows: Tasks with fewer rows (steps times episodes, padded) are computed
            together; 0: none. The result does not depend on it but for rounding.

    Raises:
        ConfigurationError: An argument is out of its range.

    Attributes:
        policy: As given.
        num_updates: K; a task brings K + 1 phases.
        ratio_tolerance: How far from 1 the ratio of an action's probabilities at learning and at
            sampling may be, on average over a task's steps; a single one by 100 times as much.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        step_sizes: Sequence[float] = (0.1,),
        objective: str = "log_likelihood",
        gae_lambda: float = 1.0,
        bootstrap_truncated: bool = False,
        stack_below_rows: int = STACK_BELOW_ROWS,
    ) -> None:
        self.step_sizes: tuple[float, ...] = _STEP_SIZES.check("step_sizes", step_sizes)
        find_objective(objective)
        if not trainable_names(policy):
            message = "the policy has no parameter that requires a gradient: nothing to learn"
            raise ConfigurationError(message)
        self.policy = policy
        self.num_updates = len(self.step_sizes)
        self.objective = objective
        self.ratio_tolerance = RATIO_TOLERANCE
        self.baseline = LinearFeatureBaseline()
        self._gae_lambda = Real(0, 1).check("gae_lambda", gae_lambda)
        self._bootstrap_truncated = Flag().check("bootstrap_truncated", bootstrap_truncated)
        self._stack_below_rows: int = Whole(0).check("stack_below_rows", stack_below_rows)
        if not getattr(policy, "accepts_stacked_params", False):
            self._stack_below_rows = 0

    # ---- before the update ----

    def phase(self, episodes: BatchEpisodes) -> Phase:
        """Fit the baseline on a task's episodes and estimate their advantages.

        Raises:
            LearningError: A number is not finite.
        """
        return make_phase(
            episodes,
            self.baseline,
            gae_lambda=self._gae_lambda,
            bootstrap_truncated=self._bootstrap_truncated,
            dtype=next(self.policy.parameters()).dtype,
        )

    def adapt(
        self,
        phase: Phase,
        params: Params | None = None,
        *,
        update: int = 0,
        step_size: float | None = None,
    ) -> dict[str, Tensor]:
        """Return the parameters after one inner update, without a graph: what samples next.

        Args:
            phase: Of episodes drawn with `params`.
            params: Where to step from; None: the policy's own.
            update: Which of the K, from 0; later ones step as the last does.
            step_size: In place of that update's own.

        Raises:
            LearningError: Nothing can be learned from the phase, or the result is not finite.
        """
        if problem := phase.problem():
            message = f"cannot adapt to a phase: {problem}; leave the task out"
            raise LearningError(message)
        if step_size is None:
            step_size = self.step_sizes[min(update, self.num_updates - 1)]
        params = dict(self.policy.named_parameters()) if params is None else params
        updated = adapt(
            self.policy,
            {name: parameter.detach() for name, parameter in params.items()},
            phase,
            step_size=step_size,
            objective=self.objective,
            first_order=True,
        )
        if not all_finite(updated.values()):
            message = (
                f"inner update {update} with step size {step_size} led to parameters that are "
                "not finite; take a smaller step size"
            )
            raise LearningError(message)
        return {name: parameter.detach() for name, parameter in updated.items()}

    # ---- the update ----

    @abstractmethod
    def update(self, tasks: Sequence[Sequence[Phase]]) -> UpdateReport:
        """Move the policy's parameters by M tasks of K + 1 phases each.

        A task with a phase that nothing can be learned from is left out and counted.

        Raises:
            LearningError: A task has another number of phases.
            OffPolicyError: Episodes were drawn by other parameters than those that lead to them.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next update depends on: tensors and plain data, copied."""
        state = self.policy.state_dict()
        return {"policy": {name: value.detach().clone() for name, value in state.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            LearningError: It is the state of another kind of policy or learner.
        """
        try:
            self.policy.load_state_dict(state["policy"])
        except (KeyError, RuntimeError) as error:
            message = f"this is no state of a {type(self).__name__} with such a policy: {error}"
            raise LearningError(message) from error

    # ---- for subclasses ----

    def _usable(
        self, tasks: Sequence[Sequence[Phase]], least_phases: int
    ) -> tuple[list[TaskGroup], UpdateReport]:
        """Return the tasks in groups, and a report of those that were left out."""
        usable, problems = list[Sequence[Phase]](), list[str]()
        for index, phases in enumerate(tasks):
            if not least_phases <= len(phases) <= self.num_updates + 1:
                message = (
                    f"task {index} brings {len(phases)} phases to {type(self).__name__} with "
                    f"{self.num_updates} inner updates; give it {self.num_updates + 1}: one "
                    "before each update and one after the last"
                )
                raise LearningError(message)
            found = [phase.problem() for phase in phases]
            if reasons := [f"phase {k}: {why}" for k, why in enumerate(found) if why]:
                problems.append(f"task {index}, {reasons[0]}")
            else:
                usable.append(phases)
        reason = ""
        if problems:
            reason = f"{len(problems)} of {len(tasks)} tasks left out, first {problems[0]}"
        if not usable:
            reason = f"no task to learn from: {reason or 'none was given'}"
        report = UpdateReport(False, reason, skipped_tasks=len(problems))
        return group_tasks(usable, stack_below_rows=self._stack_below_rows), report

    @property
    def _for_each(self) -> ForEach:
        """How a function is called for each group of tasks."""
        return at_once if _may_be_called_at_once(self.policy) else in_turn

    def _theta(self) -> dict[str, Tensor]:
        """The policy's own parameters as constants; they share its memory."""
        return {name: parameter.detach() for name, parameter in self.policy.named_parameters()}

    def _distribution(self, phase: Phase, params: Params) -> torch.distributions.Distribution:
        return distribution_of(self.policy, phase.observations, params)

    def _check_on_policy(
        self, distribution: torch.distributions.Distribution, phase: Phase, index: int
    ) -> None:
        """Compare the probabilities recorded at sampling with those of the learner's policy."""
        errors = (likelihood_ratio(distribution, phase) - 1).abs()
        mean, largest = float(masked_mean(errors, phase.mask).max()), float(errors.max())
        allowed = self.ratio_tolerance
        if not (mean <= allowed and largest <= LARGEST_TO_MEAN * allowed):
            message = (
                f"the actions of phase {index} were not drawn by the policy that the learner "
                f"takes them for: the ratio of their probabilities is off 1 by {mean:.2g} on "
                f"average and {largest:.2g} at most, wanted {allowed:g} and "
                f"{LARGEST_TO_MEAN * allowed:g}; sample with the current parameters and with what "
                "adapt() returned for this very phase, and do not change either before update(). "
                "With a standard deviation below 0.01 it may be rounding: raise ratio_tolerance"
            )
            raise OffPolicyError(message)

    @torch.no_grad()
    def _move_to(self, params: Params) -> None:
        for name, parameter in self.policy.named_parameters():
            parameter.copy_(params[name])


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number of every tensor is finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _may_be_called_at_once(policy: nn.Module) -> bool:
    """Whether several threads may call the policy, and that is of use.

    A module or a hook of one's own may keep something of a call, and `functional_call` changes a
    module for a while.
    """
    is_ours = is_plain_mlp(policy) and type(policy).__module__ == policies.__name__
    return (
        is_ours
        and all(parameter.is_cpu for parameter in policy.parameters())
        and not any(part._forward_hooks or part._forward_pre_hooks for part in policy.modules())
    )
