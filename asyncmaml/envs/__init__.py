"""The environments of this package; importing it registers them with Gymnasium.

Runs in worker processes, so there is numpy and Gymnasium here and no torch. Entry points are
strings: an environment's own module is imported when the environment is first made, and MuJoCo
with it, so that the ids are there without MuJoCo.
"""

import gymnasium


def _register_once(env_id: str, entry_point: str, **settings: object) -> None:
    """Register unless the id is there: a second import must not warn of an overridden entry."""
    if env_id not in gymnasium.registry:
        gymnasium.register(env_id, entry_point, **settings)  # type: ignore[arg-type]


_register_once(
    "asyncmaml/Bandit-v0",
    "asyncmaml.envs.bandit:BanditEnv",
    vector_entry_point="asyncmaml.envs.bandit:BanditVectorEnv",
    disable_env_checker=True,  # it warns of an observation space with one point, at every make
)
_register_once(
    "asyncmaml/TabularMDP-v0",
    "asyncmaml.envs.tabular_mdp:TabularMDPEnv",
    vector_entry_point="asyncmaml.envs.tabular_mdp:TabularMDPVectorEnv",
    max_episode_steps=10,
)
_register_once(
    "asyncmaml/Navigation2D-v0",
    "asyncmaml.envs.navigation:Navigation2DEnv",
    vector_entry_point="asyncmaml.envs.navigation:Navigation2DVectorEnv",
    max_episode_steps=100,
)
for _name, _module in (
    ("HalfCheetahDir", "half_cheetah"),
    ("HalfCheetahVel", "half_cheetah"),
    ("AntDir", "ant"),
    ("AntVel", "ant"),
    ("AntGoal", "ant"),
):
    _register_once(
        f"asyncmaml/{_name}-v0",
        f"asyncmaml.envs.{_module}:{_name}Env",
        max_episode_steps=200,
    )
for _benchmark in ("ML1", "ML10", "ML25", "ML45"):
    _register_once(
        f"asyncmaml/MetaWorld{_benchmark}-v0",
        "asyncmaml.envs.meta_world:MetaWorldEnv",
        max_episode_steps=500,
        kwargs={"benchmark": _benchmark},
    )
