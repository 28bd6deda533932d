"""Actions from a distribution and noise that was drawn beforehand, row by row.

`Distribution.sample()` draws from torch's global generator, so what a row gets would depend on
the rows around it. Here each row brings its own noise (`asyncmaml.sampling.streams`):

- normal: loc + scale * z, with z standard normal; multivariate normal: loc + L z;
- categorical: the argmax of logits + g, with g standard Gumbel (Gumbel 1954);
- any other that has an inverse distribution function (`icdf`), and Bernoulli: from a uniform u;
- `Independent` and `TransformedDistribution` of these.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
)

from asyncmaml.errors import PolicyError
from asyncmaml.sampling.noise_store import ActionNoise, NoisePlan
from asyncmaml.sampling.streams import Noise


@dataclass(frozen=True)
class ActionPlan:
    """How a policy's actions are drawn, found from its first distribution."""

    noise: NoisePlan
    shape: tuple[int, ...]
    """Of one action, A."""


def plan_actions(distribution: object, num_rows: int, space: "Space[Any]") -> ActionPlan:
    """Check a policy's distribution against the action space; return how to draw from it.

    Raises:
        PolicyError: It is no distribution, does not fit, or cannot be drawn from by row.
    """
    if not isinstance(distribution, Distribution):
        message = (
            f"the policy returned a {type(distribution).__name__}; a policy maps observations to "
            "a torch.distributions.Distribution over actions: wrap its output in one"
        )
        raise PolicyError(message)
    kind = _kind(distribution)
    shape = tuple(distribution.batch_shape + distribution.event_shape)
    if shape[:1] != (num_rows,):
        message = (
            f"the policy returned {distribution} of shape {shape} for {num_rows} observations; "
            f"its first axis must be the observations' ({num_rows})"
        )
        raise PolicyError(message)
    _check_fit(distribution, shape[1:], space)
    width = math.prod(shape[1:])
    if kind is Noise.GUMBEL:
        width *= int(_categorical(distribution).logits.shape[-1])
    return ActionPlan(NoisePlan(kind, width), shape[1:])


def draw_actions(
    plan: ActionPlan,
    distribution: Distribution,
    noise: ActionNoise,
    rows: slice | NDArray[np.intp],
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Draw one action a row.

    Args:
        plan: Of this policy, as `plan_actions` returned it.
        distribution: Of batch shape `(P, ...)`, or `(M, P, ...)` with stacked parameters.
        noise: Of N rows.
        rows: Which of the P, or M times P, rows of the distribution they are; the others are
            padding.

    Returns:
        Actions `(N, *A)` and their log-probabilities `(N,)`.
    """
    # In numpy, whose calls cost less than torch's, since there are several for each tick.
    if isinstance(distribution, Categorical) and not plan.shape:
        logits = _by_row(distribution.logits, 1)[rows]
        actions = (logits + noise.values).argmax(-1)
        return actions, logits[np.arange(len(actions)), actions]
    if isinstance(distribution, Independent) and len(plan.shape) == 1:
        normal = distribution.base_dist
        if isinstance(normal, Normal) and noise.log_densities is not None:
            loc, scale = _by_row(normal.loc, 1)[rows], _by_row(normal.scale, 1)[rows]
            # The density from z: the same to rounding as from the action, at less cost.
            is_shared = scale.strides[0] == 0  # one scale for all rows
            log_scale = np.log(scale[0] if is_shared else scale).sum(-1)
            drawn = scale * noise.values
            drawn += loc
            return drawn, noise.log_densities - log_scale
    return _draw_with_torch(plan, distribution, noise.values, rows)


def _by_row(values: Tensor, num_axes: int) -> NDArray[Any]:
    """Return the values with one axis for all rows before the last `num_axes`."""
    array: NDArray[Any] = (values if values.is_cpu else values.cpu()).numpy()
    if array.ndim > num_axes + 1:
        return array.reshape(-1, *array.shape[array.ndim - num_axes :])
    return array


def _draw_with_torch(
    plan: ActionPlan,
    distribution: Distribution,
    values: NDArray[np.float32],
    rows: slice | NDArray[np.intp],
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    shape = tuple(distribution.batch_shape + distribution.event_shape)
    num_rows = math.prod(shape[: len(shape) - len(plan.shape)])
    noise = np.full((num_rows, plan.noise.width), 0.5, np.float32)  # any that is finite
    noise[rows] = values
    actions = _transform(distribution, torch.from_numpy(noise).to(_device_of(distribution)))
    log_probs: NDArray[np.float32] = distribution.log_prob(actions).cpu().numpy()
    by_row = log_probs.reshape(num_rows, -1)[rows]
    # A distribution that is not Independent gives one for each number of an action.
    return _by_row(actions, len(plan.shape))[rows], by_row.sum(-1, dtype=np.float32)


def _device_of(distribution: Distribution) -> torch.device:
    while isinstance(distribution, Independent | TransformedDistribution):
        distribution = distribution.base_dist
    tensors = (value for value in vars(distribution).values() if isinstance(value, Tensor))
    return next(tensors).device


def _kind(distribution: Distribution) -> Noise:
    if isinstance(distribution, Independent | TransformedDistribution):
        return _kind(distribution.base_dist)
    if isinstance(distribution, Normal | MultivariateNormal):
        return Noise.NORMAL
    if isinstance(distribution, Categorical):
        return Noise.GUMBEL
    if isinstance(distribution, Bernoulli) or _has_icdf(distribution):
        return Noise.UNIFORM
    message = (
        f"the policy returned {distribution}, which cannot be drawn from row by row; use Normal, "
        "MultivariateNormal, Categorical, Bernoulli, a distribution with an icdf, or Independent "
        "or TransformedDistribution of these"
    )
    raise PolicyError(message)


def _has_icdf(distribution: Distribution) -> bool:
    return type(distribution).icdf is not Distribution.icdf


def _categorical(distribution: Distribution) -> Categorical:
    while isinstance(distribution, Independent | TransformedDistribution):
        distribution = distribution.base_dist
    return cast(Categorical, distribution)


def _transform(distribution: Distribution, noise: Tensor) -> Tensor:
    if isinstance(distribution, Independent):
        return _transform(distribution.base_dist, noise)
    if isinstance(distribution, TransformedDistribution):
        value = _transform(distribution.base_dist, noise)
        for transform in distribution.transforms:
            value = transform(value)
        return value
    shape = distribution.batch_shape + distribution.event_shape
    if isinstance(distribution, Categorical):
        gumbel = noise.reshape(distribution.logits.shape)
        return (distribution.logits + gumbel).argmax(-1)
    noise = noise.reshape(shape)
    if isinstance(distribution, MultivariateNormal):
        offset = distribution.scale_tril @ noise.unsqueeze(-1)
        return distribution.loc + offset.squeeze(-1)
    if isinstance(distribution, Normal):
        return torch.addcmul(distribution.loc, distribution.scale, noise)
    if isinstance(distribution, Bernoulli):
        return (noise < distribution.probs).to(distribution.probs.dtype)
    return distribution.icdf(noise)


def _check_fit(distribution: Distribution, shape: tuple[int, ...], space: "Space[Any]") -> None:
    if isinstance(space, Discrete | MultiDiscrete):
        wanted = () if isinstance(space, Discrete) else space.shape
        count = int(space.n if isinstance(space, Discrete) else np.max(space.nvec))
        base = _categorical(distribution)
        is_fit = isinstance(base, Categorical) and base.logits.shape[-1] == count
        want = f"a Categorical over {count} actions"
        if wanted:
            want = f"an Independent Categorical of shape {wanted} over {count} values each"
    else:
        assert isinstance(space, Box)
        wanted = space.shape
        integral = np.issubdtype(space.dtype, np.integer)
        is_fit = isinstance(_categorical(distribution), Categorical) == integral
        want = f"{'integer' if integral else 'real'} actions of shape {wanted}"
    if not is_fit or shape != wanted:
        found = f"{distribution} with actions of shape {shape}"
        if isinstance(_categorical(distribution), Categorical):
            found += f" over {_categorical(distribution).logits.shape[-1]} values"
        message = (
            f"the policy does not fit the action space {space}: it returned {found}, wanted "
            f"{want}; change the policy's output size or its kind of distribution"
        )
        raise PolicyError(message)
