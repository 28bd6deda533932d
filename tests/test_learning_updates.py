"""Outer updates: every learner's guards, and each learner against a plain implementation.

Rows of the fault list in MAMLRL.md 3.3 that fail here when put back: 9 (who drew the actions is
never checked), 11 (a gradient of 0), 12 (a line search that
leaves NaN, or does not say why it gave up), 13 (adaptation repeated for every product), 14 (the
order of tasks matters), 19 (the policy before adaptation runs away unseen).
"""

import copy
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from learning_cases import (
    PlainPolicy,
    draw_tasks,
    flat,
    make_policy,
    own_params,
    plain_adapted,
    plain_outer_kl,
    plain_outer_loss,
    unflat,
    valid_rows,
)
from torch import Tensor, nn
from torch.distributions import Cauchy, Distribution, Independent, Normal, kl_divergence

from asyncmaml.errors import ConfigurationError, LearningError, OffPolicyError, PolicyError
from asyncmaml.learning import chain, curvature
from asyncmaml.learning.groups import group_tasks
from asyncmaml.learning.learner import MetaLearner
from asyncmaml.learning.learners import LEARNERS, make_learner
from asyncmaml.learning.maml_trpo import MAMLTRPO
from asyncmaml.learning.mlp import Params
from asyncmaml.learning.phases import Phase
from asyncmaml.learning.promp import ProMP
from asyncmaml.learning.reptile import Reptile

RATES = (0.3, 0.2)
EVERY_LEARNER = pytest.mark.parametrize("name", LEARNERS)


@pytest.fixture(autouse=True)
def same_numbers_on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def learner_and_tasks(
    name: str, *, dtype: torch.dtype = torch.float64, kind: str = "normal", **options: Any
) -> tuple[MetaLearner, list[tuple[Phase, ...]]]:
    torch.manual_seed(0)
    policy = make_policy(kind, dtype)
    learner = make_learner(name, policy, step_sizes=RATES, **options)
    return learner, draw_tasks(policy, RATES, objective=learner.objective)


def with_phase(
    tasks: Sequence[Sequence[Phase]], task: int, index: int, **changes: Any
) -> list[tuple[Phase, ...]]:
    """The tasks with one phase changed."""
    changed = [list(phases) for phases in tasks]
    changed[task][index] = replace(changed[task][index], **changes)
    return [tuple(phases) for phases in changed]


@torch.no_grad()
def drawn_by(policy: nn.Module, tasks: Sequence[Sequence[Phase]]) -> list[tuple[Phase, ...]]:
    """The tasks as if the policy itself had drawn the actions of all phases."""

    def relabelled(phase: Phase) -> Phase:
        log_probs = policy(phase.observations).log_prob(phase.actions)
        return replace(phase, log_probs=torch.where(phase.mask > 0, log_probs, 0.0))

    return [tuple(map(relabelled, phases)) for phases in tasks]


def is_untouched(learner: MetaLearner, before: Params) -> bool:
    after = own_params(learner.policy)
    return all(torch.equal(after[name], before[name]) for name in before)


# ---- what every learner keeps to ----


@EVERY_LEARNER
@pytest.mark.parametrize("kind", ["categorical", "normal", "multi"])
def test_an_accepted_update_moves_the_policy_and_reports_finite_figures(
    name: str, kind: str
) -> None:
    learner, tasks = learner_and_tasks(name, kind=kind)
    before = own_params(learner.policy)
    report = learner.update(tasks)
    assert (report.accepted, report.reason, report.skipped_tasks) == (True, "", 0)
    assert not is_untouched(learner, before)
    assert all(math.isfinite(value) for value in report.scalars().values())
    assert report.loss_after < report.loss_before
    assert report.kl > 0
    assert report.pre_kl > 0


@EVERY_LEARNER
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_an_update_is_the_same_bit_for_bit_and_keeps_the_dtype(
    name: str, dtype: torch.dtype
) -> None:
    results = []
    for _ in range(2):
        learner, tasks = learner_and_tasks(name, dtype=dtype)
        report = learner.update(tasks)
        results.append((report, own_params(learner.policy)))
    assert results[0][0] == results[1][0]
    for parameter, value in results[0][1].items():
        assert value.dtype is dtype
        assert torch.equal(value, results[1][1][parameter])


@EVERY_LEARNER
def test_the_order_of_tasks_changes_nothing_but_rounding(name: str) -> None:
    """Fault 14."""
    one, tasks = learner_and_tasks(name)
    other, _ = learner_and_tasks(name)
    one.update(tasks)
    other.update(tasks[::-1])
    torch.testing.assert_close(
        own_params(one.policy), own_params(other.policy), rtol=1e-9, atol=1e-11
    )


@EVERY_LEARNER
@pytest.mark.parametrize("index", [0, 1, 2])
def test_actions_drawn_by_other_parameters_are_detected(name: str, index: int) -> None:
    """Fault 9: as if shared parameters had moved between sampling and learning."""
    learner, tasks = learner_and_tasks(name, dtype=torch.float32)
    off = tasks[1][index].log_probs + 1e-3 * torch.randn_like(tasks[1][index].log_probs)
    before = own_params(learner.policy)
    with pytest.raises(OffPolicyError, match=f"actions of phase {index} were not drawn"):
        learner.update(with_phase(tasks, 1, index, log_probs=off))
    assert is_untouched(learner, before)


@EVERY_LEARNER
def test_parameters_that_moved_since_sampling_are_detected(name: str) -> None:
    """Fault 9."""
    learner, tasks = learner_and_tasks(name, dtype=torch.float32)
    with torch.no_grad():
        next(learner.policy.parameters()).add_(1e-2)
    with pytest.raises(OffPolicyError, match="sample with the current parameters"):
        learner.update(tasks)


def test_one_action_that_the_policy_did_not_draw_is_detected_among_many() -> None:
    """Fault 9: the mean over 10,000 steps would not show it."""
    policy = make_policy("normal", torch.float32)
    tasks = draw_tasks(policy, (0.1,), num_tasks=1, lengths=lambda task: [100] * 100)
    off = tasks[0][1].log_probs.clone()
    off[3, 4] += 0.5
    learner = MAMLTRPO(policy)
    with pytest.raises(OffPolicyError, match=r"off 1 by .* at most, wanted 0.0001 and 0.01"):
        learner.update(with_phase(tasks, 0, 1, log_probs=off))
    learner.ratio_tolerance = 1.0
    assert learner.update(with_phase(tasks, 0, 1, log_probs=off)).gradient_norm > 0


@EVERY_LEARNER
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 2])
def test_a_task_that_is_not_finite_is_left_out_and_counted(
    name: str, bad: float, index: int
) -> None:
    learner, tasks = learner_and_tasks(name)
    expected, _ = learner_and_tasks(name)
    expected.update([tasks[0], tasks[2]])
    rewards = torch.full_like(tasks[1][index].rewards, bad)
    report = learner.update(with_phase(tasks, 1, index, rewards=rewards, advantages=rewards))
    assert (report.accepted, report.skipped_tasks) == (True, 1)
    assert report.reason == (
        f"1 of 3 tasks left out, first task 1, phase {index}: advantages are not finite"
    )
    assert is_untouched(learner, own_params(expected.policy))


@EVERY_LEARNER
def test_without_a_task_left_nothing_moves_and_the_report_says_why(name: str) -> None:
    learner, tasks = learner_and_tasks(name)
    before = own_params(learner.policy)
    empty = with_phase(tasks[:1], 0, 1, mask=torch.zeros_like(tasks[0][1].mask))
    report = learner.update(empty)
    assert (report.accepted, report.skipped_tasks) == (False, 1)
    assert report.reason == (
        "no task to learn from: 1 of 1 tasks left out, first task 0, phase 1: no step was taken"
    )
    assert "none was given" in learner.update([]).reason
    assert is_untouched(learner, before)


@EVERY_LEARNER
@pytest.mark.parametrize("kind", ["categorical", "normal", "multi"])
def test_without_advantages_nothing_moves_and_the_report_says_why(name: str, kind: str) -> None:
    """Fault 11: all rewards equal."""
    learner, tasks = learner_and_tasks(name, kind=kind, dtype=torch.float32)
    before = own_params(learner.policy)
    state = copy.deepcopy(learner.state_dict())
    for task in range(len(tasks)):
        for index in range(3):
            phase = tasks[task][index]
            tasks = with_phase(tasks, task, index, advantages=torch.zeros_like(phase.advantages))
    # Without advantages the parameters stay where they are, and so are those of every phase.
    report = learner.update(drawn_by(learner.policy, tasks))
    assert not report.accepted
    assert report.gradient_norm == 0
    assert report.reason
    assert is_untouched(learner, before)
    torch.testing.assert_close(learner.state_dict(), state, rtol=0, atol=0)


@EVERY_LEARNER
def test_episodes_of_one_step_are_learned_from(name: str) -> None:
    policy = make_policy("categorical")
    learner = make_learner(name, policy, step_sizes=RATES)
    tasks = draw_tasks(
        policy, RATES, objective=learner.objective, lengths=lambda task: [1] * (3 + task)
    )
    assert learner.update(tasks).accepted


@EVERY_LEARNER
def test_a_task_with_another_number_of_phases_is_a_callers_mistake(name: str) -> None:
    learner, tasks = learner_and_tasks(name)
    for phases in (tasks[0][:1], (*tasks[0], tasks[0][0])):
        message = rf"task 0 brings {len(phases)} phases .* with 2 inner updates; give it 3"
        with pytest.raises(LearningError, match=message):
            learner.update([phases])


@EVERY_LEARNER
def test_learning_goes_on_bit_for_bit_from_a_state_that_went_through_a_file(name: str) -> None:
    straight, tasks = learner_and_tasks(name, dtype=torch.float32)
    straight.update(tasks)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed, _ = learner_and_tasks(name, dtype=torch.float32)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert is_untouched(resumed, own_params(straight.policy))
    for learner in (straight, resumed):
        again = draw_tasks(learner.policy, RATES, objective=learner.objective, seed=1)
        assert learner.update(again).accepted
    assert is_untouched(resumed, own_params(straight.policy))
    torch.testing.assert_close(straight.state_dict(), resumed.state_dict(), rtol=0, atol=0)


@EVERY_LEARNER
def test_a_state_does_not_change_with_the_learner_and_another_kind_is_refused(name: str) -> None:
    learner, tasks = learner_and_tasks(name)
    state = learner.state_dict()
    kept = copy.deepcopy(state)
    learner.update(tasks)
    torch.testing.assert_close(state, kept, rtol=0, atol=0)
    with pytest.raises(LearningError, match="this is no state of a"):
        learner.load_state_dict({"policy": {}})


@EVERY_LEARNER
def test_what_the_sampler_gets_has_no_graph_and_steps_by_the_updates_own_rate(name: str) -> None:
    learner, tasks = learner_and_tasks(name)
    theta = own_params(learner.policy)
    first = learner.adapt(tasks[0][0])
    expected = plain_adapted(
        learner.policy,
        theta,
        tasks[0][:1],
        RATES[:1],
        learner.objective,
    )[-1]
    torch.testing.assert_close(first, expected)
    second = learner.adapt(tasks[0][1], first, update=1)
    by_hand = learner.adapt(tasks[0][1], first, step_size=RATES[1])
    for parameter, value in second.items():
        assert not value.requires_grad
        assert torch.equal(value, by_hand[parameter])
    assert is_untouched(learner, theta)


def test_an_adaptation_to_nothing_or_to_infinity_is_refused() -> None:
    learner, tasks = learner_and_tasks("maml-trpo")
    phase = tasks[0][0]
    with pytest.raises(LearningError, match="advantages are not finite; leave the task out"):
        learner.adapt(replace(phase, advantages=phase.advantages * math.nan))
    with pytest.raises(LearningError, match="take a smaller step size"):
        learner.adapt(phase, step_size=math.inf)


@EVERY_LEARNER
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_sizes": ()}, r"step_sizes is \(\); wanted one finite number of at least 0"),
        ({"step_sizes": (0.1, math.nan)}, "step_sizes is .*nan.*; wanted one finite number"),
        ({"step_sizes": "0.1"}, "step_sizes is '0.1'; wanted one finite number"),
        ({"objective": "lvc"}, "objective is 'lvc'; wanted one of dice, likelihood_ratio"),
        ({"objective": ["dice"]}, "objective is .*; wanted one of dice, likelihood_ratio"),
        ({"gae_lambda": 1.5}, "gae_lambda is 1.5; wanted a number between 0 and 1"),
        ({"gae_lambda": "1"}, "gae_lambda is '1'; wanted a number between 0 and 1"),
        ({"bootstrap_truncated": "no"}, "bootstrap_truncated is 'no'; wanted true or false"),
        ({"stack_below_rows": 2.9}, "stack_below_rows is 2.9; wanted a whole number"),
        ({"tau": 1.0}, "does not take these options: .*tau"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_learner(name, make_policy("normal"), **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("maml-trpo", {"max_kl": 0.0}),
        ("maml-trpo", {"max_pre_kl": -1.0}),
        ("maml-trpo", {"curvature": "fast"}),
        ("maml-trpo", {"max_kl": None}),
        ("maml-trpo", {"first_order": "no"}),
        ("maml-trpo", {"cg_iterations": 0}),
        ("maml-trpo", {"cg_iterations": 2.9}),
        ("maml-trpo", {"cg_damping": -1e-5}),
        ("maml-trpo", {"line_search_steps": 0}),
        ("maml-trpo", {"line_search_steps": 2.9}),
        ("maml-trpo", {"line_search_steps": True}),
        ("maml-trpo", {"line_search_ratio": 1.0}),
        ("maml-trpo", {"exploration": math.inf}),
        ("promp", {"learning_rate": 0.0}),
        ("promp", {"clip": math.nan}),
        ("promp", {"epochs": 0}),
        ("promp", {"epochs": 2.9}),
        ("promp", {"first_order": 1}),
        ("promp", {"inner_kl": -1.0}),
        ("reptile", {"outer_step_size": 1.5}),
        ("reptile", {"outer_step_size": "0.1"}),
        ("ppo", {"learner": 1}),
    ],
)
def test_a_learners_own_options_are_named_when_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))} is .*; wanted "):
        make_learner(name, make_policy("normal"), **options)


def test_a_policy_of_an_unknown_distribution_is_refused() -> None:
    class CauchyPolicy(PlainPolicy):
        def forward(self, observations: Tensor) -> Distribution:
            cauchy = Cauchy(self.network(observations), self.log_std.exp())
            return Independent(cauchy, 1)

    policy = CauchyPolicy()
    _, tasks = learner_and_tasks("maml-trpo", dtype=torch.float32)
    learner = MAMLTRPO(policy, step_sizes=(0.0,))
    with pytest.raises(PolicyError, match="a learner knows Normal, Categorical"):
        learner.update(drawn_by(policy, [phases[:2] for phases in tasks]))


# ---- MAML-TRPO ----


def test_a_trpo_step_is_that_of_a_plain_implementation() -> None:
    """Solve (H + damping) x = g by torch.linalg, scale, backtrack: by definition."""
    learner, tasks = learner_and_tasks("maml-trpo", cg_iterations=200, kind="categorical")
    policy = learner.policy
    theta = own_params(policy)
    at = flat(theta, policy)

    def loss(vector: Tensor) -> Tensor:
        return plain_outer_loss(policy, unflat(vector, policy), tasks, RATES, "log_likelihood")

    def kl(vector: Tensor) -> Tensor:
        return plain_outer_kl(
            policy,
            unflat(vector, policy),
            theta,
            tasks,
            RATES,
            "log_likelihood",
        )

    gradient = torch.func.grad(loss)(at)
    damped = torch.func.jacrev(torch.func.grad(kl))(at) + 1e-5 * torch.eye(len(at))
    direction = torch.linalg.solve(damped, gradient)
    step = direction * (2 * 0.01 / (direction @ damped @ direction)).sqrt()
    tries = 0
    while loss(at - step) >= loss(at) or kl(at - step) > 0.01:
        step, tries = 0.8 * step, tries + 1
    report = learner.update(tasks)
    assert report.backtracks == tries
    assert report.loss_after == pytest.approx(float(loss(at - step)), rel=1e-4)
    assert report.kl == pytest.approx(float(kl(at - step)), rel=1e-4)
    torch.testing.assert_close(flat(own_params(policy), policy), at - step, rtol=1e-4, atol=1e-5)
    after = own_params(policy)
    divergences = [
        float(kl_divergence(policy(rows, theta), policy(rows, after)).mean())
        for rows in (valid_rows(phases[0])[0] for phases in tasks)
    ]
    assert report.pre_kl == pytest.approx(sum(divergences) / len(tasks), rel=1e-6)


@pytest.mark.parametrize("max_kl", [3.0, 1e6, 1e30])
def test_a_refused_line_search_leaves_the_parameters_alone_and_says_why(max_kl: float) -> None:
    """Fault 12: so far away that the quadratic model says nothing any more."""
    learner, tasks = learner_and_tasks(
        "maml-trpo", dtype=torch.float32, max_kl=max_kl, line_search_steps=2
    )
    before = own_params(learner.policy)
    report = learner.update(tasks)
    assert not report.accepted
    assert report.backtracks == 1
    assert re.match("no step was accepted in 2 tries, the last since [^ ]", report.reason)
    assert is_untouched(learner, before)


@pytest.mark.parametrize(
    ("loss", "kl", "pre_kl", "why"),
    [
        (math.nan, 0.0, 0.0, "a number is not finite (loss nan, KL 0, pre-KL 0)"),
        (-1.0, math.inf, 0.0, "a number is not finite (loss -1, KL inf, pre-KL 0)"),
        (-1.0, 0.0, math.nan, "a number is not finite (loss -1, KL 0, pre-KL nan)"),
        (0.5, 0.0, 0.0, "the loss did not fall: 0.5 from 0.5"),
        (0.4, 0.02, 0.0, "the KL divergence 0.02 is above 0.01"),
        (0.4, 0.01, 0.3, "the KL divergence before adaptation 0.3 is above 0.2"),
        (0.4, 0.01, 0.2, ""),
    ],
)
def test_a_step_is_taken_only_if_the_loss_falls_within_both_bounds(
    loss: float, kl: float, pre_kl: float, why: str
) -> None:
    """Fault 12."""
    learner = MAMLTRPO(make_policy("normal"), max_kl=0.01, max_pre_kl=0.2)
    assert learner._refused(0.5, loss, kl, pre_kl) == why


class ValidatingPolicy(PlainPolicy):
    """A policy whose distributions raise ValueError over NaN, as torch's do unless told not to."""

    def forward(self, observations: Tensor) -> Distribution:
        normal = Normal(self.network(observations), self.log_std.exp(), validate_args=True)
        return Independent(normal, 1, validate_args=True)


def test_a_huge_step_is_refused_even_where_distributions_validate() -> None:
    """Fault 12."""
    torch.manual_seed(0)
    policy = ValidatingPolicy()
    theta = own_params(policy)
    _, tasks = learner_and_tasks("maml-trpo", dtype=torch.float32)
    learner = MAMLTRPO(policy, step_sizes=(0.0,), max_kl=1e30, line_search_steps=2)
    report = learner.update(drawn_by(policy, [phases[:2] for phases in tasks]))
    assert not report.accepted
    assert "a number is not finite" in report.reason
    assert is_untouched(learner, theta)


def test_adaptation_is_linearised_once_for_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 13: 10 products and some trial steps, and 3 tasks with 2 updates each."""
    calls = []
    original = curvature.hessian_of

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(chain, "hessian_of", counted)
    learner, tasks = learner_and_tasks("maml-trpo", stack_below_rows=0)
    learner.update(tasks)
    assert len(calls) == 3 * 2


def test_cheap_curvature_takes_another_direction_within_the_same_bounds() -> None:
    exact, tasks = learner_and_tasks("maml-trpo")
    cheap, _ = learner_and_tasks("maml-trpo", curvature="cheap")
    exact_report, cheap_report = exact.update(tasks), cheap.update(tasks)
    assert cheap_report.accepted
    assert cheap_report.kl <= 0.01
    assert cheap_report.gradient_norm == exact_report.gradient_norm
    assert not is_untouched(cheap, own_params(exact.policy))


def test_the_divergence_before_adaptation_is_bounded_when_asked() -> None:
    """Fault 19."""
    free, tasks = learner_and_tasks("maml-trpo")
    free_report = free.update(tasks)
    bound = free_report.pre_kl / 4
    bounded, _ = learner_and_tasks("maml-trpo", max_pre_kl=bound)
    report = bounded.update(tasks)
    assert report.accepted
    assert report.pre_kl <= bound < free_report.pre_kl


def test_the_bound_before_adaptation_is_in_the_curvature_and_not_in_the_search_alone() -> None:
    """Fault 19: H + max_kl / max_pre_kl times the Hessian of the KL before adaptation."""
    learner, tasks = learner_and_tasks("maml-trpo", max_pre_kl=0.002)
    assert isinstance(learner, MAMLTRPO)
    policy, theta = learner.policy, own_params(learner.policy)

    def kl(vector: Tensor) -> Tensor:
        new = unflat(vector, policy)
        post = plain_outer_kl(policy, new, theta, tasks, RATES, "log_likelihood")
        # Without an update the "adapted" policy is the one before adaptation.
        pre = plain_outer_kl(policy, new, theta, [phases[:1] for phases in tasks], (), "dice")
        return post + 0.01 / 0.002 * pre

    at = flat(theta, policy)
    vector = torch.randn_like(at)
    expected = torch.func.grad(lambda point: torch.func.grad(kl)(point) @ vector)(at)
    for stack_below_rows in (0, 500):
        point = learner._linearized(group_tasks(tasks, stack_below_rows=stack_below_rows))
        torch.testing.assert_close(learner._curvature_times(point, vector), expected)


def test_exploration_adds_the_gradient_of_e_maml() -> None:
    """- c_i <log pi> of both phases before the last, c_i the normalised return after it."""
    learner, tasks = learner_and_tasks("maml-trpo", exploration=0.5)
    plain, _ = learner_and_tasks("maml-trpo")
    assert isinstance(learner, MAMLTRPO)
    assert isinstance(plain, MAMLTRPO)
    policy = learner.policy
    returns = torch.tensor([phases[-1].mean_return for phases in tasks])
    credit = (returns - returns.mean()) / returns.std(correction=0)

    def exploration(vector: Tensor) -> Tensor:
        terms = []
        for phases, weight in zip(tasks, credit, strict=True):
            points = plain_adapted(
                policy,
                unflat(vector, policy),
                phases[:-1],
                RATES,
                "log_likelihood",
            )
            for phase, params in zip(phases[:-1], points, strict=False):
                observations, actions, *_ = valid_rows(phase)
                log_probs = policy(observations, params).log_prob(actions)
                terms.append(-0.5 * weight * log_probs.mean() / len(tasks))
        return torch.stack(terms).sum()

    for stack_below_rows in (0, 500):
        points = [
            one._linearized(group_tasks(tasks, stack_below_rows=stack_below_rows))
            for one in (learner, plain)
        ]
        expected = torch.func.grad(exploration)(flat(own_params(policy), policy))
        torch.testing.assert_close(
            points[0].gradient - points[1].gradient, expected, rtol=1e-6, atol=1e-9
        )


# ---- ProMP and Reptile against plain implementations ----


def test_promp_is_adam_on_the_clipped_loss_with_the_penalty() -> None:
    learner, tasks = learner_and_tasks("promp", epochs=3, inner_kl=0.1, learning_rate=0.05)
    assert isinstance(learner, ProMP)
    policy = learner.policy
    theta = own_params(policy)
    old = [plain_adapted(policy, theta, phases[:-1], RATES, "likelihood_ratio") for phases in tasks]

    def loss(vector: Tensor) -> Tensor:
        total = vector.new_zeros(())
        for phases, old_points in zip(tasks, old, strict=True):
            points = plain_adapted(
                policy,
                unflat(vector, policy),
                phases[:-1],
                RATES,
                "likelihood_ratio",
            )
            observations, actions, advantages, log_probs = valid_rows(phases[-1])
            ratio = (policy(observations, points[-1]).log_prob(actions) - log_probs).exp()
            clipped = ratio.clamp(0.7, 1.3)
            total = total - torch.minimum(ratio * advantages, clipped * advantages).mean()
            for phase, new, before in zip(phases[:-1], points, old_points, strict=False):
                rows = valid_rows(phase)[0]
                total = total + 0.1 * kl_divergence(policy(rows, before), policy(rows, new)).mean()
        return total / len(tasks)

    vector = flat(theta, policy).clone().requires_grad_()
    adam = torch.optim.Adam([vector], lr=0.05)
    before = float(loss(vector.detach()))
    for _ in range(3):
        vector.grad = torch.func.grad(loss)(vector.detach())
        adam.step()
    report = learner.update(tasks)
    torch.testing.assert_close(
        flat(own_params(policy), policy), vector.detach(), rtol=1e-6, atol=1e-8
    )
    assert report.loss_before == pytest.approx(before, rel=1e-6, abs=1e-12)
    assert report.loss_after == pytest.approx(float(loss(vector.detach())), rel=1e-5)


def test_promp_undoes_all_epochs_when_one_is_not_finite() -> None:
    learner, tasks = learner_and_tasks("promp", dtype=torch.float32, learning_rate=1e30)
    before, state = own_params(learner.policy), copy.deepcopy(learner.state_dict())
    report = learner.update(tasks)
    assert not report.accepted
    assert "not finite" in report.reason
    assert is_untouched(learner, before)
    torch.testing.assert_close(learner.state_dict(), state, rtol=0, atol=0)


def test_reptile_goes_a_share_of_the_way_to_the_mean_of_the_adapted() -> None:
    learner, tasks = learner_and_tasks("reptile", outer_step_size=0.25)
    policy = learner.policy
    theta = own_params(policy)
    ends = torch.stack(
        [
            flat(plain_adapted(policy, theta, phases[:-1], RATES, "log_likelihood")[-1], policy)
            for phases in tasks
        ]
    )
    at = flat(theta, policy)
    expected = at + 0.25 * (ends.mean(0) - at)
    report = learner.update(tasks)
    torch.testing.assert_close(flat(own_params(policy), policy), expected)
    assert report.gradient_norm == pytest.approx(float((ends.mean(0) - at).norm()))


def test_reptile_needs_no_episodes_after_the_last_update() -> None:
    with_last, tasks = learner_and_tasks("reptile")
    without, _ = learner_and_tasks("reptile")
    with_last.update(tasks)
    report = without.update([phases[:-1] for phases in tasks])
    assert report.accepted
    assert math.isnan(report.loss_after)
    assert math.isnan(report.kl)
    assert report.pre_kl > 0
    assert is_untouched(without, own_params(with_last.policy))
    assert isinstance(without, Reptile)
