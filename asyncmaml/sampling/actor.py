"""The device executor: forwards and action drawing for the rows of one tick."""

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray
from torch.distributions import Distribution

from asyncmaml.sampling.actions import draw_actions, plan_actions
from asyncmaml.sampling.intraop import padded
from asyncmaml.sampling.noise_store import NoiseStore
from asyncmaml.sampling.requests import Request
from asyncmaml.sampling.transitions import TransitionLog


class NotFiniteActionError(Exception):
    """A policy's action or its log-probability is NaN or infinite; inside of `sampling` only."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class Actor:
    """Draws the actions of rows that stand in the transition log.

    Args:
        space: The action space.
        num_rows: Rows of all lanes, N.
        device: Where the forwards run.
        row_block: Forwards are padded to a multiple of this (`asyncmaml.sampling.intraop`).
    """

    def __init__(
        self, space: "Space[Any]", num_rows: int, device: torch.device, row_block: int
    ) -> None:
        self._space = space
        self._noise = NoiseStore(num_rows)
        self._device = device
        self._row_block = row_block
        self._is_on_cpu = device.type == "cpu"

    def act(
        self,
        request: Request,
        log: TransitionLog,
        entries: slice | NDArray[np.intp],
        rows: NDArray[np.intp],
    ) -> None:
        """Draw the actions of one request's entries and write them into the log.

        Args:
            request: Whose policy acts.
            log: Holds the observations.
            entries: The request's entries in the log, N of them.
            rows: Their rows, shape `(N,)`.

        Raises:
            PolicyError: The policy's distribution does not fit; told at the first forward.
            NotFiniteActionError: An action or its log-probability is NaN or infinite.
        """
        count = len(rows)
        observations = log.observation_tensor[entries]
        if count % self._row_block:
            observations = padded(observations, self._row_block)
        if not self._is_on_cpu:
            observations = observations.to(self._device)
        distribution: Distribution = request.policy(observations)
        plan = request.plan
        if plan is None:
            num_rows = count + -count % self._row_block
            plan = request.plan = plan_actions(distribution, num_rows, self._space)
        ids, steps = log.batch_ids[entries], log.steps[entries]
        noise = self._noise.gather(plan.noise, request.streams, rows, ids, steps)
        actions, log_probs = draw_actions(plan, distribution, noise, slice(0, count))
        log.actions[entries] = actions
        log.log_probs[entries] = log_probs
        if not (np.isfinite(log_probs).all() and np.isfinite(actions).all()):
            _refuse_not_finite(actions, log_probs)


def to_environment(space: "Space[Any]", clip_actions: bool) -> "ActionWriter":
    """Return what writes recorded actions as the environment takes them."""
    if isinstance(space, Discrete | MultiDiscrete) and np.any(space.start):
        return ActionWriter(offset=np.asarray(space.start))
    if isinstance(space, Box) and clip_actions:
        return ActionWriter(low=space.low, high=space.high)
    return ActionWriter()


class ActionWriter:
    """Writes recorded actions as the environment takes them: clipped, or counted from `start`."""

    def __init__(
        self,
        low: NDArray[Any] | None = None,
        high: NDArray[Any] | None = None,
        offset: NDArray[Any] | None = None,
    ) -> None:
        self._low = low
        self._high = high
        self._offset = offset

    def __call__(self, actions: NDArray[Any]) -> NDArray[Any]:
        """Return the actions as the environment takes them, shape `(N, *A)`."""
        if self._low is not None:
            clipped: NDArray[Any] = np.clip(actions, self._low, self._high)
            return clipped
        return actions if self._offset is None else actions + self._offset


def _refuse_not_finite(actions: NDArray[Any], log_probs: NDArray[Any]) -> None:
    axes = tuple(range(1, actions.ndim))
    is_finite = np.isfinite(actions).all(axis=axes) & np.isfinite(log_probs)
    for index in np.flatnonzero(~is_finite).tolist():
        message = f"action {actions[index]} with log-probability {log_probs[index]}"
        raise NotFiniteActionError(message, index)
