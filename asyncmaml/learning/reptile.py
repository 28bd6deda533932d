"""Reptile: Nichol et al. (2018), https://arxiv.org/abs/1803.02999, algorithm 2.

theta moves a share of the way to the mean of the adapted parameters, by plain inner updates and no
derivative of them. It needs no episodes after the last update; those that come are reported on.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from asyncmaml.learning.adaptation import adapted
from asyncmaml.learning.distributions import mean_kl
from asyncmaml.learning.groups import STACK_BELOW_ROWS, ParameterLayout, TaskGroup
from asyncmaml.learning.learner import NOT_APPLICABLE, MetaLearner, UpdateReport, all_finite
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.objectives import likelihood_ratio_loss
from asyncmaml.learning.phases import Phase
from asyncmaml.option_kinds import Real


class Reptile(MetaLearner):
    """See the module.

    Args:
        policy: See `MetaLearner`.
        step_sizes: See `MetaLearner`.
        outer_step_size: The share of the way, in (0, 1].
        objective: See `MetaLearner`.
        gae_lambda: See `MetaLearner`.
        bootstrap_truncated: See `MetaLearner`.
        stack_below_rows: See `MetaLearner`.

    Raises:
        ConfigurationError: An argument is out of its range.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        step_sizes: Sequence[float] = (0.1,),
        outer_step_size: float = 0.1,
        objective: str = "log_likelihood",
        gae_lambda: float = 1.0,
        bootstrap_truncated: bool = False,
        stack_below_rows: int = STACK_BELOW_ROWS,
    ) -> None:
        super().__init__(
            policy,
            step_sizes=step_sizes,
            objective=objective,
            gae_lambda=gae_lambda,
            bootstrap_truncated=bootstrap_truncated,
            stack_below_rows=stack_below_rows,
        )
        share = Real(0, 1, above=True)
        self.outer_step_size: float = share.check("outer_step_size", outer_step_size)
        self._layout = ParameterLayout(policy)

    def update(self, tasks: Sequence[Sequence[Phase]]) -> UpdateReport:
        """See `MetaLearner.update`; a task may do without its last phase.

        The gradient norm is that of the mean of theta - theta'_i, which Reptile takes for one.
        """
        fewest = min((len(phases) for phases in tasks), default=0)
        if fewest == self.num_updates:  # some have no last phase: those of the others are not read
            tasks = [phases[:fewest] for phases in tasks]
        groups, report = self._usable(tasks, self.num_updates)
        if not groups:
            return report
        theta = self._theta()
        points = self._for_each(lambda group: self._points(group, theta), groups)
        direction = self._mean_move(groups, points)
        report = replace(report, gradient_norm=float(direction.norm()))
        if report.gradient_norm == 0:
            return replace(report, reason="no task's parameters moved when it adapted")
        moved = self._layout.moved(theta, self.outer_step_size * direction)
        if not all_finite(moved.values()):
            return replace(report, reason="the adapted parameters are not finite")
        report = self._reported(groups, points, moved, report)
        figures = [report.pre_kl]
        if len(groups[0].phases) > self.num_updates:
            figures.append(report.loss_after)
        if not all(map(math.isfinite, figures)):
            return replace(report, reason="the loss at the new parameters is not finite")
        self._move_to(moved)
        return replace(report, accepted=True)

    def _mean_move(
        self, groups: Sequence[TaskGroup], points: Sequence[Sequence[Params]]
    ) -> torch.Tensor:
        """Return the mean over tasks of theta'_i - theta, shape `(P,)`."""
        moves = []
        for group, (first, *_, last) in zip(groups, points, strict=True):
            move = tuple(last[name] - first[name] for name in self._layout.names)
            moves.append(self._layout.flat(group.summed(move)))
        return torch.stack(moves).sum(0) / sum(group.num_tasks for group in groups)

    def _points(self, group: TaskGroup, theta: Params) -> list[dict[str, torch.Tensor]]:
        phases = group.phases[: self.num_updates]
        points = adapted(self.policy, group.spread(theta), phases, self.step_sizes, self.objective)
        with torch.no_grad():
            for index, (phase, params) in enumerate(zip(group.phases, points, strict=False)):
                self._check_on_policy(self._distribution(phase, params), phase, index)
        return points

    def _reported(
        self,
        groups: Sequence[TaskGroup],
        old_points: Sequence[Sequence[Params]],
        theta: Params,
        report: UpdateReport,
    ) -> UpdateReport:
        """Fill in the losses and divergences, as far as there are phases for them."""

        def figures(index: int) -> torch.Tensor:
            return self._figures(groups[index], old_points[index], theta)

        totals = torch.stack(self._for_each(figures, range(len(groups)))).sum(0)
        num_tasks = sum(group.num_tasks for group in groups)
        pre_kl, kl, before, after = (totals / num_tasks).tolist()
        if len(groups[0].phases) == self.num_updates:
            kl = before = after = NOT_APPLICABLE
        return replace(report, loss_before=before, loss_after=after, kl=kl, pre_kl=pre_kl)

    def _figures(
        self, group: TaskGroup, old_points: Sequence[Params], theta: Params
    ) -> torch.Tensor:
        """Sums over the group's tasks: KL before and after, loss before and after, shape `(4,)`."""
        phases = group.phases
        new_points = adapted(
            self.policy,
            group.spread(theta),
            phases[: self.num_updates],
            self.step_sizes,
            self.objective,
        )
        totals = torch.zeros(4, dtype=torch.float64)
        with torch.no_grad():
            for index, place in ((0, 0), (len(phases) - 1, 1)):
                old = self._distribution(phases[index], old_points[index])
                new = self._distribution(phases[index], new_points[index])
                totals[place] = float(mean_kl(old, new, phases[index].mask).sum())
            totals[2] = float(likelihood_ratio_loss(old, phases[-1]))
            totals[3] = float(likelihood_ratio_loss(new, phases[-1]))
        return totals
