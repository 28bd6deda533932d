"""Inner adaptation: gradient steps from the meta-parameters towards one task's."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from asyncmaml.learning.mlp import MLPPolicy, Params
from asyncmaml.learning.objectives import find_objective
from asyncmaml.learning.phases import Phase


def distribution_of(policy: nn.Module, observations: Tensor, params: Params) -> Distribution:
    """Call a policy with parameters from outside, whether its forward takes them or not."""
    if isinstance(policy, MLPPolicy) or "params" in inspect.signature(policy.forward).parameters:
        distribution = policy(observations, params)
    else:
        distribution = torch.func.functional_call(policy, dict(params), (observations,))
    assert isinstance(distribution, Distribution)
    return distribution


def trainable_names(policy: nn.Module) -> list[str]:
    """Return the names of the parameters that learning moves: those that require a gradient."""
    return [name for name, parameter in policy.named_parameters() if parameter.requires_grad]


def adapt(
    policy: nn.Module,
    params: Params,
    phase: Phase,
    *,
    step_size: float,
    objective: str = "log_likelihood",
    first_order: bool = False,
) -> dict[str, Tensor]:
    """Take one inner update: theta' = theta - alpha grad L(theta).

    Source: Finn et al. (2017), eq. 1, https://arxiv.org/abs/1703.03400. With stacked parameters
    and a stacked phase each task steps by its own gradient.

    Args:
        policy: Only its form is used; `params` are what is stepped from.
        params: A tensor for each name of `policy.named_parameters()`.
        phase: Of the task.
        step_size: alpha.
        objective: A name in `OBJECTIVES`.
        first_order: Take the gradient as a constant; otherwise the result is differentiable
            with respect to those of `params` that require a gradient.

    Raises:
        ConfigurationError: There is no such objective.
    """
    loss_of = find_objective(objective)
    names = trainable_names(policy)
    if not any(params[name].requires_grad for name in names):
        params = {**params, **{name: params[name].detach().requires_grad_() for name in names}}
    moving = [params[name] for name in names]
    with torch.enable_grad():
        loss = loss_of(distribution_of(policy, phase.observations, params), phase)
        gradients = torch.autograd.grad(
            loss, moving, create_graph=not first_order, materialize_grads=True
        )
        updated = dict(params)
        for name, gradient in zip(names, gradients, strict=True):
            updated[name] = params[name] - step_size * gradient
    return updated


def adapted(
    policy: nn.Module,
    params: Params,
    phases: Sequence[Phase],
    step_sizes: Sequence[float],
    objective: str,
) -> list[dict[str, Tensor]]:
    """Return theta_0 to theta_K, without a graph: one inner update on each of K phases."""
    points = [{name: parameter.detach() for name, parameter in params.items()}]
    for phase, step_size in zip(phases, step_sizes, strict=True):
        updated = adapt(
            policy, points[-1], phase, step_size=step_size, objective=objective, first_order=True
        )
        points.append({name: parameter.detach() for name, parameter in updated.items()})
    return points
