"""Ants that walk in a direction, at a velocity or to a goal, on Gymnasium's Ant-v5.

Source: Finn et al. (2017), section 5.3, https://arxiv.org/abs/1703.03400, and for the goals
https://github.com/cbfinn/maml_rl. Constants: the seed project's,
https://github.com/dragen1860/MAML-Pytorch-RL, `maml_rl/envs/mujoco/ant.py`: control cost 0.005,
contact cost 0.0005 on forces clipped to ±1, 0.05 for survival, 200 steps, action scale 1, 5 physics
steps of 0.01 s in one step (rllab, with which the paper has measured: one of 0.02 s).

Gymnasium's v5 differs from what the seed ran on:

- The observation is float64, shape `(105,)`: 13 joint positions without x and y, 14 velocities and
  78 contact forces (27 numbers with `include_cfrc_ext_in_observation=False`). The seed's has 123:
  the forces of the world body, which are 0, and the torso's orientation and position, x and y
  among them, come on top.
- Contact forces are computed. mujoco-py 2 left them 0, and so the seed's contact cost.
- What is paid for survival is not paid for the step that terminates the episode.

An episode terminates when a number of the state is not finite or the torso's height leaves
[0.2, 1.0] (`terminate_when_unhealthy`, `healthy_z_range`). Velocities are Gymnasium's and the
seed's: differences of the position that MuJoCo last derived for the torso, in the last stage of
its Runge-Kutta step. Under random actions it is within 3 mm of where the torso then is, and the
velocities are off by 0.004 m/s on average. Goals are measured from where the torso is.
"""

from typing import Any

from asyncmaml.envs.extras import mujoco_required
from asyncmaml.envs.locomotion import (
    Directions,
    Positions,
    Task,
    TaskLocomotion,
    Velocities,
)

with mujoco_required("the Ant family"):
    from gymnasium.envs.mujoco.ant_v5 import AntEnv


class AntDirEnv(TaskLocomotion, AntEnv):
    """An ant that walks forward or backward; registered with 200 steps.

    - Observation: float64, shape `(105,)`; see the module. Never x or y, never the direction.
    - Action: torques, float32, shape `(8,)`, in ±`action_scale`; beyond it is clipped.
    - Reward: direction * velocity along x + `healthy_reward` - costs: `ctrl_cost_weight` * the sum
      of the squared torques, which are in ±1 after the scaling, and `contact_cost_weight` * the
      sum of the squared contact forces, clipped to ±1.
    - Task: `{"direction": 1.0 or -1.0}`, either with probability 0.5. ProMP and PEARL give this
      name to directions in the plane.

    Args:
        action_scale: See `TaskLocomotion`.
        frame_skip: Physics steps in one step.
        ctrl_cost_weight: Weight of the squared torques.
        contact_cost_weight: Weight of the squared contact forces.
        healthy_reward: Paid in each step that does not end the episode.
        render_mode: Gymnasium's: "human", "rgb_array", "depth_array" or "rgbd_tuple".
        task: The first task; None: forward.
        **mujoco: For Ant-v5: `healthy_z_range`, `xml_file`, `reset_noise_scale`, `width` ...

    Raises:
        ConfigurationError: A setting or the task is out of its range.
    """

    def __init__(
        self,
        *,
        action_scale: float = 1.0,
        frame_skip: int = 5,
        ctrl_cost_weight: float = 0.005,
        contact_cost_weight: float = 5e-4,
        healthy_reward: float = 0.05,
        render_mode: str | None = None,
        task: Task | None = None,
        **mujoco: Any,
    ) -> None:
        mujoco.update(
            ctrl_cost_weight=ctrl_cost_weight,
            contact_cost_weight=contact_cost_weight,
            healthy_reward=healthy_reward,
            render_mode=render_mode,
        )
        super().__init__(Directions(), action_scale, frame_skip, task, **mujoco)


class AntVelEnv(TaskLocomotion, AntEnv):
    """An ant that walks at a velocity; registered with 200 steps.

    - Observation, action: as of `AntDirEnv`; never the wanted velocity.
    - Reward: `bonus` - |velocity along x - wanted velocity| + `healthy_reward` - the costs of
      `AntDirEnv`. The bonus keeps an ant from ending an episode that pays less than nothing.
    - Task: `{"velocity": float}`, uniform in `[low, high]`, m/s.

    Args:
        low: Least velocity of a sampled task.
        high: Greatest velocity of a sampled task.
        bonus: Added to each step's reward.
        action_scale: See `TaskLocomotion`.
        frame_skip: Physics steps in one step.
        ctrl_cost_weight: Weight of the squared torques.
        contact_cost_weight: Weight of the squared contact forces.
        healthy_reward: Paid in each step that does not end the episode.
        render_mode: Gymnasium's: "human", "rgb_array", "depth_array" or "rgbd_tuple".
        task: The first task; None: the velocity `high`, since the seed's 0 is standing still.
        **mujoco: For Ant-v5: `healthy_z_range`, `xml_file`, `reset_noise_scale`, `width` ...

    Raises:
        ConfigurationError: A setting or the task is out of its range.
    """

    def __init__(
        self,
        *,
        low: float = 0.0,
        high: float = 3.0,
        bonus: float = 1.0,
        action_scale: float = 1.0,
        frame_skip: int = 5,
        ctrl_cost_weight: float = 0.005,
        contact_cost_weight: float = 5e-4,
        healthy_reward: float = 0.05,
        render_mode: str | None = None,
        task: Task | None = None,
        **mujoco: Any,
    ) -> None:
        kind = Velocities("AntVel", low, high, bonus)
        mujoco.update(
            ctrl_cost_weight=ctrl_cost_weight,
            contact_cost_weight=contact_cost_weight,
            healthy_reward=healthy_reward,
            render_mode=render_mode,
        )
        super().__init__(kind, action_scale, frame_skip, task, **mujoco)


class AntGoalEnv(TaskLocomotion, AntEnv):
    """An ant that walks to a goal; registered with 200 steps. The seed calls it AntPos.

    - Observation, action: as of `AntDirEnv`; never the goal, and so not how far it is.
    - Reward: `bonus` - |x - goal x| - |y - goal y| + `healthy_reward` - the costs of `AntDirEnv`.
    - Task: `{"goal": array of shape (2,)}`, uniform in `[low, high]` on each axis, m.

    Args:
        low: Least coordinate of a sampled goal.
        high: Greatest coordinate of a sampled goal.
        bonus: Added to each step's reward.
        action_scale: See `TaskLocomotion`.
        frame_skip: Physics steps in one step.
        ctrl_cost_weight: Weight of the squared torques.
        contact_cost_weight: Weight of the squared contact forces.
        healthy_reward: Paid in each step that does not end the episode.
        render_mode: Gymnasium's: "human", "rgb_array", "depth_array" or "rgbd_tuple".
        task: The first task; None: the goal `(high, high)`, since the seed's is the start.
        **mujoco: For Ant-v5: `healthy_z_range`, `xml_file`, `reset_noise_scale`, `width` ...

    Raises:
        ConfigurationError: A setting or the task is out of its range.
    """

    def __init__(
        self,
        *,
        low: float = -3.0,
        high: float = 3.0,
        bonus: float = 4.0,
        action_scale: float = 1.0,
        frame_skip: int = 5,
        ctrl_cost_weight: float = 0.005,
        contact_cost_weight: float = 5e-4,
        healthy_reward: float = 0.05,
        render_mode: str | None = None,
        task: Task | None = None,
        **mujoco: Any,
    ) -> None:
        kind = Positions("AntGoal", low, high, bonus)
        mujoco.update(
            ctrl_cost_weight=ctrl_cost_weight,
            contact_cost_weight=contact_cost_weight,
            healthy_reward=healthy_reward,
            render_mode=render_mode,
        )
        super().__init__(kind, action_scale, frame_skip, task, **mujoco)
