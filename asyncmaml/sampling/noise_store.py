"""The action noise of all rows, drawn a block of steps ahead."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncmaml.sampling.actions import ActionPlan, draw_noise
from asyncmaml.sampling.requests import Request


class NoiseStore:
    """For each of N rows, the noise of the block of steps that its episode is in."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._blocks: dict[ActionPlan, NDArray[np.float32]] = {}

    def gather(
        self,
        request: Request,
        rows: NDArray[np.intp],
        batch_ids: NDArray[np.int64],
        steps: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Return the noise of one request's rows at their steps, shape `(N, columns)`."""
        plan = request.plan
        assert plan is not None
        blocks = self._blocks.get(plan)
        if blocks is None:
            shape = (self._num_rows, plan.steps, plan.columns)
            blocks = self._blocks[plan] = np.zeros(shape, np.float32)
        within: NDArray[Any] = steps & (plan.steps - 1)
        for index in np.flatnonzero(within == 0).tolist():
            block = int(steps[index]) // plan.steps
            batch_id = int(batch_ids[index])
            blocks[rows[index]] = draw_noise(plan, request.streams, batch_id, block)
        gathered: NDArray[np.float32] = blocks[rows, within]
        return gathered
