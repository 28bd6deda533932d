"""What the policy costs by itself: its forward and the drawing of actions, in one thread.

Twice: as torch's users do it, `policy(observations).sample()`, and as the samplers of this
package do it, from noise that was drawn a block of steps ahead and with log-probabilities.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Space
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncmaml.intraop import one_intraop_thread
from asyncmaml.sampling.actions import ActionPlan, draw_actions, plan_actions
from asyncmaml.sampling.noise_store import NoiseStore
from asyncmaml.sampling.row_places import padded
from asyncmaml.sampling.streams import Seeds

_WARM_UP_CALLS = 20
_CALLS_BETWEEN_LOOKS = 16  # at the clock


@dataclass(frozen=True)
class PolicyCost:
    """Of one forward with the actions drawn from it."""

    num_rows: int
    users_us: float
    """Wall time of `policy(observations).sample()`."""
    own_us: float
    """Wall time of our forward and draw."""
    least_cpu_us: float
    """CPU time of the cheaper way."""

    @property
    def cpu_us_per_row(self) -> float:
        """CPU time of the cheaper way, a row."""
        return self.least_cpu_us / self.num_rows


def measure_policy(
    policy: nn.Module, env: gymnasium.Env[Any, Any], num_rows: int, seconds: float
) -> PolicyCost:
    """Measure both ways, each for `seconds`, on observations as `env` has them."""
    generator = np.random.default_rng(0)
    shape = (num_rows, *(env.observation_space.shape or ()))
    observations = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    with one_intraop_thread() as row_block, torch.inference_mode():

        def users_way() -> object:
            return policy(observations).sample().numpy()

        users, users_cpu = _us_per_call(users_way, seconds)
        own, own_cpu = _us_per_call(
            _OwnWay(policy, env.action_space, observations, row_block), seconds
        )
    return PolicyCost(num_rows, users, own, min(users_cpu, own_cpu))


def _us_per_call(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Return wall and CPU time."""
    for _ in range(_WARM_UP_CALLS):
        call()
    calls = 0
    began, cpu_began = time.perf_counter(), time.thread_time()
    elapsed = 0.0
    # Once at least: on a busy machine the time may be over before the first look.
    while not calls or elapsed < seconds:
        for _ in range(_CALLS_BETWEEN_LOOKS):
            call()
        calls += _CALLS_BETWEEN_LOOKS
        elapsed = time.perf_counter() - began
    cpu_elapsed = time.thread_time() - cpu_began
    return elapsed / calls * 1e6, cpu_elapsed / calls * 1e6


class _OwnWay:
    """A tick's forward and draw, without what records the transitions."""

    def __init__(
        self,
        policy: nn.Module,
        action_space: "Space[Any]",
        observations: Tensor,
        row_block: int,
    ) -> None:
        self._policy = policy
        self._observations = observations
        self._row_block = row_block
        self._streams = Seeds(0).next_request(None)
        self._params = dict(policy.named_parameters())
        distribution = policy(observations, self._params)
        count = len(observations)
        self._plan: ActionPlan = plan_actions(distribution, count, action_space)
        self._noise = NoiseStore(count)
        self._rows = np.arange(count)
        self._steps = np.zeros(count, np.int64)

    def __call__(self) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        plan, count = self._plan, len(self._observations)
        distribution = self._policy(padded(self._observations, self._row_block), self._params)
        noise = self._noise.gather(
            plan.noise, lambda _: self._streams, self._rows, self._rows, self._steps
        )
        self._steps += 1
        return draw_actions(plan, distribution, noise, slice(0, count))
