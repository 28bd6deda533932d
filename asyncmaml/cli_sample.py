"""`asyncmaml sample ENV_ID`: samples episodes and tells what came out and where the time went."""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncmaml.cli_options import HelpFormatter, json_value, keyword, reader
from asyncmaml.cli_progress import Sampled, sampling_bar
from asyncmaml.errors import ConfigurationError, PolicyError
from asyncmaml.option_kinds import LAYER_SIZES, Whole

if TYPE_CHECKING:
    from asyncmaml.episodes import BatchEpisodes
    from asyncmaml.learning.mlp import MLPPolicy
    from asyncmaml.sampling.sampler import AsyncSampler
    from asyncmaml.sampling.statistics import Statistics

_EXAMPLES = """\
examples:
  asyncmaml sample CartPole-v1
  asyncmaml sample HalfCheetah-v5 --episodes 20 --save-policy cheetah.pt
  asyncmaml sample HalfCheetah-v5 --policy cheetah.pt --output cheetah.npz
  asyncmaml sample asyncmaml/Navigation2D-v0 --tasks 8 -k low=-1 -k high=1
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand and its options."""
    parser = commands.add_parser(
        "sample",
        help="sample episodes of an environment",
        description="Sample episodes of an environment in a pool of worker processes.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    _add_environment_options(parser)
    _add_policy_options(parser.add_argument_group("policy"))
    _add_output_options(parser.add_argument_group("workers"), parser.add_argument_group("output"))


def _add_environment_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("env_id", metavar="ENV_ID", help="a Gymnasium id, also as module:Id-v0")
    add("--episodes", type=reader(Whole(1)), default=100, metavar="N", help="default: 100")
    add("--seed", type=reader(Whole(0)), metavar="N", help="default: a new one, which is told")
    add(
        "--max-episode-steps",
        type=reader(Whole(1)),
        metavar="N",
        help="replaces the environment's own time limit",
    )
    add(
        "-k",
        "--env-kwarg",
        dest="env_kwargs",
        action="append",
        type=keyword,
        default=[],
        metavar="KEY=VALUE",
        help="passed to the environment; the value is JSON, or else text; repeat it for more",
    )

    tasks = parser.add_argument_group("tasks").add_mutually_exclusive_group()
    tasks.add_argument(
        "--task",
        type=lambda text: text if text == "random" else json_value(text),
        metavar="TASK",
        help="random, or the task as JSON; default: the environment's initial one",
    )
    tasks.add_argument(
        "--tasks",
        type=reader(Whole(1)),
        metavar="N",
        help="draw N tasks and sample --episodes of each, all at once",
    )


def _add_policy_options(policy: argparse._ArgumentGroup) -> None:
    kind = policy.add_mutually_exclusive_group()
    kind.add_argument("--policy", metavar="FILE", help="what policy.save() wrote; default: fresh")
    kind.add_argument(
        "--hidden",
        type=reader(LAYER_SIZES),
        default=(100, 100),
        metavar="SIZES",
        help="hidden layers of a fresh policy; default: 100,100",
    )
    policy.add_argument(
        "--save-policy", type=Path, metavar="FILE", help="for --policy, at another time"
    )
    policy.add_argument("--device", default="cpu", help="where the policy runs; default: cpu")


def _add_output_options(workers: argparse._ArgumentGroup, output: argparse._ArgumentGroup) -> None:
    workers.add_argument(
        "--workers",
        type=reader(Whole(0)),
        metavar="N",
        help="processes; default: one per core; 0: none, all in this process",
    )
    workers.add_argument(
        "--envs-per-worker",
        type=reader(Whole(1)),
        metavar="N",
        help="environments of each; default: 128, or 256 if natively vectorised",
    )
    output.add_argument(
        "--output",
        type=Path,
        metavar="FILE.npz",
        help="where the episodes go; with --tasks, FILE-0.npz and so on",
    )
    output.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="what every worker did when, for https://ui.perfetto.dev",
    )
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(options: argparse.Namespace) -> None:
    """Sample, write the files that were asked for, and print the result."""
    result = asyncio.run(_sample(options))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    from asyncmaml.cli_report import report

    print(report(result))


async def _sample(options: argparse.Namespace) -> dict[str, Any]:
    """Sample what the options say; return all there is to tell, as plain data."""
    outputs = _outputs(options)
    for path in (options.save_policy, options.trace, *outputs):
        _check_place(path)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    progress = _Progress()
    with sampling_bar(options.episodes * (options.tasks or 1), progress.ask):
        # Here, under the bar: torch takes a second or two.
        from asyncmaml.sampling.arguments import usable_cores
        from asyncmaml.sampling.sampler import AsyncSampler

        num_workers = usable_cores() if options.workers is None else options.workers
        progress.doing = "starting"
        async with AsyncSampler(
            options.env_id,
            dict(options.env_kwargs),
            batch_size=options.episodes,
            num_workers=num_workers,
            envs_per_worker=options.envs_per_worker,
            seed=seed,
            device=options.device,
            max_episode_steps=options.max_episode_steps,
            trace=options.trace,
        ) as sampler:
            policy = _policy(options, sampler, seed)
            if options.save_policy is not None:
                policy.save(options.save_policy)
            tasks = _tasks(options, sampler)
            progress.begin(sampler)
            batches = await _sample_tasks(sampler, policy, tasks)
            seconds = progress.seconds()
            statistics = sampler.statistics
    for path, episodes in zip(outputs, batches, strict=True):
        if path is not None:
            episodes.save(path)

    from asyncmaml.cli_report import plain, summarize, summarize_times

    has_tasks = options.task is not None or options.tasks is not None
    return {
        "environment": options.env_id,
        "seed": seed,
        "policy": {
            "class": type(policy).__name__,
            "hidden_sizes": list(policy.hidden_sizes),
            "file": options.policy,
        },
        **summarize(batches),
        **summarize_times(statistics, seconds, num_workers),
        "tasks": [
            {"task": plain(task), **summarize([episodes])}
            for task, episodes in zip(tasks, batches, strict=True)
            if has_tasks
        ],
        "files": [
            str(path) for path in (options.save_policy, options.trace, *outputs) if path is not None
        ],
    }


async def _sample_tasks(
    sampler: "AsyncSampler", policy: "MLPPolicy", tasks: list[Any]
) -> "list[BatchEpisodes]":
    """Sample episodes of each task, all at once; return them in the order of the tasks."""
    async with asyncio.TaskGroup() as group:
        rollouts = [
            group.create_task(sampler.sample(policy, task=task), name=f"rollout-{index}")
            for index, task in enumerate(tasks)
        ]
    return [rollout.result() for rollout in rollouts]


def _tasks(options: argparse.Namespace, sampler: "AsyncSampler") -> list[Any]:
    """The tasks to sample; None is the environment's own, initial one."""
    if options.tasks is not None:
        return sampler.sample_tasks(options.tasks)
    return sampler.sample_tasks(1) if options.task == "random" else [options.task]


def _policy(options: argparse.Namespace, sampler: "AsyncSampler", seed: int) -> "MLPPolicy":
    import torch

    from asyncmaml.learning.policy_files import load_policy
    from asyncmaml.learning.policy_spaces import policy_for_spaces

    spaces = sampler.observation_space, sampler.action_space
    if options.policy is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return policy_for_spaces(*spaces, options.hidden).to(options.device)
    policy = load_policy(options.policy, options.device)
    wanted = policy_for_spaces(*spaces, policy.hidden_sizes)
    if _kind(policy) != _kind(wanted):
        message = (
            f"{options.policy} holds a {_kind(policy)}, where {options.env_id} needs a "
            f"{_kind(wanted)}; name a policy that was saved for this environment"
        )
        raise PolicyError(message)
    return policy


def _kind(policy: "MLPPolicy") -> str:
    sizes = f"of {policy.input_size} inputs and {policy.output_size} outputs"
    return f"{type(policy).__name__} {sizes}"


def _outputs(options: argparse.Namespace) -> list[Path | None]:
    """Where the episodes of each task go."""
    path: Path | None = options.output
    if path is None or options.tasks is None:
        return [path] * (options.tasks or 1)
    return [path.with_stem(f"{path.stem}-{index}") for index in range(options.tasks)]


def _check_place(path: Path | None) -> None:
    """Say before the work is done that its result could not be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a directory" if path.is_dir() else f"lies in no directory: {path.parent}"
        message = f"cannot write {path}: it {reason}; name a file in a directory that exists"
        raise ConfigurationError(message)


class _Progress:
    """What the bar is told."""

    def __init__(self) -> None:
        self.doing = "loading torch"
        self._sampler: AsyncSampler | None = None
        self._before: Statistics | None = None
        self._began = 0.0

    def begin(self, sampler: "AsyncSampler") -> None:
        """Count and time from now on."""
        self.doing = "sampling"
        self._began = time.perf_counter()
        self._before = sampler.statistics
        self._sampler = sampler

    def seconds(self) -> float:
        """Since `begin`."""
        return time.perf_counter() - self._began

    def ask(self) -> Sampled:
        """Return how far it is; called from the bar's thread."""
        if self._sampler is None or self._before is None:
            return Sampled(self.doing)
        so_far = self._sampler.statistics - self._before
        return Sampled(
            self.doing,
            so_far.episodes,
            so_far.transitions,
            so_far.steps_per_second,
            so_far.worker_busy_share,
        )
