"""Half-cheetahs that run in a direction or at a velocity, on Gymnasium's HalfCheetah-v5.

Source: Finn et al. (2017), section 5.3, https://arxiv.org/abs/1703.03400. Constants: the seed
project's, https://github.com/dragen1860/MAML-Pytorch-RL, `maml_rl/envs/mujoco/half_cheetah.py`:
control cost 0.05, 200 steps, action scale 1, 5 physics steps of 0.01 s in one step. rllab, with
which the paper has measured, makes one.

The observation is Gymnasium's, float64, shape `(17,)`: 8 joint positions without x and 9
velocities. The seed's has 20 numbers: the torso's position, x among them, comes on top.
Velocities are differences of x over a step, divided by its time, 0.05 s.
"""

from typing import Any

from asyncmaml.envs.extras import mujoco_required
from asyncmaml.envs.locomotion import (
    Directions,
    Task,
    TaskLocomotion,
    Velocities,
)

with mujoco_required("the HalfCheetah family"):
    from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv


class HalfCheetahDirEnv(TaskLocomotion, HalfCheetahEnv):
    """A half-cheetah that runs forward or backward; registered with 200 steps.

    - Observation: float64, shape `(17,)`; see the module. Never x, never the direction.
    - Action: torques, float32, shape `(6,)`, in ±`action_scale`; beyond it is clipped.
    - Reward: direction * velocity - `ctrl_cost_weight` * the sum of the squared torques, which are
      in ±1 after the scaling. An episode never terminates by itself.
    - Task: `{"direction": 1.0 or -1.0}`, either with probability 0.5.

    Args:
        action_scale: See `TaskLocomotion`.
        frame_skip: Physics steps in one step.
        ctrl_cost_weight: Weight of the squared torques.
        render_mode: Gymnasium's: "human", "rgb_array", "depth_array" or "rgbd_tuple".
        task: The first task; None: forward.
        **mujoco: For HalfCheetah-v5: `xml_file`, `reset_noise_scale`, `width`, `camera_id` ...

    Raises:
        ConfigurationError: A setting or the task is out of its range.
    """

    def __init__(
        self,
        *,
        action_scale: float = 1.0,
        frame_skip: int = 5,
        ctrl_cost_weight: float = 0.05,
        render_mode: str | None = None,
        task: Task | None = None,
        **mujoco: Any,
    ) -> None:
        mujoco.update(ctrl_cost_weight=ctrl_cost_weight, render_mode=render_mode)
        super().__init__(Directions(), action_scale, frame_skip, task, **mujoco)


class HalfCheetahVelEnv(TaskLocomotion, HalfCheetahEnv):
    """A half-cheetah that runs at a velocity; registered with 200 steps.

    - Observation: float64, shape `(17,)`; see the module. Never x, never the wanted velocity.
    - Action: torques, float32, shape `(6,)`, in ±`action_scale`; beyond it is clipped.
    - Reward: -|velocity - wanted velocity| - `ctrl_cost_weight` * the sum of the squared torques,
      which are in ±1 after the scaling. An episode never terminates by itself.
    - Task: `{"velocity": float}`, uniform in `[low, high]`, m/s.

    Args:
        low: Least velocity of a sampled task.
        high: Greatest velocity of a sampled task; PEARL takes 3.
        action_scale: See `TaskLocomotion`.
        frame_skip: Physics steps in one step.
        ctrl_cost_weight: Weight of the squared torques.
        render_mode: Gymnasium's: "human", "rgb_array", "depth_array" or "rgbd_tuple".
        task: The first task; None: the velocity `high`, since the seed's 0 is standing still.
        **mujoco: For HalfCheetah-v5: `xml_file`, `reset_noise_scale`, `width`, `camera_id` ...

    Raises:
        ConfigurationError: A setting or the task is out of its range.
    """

    def __init__(
        self,
        *,
        low: float = 0.0,
        high: float = 2.0,
        action_scale: float = 1.0,
        frame_skip: int = 5,
        ctrl_cost_weight: float = 0.05,
        render_mode: str | None = None,
        task: Task | None = None,
        **mujoco: Any,
    ) -> None:
        kind = Velocities("HalfCheetahVel", low, high)
        mujoco.update(ctrl_cost_weight=ctrl_cost_weight, render_mode=render_mode)
        super().__init__(kind, action_scale, frame_skip, task, **mujoco)
