"""How the rows of a forward are laid out, so that a row's result does not show who shares it.

Whole blocks: functions of single numbers have an end of their own. torch computes sigmoid, elu,
silu and softplus 32 floats at a time (AVX-512), and what is left over by another routine, whose
last bits differ. In twice `ROW_BLOCK` rows nothing is ever left over, whatever the widths of the
layers. A policy that does not need that says so by `has_exact_ends`.

Places of one kind: on AMD's processors MKL sums up products of few outputs (2 to 11 of them) in an
order that depends on where a row begins in memory, modulo 16 bytes. Rows of 17 floats come out in
four ways, by their place modulo 4; rows of 4, 8 or 100 in one. So there a row is put where the
number of its episode says: always in places of the same kind. A policy whose layers have one way
only says so by `has_exact_places`. Measured on an EPYC (Zen 4): of 625 shapes of layers 84 had
several ways, in float64 162; none had, where each row stayed in places of its kind. On Intel's
processors there is one way.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - what every torch user calls it
from numpy.typing import NDArray
from torch import Tensor

from asyncmaml.sampling.snapshot import PolicySnapshot

_KINDS = 4
"""Floats in 16 bytes."""

Places = slice | NDArray[np.intp]
"""Where rows lie in an array; a slice where it can be one, since that makes views, not copies."""


def rows_at(values: NDArray[Any], places: Places) -> NDArray[Any]:
    """Return the rows that lie in these places; a view where they are a slice."""
    # Of rows of two floats, indexing by an array takes twenty times as long.
    return values[places] if isinstance(places, slice) else values.take(places, axis=0)


@cache
def places_matter() -> bool:
    """Measure whether a row's place changes its result on this machine.

    To be called where one intra-op thread computes.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((17, 6), (7, 6), (33, 2), (65, 10))
    for inputs, outputs in shapes:
        weight = torch.randn(outputs, inputs, generator=generator)
        rows = torch.randn(64, inputs, generator=generator)
        if not torch.equal(F.linear(rows.roll(1, 0), weight), F.linear(rows, weight).roll(1, 0)):
            return True
    return False


class RowLayout:
    """How the rows of one policy's forwards are laid out.

    Args:
        policy: Whose forwards they are.
        block: Of `one_intraop_thread`.
    """

    def __init__(self, policy: PolicySnapshot, block: int) -> None:
        origin = policy.origin
        self.block: int = block if getattr(origin, "has_exact_ends", False) else 2 * block
        """Forwards are padded to a multiple of this many rows."""
        has_one_way = policy.is_single_precision and getattr(origin, "has_exact_places", False)
        self.needs_places: bool = not has_one_way and places_matter()
        """Whether rows must stay in places of their kind on this machine."""

    def __call__(self, rows: Tensor, batch_ids: NDArray[np.int64]) -> tuple[Tensor, Places]:
        """Return the rows as the forward takes them, and where in there they lie.

        Args:
            rows: Shape `(N, *O)`.
            batch_ids: Of their episodes, shape `(N,)`.

        Returns:
            The rows among zeros, shape `(P, *O)`; themselves where nothing is to be added.
        """
        if not self.needs_places:
            return padded(rows, self.block), slice(0, len(batch_ids))
        places = _places_by_kind(batch_ids)
        size = int(places.max()) + 1
        among_zeros = rows.new_zeros((size + -size % self.block, *rows.shape[1:]))
        among_zeros[torch.from_numpy(places)] = rows
        return among_zeros, places


def _places_by_kind(batch_ids: NDArray[np.int64]) -> NDArray[np.intp]:
    """Give each row the next place of the kind that its episode's number says."""
    kinds = batch_ids % _KINDS
    places = np.empty(len(kinds), np.intp)
    for kind in range(_KINDS):
        mine = np.flatnonzero(kinds == kind)
        places[mine] = _KINDS * np.arange(len(mine)) + kind
    return places


def padded(rows: Tensor, block: int) -> Tensor:
    """Return the rows with zero rows added up to a multiple of `block`; themselves if none."""
    missing = -len(rows) % block
    if not missing:
        return rows
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))
