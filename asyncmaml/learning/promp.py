"""ProMP: Rothfuss et al. (2018), https://arxiv.org/abs/1810.06784, algorithm 1.

Several Adam steps on the same episodes. The outer loss clips the ratio of the adapted policies
(PPO; Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7) and holds the policies before
the last update near those that drew their episodes:

    mean_i [ -<min(r A', clip(r, 1 - c, 1 + c) A')> + eta sum_(k<K) <KL(old_k || pi_theta_k)> ]

with r = pi_theta_K / pi_old_K. The inner objective is the likelihood ratio against the policy that
drew the episodes, so that the inner gradient stays right while theta moves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from asyncmaml.errors import LearningError
from asyncmaml.learning.chain import AdaptationChain
from asyncmaml.learning.distributions import detached, mean_kl
from asyncmaml.learning.groups import STACK_BELOW_ROWS, ParameterLayout, TaskGroup
from asyncmaml.learning.learner import (
    NO_GRADIENT,
    MetaLearner,
    UpdateReport,
    all_finite,
)
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.objectives import likelihood_ratio
from asyncmaml.learning.phases import Phase, masked_mean
from asyncmaml.learning.products import Tensors, leaves_of
from asyncmaml.option_kinds import Flag, Real, Whole


class ProMP(MetaLearner):
    """See the module.

    Args:
        policy: See `MetaLearner`.
        step_sizes: See `MetaLearner`.
        objective: See `MetaLearner`; the source's is "likelihood_ratio".
        learning_rate: Of Adam.
        epochs: Adam steps on one set of episodes.
        clip: c, how far a ratio may move before its gradient ends.
        inner_kl: eta.
        first_order: Take the derivative of theta' by theta as the identity.
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
        objective: str = "likelihood_ratio",
        learning_rate: float = 1e-3,
        epochs: int = 5,
        clip: float = 0.3,
        inner_kl: float = 5e-4,
        first_order: bool = False,
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
        rate = Real(0, above=True).check("learning_rate", learning_rate)
        self.epochs: int = Whole(1).check("epochs", epochs)
        self.clip: float = Real(0, above=True).check("clip", clip)
        self.inner_kl: float = Real(0).check("inner_kl", inner_kl)
        self.first_order: bool = Flag().check("first_order", first_order)
        self._layout = ParameterLayout(policy)
        moving = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(moving, lr=rate)

    def update(self, tasks: Sequence[Sequence[Phase]]) -> UpdateReport:
        """See `MetaLearner.update`. What is not finite undoes every epoch."""
        groups, report = self._usable(tasks, self.num_updates + 1)
        if not groups:
            return report
        before = self.state_dict()
        try:
            report = self._epochs(groups, report)
        except BaseException:
            self.load_state_dict(before)
            raise
        if not report.accepted:
            self.load_state_dict(before)
        return report

    def state_dict(self) -> dict[str, Any]:
        """See `MetaLearner.state_dict`; with Adam's moments."""
        state = self._optimizer.state_dict()
        moments = {
            index: {name: value.detach().clone() for name, value in moment.items()}
            for index, moment in state["state"].items()
        }
        return {**super().state_dict(), "optimizer": {**state, "state": moments}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `MetaLearner.load_state_dict`."""
        super().load_state_dict(state)
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except (KeyError, ValueError) as error:
            message = f"this is no state of a ProMP with such a policy: {error}"
            raise LearningError(message) from error

    # ---- parts of an update ----

    def _epochs(self, groups: Sequence[TaskGroup], report: UpdateReport) -> UpdateReport:
        """Move the parameters; the report tells whether they are to stay."""
        olds: list[list[Distribution]] = []
        for epoch in range(self.epochs):
            parts = self._all_evaluated(groups, olds)
            loss, gradient = self._means(groups, parts)
            if not epoch:
                olds = [part.distributions for part in parts]
                norm = float(gradient.norm())
                report = replace(report, loss_before=loss, gradient_norm=norm)
                if norm == 0:
                    return replace(report, reason=NO_GRADIENT)
            if not gradient.isfinite().all():
                return replace(report, reason=f"the gradient of epoch {epoch} is not finite")
            self._step(gradient)
        return self._judged(groups, olds, report)

    def _all_evaluated(
        self, groups: Sequence[TaskGroup], olds: Sequence[Sequence[Distribution]]
    ) -> "list[_Evaluation]":
        """Evaluate each group; `olds` are empty as long as nothing has moved."""
        indices = range(len(groups))
        return self._for_each(
            lambda index: self._evaluated(groups[index], olds[index] if olds else None), indices
        )

    def _evaluated(self, group: TaskGroup, olds: Sequence[Distribution] | None) -> "_Evaluation":
        """Evaluate the outer loss of a group and its gradient; without `olds`, on policy."""
        chain = AdaptationChain(
            self.policy,
            group.spread(self._theta()),
            group.phases[:-1],
            self.step_sizes,
            objective=self.objective,
            first_order=self.first_order,
        )
        distributions = list[Distribution]()
        direct = list[Tensors | None]()
        gradient: Tensors = ()
        loss = kl = pre_kl = 0.0
        for index, (phase, params) in enumerate(zip(group.phases, chain.points, strict=True)):
            leaves = leaves_of(self.policy, params)
            new = self._distribution(phase, {**params, **leaves})
            distributions.append(detached(new))
            is_last = index == self.num_updates
            if olds is None:
                with torch.no_grad():
                    self._check_on_policy(new, phase, index)
                if not is_last:
                    # KL(old || old): its gradient is 0, and what rounding made of it is no
                    # gradient for Adam, which divides by its size.
                    direct.append(None)
                    continue
            divergence = mean_kl(olds[index] if olds else distributions[-1], new, phase.mask).sum()
            if is_last:
                one, kl = self._clipped(new, phase), float(divergence.detach())
            else:
                one = self.inner_kl * divergence
                pre_kl = float(divergence.detach()) if not index else pre_kl
            loss += float(one.detach())
            gradient = torch.autograd.grad(one, list(leaves.values()), materialize_grads=True)
            direct.append(gradient)
        gradient = group.summed(chain.pull(gradient, direct[:-1]))
        return _Evaluation(loss, gradient, kl, pre_kl, distributions)

    def _clipped(self, distribution: Distribution, phase: Phase) -> Tensor:
        """PPO's loss, summed over the group's tasks."""
        ratio = likelihood_ratio(distribution, phase)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * phase.advantages, clipped * phase.advantages)
        return -masked_mean(gain, phase.mask).sum()

    def _means(
        self, groups: Sequence[TaskGroup], parts: Sequence["_Evaluation"]
    ) -> tuple[float, Tensor]:
        """Return loss and flat gradient, means over the tasks of all groups."""
        num_tasks = sum(group.num_tasks for group in groups)
        gradient = torch.stack([self._layout.flat(part.gradient) for part in parts]).sum(0)
        return sum(part.loss for part in parts) / num_tasks, gradient / num_tasks

    def _step(self, gradient: Tensor) -> None:
        own = dict(self.policy.named_parameters())
        for name, part in zip(self._layout.names, self._layout.tensors(gradient), strict=True):
            own[name].grad = part
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _judged(
        self,
        groups: Sequence[TaskGroup],
        olds: Sequence[Sequence[Distribution]],
        report: UpdateReport,
    ) -> UpdateReport:
        """Report on the new parameters."""
        theta: Params = self._theta()
        parts = []
        if all_finite(theta.values()):
            parts = self._all_evaluated(groups, olds)
        if not parts or not all(part.is_finite for part in parts):
            return replace(report, reason="the loss after the last epoch is not finite")
        num_tasks = sum(group.num_tasks for group in groups)
        return replace(
            report,
            accepted=True,
            loss_after=sum(part.loss for part in parts) / num_tasks,
            kl=sum(part.kl for part in parts) / num_tasks,
            pre_kl=sum(part.pre_kl for part in parts) / num_tasks,
        )


@dataclass(frozen=True)
class _Evaluation:
    """Of one group; sums over its tasks."""

    loss: float
    gradient: Tensors
    kl: float
    pre_kl: float
    distributions: list[Distribution]

    @property
    def is_finite(self) -> bool:
        return all(abs(number) < float("inf") for number in (self.loss, self.kl, self.pre_kl))
