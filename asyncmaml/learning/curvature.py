"""Which product with a second derivative serves which policy: one result either way."""

from torch import Tensor, nn

from asyncmaml.learning.mlp import Params
from asyncmaml.learning.mlp_products import MLPFisher, MLPHessian, is_plain_mlp
from asyncmaml.learning.phases import Phase
from asyncmaml.learning.products import (
    AutogradFisher,
    AutogradHessian,
    CurvatureProduct,
    Hessian,
    Loss,
)


def hessian_of(policy: nn.Module, params: Params, observations: Tensor, loss_of: Loss) -> Hessian:
    """Return the Hessian of `loss_of(policy(observations, params))` at `params`."""
    if is_plain_mlp(policy):
        return MLPHessian(policy, params, observations, loss_of)
    return AutogradHessian(policy, params, observations, loss_of)


def fisher_of(policy: nn.Module, params: Params, phase: Phase) -> CurvatureProduct:
    """Return the mean Fisher information of the policy over a phase's steps, at `params`."""
    if is_plain_mlp(policy):
        return MLPFisher(policy, params, phase)
    return AutogradFisher(policy, params, phase)
