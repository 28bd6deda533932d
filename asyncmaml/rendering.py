"""`render()`: a film of a run's policy before and after adaptation, side by side.

Everything of it runs in this process: one environment with `render_mode="rgb_array"`.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncmaml.config import TrainConfig
from asyncmaml.envs.making import EnvMaker
from asyncmaml.envs.tasks import reset_task
from asyncmaml.errors import ConfigurationError, MissingExtraError
from asyncmaml.evaluation import adapted_tasks, halving_step_sizes, policy_and_config
from asyncmaml.learning.mlp import MLPPolicy
from asyncmaml.training.draws import Purpose
from asyncmaml.training.rollouts import AdaptedTask

Frame = NDArray[np.uint8]
_DEFAULT_FRAMES_PER_SECOND = 30
_LINE_PIXELS = 4


@dataclass(frozen=True)
class Film:
    """What was filmed.

    Attributes:
        path: The video.
        num_frames: Its length.
        returns: Of the episode before adaptation and of the one after, for each task.
        tasks: The tasks, in the order in which they are shown.
    """

    path: Path
    num_frames: int
    returns: list[tuple[float, float]]
    tasks: list[Any]


async def render(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    num_tasks: int = 2,
    num_updates: int = 1,
    num_episodes: int = 20,
    seed: int = 1,
) -> Film:
    """Film one episode before adaptation (left) and one after (right), for each of some tasks.

    Args:
        run: The run's folder.
        output: The video; its ending decides the kind: .mp4 or .gif.
        num_tasks: Held-out tasks, one after the other.
        num_updates: Gradient steps of the adaptation.
        num_episodes: That each gradient step learns from.
        seed: Of tasks and episodes.

    Raises:
        ConfigurationError: There is no run, its environment draws no images, or the ending of
            `output` is another.
        MissingExtraError: imageio or MuJoCo is missing.
    """
    path = Path(output)
    writer_of = _writer_of(path)
    prepare_display()
    policy, config = policy_and_config(run)
    await asyncio.to_thread(_check_draws, config)
    adapted = await adapted_tasks(
        policy,
        config,
        num_tasks,
        num_episodes=num_episodes,
        step_sizes=halving_step_sizes(config, num_updates),
        seed=seed,
        purpose=Purpose.PICTURE,
    )
    returns, num_frames = await asyncio.to_thread(_film, config, policy, adapted, seed, writer_of)
    return Film(path, num_frames, returns, [one.task for one in adapted])


def prepare_display() -> None:
    """Let MuJoCo draw without a screen; it reads the variable when it is first imported."""
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_screen:
        os.environ.setdefault("MUJOCO_GL", "egl")


def _film(
    config: TrainConfig, policy: MLPPolicy, adapted: list[AdaptedTask], seed: int, writer_of: Any
) -> tuple[list[tuple[float, float]], int]:
    """Write the film; return each task's returns and the number of frames."""
    returns, num_frames = [], 0
    env = _maker(config, render_mode="rgb_array").make()
    try:
        with writer_of(env.metadata.get("render_fps", _DEFAULT_FRAMES_PER_SECOND)) as writer:
            for index, one in enumerate(adapted):
                reset_task(env, one.task)
                before, after = (
                    _episode(env, policy, params, seed + index) for params in (None, one.params)
                )
                for frame in side_by_side(before[0], after[0]):
                    writer.append_data(frame)
                    num_frames += 1
                returns.append((before[1], after[1]))
    finally:
        env.close()
    return returns, num_frames


def side_by_side(left: list[Frame], right: list[Frame]) -> list[Frame]:
    """Join two films of one height, a white line between; what is over first stands still."""
    length = max(len(left), len(right))
    line = np.full((left[0].shape[0], _LINE_PIXELS, 3), 255, np.uint8)
    return [
        np.concatenate([left[min(i, len(left) - 1)], line, right[min(i, len(right) - 1)]], axis=1)
        for i in range(length)
    ]


def _writer_of(path: Path) -> Any:
    """Return what opens a writer at a frame rate; complain before the work is done."""
    if path.suffix.lower() not in (".mp4", ".gif"):
        message = f"cannot film into {path}: its ending must be .mp4 or .gif"
        raise ConfigurationError(message)
    try:
        import imageio.v2 as imageio

        if path.suffix.lower() == ".mp4":
            import imageio_ffmpeg  # noqa: F401 - what imageio writes .mp4 with
    except ImportError as error:
        who, package = f"writing {path}", error.name or "imageio"
        raise MissingExtraError.naming(who, package, "asyncmaml[video]") from error
    if not path.parent.is_dir():
        message = f"cannot write {path}: {path.parent} is no directory; make it first"
        raise ConfigurationError(message)
    if path.suffix.lower() == ".gif":
        return lambda rate: imageio.get_writer(path, duration=1000 / rate, loop=0)
    return lambda rate: imageio.get_writer(path, fps=rate, macro_block_size=2)


def _check_draws(config: TrainConfig) -> None:
    """Complain of an environment that draws no images."""
    env = _maker(config).make()  # one that cannot draw may not even know the keyword
    modes = env.metadata.get("render_modes", [])
    env.close()
    if "rgb_array" not in modes:
        message = (
            f"{config.env_id} draws no images (no render mode 'rgb_array'); for Navigation2D "
            "`asyncmaml plot` draws the paths"
        )
        raise ConfigurationError(message)


def _maker(config: TrainConfig, **keywords: str) -> EnvMaker:
    keywords_of_all = {**config.env_kwargs, **keywords}
    return EnvMaker.resolve(config.env_id, keywords_of_all, config.max_episode_steps)


@torch.no_grad()
def _episode(
    env: Any, policy: MLPPolicy, params: dict[str, Tensor] | None, seed: int
) -> tuple[list[Frame], float]:
    """Return the frames and the return of one episode, with the distribution's mean action."""
    observation, _ = env.reset(seed=seed)
    frames, total, is_over = [env.render()], 0.0, False
    space = env.action_space
    while not is_over:
        rows = torch.as_tensor(np.asarray(observation, np.float32)).unsqueeze(0)
        action = _most_likely(policy, rows.to(next(policy.parameters()).device), params)
        if hasattr(space, "low"):
            action = np.clip(action, space.low, space.high)
        observation, reward, terminated, truncated, _ = env.step(action)
        frames.append(env.render())
        total += float(reward)
        is_over = terminated or truncated
    return frames, total


def _most_likely(policy: MLPPolicy, rows: Tensor, params: dict[str, Tensor] | None) -> Any:
    """Return the mode of the policy's distribution for one observation."""
    return policy(rows, params).mode[0].cpu().numpy()
