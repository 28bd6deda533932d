"""Random numbers by row: each row's own stream, fixed by the seed of its reset.

A generator of numpy's costs 12 us to seed, which for 400 rows of one-step episodes is more than
all else together. SplitMix64 is seeded by an assignment, and all rows draw in a handful of array
operations on integers, which are exact: one row or 400, the bits are the same.

Source: Steele, Lea and Flood (2014), https://doi.org/10.1145/2660193.2660195; the constants of the
mixing function are those of Vigna's https://prng.di.unimi.it/splitmix64.c.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_UNIT = 2.0**-53  # the spacing of the doubles in [0.5, 1)


class RowStreams:
    """One stream of uniform numbers for each row.

    The streams start where the operating system's entropy puts them, until they are reseeded.

    Args:
        num_rows: Rows, R.
    """

    def __init__(self, num_rows: int) -> None:
        entropy = np.random.default_rng()
        self._states = entropy.integers(0, 2**64, num_rows, np.uint64)

    def reseed(
        self, seed: int | Sequence[int | None] | None, mask: NDArray[np.bool_] | None = None
    ) -> None:
        """Begin the streams of the masked rows (None: of all) anew.

        Args:
            seed: As `RowVectorEnv.reset` takes it: one for each of the R rows, `seed + row` for an
                integer; None: the stream, or that row's, goes on.
            mask: Shape `(R,)`.
        """
        if seed is None:
            return
        rows = np.arange(len(self._states)) if mask is None else np.flatnonzero(mask)
        if isinstance(seed, int | np.integer):
            seeds = [int(seed) + row for row in rows.tolist()]
        else:
            of_rows = [(row, each) for row in rows.tolist() if (each := seed[row]) is not None]
            rows = np.array([row for row, _ in of_rows], np.intp)
            seeds = [int(each) for _, each in of_rows]
        words = np.array([each % 2**64 for each in seeds], np.uint64)
        # Mixed once, so that neighbouring seeds begin far apart on the generator's one cycle.
        self._states[rows] = _mixed((words + np.uint64(1)) * np.uint64(_GOLDEN))

    def uniforms(self, num: int, advancing: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the next `num` numbers of every row, in [0, 1); shape `(num, R)`.

        Args:
            num: Numbers of each row.
            advancing: Shape `(R,)`. The other rows' streams stay where they are, so that idle
                steps leave no trace.
        """
        steps = np.arange(1, num + 1, dtype=np.uint64)[:, None] * np.uint64(_GOLDEN)
        after = self._states + steps
        np.copyto(self._states, after[-1], where=advancing)
        return (_mixed(after) >> np.uint64(11)).astype(np.float64) * _UNIT


def standard_normals(
    radii: NDArray[np.float64], angles: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return standard normal numbers made of two independent uniform ones each.

    Source: Box and Muller (1958), https://doi.org/10.1214/aoms/1177706645; the second number of
    each pair is not used.

    Args:
        radii: In [0, 1), shape `(R,)`.
        angles: In [0, 1), shape `(R,)`.
    """
    # By math, one by one (40 ns each): numpy's vectorised log and cos do not promise the same
    # bits for an array of 1 and of 400.
    logs = np.array([math.log(1.0 - radius) for radius in radii.tolist()])
    cosines = np.array([math.cos(2.0 * math.pi * angle) for angle in angles.tolist()])
    normals: NDArray[np.float64] = np.sqrt(-2.0 * logs) * cosines
    return normals


def _mixed(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's output for these states."""
    mixed = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
