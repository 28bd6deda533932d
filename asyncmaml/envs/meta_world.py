"""Meta-World's meta-learning benchmarks, with a robot arm's tasks; needs `asyncmaml[metaworld]`.

Source: Yu et al. (2019), https://arxiv.org/abs/1910.10897, as the package metaworld has it. A task
is one of its environments ("reach-v3", "door-open-v3" ...) and where object and goal lie in that;
ML1 has one environment, ML10, ML25 and ML45 have so many for training and five others for testing.

The tasks come from the package's `Benchmark` classes, never from its Gymnasium ids: in release
3.1.1 `Meta-World/ML1-train` serves the tasks that are held out for testing.
"""

import functools
import pickle
import threading
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from asyncmaml.envs.extras import metaworld_required
from asyncmaml.errors import ConfigurationError
from asyncmaml.option_kinds import Choice, OrNone, Whole

with metaworld_required("the Meta-World family"):
    import metaworld

FloatArray = NDArray[np.float64]
Task = dict[str, Any]

_FIRST_ENV = "reach-v3"  # ML10, ML25 and ML45 train on it as well
# Making a benchmark borrows numpy's global generator, so two threads must not at once.
_making = threading.Lock()


class MetaWorldEnv(gymnasium.Env[FloatArray, NDArray[np.float32]]):
    """A robot arm of Meta-World, in the environment that its task names; 500 steps.

    - Observation: float64, shape `(39,)`: hand, gripper and objects, now and one step before, and
      three zeros where the goal would be; it is hidden, as in all of these benchmarks.
    - Action: the hand's shift and the gripper's force, float32, shape `(4,)`, in ±1.
    - Reward: Meta-World's, from 0 to 10; `info["success"]` is 1 where the goal is reached. An
      episode never terminates; after 500 steps it is truncated.
    - Task: `{"env_name": "reach-v3", "rand_vec": [...]}`, of which each environment has 50 in a
      benchmark. The arm always starts alike: a seed decides which tasks are drawn, nothing else.

    Where tasks are drawn the benchmark is made, once in a process: 3 s for ML1, 16 s for ML10,
    110 s for ML45. Each environment takes 0.3 s and 20 MiB.

    Args:
        benchmark: "ML1", "ML10", "ML25" or "ML45".
        env_name: The environment of ML1; None: "reach-v3". The other benchmarks have their own.
        split: What `sample_tasks` draws from: "train" or "test". `sample_held_out_tasks`, by which
            evaluations draw, takes "test" in any case.
        benchmark_seed: Of the benchmark's tasks. Train and evaluate with the same one: the test
            tasks of an ML1 are the training tasks of the ML1 with the next seed.
        max_envs: Environments that are kept, of those that the tasks named last.
        task: The first task; None: the first of the split in ML1, which takes each worker 3 s.
        **settings: For the environments: `reward_function_version` ("v1" or "v2"), `render_mode`,
            `camera_name`, `width`, `height` ...

    Raises:
        ConfigurationError: A setting or the task is out of its range.
    """

    metadata = metaworld.SawyerXYZEnv.metadata

    def __init__(
        self,
        *,
        benchmark: str = "ML1",
        env_name: str | None = None,
        split: str = "train",
        benchmark_seed: int = 0,
        max_envs: int = 10,
        task: Task | None = None,
        **settings: Any,
    ) -> None:
        family = "MetaWorld"
        benchmarks, names = ("ML1", "ML10", "ML25", "ML45"), tuple(metaworld.ALL_V3_ENVIRONMENTS)
        self._benchmark = Choice(benchmarks).check(f"benchmark of {family}", benchmark)
        OrNone(Choice(names)).check(f"env_name of {family}", env_name)
        if env_name is not None and benchmark != "ML1":
            message = f"{benchmark} has environments of its own; leave out env_name={env_name!r}"
            raise ConfigurationError(message)
        self._split = Choice(("train", "test")).check(f"split of {family}", split)
        self._seed = Whole(0, 2**32 - 2).check(f"benchmark_seed of {family}", benchmark_seed)
        self._max_envs = Whole(1).check(f"max_envs of {family}", max_envs)
        self._env_name = env_name or _FIRST_ENV
        self._settings = settings
        self._envs: dict[str, Any] = {}
        """The one of the last task comes last."""
        self._has_task = False
        self._is_reset = False
        if task is None:
            self._env = self._env_of(self._env_name)
        else:
            self.reset_task(task)
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        self.render_mode = settings.get("render_mode")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Begin an episode; the seed is for `sample_tasks` alone."""
        super().reset(seed=seed)
        if not self._has_task:
            # Of ML1 always: a worker would be at an ML45 for minutes.
            self.reset_task(_tasks_of("ML1", self._env_name, self._seed)[self._split][0])
        self._is_reset = True
        observation, info = self._env.reset()
        return observation, info

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Simulate one step.

        Raises:
            ResetNeeded: A task was set, and no episode begun since.
        """
        if not self._is_reset:
            message = "MetaWorld cannot step: a task takes effect with a reset; call reset() first"
            raise ResetNeeded(message)
        observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, float(reward), terminated, truncated, info

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Draw tasks of the split with the generator that `reset(seed=...)` seeded.

        All environments of the benchmark come equally often, up to one, and none of their tasks
        twice before all have come once.
        """
        return self._draw(self._split, num_tasks)

    def sample_held_out_tasks(self, num_tasks: int) -> list[Task]:
        """Draw tasks of the split "test", like `sample_tasks`."""
        return self._draw("test", num_tasks)

    def reset_task(self, task: Task) -> None:
        """Take this task from the next reset on, which must come before the next step.

        Raises:
            ConfigurationError: The task is none of Meta-World's.
        """
        name, rand_vec = self._checked(task)
        env = self._env_of(name)
        env.set_task(_metaworlds(name, rand_vec))
        self._env = env
        self._has_task, self._is_reset = True, False
        while len(self._envs) > self._max_envs:
            self._envs.pop(next(iter(self._envs))).close()

    def render(self) -> Any:
        """Return what the environment of the task draws."""
        return self._env.render()

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs.values():
            env.close()
        self._envs.clear()

    def _draw(self, split: str, num_tasks: int) -> list[Task]:
        drawn: list[Task] = []
        tasks: dict[str, list[Task]] = {}
        for task in _tasks_of(self._benchmark, self._env_name, self._seed)[split]:
            tasks.setdefault(task["env_name"], []).append(task)
        left: dict[str, list[int]] = {name: [] for name in tasks}
        while len(drawn) < num_tasks:
            for name in self.np_random.permutation(list(tasks)).tolist():
                if not left[name]:
                    left[name] = self.np_random.permutation(len(tasks[name])).tolist()
                drawn.append(tasks[name][left[name].pop()])
        # Copies: what a caller does to its tasks must not reach the next draw.
        return [task | {"rand_vec": [*task["rand_vec"]]} for task in drawn[:num_tasks]]

    def _env_of(self, name: str) -> Any:
        """Return the environment of that name, which is the last one used from now on."""
        env = self._envs.pop(name, None)
        if env is None:
            env = metaworld.ALL_V3_ENVIRONMENTS[name](**self._settings)
        self._envs[name] = env
        return env

    def _checked(self, task: Task) -> tuple[str, FloatArray]:
        """Return the parts of a task."""
        if isinstance(task, Mapping) and task.keys() == {"env_name", "rand_vec"}:
            name = task["env_name"]
            try:
                rand_vec = np.array(task["rand_vec"], np.float64)
            except (TypeError, ValueError):
                rand_vec = np.full(0, np.nan)
            if isinstance(name, str) and name in metaworld.ALL_V3_ENVIRONMENTS:
                # Private, but all that tells how many numbers the environment reads.
                shape = self._env_of(name)._random_reset_space.shape
                if rand_vec.shape == shape and np.isfinite(rand_vec).all():
                    return name, rand_vec
        message = (
            f"MetaWorld cannot set the task {task!r}: a task is a dict whose 'env_name' is one of "
            "Meta-World's environments and whose 'rand_vec' says, in finite numbers, where object "
            "and goal lie in that; take one from sample_tasks()"
        )
        raise ConfigurationError(message)


def _tasks_of(benchmark: str, env_name: str, seed: int) -> dict[str, list[Task]]:
    """Return a benchmark's tasks by split; `env_name` is for ML1."""
    with _making:
        return _made_tasks_of(benchmark, env_name, seed)


@functools.cache
def _made_tasks_of(benchmark: str, env_name: str, seed: int) -> dict[str, list[Task]]:
    if benchmark == "ML1":
        made = metaworld.ML1(env_name, seed=seed)
    else:
        made = getattr(metaworld, benchmark)(seed=seed)
    return {"train": _as_ours(made.train_tasks), "test": _as_ours(made.test_tasks)}


def _as_ours(tasks: list[Any]) -> list[Task]:
    return [
        {"env_name": name, "rand_vec": pickle.loads(data)["rand_vec"].tolist()}
        for name, data in tasks
    ]


def _metaworlds(name: str, rand_vec: FloatArray) -> Any:
    """Return a task as Meta-World writes it; partially observable: the goal is hidden."""
    env_class = metaworld.ALL_V3_ENVIRONMENTS[name]
    data = {"rand_vec": rand_vec, "env_cls": env_class, "partially_observable": True}
    return metaworld.Task(name, pickle.dumps(data))
