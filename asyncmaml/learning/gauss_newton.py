"""The curvature of the mean KL divergence of adapted policies, at the parameters that sampled.

For one task J^T F J: F the Fisher information of the adapted policy, J the derivative of its
parameters by theta (`chain`). The policy before adaptation has J = I.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from asyncmaml.learning.chain import AdaptationChain
from asyncmaml.learning.groups import ParameterLayout, TaskGroup
from asyncmaml.learning.products import CurvatureProduct, Tensors
from asyncmaml.learning.task_threads import ForEach


@dataclass(frozen=True)
class LinearizedGroup:
    """What is known of a group of tasks at the old parameters.

    Attributes:
        group: The tasks.
        chain: Their adaptation.
        fisher: Of the adapted policies.
        pre_fisher: Of the policy before adaptation; None if nobody asks.
        old_pre: The policy before adaptation on the observations of phase 0, as a constant.
        old_post: The adapted policies on those of the last phase.
        credit: E-MAML's, of each task.
        loss: Of the outer objective, summed over the tasks.
        gradient: Of that sum, by theta.
    """

    group: TaskGroup
    chain: AdaptationChain
    fisher: CurvatureProduct
    pre_fisher: CurvatureProduct | None
    old_pre: Distribution
    old_post: Distribution
    credit: Tensor
    loss: float
    gradient: Tensors


@dataclass(frozen=True)
class Point:
    """All groups at the old parameters; `loss` and `gradient` are means over their tasks."""

    parts: Sequence[LinearizedGroup]
    num_tasks: int
    loss: float
    gradient: Tensor


def curvature_times(
    point: Point,
    layout: ParameterLayout,
    flat: Tensor,
    *,
    is_exact: bool,
    pre_weight: float,
    for_each: ForEach,
) -> Tensor:
    """Return the curvature's product with a vector `(P,)`: the mean over tasks.

    Args:
        point: Where.
        layout: Of the vector.
        flat: The vector.
        is_exact: Whether J is what it is, or taken as the identity.
        pre_weight: Of the curvature of the policy before adaptation, which is added.
        for_each: Calls a function for each group, in turn or at once; see `task_threads`.
    """
    vector = layout.tensors(flat)

    def of_group(part: LinearizedGroup) -> Tensor:
        spread = part.group.spread_vector(vector)
        along = part.chain.push(spread) if is_exact else spread
        product = part.fisher.times(along)
        if is_exact:
            product = part.chain.pull(product)
        total = layout.flat(part.group.summed(product))
        if part.pre_fisher:
            product = part.group.summed(part.pre_fisher.times(spread))
            total.add_(layout.flat(product), alpha=pre_weight)
        return total

    return torch.stack(for_each(of_group, point.parts)).sum(0) / point.num_tasks
