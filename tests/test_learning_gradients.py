"""Meta-gradients and curvature against closed forms, `torch.func` and finite differences, float64.

Rows of the fault list in MAMLRL.md 3.3 that fail here when put back: 1 (log-likelihood taken for
exact), 2 (episodes weighed alike), 6 and 7 (mask and direction of KL), 10 (mean over numbers), 13
(a product that depends on what was kept), 16 (first order that is not), 20 (mean over tasks in
the inner loss), 21 (one rate for all updates), 24 (the floor of a normal policy's spread).
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from learning_cases import (
    KINDS,
    PlainPolicy,
    draw_tasks,
    flat,
    make_policy,
    own_params,
    plain_adapted,
    plain_outer_kl,
    plain_outer_loss,
    unflat,
)
from torch import Tensor
from torch.distributions import Distribution

from asyncmaml.learning.adaptation import adapt, adapted
from asyncmaml.learning.chain import AdaptationChain
from asyncmaml.learning.curvature import fisher_of, hessian_of
from asyncmaml.learning.distributions import mean_kl
from asyncmaml.learning.maml_trpo import MAMLTRPO
from asyncmaml.learning.mlp import NONLINEARITIES
from asyncmaml.learning.mlp_products import is_plain_mlp
from asyncmaml.learning.objectives import OBJECTIVES, likelihood_ratio
from asyncmaml.learning.phases import Phase, stack_phases
from asyncmaml.learning.policies import CategoricalMLPPolicy, NormalMLPPolicy
from asyncmaml.learning.products import AutogradFisher, AutogradHessian

RATES = (0.3, 0.2)


@pytest.fixture(autouse=True)
def same_numbers_on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def gradient_and_curvature(
    learner: MAMLTRPO, tasks: Sequence[Sequence[Phase]]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The meta-gradient, and products with H."""
    groups, _ = learner._usable(tasks, learner.num_updates + 1)
    point = learner._linearized(groups)
    return point.gradient, lambda vector: learner._curvature_times(point, vector)


EVERY_CASE = [
    pytest.param(kind, objective, num_updates, id=f"{kind}-{objective}-{num_updates}")
    for kind in KINDS
    for objective in OBJECTIVES
    for num_updates in (1, 2)
]


@pytest.mark.parametrize(("kind", "objective", "num_updates"), EVERY_CASE)
def test_gradient_and_curvature_are_those_of_torch_func_on_unpadded_rows(
    kind: str, objective: str, num_updates: int
) -> None:
    """Of single tasks and of stacked ones."""
    policy, rates = make_policy(kind), RATES[:num_updates]
    tasks = draw_tasks(policy, rates, objective=objective)
    theta = own_params(policy)

    def loss(vector: Tensor) -> Tensor:
        return plain_outer_loss(policy, unflat(vector, policy), tasks, rates, objective)

    def kl(vector: Tensor) -> Tensor:
        return plain_outer_kl(policy, unflat(vector, policy), theta, tasks, rates, objective)

    at = flat(theta, policy)
    expected_gradient = torch.func.grad(loss)(at)
    vector = torch.randn_like(at)
    expected = torch.func.grad(lambda point: torch.func.grad(kl)(point) @ vector)(at)
    for stack_below_rows in (0, 500):
        learner = MAMLTRPO(
            policy, step_sizes=rates, objective=objective, stack_below_rows=stack_below_rows
        )
        gradient, times = gradient_and_curvature(learner, tasks)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(times(vector), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("kind", "objective", "num_updates"), EVERY_CASE)
def test_gradient_and_curvature_are_finite_differences_of_loss_and_of_kls_gradient(
    kind: str, objective: str, num_updates: int
) -> None:
    """The loss is the one that the line search sees, so that both speak of one function."""
    policy, rates = make_policy(kind), RATES[:num_updates]
    tasks = draw_tasks(policy, rates, objective=objective, num_tasks=1)
    learner = MAMLTRPO(policy, step_sizes=rates, objective=objective)
    gradient, times = gradient_and_curvature(learner, tasks)
    point = learner._linearized(learner._usable(tasks, num_updates + 1)[0])
    theta = own_params(policy)
    at, small = flat(theta, policy), 1e-6
    vector = torch.randn_like(at)
    ahead, behind = (
        learner._evaluated(point, unflat(at + sign * small * vector, policy))[0] for sign in (1, -1)
    )
    assert float(gradient @ vector) == pytest.approx((ahead - behind) / (2 * small), rel=1e-6)

    def kl(moved: Tensor) -> Tensor:
        return plain_outer_kl(policy, unflat(moved, policy), theta, tasks, rates, objective)

    kl_gradient = torch.func.grad(kl)
    difference = (kl_gradient(at + small * vector) - kl_gradient(at - small * vector)) / (2 * small)
    error = (times(vector) - difference).norm() / difference.norm()
    assert float(error) < 1e-6


def test_curvature_is_that_of_the_double_backward_graph() -> None:
    policy = make_policy("normal")
    tasks = draw_tasks(policy, (0.3,))
    _, times = gradient_and_curvature(MAMLTRPO(policy, step_sizes=(0.3,)), tasks)
    theta = dict(policy.named_parameters())
    divergences = []
    for pre, post in tasks:
        params = adapt(policy, theta, pre, step_size=0.3)
        new = policy(post.observations, params)
        old = policy(post.observations, {name: value.detach() for name, value in params.items()})
        divergences.append(mean_kl(old, new, post.mask))
    own = list(theta.values())
    gradient = torch.autograd.grad(torch.stack(divergences).mean(), own, create_graph=True)
    flat_gradient = torch.cat([part.reshape(-1) for part in gradient])
    vector = torch.randn_like(flat_gradient)
    product = torch.autograd.grad(flat_gradient @ vector, own)
    torch.testing.assert_close(times(vector), torch.cat([part.reshape(-1) for part in product]))


def test_a_product_does_not_depend_on_the_products_before_it() -> None:
    """Fault 13: the graph is built once and used by every product."""
    policy = make_policy("normal")
    tasks = draw_tasks(policy, RATES, objective="dice")
    learner = MAMLTRPO(policy, step_sizes=RATES, objective="dice")
    _, kept = gradient_and_curvature(learner, tasks)
    vectors = torch.randn(3, flat(own_params(policy), policy).numel(), dtype=torch.float64)
    for vector in vectors:
        _, fresh = gradient_and_curvature(learner, tasks)
        assert torch.equal(kept(vector), fresh(vector))


# ---- closed forms ----

REWARDS = torch.tensor([0.1, 0.9, 0.4, 0.6, 0.2], dtype=torch.float64)
LOGITS = torch.tensor([0.3, -0.2, 0.5, 0.0, 0.1], dtype=torch.float64)


def arms_of(logits: Tensor, *, centred: bool = True) -> Phase:
    """Every arm once, weighed by its probability: means over rows are exact expectations."""
    probabilities = logits.softmax(0)
    advantages = REWARDS - (probabilities @ REWARDS if centred else 0)
    rows = (1, 5)
    return Phase(
        torch.zeros(*rows, 1, dtype=torch.float64),
        torch.arange(5).reshape(rows),
        torch.ones(rows, dtype=torch.float64),
        (5 * probabilities * advantages).reshape(rows),
        REWARDS.reshape(rows),
        logits.log_softmax(0).reshape(rows),
        0.0,
    )


def exact_gradient(logits: Tensor) -> Tensor:
    """Of J = sum pi r: pi_a (r_a - J)."""
    probabilities = logits.softmax(0)
    return probabilities * (REWARDS - probabilities @ REWARDS)


def exact_hessian(logits: Tensor) -> Tensor:
    """Of J: diag(g) - pi g^T - g pi^T, with g its gradient."""
    probabilities, gradient = logits.softmax(0), exact_gradient(logits)
    crossed = torch.outer(probabilities, gradient)
    return torch.diag(gradient) - crossed - crossed.T


def bandit_meta_gradient(
    objective: str, rates: Sequence[float], *, centred: bool = True, first_order: bool = False
) -> Tensor:
    """By the learner, with respect to the logits."""
    policy = CategoricalMLPPolicy(1, 5, hidden_sizes=()).double()
    with torch.no_grad():
        policy.get_parameter("layer1.bias").copy_(LOGITS)
    points = [LOGITS]
    for rate in rates:
        points.append(points[-1] + rate * exact_gradient(points[-1]))
    phases = [arms_of(logits, centred=centred) for logits in points]
    learner = MAMLTRPO(policy, step_sizes=rates, objective=objective, first_order=first_order)
    gradient, _ = gradient_and_curvature(learner, [phases])
    return -unflat(gradient, policy)["layer1.bias"]


@pytest.mark.parametrize("rates", [(0.7,), (0.7, 0.4)])
@pytest.mark.parametrize("objective", ["likelihood_ratio", "dice"])
def test_meta_gradient_of_the_bandit_is_the_closed_form(
    objective: str, rates: Sequence[float]
) -> None:
    """Fault 1: (I + alpha H(theta)) ... grad J(theta'), by hand."""
    points = [LOGITS]
    for rate in rates:
        points.append(points[-1] + rate * exact_gradient(points[-1]))
    expected = exact_gradient(points[-1])
    for rate, logits in zip(reversed(rates), reversed(points[:-1]), strict=True):
        expected = expected + rate * exact_hessian(logits) @ expected
    torch.testing.assert_close(
        bandit_meta_gradient(objective, rates), expected, rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("centred", [True, False], ids=["centred", "raw"])
@pytest.mark.parametrize("rates", [(0.7,), (0.7, 0.4)])
def test_meta_gradient_by_the_log_likelihood_is_the_closed_form_of_its_own_hessian(
    rates: Sequence[float], centred: bool
) -> None:
    """Fault 1: hess log pi is pi pi^T - diag(pi) for every arm, so E[A hess log pi] is E[A] that.

    E[A] is 0 with centred advantages, and J with raw rewards.
    """
    points = [LOGITS]
    for rate in rates:
        points.append(points[-1] + rate * exact_gradient(points[-1]))
    expected = exact_gradient(points[-1])
    for rate, logits in zip(reversed(rates), reversed(points[:-1]), strict=True):
        probabilities = logits.softmax(0)
        hessian = torch.outer(probabilities, probabilities) - torch.diag(probabilities)
        mean_advantage = 0.0 if centred else float(probabilities @ REWARDS)
        expected = expected + rate * mean_advantage * hessian @ expected
    torch.testing.assert_close(
        bandit_meta_gradient("log_likelihood", rates, centred=centred),
        expected,
        rtol=1e-12,
        atol=1e-15,
    )


def test_log_likelihood_sees_no_curvature_of_the_bandit() -> None:
    """Fault 1: with centred advantages it is first order, exactly; without, it is wrong."""
    first_order = bandit_meta_gradient("likelihood_ratio", (0.7,), first_order=True)
    torch.testing.assert_close(
        bandit_meta_gradient("log_likelihood", (0.7,)), first_order, rtol=1e-12, atol=1e-15
    )
    exact = bandit_meta_gradient("likelihood_ratio", (0.7,))
    assert float((exact - first_order).norm() / exact.norm()) > 0.01
    raw = bandit_meta_gradient("log_likelihood", (0.7,), centred=False)
    assert float((raw - exact).norm()) > 1.5 * float((first_order - exact).norm())


def test_over_two_steps_dice_has_the_true_hessian_and_the_likelihood_ratio_has_not() -> None:
    """All 4 trajectories of two steps with two actions each, weighed by their probability."""
    policy = CategoricalMLPPolicy(2, 2, hidden_sizes=()).double()
    theta = own_params(policy)
    rewards = torch.tensor([[0.3, 1.0], [2.0, -1.0]], dtype=torch.float64)  # of the second step
    observations = torch.eye(2, dtype=torch.float64).unsqueeze(1).expand(2, 4, 2)
    actions = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])

    def probabilities(vector: Tensor) -> Tensor:
        log_probs: Tensor = policy(observations, unflat(vector, policy)).log_prob(actions)
        return log_probs.sum(0).exp()

    def gain(vector: Tensor) -> Tensor:
        return probabilities(vector) @ gains

    at = flat(theta, policy)
    gains = rewards[actions[0], actions[1]]
    true_hessian = torch.func.jacrev(torch.func.grad(gain))(at)
    weights = probabilities(at).detach() * gains * 8  # rewards-to-go of both steps; 8 rows
    phase = Phase(
        observations,
        actions,
        torch.ones(2, 4, dtype=torch.float64),
        weights.expand(2, 4),
        torch.zeros(2, 4, dtype=torch.float64),
        policy(observations).log_prob(actions).detach(),
        0.0,
    )

    def hessian_by(objective: str) -> Tensor:
        def loss(new: Distribution) -> Tensor:
            return OBJECTIVES[objective](new, phase)

        product = hessian_of(policy, theta, observations, loss)
        columns = []
        for unit in torch.eye(len(at), dtype=torch.float64):
            column = product.times(tuple(unflat(unit, policy).values()))
            columns.append(torch.cat([part.reshape(-1) for part in column]))
        return -torch.stack(columns)

    torch.testing.assert_close(hessian_by("dice"), true_hessian, rtol=1e-10, atol=1e-12)
    assert float((hessian_by("likelihood_ratio") - true_hessian).norm()) > 0.1


# ---- adaptation ----


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_are_those_unrolled_by_hand(kind: str, objective: str) -> None:
    """Fault 21: each update has its own phase and its own rate."""
    policy = make_policy(kind)
    (task,) = draw_tasks(policy, RATES, objective=objective, num_tasks=1)
    points = adapted(policy, own_params(policy), task[:-1], RATES, objective)
    expected = plain_adapted(policy, own_params(policy), task[:-1], RATES, objective)
    for point, one in zip(points, expected, strict=True):
        torch.testing.assert_close(flat(point, policy), flat(one, policy))
    swapped = adapted(policy, own_params(policy), task[:-1], RATES[::-1], objective)
    assert not torch.allclose(flat(swapped[-1], policy), flat(points[-1], policy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_stacked_tasks_adapt_as_each_does_alone(
    kind: str, objective: str, dtype: torch.dtype
) -> None:
    """Fault 20: with a mean over tasks each would take a third of its step."""
    policy = make_policy(kind, dtype)
    tasks = draw_tasks(policy, (0.3,), objective=objective)
    phase = stack_phases([pre for pre, _ in tasks])
    theta = own_params(policy)
    stacked_theta = {name: value.expand(3, *value.shape) for name, value in theta.items()}
    stacked = adapt(policy, stacked_theta, phase, step_size=0.3, objective=objective)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-10
    for index, (pre, _) in enumerate(tasks):
        alone = adapt(policy, theta, pre, step_size=0.3, objective=objective)
        for name, value in alone.items():
            torch.testing.assert_close(stacked[name][index], value, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_outer_update_is_the_same_for_stacked_and_for_single_tasks(
    kind: str, dtype: torch.dtype
) -> None:
    results = []
    for stack_below_rows in (0, 500):
        torch.manual_seed(0)
        policy = make_policy(kind, dtype, hidden_sizes=(8, 8))
        tasks = draw_tasks(policy, RATES, lengths=lambda task: (3, 4 + task, 2))
        learner = MAMLTRPO(policy, step_sizes=RATES, stack_below_rows=stack_below_rows)
        gradient, times = gradient_and_curvature(learner, tasks)
        results.append((gradient, times(gradient)))
    tolerance = 1e-6 if dtype is torch.float32 else 1e-10
    for one, other in zip(*results, strict=True):
        error = (one - other).norm() / one.norm()
        assert float(error) < tolerance


def test_a_second_order_adaptation_is_differentiable_and_a_first_order_one_is_the_identity() -> (
    None
):
    """Fault 16."""
    policy = make_policy("normal")
    (task,) = draw_tasks(policy, (0.3,), num_tasks=1)

    def pulled(first_order: bool) -> Tensor:
        theta = {name: value.requires_grad_() for name, value in own_params(policy).items()}
        moved = adapt(policy, theta, task[0], step_size=0.3, first_order=first_order)
        total = torch.stack([value.sum() for value in moved.values()]).sum()
        gradients = torch.autograd.grad(total, list(theta.values()))
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    assert torch.equal(pulled(first_order=True), torch.ones_like(pulled(first_order=True)))
    assert not torch.allclose(pulled(first_order=False), torch.ones_like(pulled(first_order=True)))


def test_first_order_takes_the_gradient_at_the_adapted_parameters_as_it_is() -> None:
    """Fault 16."""
    policy = make_policy("normal")
    tasks = draw_tasks(policy, RATES)
    first, _ = gradient_and_curvature(MAMLTRPO(policy, step_sizes=RATES, first_order=True), tasks)
    second, _ = gradient_and_curvature(MAMLTRPO(policy, step_sizes=RATES), tasks)
    expected = torch.zeros_like(first)
    for task in tasks:
        last = adapted(policy, own_params(policy), task[:-1], RATES, "log_likelihood")[-1]

        def loss(vector: Tensor, task: tuple[Phase, ...] = task) -> Tensor:
            return plain_outer_loss(policy, unflat(vector, policy), [task[-1:]], (), "dice")

        expected += torch.func.grad(loss)(flat(last, policy)) / len(tasks)
    torch.testing.assert_close(first, expected)
    assert not torch.allclose(first, second)


# ---- divergence, ratio, spread ----


def test_kl_is_from_old_to_new_summed_over_numbers_and_averaged_over_steps() -> None:
    """Faults 6 and 7, against a loop."""
    policy = make_policy("normal")
    (task,) = draw_tasks(policy, (0.3,), num_tasks=1)
    theta = own_params(policy)
    moved = {name: value + 0.1 * torch.randn_like(value) for name, value in theta.items()}
    old, new = (policy(task[0].observations, params) for params in (theta, moved))
    total, count = 0.0, 0
    for step, episode in task[0].mask.nonzero().tolist():
        old_mean, new_mean = old.base_dist.loc[step, episode], new.base_dist.loc[step, episode]
        old_std, new_std = old.base_dist.scale[step, episode], new.base_dist.scale[step, episode]
        for number in range(2):
            ratio = old_std[number] / new_std[number]
            distance = (old_mean[number] - new_mean[number]) / new_std[number]
            total += float((ratio**2 + distance**2 - 1) / 2 - ratio.log())
        count += 1
    assert float(mean_kl(old, new, task[0].mask)) == pytest.approx(total / count, rel=1e-10)
    assert float(mean_kl(new, old, task[0].mask)) != pytest.approx(total / count, rel=1e-2)
    assert float(mean_kl(old, old, task[0].mask)) == 0


def test_the_ratio_of_two_numbers_is_the_product_of_their_ratios() -> None:
    """Fault 10: with a mean over the numbers it would be the square root."""
    policy = make_policy("normal")
    (task,) = draw_tasks(policy, (0.3,), num_tasks=1)
    theta = own_params(policy)
    moved = {name: value + 0.1 * torch.randn_like(value) for name, value in theta.items()}
    old, new = (policy(task[0].observations, params).base_dist for params in (theta, moved))
    each = (new.log_prob(task[0].actions) - old.log_prob(task[0].actions)).exp()
    ratio = likelihood_ratio(policy(task[0].observations, moved), task[0])
    torch.testing.assert_close(ratio, torch.where(task[0].mask > 0, each.prod(-1), 1.0))


def test_a_spread_below_its_floor_has_no_gradient_and_no_curvature() -> None:
    """Fault 24: documented, and so it stays where an update carried it."""
    policy = NormalMLPPolicy(2, 2, (4,), "tanh", min_std=0.5).double()
    with torch.no_grad():
        policy.sigma.fill_(-3.0)
    tasks = draw_tasks(policy, (0.3,))
    gradient, times = gradient_and_curvature(MAMLTRPO(policy, step_sizes=(0.3,)), tasks)
    assert not unflat(gradient, policy)["sigma"].any()
    assert not unflat(times(torch.randn_like(gradient)), policy)["sigma"].any()


# ---- by hand and by autograd ----


@pytest.mark.parametrize("nonlinearity", sorted(NONLINEARITIES))
@pytest.mark.parametrize("kind", KINDS)
def test_products_by_hand_are_those_by_autograd(kind: str, nonlinearity: str) -> None:
    policy = make_policy(kind, hidden_sizes=(5, 4), nonlinearity=nonlinearity)
    assert is_plain_mlp(policy)
    tasks = draw_tasks(policy, (0.3,), objective="dice")
    pre = stack_phases([pre for pre, _ in tasks])
    for phase, axes in ((tasks[0][0], ()), (pre, (3,))):
        params = {
            name: (value + 0.3 * torch.randn(*axes, *value.shape, dtype=torch.float64))
            for name, value in own_params(policy).items()
        }
        vector = tuple(torch.randn_like(value) for value in params.values())

        def loss(new: Distribution, phase: Phase = phase) -> Tensor:
            return OBJECTIVES["dice"](new, phase)

        arguments = policy, params, phase.observations, loss
        by_hand, by_autograd = hessian_of(*arguments), AutogradHessian(*arguments)
        torch.testing.assert_close(by_hand.gradient, by_autograd.gradient)
        torch.testing.assert_close(by_hand.times(vector), by_autograd.times(vector))
        torch.testing.assert_close(
            fisher_of(policy, params, phase).times(vector),
            AutogradFisher(policy, params, phase).times(vector),
        )


def test_a_policy_that_takes_no_parameters_from_outside_is_learned_all_the_same() -> None:
    torch.manual_seed(0)
    plain, ours = PlainPolicy().double(), make_policy("normal")
    names = {"network.0": "layer1", "network.2": "mu"}
    with torch.no_grad():
        for theirs, own in names.items():
            for part in ("weight", "bias"):
                ours.get_parameter(f"{own}.{part}").copy_(plain.get_parameter(f"{theirs}.{part}"))
        ours.get_parameter("sigma").zero_()
    tasks = draw_tasks(ours, RATES)
    gradient, times = gradient_and_curvature(MAMLTRPO(ours, step_sizes=RATES), tasks)
    plain_gradient, plain_times = gradient_and_curvature(MAMLTRPO(plain, step_sizes=RATES), tasks)
    order = [("log_std", "sigma")] + [
        (f"{theirs}.{part}", f"{own}.{part}")
        for theirs, own in names.items()
        for part in ("weight", "bias")
    ]
    for product, plain_product in (
        (gradient, plain_gradient),
        (times(gradient), plain_times(plain_gradient)),
    ):
        ours_by_name, plain_by_name = unflat(product, ours), unflat(plain_product, plain)
        for theirs, own in order:
            torch.testing.assert_close(plain_by_name[theirs], ours_by_name[own])


def test_a_parameter_that_requires_no_gradient_is_left_out() -> None:
    policy = make_policy("normal")
    policy.get_parameter("sigma").requires_grad_(False)
    tasks = draw_tasks(policy, (0.3,))
    learner = MAMLTRPO(policy, step_sizes=(0.3,))
    before = own_params(policy)
    assert learner.update(tasks).accepted
    after = own_params(policy)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == before.keys() - {"sigma"}
    assert torch.equal(adapt(policy, after, tasks[0][0], step_size=1.0)["sigma"], before["sigma"])


def test_a_chain_pulls_back_what_depends_on_the_way_too() -> None:
    """pull(u, onto) is the gradient of u . theta_K + e . theta_1, here with K = 2."""
    policy = make_policy("categorical")
    (task,) = draw_tasks(policy, RATES, num_tasks=1)
    theta = own_params(policy)
    chain = AdaptationChain(
        policy, theta, task[:-1], RATES, objective="log_likelihood", first_order=False
    )
    ends, middles = (tuple(torch.randn_like(value) for value in theta.values()) for _ in range(2))

    def total(vector: Tensor) -> Tensor:
        points = plain_adapted(policy, unflat(vector, policy), task[:-1], RATES, "log_likelihood")
        dots = [(one * points[2][name]).sum() for name, one in zip(theta, ends, strict=True)]
        dots += [(one * points[1][name]).sum() for name, one in zip(theta, middles, strict=True)]
        return torch.stack(dots).sum()

    pulled = chain.pull(ends, [None, middles])
    expected = unflat(torch.func.grad(total)(flat(theta, policy)), policy)
    torch.testing.assert_close(dict(zip(theta, pulled, strict=True)), expected)
