"""The action noise of all rows, drawn a block of steps ahead."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncmaml.sampling.streams import EpisodeStreams, Noise, steps_per_block

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_TINY = np.float32(np.finfo(np.float32).tiny)
_LEAST_UNIFORM = np.float32(2**-25)


@dataclass(frozen=True)
class NoisePlan:
    """What a policy's actions are drawn from."""

    kind: Noise
    width: int
    """Numbers of noise that one action takes."""


@dataclass(frozen=True)
class ActionNoise:
    """The noise of one action for each of N rows."""

    values: NDArray[np.float32]
    """Shape `(N, width)`: standard normal, standard Gumbel, or uniform in (0, 1)."""
    log_densities: NDArray[np.float32] | None
    """Of normal noise, shape `(N,)`."""


class NoiseStore:
    """For each of N rows, the noise of the block of steps that its episode is in.

    Args:
        num_rows: Rows, N.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._blocks: dict[NoisePlan, _Blocks] = {}

    def gather(
        self,
        plan: NoisePlan,
        streams: Callable[[int], EpisodeStreams],
        rows: NDArray[np.intp],
        batch_ids: NDArray[np.int64],
        steps: NDArray[np.int64],
    ) -> ActionNoise:
        """Return the noise of rows at their steps; a row goes through its episode step by step.

        Args:
            plan: What kind of noise, how much.
            streams: Gives those of the request that the n-th of the rows belongs to.
            rows: Shape `(N,)`.
            batch_ids: The rows' episodes, shape `(N,)`.
            steps: The rows' steps, shape `(N,)`.
        """
        blocks = self._blocks.get(plan)
        if blocks is None:
            blocks = self._blocks[plan] = _Blocks(plan, self._num_rows)
        within = steps & blocks.last_step
        if not within.all():  # a test that costs less than to look for them
            begun = np.flatnonzero(within == 0)
            of_begun = [streams(index) for index in begun.tolist()]
            blocks.draw(of_begun, rows[begun], batch_ids[begun], steps[begun])
        return blocks.at(rows, within)


class _Blocks:
    """One block of noise for each row."""

    def __init__(self, plan: NoisePlan, num_rows: int) -> None:
        self._kind = plan.kind
        steps = steps_per_block(plan.width)
        self.last_step = steps - 1  # also the mask of a step within its block
        self._shift = steps.bit_length() - 1
        self._values = np.zeros((num_rows, steps, plan.width), np.float32)
        self._flat_values = self._values.reshape(-1, plan.width)
        self._constant = np.float32(plan.width * _HALF_LOG_TWO_PI)
        self._log_densities = np.zeros((num_rows, steps), np.float32)

    def draw(
        self,
        streams: list[EpisodeStreams],
        rows: NDArray[np.intp],
        batch_ids: NDArray[np.int64],
        steps: NDArray[np.int64],
    ) -> None:
        values, kind = self._values, self._kind
        blocks = steps >> self._shift
        for stream, row, batch_id, block in zip(
            streams, rows.tolist(), batch_ids.tolist(), blocks.tolist(), strict=True
        ):
            stream.draw(kind, batch_id, block, values[row])
        drawn = values[rows]
        if kind is Noise.NORMAL:
            # Here for a block of steps, which is cheaper than once for every tick.
            density = np.einsum("ntw,ntw->nt", drawn, drawn)
            density *= np.float32(-0.5)
            density -= self._constant
            self._log_densities[rows] = density
        elif kind is Noise.GUMBEL:
            # -log(E) of a standard exponential E is a standard Gumbel variable.
            np.maximum(drawn, _TINY, out=drawn)
            np.log(drawn, out=drawn)
            values[rows] = np.negative(drawn, out=drawn)
        else:
            # Never 0, where many inverse distribution functions are infinite.
            values[rows] = np.maximum(drawn, _LEAST_UNIFORM, out=drawn)

    def at(self, rows: NDArray[np.intp], within: NDArray[np.int64]) -> ActionNoise:
        # One index for both: to take by two costs twice as much.
        places = (rows << self._shift) + within
        is_normal = self._kind is Noise.NORMAL
        densities = self._log_densities.take(places) if is_normal else None
        return ActionNoise(self._flat_values.take(places, axis=0), densities)
