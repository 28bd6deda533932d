"""`asyncmaml render DIR --output video.mp4`: a film of a policy before and after adaptation."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from asyncmaml.cli_options import HelpFormatter, reader
from asyncmaml.option_kinds import Whole

_DESCRIPTION = """\
Film a run's policy on held-out tasks: left before adaptation, right after it, with
the most likely actions. For environments that draw images, such as MuJoCo's; where
there is no screen they draw with MUJOCO_GL=egl.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand and its options."""
    parser = commands.add_parser(
        "render",
        help="film a policy before and after adaptation",
        description=_DESCRIPTION,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="what was the --output of asyncmaml train")
    add("--output", type=Path, required=True, metavar="FILE", help="the video, .mp4 or .gif")
    add("--tasks", type=reader(Whole(1)), default=2, metavar="N", help="default: 2")
    add(
        "--updates",
        type=reader(Whole(1)),
        default=1,
        metavar="N",
        help="gradient steps; default: 1",
    )
    add(
        "--episodes",
        type=reader(Whole(1)),
        default=20,
        metavar="N",
        help="that each gradient step learns from; default: 20",
    )
    add("--seed", type=reader(Whole(0)), default=1, metavar="N", help="default: 1")


def _run(parsed: argparse.Namespace) -> None:
    """Film, and tell what is seen."""
    from asyncmaml.rendering import render

    film = asyncio.run(
        render(
            parsed.folder,
            parsed.output,
            num_tasks=parsed.tasks,
            num_updates=parsed.updates,
            num_episodes=parsed.episodes,
            seed=parsed.seed,
        )
    )
    for task, (before, after) in zip(film.tasks, film.returns, strict=True):
        print(f"{task}: return {before:,.1f} before, {after:,.1f} after adaptation")
    print(f"wrote {film.path}, {film.num_frames} frames")
