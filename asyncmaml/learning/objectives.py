"""The inner objectives: the loss whose gradient adapts a policy to a task.

All three have the same gradient at the parameters that drew the episodes, the policy gradient with
advantages; they differ in the derivative of that gradient, which is what a meta-gradient sees.

- `log_likelihood`: -<A log pi>; Finn et al. (2017), https://arxiv.org/abs/1703.03400, eq. 4. Its
  Hessian lacks <A grad log pi (grad log pi)^T>: where E[A hess log pi] = 0, as for a tabular
  softmax with centred advantages, second order is then no more than first order.
- `likelihood_ratio`: -<A pi / pi_old>; the low variance curvature (LVC) of Rothfuss et al. (2018),
  https://arxiv.org/abs/1810.06784, eq. 9. Unbiased for one step, low variance for many.
- `dice`: Foerster et al. (2018), https://arxiv.org/abs/1802.05098, with advantages as in Farquhar
  et al. (2019), https://arxiv.org/abs/1909.10549: -<A_t (D_t - D_(t-1))>, where D_t is the product
  of the ratios of steps 0 to t. Unbiased, of higher variance.

pi_old is what the sampler recorded and not a detached pi: equal where the episodes were drawn, and
right elsewhere too, so that an outer loop may move theta more than once on the same episodes.
Angle brackets are means over the steps that were taken; stacked tasks are summed, so that each
steps by its own gradient.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributions import Distribution

from asyncmaml.learning.phases import Phase, masked_mean
from asyncmaml.option_kinds import Choice

Objective: TypeAlias = Callable[[Distribution, Phase], Tensor]


def log_likelihood_loss(distribution: Distribution, phase: Phase) -> Tensor:
    """Return -<A log pi>, a scalar."""
    log_probs = distribution.log_prob(phase.actions)
    return -masked_mean(log_probs * phase.advantages, phase.mask).sum()


def likelihood_ratio_loss(distribution: Distribution, phase: Phase) -> Tensor:
    """Return -<A pi / pi_old>, a scalar."""
    return -masked_mean(likelihood_ratio(distribution, phase) * phase.advantages, phase.mask).sum()


def dice_loss(distribution: Distribution, phase: Phase) -> Tensor:
    """Return -<A_t (D_t - D_(t-1))>, a scalar; 0 where the episodes were drawn."""
    log_ratios = _log_ratios(distribution, phase)
    products = log_ratios.cumsum(dim=-2).exp()
    before = torch.cat([torch.ones_like(products[..., :1, :]), products[..., :-1, :]], dim=-2)
    return -masked_mean((products - before) * phase.advantages, phase.mask).sum()


def likelihood_ratio(distribution: Distribution, phase: Phase) -> Tensor:
    """Return pi / pi_old of each step, shape `(T, B)`; 1 in the padding."""
    return _log_ratios(distribution, phase).exp()


def _log_ratios(distribution: Distribution, phase: Phase) -> Tensor:
    log_ratios = distribution.log_prob(phase.actions) - phase.log_probs
    return torch.where(phase.mask > 0, log_ratios, 0.0)


OBJECTIVES: dict[str, Objective] = {
    "log_likelihood": log_likelihood_loss,
    "likelihood_ratio": likelihood_ratio_loss,
    "dice": dice_loss,
}


def find_objective(name: str) -> Objective:
    """Return the objective of that name.

    Raises:
        ConfigurationError: There is none.
    """
    return OBJECTIVES[Choice(tuple(sorted(OBJECTIVES))).check("objective", name)]
