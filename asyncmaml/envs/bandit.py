"""Multi-armed bandits: pull one arm, once.

Source: Duan et al. (2016), section 3.1, https://arxiv.org/abs/1611.02779, in the form of
https://github.com/tristandeleu/pytorch-maml-rl: an episode is one pull, and what an agent knows
of the arms it knows from its other episodes. `BanditFamily.pull` is the dynamics of both forms of
the environment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import ArrayLike, NDArray

from asyncmaml.envs.row_streams import RowStreams, standard_normals
from asyncmaml.envs.rows import RowVectorEnv, checked_choices
from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import Choice, Real, Whole

FloatArray = NDArray[np.float64]
Observation = NDArray[np.float32]

DISTRIBUTIONS = ("bernoulli", "gaussian")


@dataclass(frozen=True)
class BanditFamily:
    """The bandits with `k` arms; see `BanditEnv` for the settings.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    k: int
    distribution: str
    std: float

    def __post_init__(self) -> None:
        Whole(1).check("k of Bandit, its number of arms,", self.k)
        Choice(DISTRIBUTIONS).check("distribution of Bandit's rewards", self.distribution)
        Real(0).check("std of Bandit's Gaussian rewards", self.std)

    def spaces(self) -> tuple[Space[Observation], Discrete]:
        """Return the spaces of one observation and of one action."""
        return Box(0.0, 0.0, (1,), np.float32), Discrete(int(self.k))

    def sample_tasks(self, generator: np.random.Generator, num_tasks: int) -> list[dict[str, Any]]:
        """Draw tasks: every arm's mean uniform in [0, 1)."""
        return [{"mean": mean} for mean in generator.uniform(size=(num_tasks, self.k))]

    def first_means(self, task: Mapping[str, ArrayLike] | None) -> FloatArray:
        """Return the means of a constructor's task; None: 0.5 for each arm."""
        return np.full(self.k, 0.5) if task is None else self.means_of(task)

    def means_of(self, task: Mapping[str, ArrayLike]) -> FloatArray:
        """Return the task's mean of each arm, a copy of shape `(k,)`.

        Raises:
            ConfigurationError: The task has not a mean for each arm.
        """
        try:
            means = np.array(task["mean"], np.float64)
        except (TypeError, KeyError, ValueError, IndexError):
            means = np.full(0, np.nan)
        is_good = means.shape == (self.k,) and bool(np.isfinite(means).all())
        if is_good and self.distribution == "bernoulli":
            is_good = bool(((means >= 0.0) & (means <= 1.0)).all())
        if not is_good:
            numbers = "probabilities" if self.distribution == "bernoulli" else "finite numbers"
            message = (
                f"Bandit cannot set the task {task!r}: a task is a dict whose 'mean' is "
                f"{self.k} {numbers}, one for each arm; take one from sample_tasks()"
            )
            raise ConfigurationError(message)
        return means

    def pull(
        self,
        means: FloatArray,
        actions: ArrayLike,
        streams: RowStreams,
        is_running: NDArray[np.bool_],
    ) -> FloatArray:
        """Pull one arm in every row.

        Args:
            means: Shape `(R, k)`.
            actions: The arms, shape `(R,)`.
            streams: Of the rows; those that run draw 1 number (Bernoulli) or 2 (Gaussian).
            is_running: Rows whose action is looked at and whose stream goes on, shape `(R,)`.

        Returns:
            Rewards, shape `(R,)`.

        Raises:
            ConfigurationError: A running row's action is no arm.
        """
        arms = checked_choices("Bandit", actions, int(self.k), is_running)
        chosen = means[np.arange(len(arms)), arms]
        rewards: FloatArray
        if self.distribution == "bernoulli":
            rewards = (streams.uniforms(1, is_running)[0] < chosen).astype(np.float64)
        else:
            radii, angles = streams.uniforms(2, is_running)
            rewards = chosen + float(self.std) * standard_normals(radii, angles)
        return rewards


class BanditEnv(gymnasium.Env[Observation, np.int64]):
    """One pull of one of `k` arms; every episode terminates with its first step.

    - Observation: nothing, as one zero, float32, shape `(1,)`.
    - Action: the arm, `Discrete(k)`.
    - Reward: 1 with the arm's probability, else 0 (`"bernoulli"`); or normal around the arm's mean
      with the standard deviation `std` (`"gaussian"`).
    - Task: `{"mean": array of shape (k,)}`, each uniform in [0, 1).

    The best return of a task is its greatest mean, that of the random policy the mean of its
    means (`asyncmaml.envs.oracles`). Without a task every arm has the mean 0.5.

    Constants: https://github.com/dragen1860/MAML-Pytorch-RL, `maml_rl/envs/bandit.py`.

    Args:
        k: Arms; the source's presets take 5, 10 and 50.
        distribution: "bernoulli" or "gaussian".
        std: Standard deviation of Gaussian rewards, the same in all tasks.
        task: The first task; None: 0.5 for every arm.

    Raises:
        ConfigurationError: A setting or the task is out of its range.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        k: int = 10,
        distribution: str = "bernoulli",
        std: float = 1.0,
        task: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        self._family = BanditFamily(k, distribution, std)
        self.observation_space, self.action_space = self._family.spaces()
        self._streams = RowStreams(1)
        self._means = self._family.first_means(task).reshape(1, -1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; the task stays."""
        super().reset(seed=seed, options=options)
        self._streams.reseed(seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Pull the arm."""
        rewards = self._family.pull(self._means, [action], self._streams, np.ones(1, np.bool_))
        return np.zeros(1, np.float32), rewards.item(), True, False, {}

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        """Draw tasks with the generator that `reset(seed=...)` seeded."""
        return self._family.sample_tasks(self.np_random, num_tasks)

    def reset_task(self, task: Mapping[str, ArrayLike]) -> None:
        """Pull this task's arms from now on.

        Raises:
            ConfigurationError: The task has not a mean for each arm.
        """
        self._means = self._family.means_of(task).reshape(1, -1)


class BanditVectorEnv(RowVectorEnv):
    """`BanditEnv` by rows; takes the same keywords and returns the same numbers.

    A reset costs an assignment: an episode is one step long, and each step ends all rows.
    """

    def __init__(
        self,
        num_envs: int,
        max_episode_steps: int | None = None,
        k: int = 10,
        distribution: str = "bernoulli",
        std: float = 1.0,
        task: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        self._family = BanditFamily(k, distribution, std)
        super().__init__(num_envs, *self._family.spaces(), max_episode_steps)
        self._initial_means = self._family.first_means(task)
        self._means = np.tile(self._initial_means, (num_envs, 1))
        self._streams = RowStreams(num_envs)
        self._is_running = np.zeros(num_envs, np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in the masked rows; their tasks stay."""
        mask = None if options is None else options.get("reset_mask")
        self._streams.reseed(seed, mask)
        self._is_running[slice(None) if mask is None else mask] = True
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Observation, FloatArray, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Pull an arm in every row."""
        rewards = self._family.pull(self._means, actions, self._streams, self._is_running)
        self._is_running[:] = False
        observations = np.zeros((self.num_envs, 1), np.float32)
        terminated = np.ones(self.num_envs, np.bool_)
        # One step is the shortest limit there is, and TimeLimit says so of a terminated one too.
        truncated = np.full(self.num_envs, self.max_episode_steps == 1)
        return observations, rewards, terminated, truncated, {}

    def reset_task(
        self, task: Mapping[str, ArrayLike], mask: NDArray[np.bool_] | None = None
    ) -> None:
        """Give the masked rows (None: all) this task.

        Raises:
            ConfigurationError: The task has not a mean for each arm.
        """
        self._means[slice(None) if mask is None else mask] = self._family.means_of(task)

    def restore_task(self, mask: NDArray[np.bool_]) -> None:
        """Give the masked rows the task that they had at first."""
        self._means[mask] = self._initial_means
