"""As much of the package metaworld as its adapter needs, with the fault of release 3.1.1.

A hand in space that is to come to a goal; an episode lasts 6 steps. `open_envs` counts what is not
closed yet, and `tasks_set` keeps the tasks that any environment was given.
"""

import pickle
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import SyncVectorEnv

NUM_GOALS = 8

open_envs: list["SawyerXYZEnv"] = []
tasks_set: list["Task"] = []


class Task(NamedTuple):
    env_name: str
    data: bytes


class SawyerXYZEnv(gymnasium.Env[Any, Any]):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012
    max_path_length = 6
    worth = 1.0
    """Of being at the goal."""

    def __init__(self, render_mode: str | None = None, reward_function_version: str = "v2") -> None:
        low, high = np.full(39, -np.inf), np.full(39, np.inf)
        low[-3:] = high[-3:] = 0
        self.observation_space = Box(low, high, dtype=np.float64)
        self.action_space = Box(-np.ones(4, np.float32), np.ones(4, np.float32), dtype=np.float32)
        self.render_mode = render_mode
        self.reward_function_version = reward_function_version
        self._random_reset_space = Box(-np.ones(6), np.ones(6), dtype=np.float64)
        self._rand_vec: Any = None
        self._steps = 0
        open_envs.append(self)

    def set_task(self, task: Task) -> None:
        data = pickle.loads(task.data)
        assert isinstance(self, data.pop("env_cls"))
        self._rand_vec = data.pop("rand_vec")
        self._hides_goal = data.pop("partially_observable")
        assert not data
        tasks_set.append(task)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        # Like Meta-World's, it passes the seed over.
        self._hand = np.zeros(3)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self in open_envs
        if self._rand_vec is None:
            message = "You must call env.set_task before using env.step"
            raise RuntimeError(message)
        if self._steps >= self.max_path_length:
            message = "You must reset the env manually once truncate==True"
            raise ValueError(message)
        self._steps += 1
        self._hand = self._hand + np.clip(action[:3], -1, 1) / 10
        distance = np.linalg.norm(self._hand - self._rand_vec[3:])
        info = {"success": float(distance < 0.05)}
        is_over = self._steps == self.max_path_length
        return self._observation(), self.worth - distance, False, is_over, info

    def _observation(self) -> Any:
        goal = np.zeros(3) if self._hides_goal else self._rand_vec[3:]
        return np.concatenate([self._hand, self._rand_vec[:3], np.zeros(30), goal])

    def close(self) -> None:
        open_envs.remove(self)


class SawyerReachEnvV3(SawyerXYZEnv):
    pass


class SawyerPushEnvV3(SawyerXYZEnv):
    worth = 10.0


class SawyerDoorOpenEnvV3(SawyerXYZEnv):
    worth = 100.0


class SawyerDrawerOpenEnvV3(SawyerXYZEnv):
    worth = 1000.0


ALL_V3_ENVIRONMENTS = {
    "reach-v3": SawyerReachEnvV3,
    "push-v3": SawyerPushEnvV3,
    "door-open-v3": SawyerDoorOpenEnvV3,
    "drawer-open-v3": SawyerDrawerOpenEnvV3,
}


def _tasks(names: list[str], seed: int) -> list[Task]:
    numbers = np.random.RandomState(seed)
    return [
        Task(
            name,
            pickle.dumps(
                {
                    "rand_vec": numbers.uniform(-1, 1, 6),
                    "env_cls": ALL_V3_ENVIRONMENTS[name],
                    "partially_observable": True,
                }
            ),
        )
        for name in names
        for _ in range(NUM_GOALS)
    ]


class ML1:
    def __init__(self, env_name: str, seed: int) -> None:
        self.train_tasks, self.test_tasks = _tasks([env_name], seed), _tasks([env_name], seed + 1)


class ML10:
    def __init__(self, seed: int) -> None:
        self.train_tasks = _tasks(["reach-v3", "push-v3", "door-open-v3"], seed)
        self.test_tasks = _tasks(["drawer-open-v3"], seed)


def register_ids() -> None:
    """Register the two ids of ML1; both serve the test tasks, as in release 3.1.1."""

    class WithTasks(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __init__(self, tasks: list[Task]) -> None:
            super().__init__(SawyerReachEnvV3())
            self.tasks = tasks

    for split in ("train", "test"):

        def make(env_name: str, seed: int, num_envs: int = 1) -> Any:
            tasks = getattr(ML1(env_name, seed), f"{split}_tasks")  # noqa: B023  (the fault)
            return SyncVectorEnv([lambda: WithTasks(tasks)])

        gymnasium.register(f"Meta-World/ML1-{split}", vector_entry_point=make)  # type: ignore[arg-type]
