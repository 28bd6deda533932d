"""`BatchSampler`: all environments in lock step, blocking. The baseline and the oracle.

Kept simple on purpose. It shares with the engine the episodes' streams, the drawing of actions
from their noise, and `BatchEpisodes`; nothing else. Every step waits for the slowest environment.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from torch import Tensor

from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.tasks import sample_tasks, task_setter
from asyncmaml.episodes import BatchEpisodes
from asyncmaml.errors import NotFiniteError, SamplerStateError
from asyncmaml.intraop import one_intraop_thread
from asyncmaml.option_kinds import Real, Whole
from asyncmaml.sampling.actions import ActionPlan, draw_actions, plan_actions
from asyncmaml.sampling.actor import to_environment
from asyncmaml.sampling.arguments import (
    optional_seed,
    torch_device,
    usable_cores,
)
from asyncmaml.sampling.noise_store import NoiseStore
from asyncmaml.sampling.row_places import RowLayout
from asyncmaml.sampling.sampler import EnvLike
from asyncmaml.sampling.snapshot import Policy, PolicySnapshot
from asyncmaml.sampling.starting import safe_start
from asyncmaml.sampling.streams import EpisodeStreams, Seeds
from asyncmaml.worker.layout import record_type

_IDLE = -1


class BatchSampler:
    """Samples episodes from environments that are stepped together.

    The same seed gives the same episodes as `AsyncSampler`, bit for bit.

    Args:
        env: A Gymnasium id, an `EnvSpec`, or a callable that makes an environment.
        env_kwargs: Passed to the environment.
        batch_size: Episodes that one `sample()` returns, B.
        num_workers: Processes, with one environment each; None: one for each usable core; 0: all
            environments in this process.
        num_envs: Environments where `num_workers` is 0; None: `batch_size`.
        seed: The root seed; None: from the OS.
        device: Where the policy runs.
        max_episode_steps: Replaces the environment's own time limit.
        clip_actions: Clip Box actions to the space on their way to the environment.

    Raises:
        ConfigurationError: An argument is out of its range.
        UnsupportedSpaceError: The environment's spaces are of a kind that cannot be carried.
    """

    def __init__(
        self,
        env: EnvLike,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 20,
        num_workers: int | None = None,
        num_envs: int | None = None,
        seed: int | None = None,
        device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        clip_actions: bool = True,
    ) -> None:
        maker = EnvMaker.resolve(env, env_kwargs, max_episode_steps)
        self._batch_size = Whole(1).check("batch_size", batch_size)
        workers = usable_cores() if num_workers is None else num_workers
        workers = Whole(0).check("num_workers", workers)
        self._device = torch_device(device)
        self._seeds = Seeds(optional_seed(seed))
        self._task: Any = None
        self._num_envs = self._batch_size
        if num_envs is not None:
            self._num_envs = Whole(1).check("num_envs", num_envs)
        self._num_workers = workers
        self._maker = maker
        self._task_env: gymnasium.Env[Any, Any] = maker.make()
        self.observation_space = self._task_env.observation_space
        self.action_space = self._task_env.action_space
        self._observation_type = record_type(self.observation_space, "observation")[1]
        self._action_type = record_type(self.action_space, "action")[1]
        self._to_environment = to_environment(self.action_space, clip_actions)
        self._envs = self._make_envs()
        self._is_closed = False

    def _make_envs(self) -> SyncVectorEnv | AsyncVectorEnv:
        make = self._maker.make
        if self._num_workers:
            # Gymnasium's default would fork this process, with its threads and their locks.
            with safe_start("spawn"):
                return AsyncVectorEnv(
                    [make] * self._num_workers,
                    context="spawn",
                    autoreset_mode=AutoresetMode.DISABLED,
                )
        return SyncVectorEnv([make] * self._num_envs, autoreset_mode=AutoresetMode.DISABLED)

    def sample(
        self,
        policy: Policy,
        params: Mapping[str, Tensor] | None = None,
        *,
        batch_size: int | None = None,
        gamma: float = 0.95,
        seed: int | None = None,
    ) -> BatchEpisodes:
        """Sample a batch of episodes; see `AsyncSampler.sample`."""
        self._check_open()
        size = self._batch_size if batch_size is None else Whole(1).check("batch_size", batch_size)
        snapshot = PolicySnapshot(policy, params, self._device)
        discount = Real(0, 1).check("gamma", gamma)
        episodes = BatchEpisodes(size, gamma=discount, device=str(self._device))
        streams = self._seeds.next_request(optional_seed(seed))
        with one_intraop_thread() as block, torch.inference_mode():
            self._fill(episodes, snapshot, streams, RowLayout(snapshot, block))
        episodes.task = self._task
        return episodes

    def _fill(
        self,
        episodes: BatchEpisodes,
        policy: PolicySnapshot,
        streams: EpisodeStreams,
        layout: RowLayout,
    ) -> None:
        noise = NoiseStore(self._envs.num_envs)
        plan: ActionPlan | None = None
        steps = np.zeros(self._envs.num_envs, np.int64)
        batch_ids = np.full(self._envs.num_envs, _IDLE)
        done = np.ones(self._envs.num_envs, np.bool_)
        next_id = 0
        observations: Any = None
        while True:
            seeds: list[int | None] = [0] * len(done)
            for row in np.flatnonzero(done).tolist():
                batch_ids[row] = _IDLE
                steps[row] = 0
                if next_id < episodes.batch_size:
                    batch_ids[row] = next_id
                    seeds[row] = streams.reset_seed(next_id)
                    next_id += 1
            active = np.flatnonzero(batch_ids != _IDLE)
            if not active.size:
                return
            if done.any():
                # Rows without an episode are reset and stepped along; nothing of them is kept.
                observations, _ = self._envs.reset(seed=seeds, options={"reset_mask": done})
                _refuse_not_finite(observations, np.zeros(len(done)), batch_ids, steps)
            seen = np.array(observations, self._observation_type)
            batch, places = layout(torch.from_numpy(seen[active]), batch_ids[active])
            distribution = policy(batch)
            if plan is None:
                plan = plan_actions(distribution, len(batch), self.action_space)
            drawn, log_probs = draw_actions(
                plan,
                distribution,
                noise.gather(
                    plan.noise, lambda _: streams, active, batch_ids[active], steps[active]
                ),
                places,
            )
            actions = np.zeros((len(done), *drawn.shape[1:]), self._action_type)
            actions[active] = drawn
            observations, rewards, terminated, truncated, _ = self._envs.step(
                self._to_environment(actions).astype(self._action_type, copy=False)
            )
            episodes.append(
                seen[active],
                actions[active],
                rewards[active].astype(np.float32),
                batch_ids[active],
                log_probs,
            )
            steps += 1
            _refuse_not_finite(observations, rewards, batch_ids, steps)
            done = terminated | truncated
            ended = np.flatnonzero(done & (batch_ids != _IDLE))
            if ended.size:
                last = np.array(observations, self._observation_type)[ended]
                episodes.finish(batch_ids[ended], last, terminated[ended], truncated[ended])

    def sample_tasks(
        self, num_tasks: int, *, seed: int | None = None, held_out: bool = False
    ) -> list[Any]:
        """Draw tasks from the environment's distribution; see `AsyncSampler.sample_tasks`."""
        self._check_open()
        number, call_seed = Whole(1).check("num_tasks", num_tasks), optional_seed(seed)
        tasks_seed = self._seeds.next_tasks(call_seed)
        return sample_tasks(self._task_env, number, tasks_seed, held_out=held_out)

    def reset_task(self, task: Any) -> None:
        """Give all environments a task, which they keep; None: the one of their constructor."""
        self._check_open()
        if task is None:
            self._envs.close()
            self._envs = self._make_envs()
        else:
            self._envs.call(task_setter(self._task_env), task)
        self._task = task

    def _check_open(self) -> None:
        if self._is_closed:
            message = "the sampler is closed; make a new BatchSampler"
            raise SamplerStateError(message)

    def close(self) -> None:
        """End the environments and their processes. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._envs.close()
            self._task_env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _refuse_not_finite(
    observations: NDArray[Any],
    rewards: NDArray[Any],
    batch_ids: NDArray[Any],
    steps: NDArray[np.int64],
) -> None:
    axes = tuple(range(1, observations.ndim))
    is_finite = np.isfinite(observations).all(axis=axes) & np.isfinite(rewards)
    for row in np.flatnonzero(~is_finite & (batch_ids != _IDLE)).tolist():
        batch_id, step = int(batch_ids[row]), int(steps[row]) - 1 if steps[row] else None
        message = (
            f"the environment returned observation {observations[row]} and reward {rewards[row]} "
            f"(in the episode with batch_id {batch_id}, step {step})"
        )
        raise NotFiniteError(message, batch_id=batch_id, step=step)
