"""The presets of `asyncmaml train PRESET`: what each family is trained with, and from where.

`navigation-2d` is the set-up of Finn et al. (2017), section 5.3 and the code behind it
(https://github.com/cbfinn/maml_rl), the others those of tristandeleu/pytorch-maml-rl
(`configs/maml/*.yaml`). The seed's table of the MDP has no configuration there; ours has the
horizon of the environment and the rates of the bandits.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named configuration: what it is, and the fields of `TrainConfig` that it sets."""

    about: str
    fields: dict[str, Any]


def _locomotion(env_id: str, about: str, **env_kwargs: Any) -> Preset:
    """A MuJoCo family; all five are configured alike."""
    return Preset(
        about,
        {
            "env_id": f"asyncmaml/{env_id}-v0",
            # Actions in ±10 are scaled to the environment's ±1: a tenth of it for a first
            # standard deviation of 1.
            "env_kwargs": {"action_scale": 10.0, **env_kwargs},
            "max_episode_steps": 100,
            "hidden_sizes": (64, 64),
            "nonlinearity": "tanh",
            "tasks_per_iteration": 40,
        },
    )


PRESETS = {
    "navigation-2d": Preset(
        "walk to an unseen goal; the paper's set-up",
        {
            "env_id": "asyncmaml/Navigation2D-v0",
            "env_kwargs": {"low": -0.5, "high": 0.5, "action_scale": 0.1},
            "max_episode_steps": 100,
            "step_sizes": (0.5,),
            "iterations": 100,
            # Not in the paper: some seeds let the policy before adaptation run away, since the
            # trust region binds the adapted ones alone. Steps that do not are hardly changed.
            "max_pre_kl": 0.02,
        },
    ),
    "bandit": Preset(
        "five arms of unknown payoff",
        {
            "env_id": "asyncmaml/Bandit-v0",
            "env_kwargs": {"k": 5},
            "gamma": 0.95,
            "hidden_sizes": (32, 32),
            # Theirs is relu, by which a network that only ever observes 0 learns nothing but its
            # last biases; and the log-likelihood's derivative is first order here. Measured, 60
            # iterations, after one step on held-out tasks, of 0.833 at best: relu 0.48, tanh
            # 0.70, tanh with the ratio 0.78.
            "nonlinearity": "tanh",
            "objective": "likelihood_ratio",
            "step_sizes": (0.5,),
            "episodes_per_task": 100,
        },
    ),
    "tabular-mdp": Preset(
        "ten states, five actions, unknown transitions",
        {
            "env_id": "asyncmaml/TabularMDP-v0",
            "max_episode_steps": 10,
            "gamma": 0.95,
            "hidden_sizes": (32, 32),
            "step_sizes": (0.5,),
        },
    ),
    "halfcheetah-dir": _locomotion("HalfCheetahDir", "run forward or backward"),
    "halfcheetah-vel": _locomotion("HalfCheetahVel", "run at a speed", low=0.0, high=2.0),
    "ant-dir": _locomotion("AntDir", "walk forward or backward"),
    "ant-vel": _locomotion("AntVel", "walk at a speed", low=0.0, high=3.0),
    "ant-goal": _locomotion("AntGoal", "walk to a goal", low=-3.0, high=3.0),
}
