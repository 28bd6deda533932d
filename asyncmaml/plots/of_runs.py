"""Which pictures a run's folder gets, and what has to be sampled for them."""

from pathlib import Path

from asyncmaml.config import TrainConfig
from asyncmaml.evaluation import (
    adapted_tasks,
    halving_step_sizes,
    load_report,
    policy_and_config,
)
from asyncmaml.plots.gradient_steps import draw_gradient_steps
from asyncmaml.plots.learning_curves import draw_learning_curves
from asyncmaml.plots.trajectories import draw_trajectories, one_goal_of_each_quadrant
from asyncmaml.training.draws import Purpose
from asyncmaml.training.run_folder import RunFolder

_TRAJECTORY_STEPS = (0, 1, 3)
_TRAJECTORY_EPISODES = 20


async def draw_run(path: str | Path) -> list[Path]:
    """Draw all pictures that there is something for; return where they are.

    Raises:
        ConfigurationError: The folder holds no run.
        MissingExtraError: matplotlib is not installed.
    """
    folder = RunFolder(path)
    curve = folder.picture("learning_curve")
    draw_learning_curves([path], curve)
    pictures = [curve]
    if folder.evaluation.is_file():
        pictures.append(draw_evaluation(path))
    _, config = policy_and_config(path)
    if has_trajectories(config):
        pictures.append(await draw_run_trajectories(path))
    return pictures


def draw_evaluation(path: str | Path) -> Path:
    """Draw what `evaluate` wrote; return where the picture is."""
    folder = RunFolder(path)
    picture = folder.picture("evaluation")
    draw_gradient_steps(load_report(folder.evaluation), picture)
    return picture


def has_trajectories(config: TrainConfig) -> bool:
    """Tell whether the run walks in a plane, so that its paths can be drawn."""
    return config.env_id.partition("-v")[0] == "asyncmaml/Navigation2D"


async def draw_run_trajectories(
    path: str | Path, picture: Path | None = None, seed: int = 1
) -> Path:
    """Adapt to one held-out goal of each quadrant and draw the paths; return the picture."""
    policy, config = policy_and_config(path)
    adapted = await adapted_tasks(
        policy,
        config,
        40,
        choose=one_goal_of_each_quadrant,
        num_episodes=_TRAJECTORY_EPISODES,
        step_sizes=halving_step_sizes(config, _TRAJECTORY_STEPS[-1]),
        seed=seed,
        purpose=Purpose.PICTURE,
        keeps_episodes=True,
    )
    picture = picture or RunFolder(path).picture("trajectories")
    draw_trajectories(adapted, _TRAJECTORY_STEPS, picture)
    return picture
