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
from asyncmaml.sampling.streams import EpisodeStreams, Noise, steps_per_block

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class ActionPlan:
    """How a policy's actions are drawn, found from its first distribution."""

    kind: Noise
    width: int
    """Numbers of noise that one action takes."""
    steps: int
    """Steps whose noise is drawn at once."""

    @property
    def columns(self) -> int:
        """Numbers that `draw_noise` gives for one action: normal noise brings its log-density."""
        return self.width + (self.kind is Noise.NORMAL)


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
    return ActionPlan(kind, width, steps_per_block(width))


def draw_noise(
    plan: ActionPlan, streams: EpisodeStreams, batch_id: int, block: int
) -> NDArray[np.float32]:
    """Draw the noise of one block of an episode's steps.

    Returns:
        Shape `(steps, columns)`. Behind normal noise z stands its log-density, which is cheaper
        here, for a block, than once for every tick.
    """
    noise = streams.noise(plan.kind, batch_id, block, (plan.steps, plan.width))
    if plan.kind is not Noise.NORMAL:
        return noise
    drawn = np.empty((plan.steps, plan.width + 1), np.float32)
    drawn[:, :-1] = noise
    density = drawn[:, -1]
    np.einsum("tw,tw->t", noise, noise, out=density)
    density *= -0.5
    density -= plan.width * _HALF_LOG_TWO_PI
    return drawn


def draw_actions(distribution: Distribution, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one action a row.

    Args:
        distribution: Of batch shape `(N, ...)`, as `plan_actions` accepted it.
        noise: One row of `draw_noise` for each, shape `(N, columns)`.

    Returns:
        Actions `(N, *A)` and their log-probabilities `(N,)`.
    """
    if isinstance(distribution, Categorical):
        actions = (distribution.logits + noise).argmax(-1)
        return actions, distribution.logits.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    if isinstance(distribution, Independent) and isinstance(distribution.base_dist, Normal):
        normal = distribution.base_dist
        if normal.loc.ndim == 2:
            # The density from z: the same to rounding as from the action, at less cost.
            scale = normal.scale
            if scale.stride(0) == 0:  # one scale for all rows
                scale = scale[:1]
            log_probs = noise[:, -1] - scale.log().sum(-1)
            return torch.addcmul(normal.loc, normal.scale, noise[:, :-1]), log_probs
    actions = _transform(distribution, noise)
    log_probs = distribution.log_prob(actions)
    return actions, log_probs.flatten(1).sum(-1) if log_probs.ndim > 1 else log_probs


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
    if isinstance(distribution, Normal | MultivariateNormal):
        noise = noise[:, :-1]
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
