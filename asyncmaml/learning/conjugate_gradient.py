"""Solving A x = b by conjugate gradients, for an A that is known by its products.

Source: Nocedal & Wright (2006), algorithms 5.2 and, for the stop at negative curvature, 7.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Solution:
    """What conjugate gradients came to.

    Attributes:
        x: Shape `(P,)`, finite whatever A is; 0 where not one iteration could be made.
        product: A x, from the residual: no further product was needed.
        iterations: Made.
        reason: "" or why it stopped before what was asked for.
    """

    x: Tensor
    product: Tensor
    iterations: int
    reason: str


def conjugate_gradient(
    times: Callable[[Tensor], Tensor],
    right: Tensor,
    *,
    iterations: int,
    damping: float = 0.0,
    residual_tolerance: float = 1e-10,
) -> Solution:
    """Solve (A + damping I) x = b, from x = 0.

    Args:
        times: A v for a v of shape `(P,)`; A symmetric.
        right: b, shape `(P,)`.
        iterations: At most.
        damping: Added to A's diagonal.
        residual_tolerance: Stop when |r|^2 falls below this share of |b|^2. (Not below a fixed
            number, as in many codes: small gradients deserve a direction, too.)
    """
    x = torch.zeros_like(right)
    residual, direction = right.clone(), right.clone()
    square = first = float(right @ right)
    reason, done = "", 0
    while done < iterations and square > residual_tolerance * first:
        product = times(direction) + damping * direction
        curvature = float(direction @ product)
        if not 0 < curvature < float("inf"):
            reason = f"the curvature along direction {done} is {curvature:.3g}, not above 0"
            break
        rate = square / curvature
        x.add_(direction, alpha=rate)
        residual.sub_(product, alpha=rate)
        done += 1
        square, last = float(residual @ residual), square
        direction.mul_(square / last).add_(residual)
    return Solution(x, right - residual, done, reason)
