"""What the machine can do of a workload, measured again and again between other measurements."""

import torch
from comparison import Limit
from policy_cost import measure_policy
from raw_stepping import RawForm, RawMeasurement, RawStepping
from workloads import SOURCES

import asyncmaml
from asyncmaml import TrainConfig
from asyncmaml.sampling.arguments import usable_cores
from asyncmaml.worker.fleet import DEFAULT_ROWS

_WARM_UP_SECONDS = 0.2  # of raw stepping: first steps find no caches
_POLICY_SECONDS = 0.1  # for each way of drawing


class MachineLimits:
    """Raw environments on all cores at once, and the policy by itself.

    Args:
        workload: Which environment is stepped; a key of `SOURCES`.
        config: Its policy and rows.
        raw_seconds: Of each measurement of raw steps.
    """

    def __init__(self, workload: str, config: TrainConfig, raw_seconds: float) -> None:
        rows, std = config.envs_per_worker or DEFAULT_ROWS, config.init_std
        # The first one is the limit: what a worker has, moved as a policy moves it at first.
        forms = RawForm(rows, action_std=std), RawForm(rows), RawForm(action_std=std)
        self.raw: dict[RawForm, list[RawMeasurement]] = {form: [] for form in forms}
        self.limits: dict[RawForm, list[Limit]] = {form: [] for form in forms}
        self._workload = workload
        self._raw_seconds = raw_seconds
        self._env = SOURCES[workload].make()
        torch.manual_seed(0)
        self._policy = asyncmaml.policy_for_spaces(
            self._env.observation_space,
            self._env.action_space,
            config.hidden_sizes,
            config.nonlinearity,
            init_std=config.init_std,
        )

    def close(self) -> None:
        """Close the environment that the policy was made for."""
        self._env.close()

    @property
    def first(self) -> list[Limit]:
        """Of the form that counts, one for each measurement."""
        return next(iter(self.limits.values()))

    def measure(self, rows_per_tick: float) -> None:
        """Block the event loop, in which nothing is under way, and leave no process behind."""
        num_rows = max(1, round(rows_per_tick))
        policy = measure_policy(self._policy, self._env, num_rows, _POLICY_SECONDS)
        for form, measured in self.raw.items():
            with RawStepping(self._workload, usable_cores(), form) as processes:
                processes.measure(_WARM_UP_SECONDS)
                raw = processes.measure(self._raw_seconds)
            measured.append(raw)
            self.limits[form].append(Limit.of_cores(raw, policy))
