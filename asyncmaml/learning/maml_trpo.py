"""MAML with a trust region step outside: Finn et al. (2017), algorithm 3, as in section 5.3.

The outer loss is the surrogate -<A' pi_(theta'_i) / pi_old_i> on the episodes after adaptation,
mean over tasks; the step solves H x = g by conjugate gradients and backtracks until the loss falls
and the mean KL(old || new) of the adapted policies stays within `max_kl` (Schulman et al. 2015,
appendix C, https://arxiv.org/abs/1502.05477).

H is the Hessian of that divergence. At the old parameters its gradient by the distributions is 0,
so it is exactly mean_i J_i^T F_i J_i: F_i the Fisher information at theta'_i, J_i the derivative of
theta'_i by theta. No third derivative is needed, and `chain` and `products` keep what there is from
one product to the next.

What the policy does before adaptation is not bounded by this: it may run away while the adapted
policies stay near each other. `max_pre_kl` bounds its divergence, too: its Fisher information joins
H, weighed by max_kl / max_pre_kl, so that the step is within both bounds to second order, and the
line search holds both. The search alone only shortens a step that points the wrong way. On
Navigation2D (8 tasks, alpha 0.5, a seed that runs away) the returns before and after adaptation in
iteration 24 were -457 and -40 without a bound, -184 and -44 with 0.01 in the search alone, and this
way -93 and -38 with 0.01, -44 and -15 with 0.005, -55 and -24 with 0.002.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from asyncmaml.learning.adaptation import adapted
from asyncmaml.learning.chain import AdaptationChain
from asyncmaml.learning.conjugate_gradient import Solution, conjugate_gradient
from asyncmaml.learning.curvature import fisher_of
from asyncmaml.learning.distributions import detached, mean_kl
from asyncmaml.learning.gauss_newton import LinearizedGroup, Point, curvature_times
from asyncmaml.learning.groups import STACK_BELOW_ROWS, ParameterLayout, TaskGroup
from asyncmaml.learning.learner import NO_GRADIENT, MetaLearner, UpdateReport
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.objectives import likelihood_ratio_loss
from asyncmaml.learning.phases import Phase, masked_mean
from asyncmaml.learning.products import Tensors, leaves_of
from asyncmaml.option_kinds import Choice, Flag, OrNone, Real, Whole

CURVATURES = ("exact", "cheap")


class MAMLTRPO(MetaLearner):
    """See the module; `first_order` and `exploration` make FOMAML and E-MAML of it.

    Args:
        policy: See `MetaLearner`.
        step_sizes: See `MetaLearner`.
        objective: See `MetaLearner`.
        first_order: Take the derivative of theta' by theta as the identity everywhere.
        max_kl: Bound of the mean KL(old || new) of the adapted policies.
        cg_iterations: At most.
        cg_damping: Added to the diagonal of H.
        line_search_steps: Lengths tried, at most.
        line_search_ratio: Each as a share of the one before.
        max_pre_kl: Bound of the mean KL(old || new) of the policy before adaptation, which
            `max_kl` leaves free. None: none; it is reported all the same.
        curvature: "exact"; or "cheap", which takes J_i as the identity in H alone: a third of the
            time and a worse direction, while gradient and line search stay exact.
        exploration: Weight of E-MAML's term (Stadie et al. 2018, https://arxiv.org/abs/1803.01118):
            -<log pi> of the actions before the last update times the task's return after it,
            normalised over tasks.
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
        objective: str = "log_likelihood",
        first_order: bool = False,
        max_kl: float = 0.01,
        cg_iterations: int = 10,
        cg_damping: float = 1e-5,
        line_search_steps: int = 15,
        line_search_ratio: float = 0.8,
        max_pre_kl: float | None = None,
        curvature: str = "exact",
        exploration: float = 0.0,
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
        bound = Real(0, above=True)
        self.first_order: bool = Flag().check("first_order", first_order)
        self.max_kl: float = bound.check("max_kl", max_kl)
        self.max_pre_kl: float | None = OrNone(bound).check("max_pre_kl", max_pre_kl)
        self.curvature: str = Choice(CURVATURES).check("curvature", curvature)
        self.exploration: float = Real(0).check("exploration", exploration)
        self._cg_iterations: int = Whole(1).check("cg_iterations", cg_iterations)
        self._cg_damping: float = Real(0).check("cg_damping", cg_damping)
        self._line_search_steps: int = Whole(1).check("line_search_steps", line_search_steps)
        ratio = Real(0.01, 0.99)
        self._line_search_ratio: float = ratio.check("line_search_ratio", line_search_ratio)
        self._layout = ParameterLayout(policy)

    def update(self, tasks: Sequence[Sequence[Phase]]) -> UpdateReport:
        """See `MetaLearner.update`. What is not accepted leaves the parameters as they were."""
        groups, report = self._usable(tasks, self.num_updates + 1)
        if not groups:
            return report
        point = self._linearized(groups)
        norm = float(point.gradient.norm())
        report = replace(report, loss_before=point.loss, gradient_norm=norm)
        if report.gradient_norm == 0:
            return replace(report, reason=NO_GRADIENT)
        if not point.gradient.isfinite().all():
            return replace(report, reason="the gradient is not finite")
        step, reason = self._full_step(point)
        if reason:
            return replace(report, reason=reason)
        return self._line_search(point, step, report)

    # ---- the three parts of an update ----

    def _linearized(self, groups: Sequence[TaskGroup]) -> Point:
        """Evaluate the outer loss, its gradient and what products with H need."""
        returns = torch.cat([group.mean_returns.reshape(-1) for group in groups])
        mean, std = returns.mean(), returns.std(correction=0) + 1e-8

        def linearized(group: TaskGroup) -> LinearizedGroup:
            return self._linearized_group(group, (group.mean_returns - mean) / std)

        parts = self._for_each(linearized, groups)
        num_tasks = sum(group.num_tasks for group in groups)
        gradient = torch.stack([self._layout.flat(part.gradient) for part in parts]).sum(0)
        loss = sum(part.loss for part in parts) / num_tasks
        return Point(parts, num_tasks, loss, gradient / num_tasks)

    def _linearized_group(self, group: TaskGroup, credit: Tensor) -> LinearizedGroup:
        chain = AdaptationChain(
            self.policy,
            group.spread(self._theta()),
            group.phases[:-1],
            self.step_sizes,
            objective=self.objective,
            first_order=self.first_order,
        )
        old, direct = list[Distribution](), list[Tensors]()
        loss = 0.0
        gradient: Tensors = ()
        for index, (phase, params) in enumerate(zip(group.phases, chain.points, strict=True)):
            leaves = leaves_of(self.policy, params)
            distribution = self._distribution(phase, {**params, **leaves})
            with torch.no_grad():
                self._check_on_policy(distribution, phase, index)
            old.append(detached(distribution))
            is_last = index == self.num_updates
            if is_last or self.exploration:
                if is_last:
                    one = likelihood_ratio_loss(distribution, phase)
                else:
                    one = self._exploration_loss(distribution, phase, credit)
                loss += float(one.detach())
                gradient = torch.autograd.grad(one, list(leaves.values()), materialize_grads=True)
                direct.append(gradient)
        gradient = chain.pull(gradient, direct[:-1])
        pre_fisher = None
        if self.max_pre_kl is not None:
            pre_fisher = fisher_of(self.policy, chain.points[0], group.phases[0])
        return LinearizedGroup(
            group,
            chain,
            fisher_of(self.policy, chain.points[-1], group.phases[-1]),
            pre_fisher,
            old[0],
            old[-1],
            credit,
            loss,
            group.summed(gradient),
        )

    def _full_step(self, point: Point) -> tuple[Tensor, str]:
        """Return the step that the quadratic model allows; or why there is none."""

        def times(flat: Tensor) -> Tensor:
            return self._curvature_times(point, flat)

        solution: Solution = conjugate_gradient(
            times, point.gradient, iterations=self._cg_iterations, damping=self._cg_damping
        )
        # With the damping in it, and so a bit shorter; never a division by what is all but 0.
        length = float(solution.x @ solution.product)
        if not 0 < length < float("inf"):
            return solution.x, f"there is no direction to step in: {solution.reason}"
        step = solution.x * -((2 * self.max_kl / length) ** 0.5)
        if not step.isfinite().all():
            return step, "the step is not finite"
        return step, ""

    def _curvature_times(self, point: Point, flat: Tensor) -> Tensor:
        pre_weight = 0.0 if self.max_pre_kl is None else self.max_kl / self.max_pre_kl
        is_exact = self.curvature == "exact"
        return curvature_times(
            point,
            self._layout,
            flat,
            is_exact=is_exact,
            pre_weight=pre_weight,
            for_each=self._for_each,
        )

    def _line_search(self, point: Point, step: Tensor, report: UpdateReport) -> UpdateReport:
        """Shorten the step until it is accepted; the policy is written to only then."""
        theta = self._theta()
        why = ""
        for tries in range(self._line_search_steps):
            moved = self._layout.moved(theta, step * self._line_search_ratio**tries)
            loss, kl, pre_kl = self._evaluated(point, moved)
            report = replace(report, loss_after=loss, kl=kl, pre_kl=pre_kl, backtracks=tries)
            why = self._refused(point.loss, loss, kl, pre_kl)
            if not why:
                self._move_to(moved)
                return replace(report, accepted=True)
        reason = f"no step was accepted in {self._line_search_steps} tries, the last since {why}"
        return replace(report, reason=reason)

    def _refused(self, loss_before: float, loss: float, kl: float, pre_kl: float) -> str:
        """Why a step is not taken; "" if it is."""
        if not all(abs(number) < float("inf") for number in (loss, kl, pre_kl)):
            return f"a number is not finite (loss {loss:.3g}, KL {kl:.3g}, pre-KL {pre_kl:.3g})"
        if loss >= loss_before:
            return f"the loss did not fall: {loss:.6g} from {loss_before:.6g}"
        if kl > self.max_kl:
            return f"the KL divergence {kl:.3g} is above {self.max_kl:g}"
        if self.max_pre_kl is not None and pre_kl > self.max_pre_kl:
            return f"the KL divergence before adaptation {pre_kl:.3g} is above {self.max_pre_kl:g}"
        return ""

    def _evaluated(self, point: Point, theta: Params) -> tuple[float, float, float]:
        """Return loss, KL and KL before adaptation at other parameters: means over tasks."""

        def figures(part: LinearizedGroup) -> Tensor:
            group = part.group
            points = adapted(
                self.policy,
                group.spread(theta),
                group.phases[:-1],
                self.step_sizes,
                self.objective,
            )
            with torch.no_grad():
                return self._figures(part, points)

        try:
            totals = torch.stack(self._for_each(figures, point.parts)).sum(0)
        except ValueError:
            # A policy whose distributions validate their arguments refuses NaN this way.
            return (float("nan"),) * 3
        loss, kl, pre_kl = (totals / point.num_tasks).tolist()
        return loss, kl, pre_kl

    def _figures(self, part: LinearizedGroup, points: Sequence[Params]) -> Tensor:
        """Sums over the group's tasks, shape `(3,)`."""
        phases = part.group.phases
        pre, post = (self._distribution(phases[k], points[k]) for k in (0, -1))
        loss = likelihood_ratio_loss(post, phases[-1])
        if self.exploration:
            for phase, params in zip(phases[:-1], points, strict=False):
                distribution = self._distribution(phase, params)
                loss = loss + self._exploration_loss(distribution, phase, part.credit)
        kl = mean_kl(part.old_post, post, phases[-1].mask).sum()
        pre_kl = mean_kl(part.old_pre, pre, phases[0].mask).sum()
        return torch.stack([loss, kl, pre_kl]).double().cpu()

    def _exploration_loss(self, distribution: Distribution, phase: Phase, credit: Tensor) -> Tensor:
        """E-MAML's term, summed over tasks: credit for the return after adaptation."""
        log_probs = masked_mean(distribution.log_prob(phase.actions), phase.mask)
        return -self.exploration * (credit * log_probs).sum()
