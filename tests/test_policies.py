"""The policies against analytic densities, hand-made gradients and loops over tasks."""

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence
from torch.nn import functional

from asyncmaml.errors import ConfigurationError, ParameterError, UnsupportedSpaceError
from asyncmaml.learning.policies import (
    CategoricalMLPPolicy,
    MLPPolicy,
    MultiCategoricalMLPPolicy,
    NormalMLPPolicy,
)
from asyncmaml.learning.policy_files import load_policy
from asyncmaml.learning.policy_spaces import policy_for_spaces


@pytest.fixture(autouse=True)
def same_numbers_on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def policies(ndim: int = 1, hidden_sizes: tuple[int, ...] = (8, 8)) -> list[MLPPolicy]:
    return [
        CategoricalMLPPolicy(3, 4, hidden_sizes, observation_ndim=ndim),
        NormalMLPPolicy(3, 2, hidden_sizes, observation_ndim=ndim),
        MultiCategoricalMLPPolicy(3, (2, 4, 3), hidden_sizes, observation_ndim=ndim),
    ]


def perturbed(policy: MLPPolicy, scale: float = 0.3) -> dict[str, Tensor]:
    return {
        name: parameter.detach() + scale * torch.randn_like(parameter)
        for name, parameter in policy.named_parameters()
    }


def numbers(distribution: Distribution) -> list[Tensor]:
    """What the distribution is made of."""
    if isinstance(distribution, Independent):
        return numbers(distribution.base_dist)
    if isinstance(distribution, Normal):
        return [distribution.loc, distribution.scale]
    assert isinstance(distribution, Categorical)
    return [distribution.logits]


ALL = pytest.mark.parametrize("index", range(3), ids=["categorical", "normal", "multi"])

# ---- the network ----


def test_names_and_start_are_those_of_the_seed() -> None:
    categorical, normal = CategoricalMLPPolicy(3, 2), NormalMLPPolicy(3, 2, init_std=0.5)
    layers = [f"layer{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")]
    assert list(categorical.state_dict()) == [*layers, "layer3.weight", "layer3.bias"]
    assert list(normal.state_dict()) == ["sigma", *layers, "mu.weight", "mu.bias"]
    assert normal.sigma.tolist() == pytest.approx([math.log(0.5)] * 2)
    for name, parameter in categorical.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        else:  # xavier: uniform within sqrt(6 / (inputs + outputs)), so it comes near the bound
            bound = math.sqrt(6 / sum(parameter.shape))
            assert 0.9 * bound < parameter.abs().max() <= bound


def test_forward_matches_hand_calculation() -> None:
    # x = 2: hidden = relu(2 * [1, -1] + [1, 0]) = [3, 0];  logits = [3 * 1, 3 * -1 + 2].
    policy = CategoricalMLPPolicy(1, 2, (2,))
    params = {
        "layer1.weight": torch.tensor([[1.0], [-1.0]]),
        "layer1.bias": torch.tensor([1.0, 0.0]),
        "layer2.weight": torch.tensor([[1.0, 5.0], [-1.0, 5.0]]),
        "layer2.bias": torch.tensor([0.0, 2.0]),
    }
    probs = policy(torch.tensor([[2.0]]), params).probs
    assert torch.allclose(probs, torch.softmax(torch.tensor([[3.0, -1.0]]), -1))


@ALL
def test_own_parameters_are_used_where_none_are_given(index: int) -> None:
    policy, observations = policies()[index], torch.randn(5, 3)
    given = numbers(policy(observations, dict(policy.named_parameters())))
    assert all(map(torch.equal, numbers(policy(observations)), given))


@ALL
def test_functional_call_reaches_the_parameters(index: int) -> None:
    policy, observations = policies()[index], torch.randn(5, 3)
    params = perturbed(policy)
    called = numbers(torch.func.functional_call(policy, params, (observations,)))
    assert all(map(torch.equal, called, numbers(policy(observations, params))))


@ALL
def test_copies_and_pickles_are_policies_of_their_own(index: int) -> None:
    policy, observations = policies()[index], torch.randn(5, 3)
    before = numbers(policy(observations))
    twins = [copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    for twin in twins:
        assert all(map(torch.equal, numbers(twin(observations)), before))


@pytest.mark.parametrize("batch", [(), (5,), (4, 5)])
def test_batch_axes_come_first(batch: tuple[int, ...]) -> None:
    categorical, normal, multi = policies()
    observations = torch.randn(*batch, 3)
    assert categorical(observations).batch_shape == batch
    for policy, size in ((normal, 2), (multi, 3)):
        distribution = policy(observations)
        assert (distribution.batch_shape, distribution.event_shape) == (batch, (size,))


def test_index_observations_become_one_hot() -> None:
    policy = CategoricalMLPPolicy(3, 2, (4,), observation_ndim=0)
    vector_policy = CategoricalMLPPolicy(3, 2, (4,))
    observations = torch.tensor([[0, 2], [1, 1]])
    params = perturbed(policy)
    expected = vector_policy(torch.eye(3)[observations], params).logits
    assert torch.equal(policy(observations, params).logits, expected)


def test_image_observations_are_flattened_and_bytes_scaled_to_one() -> None:
    policy = CategoricalMLPPolicy(12, 2, (4,), observation_ndim=3)
    vector_policy = CategoricalMLPPolicy(12, 2, (4,))
    params = perturbed(policy)
    images = torch.randint(0, 256, (5, 2, 2, 3), dtype=torch.uint8)
    expected = vector_policy(images.reshape(5, 12) / 255, params).logits
    assert torch.equal(policy(images, params).logits, expected)
    floats = torch.randn(5, 6, 2, 2, 3)
    assert policy(floats, params).batch_shape == (5, 6)
    expected = vector_policy(floats.reshape(5, 6, 12), params).logits
    assert torch.equal(policy(floats, params).logits, expected)


def test_observations_are_cast_to_the_type_of_the_parameters() -> None:
    policy = CategoricalMLPPolicy(3, 2)
    assert policy(torch.randn(4, 3, dtype=torch.float64)).logits.dtype == torch.float32
    assert policy.double()(torch.randn(4, 3)).logits.dtype == torch.float64


def test_policy_without_hidden_layers_is_linear() -> None:
    policy = CategoricalMLPPolicy(3, 2, ())
    assert list(policy.state_dict()) == ["layer1.weight", "layer1.bias"]
    assert policy(torch.zeros(1, 3)).probs.tolist() == [[0.5, 0.5]]


def test_nonlinearity_may_be_a_name_a_function_or_any_callable() -> None:
    observations = torch.randn(5, 3)
    by_name = CategoricalMLPPolicy(3, 2, (4,), "tanh")
    params = perturbed(by_name)
    for nonlinearity in (torch.tanh, functional.tanh, nn.Tanh(), lambda x: torch.tanh(x)):
        policy = CategoricalMLPPolicy(3, 2, (4,), nonlinearity)
        logits = policy(observations, params).logits
        assert torch.equal(logits, by_name(observations, params).logits)


# ---- the distributions ----


def test_log_prob_of_normal_policy_sums_over_the_action() -> None:
    # log N(a; m, s) = -(a - m)^2 / (2 s^2) - log s - log(2 pi) / 2, once for each of 2 numbers.
    policy = NormalMLPPolicy(3, 2, (4,), init_std=0.5)
    observations, actions = torch.randn(5, 3), torch.randn(5, 2)
    distribution = policy(observations)
    (loc, scale) = numbers(distribution)
    assert torch.allclose(scale, torch.full((5, 2), 0.5))
    each = -((actions - loc) ** 2) / (2 * 0.25) - math.log(0.5) - math.log(2 * math.pi) / 2
    assert torch.allclose(distribution.log_prob(actions), each.sum(-1), atol=1e-5)


@pytest.mark.parametrize("num_sets", [0, 3])
def test_distributions_made_in_short_are_torchs_own_in_all_that_they_do(num_sets: int) -> None:
    normal, categorical = NormalMLPPolicy(3, 2, (8,)), CategoricalMLPPolicy(3, 4, (8,))
    rows = torch.randn(*([num_sets] if num_sets else []), 5, 3)
    for policy in (normal, categorical):
        own = dict(policy.named_parameters())
        params = {name: value.expand(num_sets, *value.shape) for name, value in own.items()}
        found: Any = policy(rows, params if num_sets else own)
        wanted: Any
        if policy is normal:
            scale = normal.sigma.exp().expand_as(found.mean)
            wanted = Independent(Normal(found.mean, scale), 1)
        else:
            wanted = Categorical(logits=found.logits)
        actions = wanted.sample((7,))
        for one, other in ((found, wanted), (found.expand((6, *rows.shape[:-1])), wanted)):
            torch.testing.assert_close(one.log_prob(actions[:6]), other.log_prob(actions[:6]))
            torch.testing.assert_close(one.entropy(), other.entropy().expand(one.batch_shape))
        assert found.batch_shape == wanted.batch_shape
        assert found.event_shape == wanted.event_shape
        assert found.sample((2,)).shape == wanted.sample((2,)).shape
        torch.testing.assert_close(kl_divergence(found, wanted), torch.zeros(rows.shape[:-1]))
        torch.manual_seed(3)
        drawn = found.sample()
        torch.manual_seed(3)
        assert torch.equal(drawn, wanted.sample())


def test_gradient_of_sigma_is_zero_below_the_floor() -> None:
    policy = NormalMLPPolicy(3, 2, (4,), min_std=0.1)
    with torch.no_grad():
        policy.sigma.copy_(torch.tensor([math.log(0.01), math.log(0.5)]))
    distribution = policy(torch.zeros(1, 3))
    assert torch.allclose(distribution.base_dist.scale, torch.tensor([[0.1, 0.5]]))
    (gradient,) = torch.autograd.grad(distribution.log_prob(torch.ones(1, 2)).sum(), policy.sigma)
    assert gradient[0] == 0
    assert gradient[1] != 0


def test_multi_categorical_is_a_product_of_softmaxes() -> None:
    policy = MultiCategoricalMLPPolicy(3, (2, 3), (4,))
    observations, actions = torch.randn(5, 3), torch.tensor([[0, 2]] * 5)
    params = perturbed(policy)
    outputs = CategoricalMLPPolicy(3, 5, (4,))._outputs(observations, params)
    expected = outputs[:, :2].log_softmax(-1)[:, 0] + outputs[:, 2:].log_softmax(-1)[:, 2]
    distribution = policy(observations, params)
    assert torch.allclose(distribution.log_prob(actions), expected, atol=1e-6)
    assert not distribution.base_dist.probs[:, 0, 2].any()
    assert not (distribution.sample((200,))[..., 0] > 1).any()


def test_padding_of_choices_leaves_entropy_and_divergence_and_their_gradients_finite() -> None:
    policy = MultiCategoricalMLPPolicy(3, (2, 3), (4,))
    observations = torch.randn(5, 3)
    other = policy(observations, perturbed(policy))
    distribution = policy(observations)
    loss = (kl_divergence(other, distribution) + kl_divergence(distribution, other)).mean()
    loss = loss + distribution.entropy().mean()
    first = torch.autograd.grad(loss, list(policy.parameters()), create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), list(policy.parameters()))  # type: ignore[arg-type]
    assert all(bool(gradient.isfinite().all()) for gradient in (*first, *second))


# ---- stacked parameters ----


@ALL
@pytest.mark.parametrize("batch", [(4,), (9,), (3, 4)])
def test_stacked_parameters_equal_the_loop_over_tasks_bit_for_bit(
    index: int, batch: tuple[int, ...]
) -> None:
    """Holds where every layer has 400 multiplications per task or more; see `_outputs`."""
    policy = policies(hidden_sizes=(100, 100))[index]
    tasks = [perturbed(policy) for _ in range(5)]
    stacked = {name: torch.stack([task[name] for task in tasks]) for name in tasks[0]}
    policy.check_params(stacked)
    observations = torch.randn(5, *batch, 3)
    distribution = policy(observations, stacked)
    assert distribution.batch_shape == (5, *batch)
    loop = [numbers(policy(observations[task], tasks[task])) for task in range(5)]
    for found, *expected in zip(numbers(distribution), *loop, strict=True):
        assert torch.equal(found, torch.stack(expected))


@ALL
@pytest.mark.parametrize(("observation_ndim", "shape"), [(0, ()), (3, (1, 1, 3))])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_stacked_parameters_equal_the_loop_for_indices_images_and_small_layers(
    index: int, observation_ndim: int, shape: tuple[int, ...], num_rows: int
) -> None:
    policy = policies(observation_ndim)[index]
    tasks = [perturbed(policy) for _ in range(3)]
    stacked = {name: torch.stack([task[name] for task in tasks]) for name in tasks[0]}
    observations = torch.randint(0, 3, (3, num_rows, *shape), dtype=torch.uint8)
    distribution = policy(observations, stacked)
    loop = [numbers(policy(observations[task], tasks[task])) for task in range(3)]
    for found, *expected in zip(numbers(distribution), *loop, strict=True):
        assert torch.allclose(found, torch.stack(expected), rtol=1e-6, atol=1e-6)


# ---- gradient steps ----


def scalar_policy() -> CategoricalMLPPolicy:
    """One weight and one bias, in float64: as good as two numbers."""
    policy = CategoricalMLPPolicy(1, 1, ()).double()
    with torch.no_grad():
        policy.get_parameter("layer1.weight").fill_(3.0)
        policy.get_parameter("layer1.bias").fill_(5.0)
    return policy


def quartic(params: Any) -> Tensor:
    total: Tensor = (params["layer1.weight"] ** 4).sum()
    return total


def test_update_is_one_step_down_the_gradient() -> None:
    # d(w^4)/dw = 4 * 27 = 108;  3 - 0.01 * 108 = 1.92; the bias does not enter and stays.
    policy = scalar_policy()
    updated = policy.update_params(quartic(dict(policy.named_parameters())), step_size=0.01)
    assert list(updated) == ["layer1.weight", "layer1.bias"]
    assert updated["layer1.weight"].item() == pytest.approx(1.92)
    assert updated["layer1.bias"].item() == 5
    assert policy.get_parameter("layer1.weight").item() == 3


@pytest.mark.parametrize(("first_order", "jacobian"), [(False, -0.08), (True, 1.0)])
def test_second_order_is_kept_and_first_order_is_the_identity(
    first_order: bool, jacobian: float
) -> None:
    # w' = w - 0.01 * 4 w^3;  dw'/dw = 1 - 0.01 * 12 * 9 = -0.08, or 1 with the gradient constant.
    policy = scalar_policy()
    own = dict(policy.named_parameters())
    updated = policy.update_params(quartic(own), None, 0.01, first_order)
    (gradient,) = torch.autograd.grad(updated["layer1.weight"].sum(), own["layer1.weight"])
    assert gradient.item() == pytest.approx(jacobian)


def test_two_chained_updates_differentiate_as_finite_differences_do() -> None:
    policy = NormalMLPPolicy(2, 2, (3,), "tanh").double()
    observations, actions = torch.randn(7, 2).double(), torch.randn(7, 2).double()

    def loss(params: Any) -> Tensor:
        negative: Tensor = -policy(observations, params).log_prob(actions).mean()
        return negative

    def after_two_steps(weight: Tensor) -> Tensor:
        params: Any = {**dict(policy.named_parameters()), "layer1.weight": weight}
        for _ in range(2):
            params = policy.update_params(loss(params), params, 0.3)
        return loss(params)

    weight = policy.get_parameter("layer1.weight").detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(after_two_steps(weight), weight)
    for index in range(weight.numel()):
        shift = torch.zeros(weight.numel(), dtype=torch.float64)
        shift[index] = 1e-5
        shift = shift.reshape(weight.shape)
        slope = (after_two_steps(weight + shift) - after_two_steps(weight - shift)) / 2e-5
        assert slope.item() == pytest.approx(gradient.flatten()[index].item(), rel=1e-6)


def test_each_parameter_may_have_its_own_step_size() -> None:
    policy = scalar_policy()
    own = dict(policy.named_parameters())
    loss = quartic(own) + 10 * own["layer1.bias"].sum()
    rate = torch.tensor([[0.01]], dtype=torch.float64, requires_grad=True)
    updated = policy.update_params(loss, step_size={"layer1.weight": rate, "layer1.bias": 0.2})
    assert updated["layer1.weight"].item() == pytest.approx(1.92)
    assert updated["layer1.bias"].item() == pytest.approx(3)
    (gradient,) = torch.autograd.grad(updated["layer1.weight"].sum(), rate)
    assert gradient.item() == pytest.approx(-108)


def test_stacked_tasks_step_by_their_own_gradients() -> None:
    policy = CategoricalMLPPolicy(3, 4, (8,))
    own = dict(policy.named_parameters())
    observations, actions = torch.randn(5, 9, 3), torch.randint(0, 4, (5, 9))
    stacked = {name: tensor.expand(5, *tensor.shape) for name, tensor in own.items()}
    losses = -policy(observations, stacked).log_prob(actions).mean(1)
    together = policy.update_params(losses.sum(), stacked)
    for task in range(5):
        loss = -policy(observations[task]).log_prob(actions[task]).mean()
        alone = policy.update_params(loss)
        for name in own:
            assert torch.allclose(together[name][task], alone[name], atol=1e-6)


def test_frozen_parameters_stay() -> None:
    policy = NormalMLPPolicy(3, 2, (4,))
    policy.sigma.requires_grad_(False)
    loss = -policy(torch.randn(5, 3)).log_prob(torch.randn(5, 2)).mean()
    assert policy.update_params(loss)["sigma"] is policy.sigma


def test_update_that_cannot_step_tells_why() -> None:
    policy = scalar_policy()
    own = dict(policy.named_parameters())
    with pytest.raises(ParameterError, match=r"\['layer1.bias'\] have no step size"):
        policy.update_params(quartic(own), step_size={"layer1.weight": 0.1})
    constants = {name: tensor.detach() for name, tensor in own.items()}
    with pytest.raises(ParameterError, match="none requires a gradient"):
        policy.update_params(quartic(constants), constants)


# ---- parameters that do not fit ----


@ALL
def test_missing_parameter_is_named(index: int) -> None:
    policy = policies()[index]
    for name in dict(policy.named_parameters()):
        params = perturbed(policy)
        del params[name]
        with pytest.raises(ParameterError, match=name):
            policy(torch.zeros(4, 3), params)
        with pytest.raises(ParameterError, match=name):
            policy.check_params(params)


def test_unknown_and_misshapen_parameters_are_named() -> None:
    policy = NormalMLPPolicy(3, 2, (4,))
    params = perturbed(policy)
    with pytest.raises(ParameterError, match=r"have \['extra'\] in excess"):
        policy.check_params({**params, "extra": torch.ones(1)})
    with pytest.raises(ParameterError, match=r"layer1\.bias .* \(4,\).* got \(5,\)"):
        policy.check_params({**params, "layer1.bias": torch.ones(5)})
    stacked = {name: tensor.expand(6, *tensor.shape) for name, tensor in params.items()}
    policy.check_params(stacked)
    with pytest.raises(ParameterError, match=r"mu\.bias"):
        policy.check_params({**stacked, "mu.bias": params["mu.bias"]})
    with pytest.raises(ParameterError, match="layer1"):
        policy.check_params({**params, "sigma": stacked["sigma"]})


@pytest.mark.parametrize(
    ("make", "arguments", "options", "message"),
    [
        (CategoricalMLPPolicy, (0, 2), {}, "input_size is 0; wanted a whole number"),
        (CategoricalMLPPolicy, (2, 2.9), {}, "output_size is 2.9; wanted a whole number"),
        (CategoricalMLPPolicy, (2, 2, (0,)), {}, r"hidden_sizes is \(0,\); wanted sizes"),
        (CategoricalMLPPolicy, (2, 2, (64.9,)), {}, r"hidden_sizes is \(64.9,\); wanted sizes"),
        (CategoricalMLPPolicy, (2, 2, "64"), {}, "hidden_sizes is '64'; wanted sizes"),
        (CategoricalMLPPolicy, (2, 2), {"observation_ndim": -1}, "observation_ndim is -1"),
        (CategoricalMLPPolicy, (2, 2, (4,), "rely"), {}, "one of .*'relu'.* got 'rely'"),
        (CategoricalMLPPolicy, (2, 2, (4,), nn.PReLU()), {}, "no parameters of its own"),
        (NormalMLPPolicy, (2, 2), {"init_std": 0.0}, "init_std is 0.0; wanted a finite number"),
        (NormalMLPPolicy, (2, 2), {"init_std": float("inf")}, "init_std is inf; wanted a finite"),
        (NormalMLPPolicy, (2, 2), {"init_std": "1"}, "init_std is '1'; wanted a finite number"),
        (NormalMLPPolicy, (2, 2), {"min_std": -1.0}, "min_std is -1.0; wanted a finite number"),
        (MultiCategoricalMLPPolicy, (2, ()), {}, r"nvec is \(\); wanted one whole number"),
        (MultiCategoricalMLPPolicy, (2, (2, 0)), {}, r"nvec is \(2, 0\); wanted one whole"),
        (MultiCategoricalMLPPolicy, (2, (2, 3.9)), {}, r"nvec is \(2, 3.9\); wanted one whole"),
    ],
)
def test_arguments_out_of_range_are_configuration_errors(
    make: Any, arguments: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(*arguments, **options)


# ---- spaces ----

VECTOR, CHOICE = Box(-1, 1, (3,)), Discrete(4)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "kind"),
    [
        (VECTOR, CHOICE, CategoricalMLPPolicy),
        (VECTOR, Box(-1, 1, (2,)), NormalMLPPolicy),
        (VECTOR, Box(-1, 1, (2,), np.float64), NormalMLPPolicy),
        (VECTOR, MultiDiscrete([2, 3]), MultiCategoricalMLPPolicy),
        (Discrete(5), CHOICE, CategoricalMLPPolicy),
        (Discrete(5, start=-2), CHOICE, CategoricalMLPPolicy),
        (Box(0, 255, (4, 4, 3), np.uint8), MultiDiscrete([2, 3]), MultiCategoricalMLPPolicy),
    ],
)
def test_policy_fits_its_spaces(
    observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], kind: type
) -> None:
    policy = policy_for_spaces(observation_space, action_space, (8,), "tanh")
    assert type(policy) is kind
    assert policy.nonlinearity_name == "tanh"
    observation_space.seed(0)
    observations = np.stack([observation_space.sample() for _ in range(5)])
    actions = policy(torch.as_tensor(observations)).sample()
    assert actions.shape == (5, *(action_space.shape or ()))
    if not isinstance(action_space, Box):
        assert all(action_space.contains(action) for action in actions.numpy())


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (MultiBinary(3), CHOICE, "no policy for observations of MultiBinary"),
        (Box(-1, 1, ()), CHOICE, "no policy for observations of Box"),
        (VECTOR, MultiBinary(3), "no policy for actions of MultiBinary"),
        (VECTOR, Box(0, 9, (2,), np.int64), "no policy for actions of Box"),
        (VECTOR, Box(-1, 1, (2, 2)), "no policy for actions of Box"),
        (VECTOR, MultiDiscrete(np.array([[2, 3]])), "no policy for actions of MultiDiscrete"),
        (VECTOR, MultiDiscrete([2, 3], start=[0, 1]), "no policy for actions of MultiDiscrete"),
    ],
)
def test_space_without_a_policy_is_refused(
    observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], message: str
) -> None:
    with pytest.raises(UnsupportedSpaceError, match=message):
        policy_for_spaces(observation_space, action_space)


def test_actions_count_from_zero_wherever_their_space_starts() -> None:
    policy = policy_for_spaces(VECTOR, Discrete(3, start=7), (8,))
    assert policy(torch.zeros(200, 3)).sample().unique().tolist() == [0, 1, 2]


def test_index_counts_from_the_start_of_its_space() -> None:
    policy = policy_for_spaces(Discrete(3, start=7), CHOICE, (8,))
    from_zero = policy_for_spaces(Discrete(3), CHOICE, (8,))
    from_zero.load_state_dict(policy.state_dict())
    found, expected = policy(torch.tensor([7, 8, 9])), from_zero(torch.arange(3))
    assert all(map(torch.equal, numbers(found), numbers(expected)))


# ---- files ----


@pytest.mark.parametrize(
    "policy",
    [
        CategoricalMLPPolicy(3, 4, (8, 5), "tanh", observation_ndim=0, observation_start=-1),
        NormalMLPPolicy(3, 2, (8,), functional.elu, init_std=0.3, min_std=0.2),
        MultiCategoricalMLPPolicy(3, (2, 4), (), observation_ndim=2).double(),
    ],
    ids=["categorical", "normal", "multi"],
)
def test_loaded_policy_equals_the_saved_one(policy: MLPPolicy, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy.pt")
    loaded = load_policy(tmp_path / "policy.pt")
    assert type(loaded) is type(policy)
    shapes = {0: (5,), 1: (5, 3), 2: (5, 1, 3)}
    observations = torch.randint(0, 3, shapes[policy.observation_ndim]) + policy.observation_start
    found, expected = numbers(loaded(observations)), numbers(policy(observations))
    assert all(map(torch.equal, found, expected))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_checkpoint_of_the_seed_loads() -> None:
    seed = nn.Module()
    for name, layer in (("layer1", nn.Linear(3, 8)), ("mu", nn.Linear(8, 2))):
        seed.add_module(name, layer)
    seed.register_parameter("sigma", nn.Parameter(torch.zeros(2)))
    NormalMLPPolicy(3, 2, (8,)).load_state_dict(seed.state_dict())


def test_nonlinearity_without_a_name_cannot_be_saved(tmp_path: Path) -> None:
    policy = CategoricalMLPPolicy(3, 2, (4,), lambda x: x)
    with pytest.raises(ConfigurationError, match=r"save its state_dict\(\) instead"):
        policy.save(tmp_path / "policy.pt")


def test_class_from_elsewhere_cannot_be_saved(tmp_path: Path) -> None:
    class Derived(CategoricalMLPPolicy):
        pass

    with pytest.raises(ConfigurationError, match="cannot save Derived"):
        Derived(3, 2).save(tmp_path / "policy.pt")


@pytest.mark.parametrize(
    "content",
    [
        b"no policy",
        b"",
        torch.ones(2),
        [1],
        {"weights": 1},
        {"policy": "SomethingElse", "arguments": {}, "state": {}},
        {"policy": "CategoricalMLPPolicy", "arguments": {"size": 1}, "state": {}},
        {
            "policy": "CategoricalMLPPolicy",
            "arguments": {"input_size": 1, "output_size": 1},
            "state": {},
        },
    ],
    ids=str,
)
def test_file_that_holds_no_policy_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "other.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ConfigurationError, match=r"other\.pt holds no policy"):
        load_policy(path)
