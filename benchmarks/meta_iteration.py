"""Times one meta-iteration on Navigation2D in the paper's set-up: sampling, and the outer step.

    python benchmarks/meta_iteration.py              # some minutes
    python benchmarks/meta_iteration.py --quick      # one repeat of everything, fewer tasks

20 tasks of 20 episodes of 100 steps, a 2 x 100 MLP, one inner update (Finn et al. 2017, section
5.3). The outer step is timed three ways on the same episodes, in turn, repeat after repeat: as
`MAMLTRPO` does it, by the graph of KL's gradient built once, and by a graph for every product
(`outer_steps`). Sampling is timed through `AsyncSampler` and by stepping Python environments one
by one with a forward for the 20 of a task, as the seed does. Ratios are taken within a repeat.
"""

import argparse
import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from measuring import Spread
from outer_steps import PlainOuterStep
from reporting import machine_facts
from torch import Tensor

import asyncmaml
import asyncmaml.envs  # registers the environment
from asyncmaml.learning.maml_trpo import MAMLTRPO
from asyncmaml.learning.phases import Phase
from asyncmaml.learning.policies import NormalMLPPolicy

ENVIRONMENT = "asyncmaml/Navigation2D-v0"
ACTION_SCALE = 0.1  # a standard deviation of 1 moves by 0.1, as in the paper's code
STEP_SIZE = 0.5  # of the inner update; the paper's code for this environment
GAMMA = 0.99
TARGETS = {"graph kept": 1.4, "graph per product": 2.0, "one by one": 10.0}


@dataclass(frozen=True)
class SetUp:
    """How much of it."""

    num_tasks: int
    batch_size: int
    num_steps: int


def main() -> None:
    arguments = _parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    set_up = SetUp(6 if arguments.quick else 20, 20, 100)
    repeats = 1 if arguments.quick else arguments.repeats
    print(f"{set_up}, {torch.get_num_threads()} threads, {repeats} repeats")
    policy = NormalMLPPolicy(2, 2)
    sampling, tasks = asyncio.run(_time_sampling(policy, set_up, repeats, arguments.warm_up))
    _show("sampling, both phases", sampling)
    outer, differences = _time_outer_steps(policy, tasks, repeats)
    _show("outer step", outer)
    for name, (difference, step) in differences.items():
        print(f"  {name}: parameters differ by {difference:.1e} at most; the step is {step:.1e}")


def _time_outer_steps(
    policy: NormalMLPPolicy, tasks: Sequence[Sequence[Phase]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, tuple[float, float]]]:
    """Return seconds of each way, and how far each ends from MAMLTRPO, beside its step."""

    def ours(mine: NormalMLPPolicy) -> None:
        report = MAMLTRPO(mine, step_sizes=(STEP_SIZE,)).update(tasks)
        assert report.accepted, report.reason

    def plain(keeps_graph: bool) -> Callable[[NormalMLPPolicy], None]:
        return lambda mine: PlainOuterStep(mine, STEP_SIZE, keeps_graph=keeps_graph).update(tasks)

    ways = {"MAMLTRPO": ours, "graph kept": plain(True), "graph per product": plain(False)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    ends: dict[str, Tensor] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            mine = copy.deepcopy(policy)
            began = time.perf_counter()
            way(mine)
            seconds[name].append(time.perf_counter() - began)
            ends[name] = torch.nn.utils.parameters_to_vector(mine.parameters()).detach()
    start = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
    step = float((ends["MAMLTRPO"] - start).abs().max())
    differences = {
        name: (float((end - ends["MAMLTRPO"]).abs().max()), step) for name, end in ends.items()
    }
    return seconds, differences


async def _time_sampling(
    policy: NormalMLPPolicy, set_up: SetUp, repeats: int, warm_up: int
) -> tuple[dict[str, list[float]], list[tuple[Phase, Phase]]]:
    """Return the seconds of each way, and the phases sampled last.

    The sampler is opened once, as in training, and so are the environments of the other way.
    """
    seconds: dict[str, list[float]] = {"AsyncSampler": [], "one by one": []}
    async with asyncmaml.AsyncSampler(
        ENVIRONMENT,
        env_kwargs={"action_scale": ACTION_SCALE},
        batch_size=set_up.batch_size,
        num_workers=0,  # so cheap an environment is fastest in this process, all rows in one
        envs_per_worker=set_up.num_tasks * set_up.batch_size,
        seed=1,
    ) as sampler:
        for _ in range(warm_up):  # away from the start, where all advantages are noise
            phases, _ = await _sampled(sampler, policy, set_up)
            MAMLTRPO(policy, step_sizes=(STEP_SIZE,)).update(phases)
        envs = [
            gymnasium.make(ENVIRONMENT, disable_env_checker=True, action_scale=ACTION_SCALE)
            for _ in range(set_up.batch_size)
        ]
        for _ in range(repeats):
            phases, ours = await _sampled(sampler, policy, set_up)
            seconds["AsyncSampler"].append(ours)
            seconds["one by one"].append(_seconds_one_by_one(envs, policy, set_up))
        for env in envs:
            env.close()
    return seconds, phases


async def _sampled(
    sampler: asyncmaml.AsyncSampler, policy: NormalMLPPolicy, set_up: SetUp
) -> tuple[list[tuple[Phase, Phase]], float]:
    """Return both phases of every task, and the seconds that sampling alone took."""
    learner = MAMLTRPO(policy, step_sizes=(STEP_SIZE,))
    tasks = sampler.sample_tasks(set_up.num_tasks)
    began = time.perf_counter()
    pre = await asyncio.gather(*(sampler.sample(policy, task=task, gamma=GAMMA) for task in tasks))
    seconds = time.perf_counter() - began
    pre_phases = [learner.phase(episodes) for episodes in pre]
    adapted = [learner.adapt(phase) for phase in pre_phases]
    began = time.perf_counter()
    post = await asyncio.gather(
        *(
            sampler.sample(policy, params, task=task, gamma=GAMMA)
            for task, params in zip(tasks, adapted, strict=True)
        )
    )
    seconds += time.perf_counter() - began
    post_phases = [learner.phase(episodes) for episodes in post]
    return list(zip(pre_phases, post_phases, strict=True)), seconds


@torch.no_grad()
def _seconds_one_by_one(
    envs: Sequence[gymnasium.Env[Any, Any]], policy: NormalMLPPolicy, set_up: SetUp
) -> float:
    """Seconds for as many episodes of Python environments, all of one task in lock step."""
    began = time.perf_counter()
    for _ in range(2 * set_up.num_tasks):
        observations = [env.reset()[0] for env in envs]
        for _ in range(set_up.num_steps):
            rows = torch.stack([torch.as_tensor(observation) for observation in observations])
            actions = policy(rows).sample().numpy()
            observations = [env.step(action)[0] for env, action in zip(envs, actions, strict=True)]
    return time.perf_counter() - began


def _show(title: str, seconds: dict[str, list[float]]) -> None:
    """Print medians and extremes, and how often as fast the first one is."""
    print(f"\n{title}")
    (first, fastest), *others = seconds.items()
    spread = Spread.of(fastest)
    print(f"  {first:18} {_milliseconds(spread)}")
    for name, other in others:
        ratio = Spread.of(theirs / mine for mine, theirs in zip(fastest, other, strict=True))
        print(
            f"  {name:18} {_milliseconds(Spread.of(other))}   {ratio.median:.2f} times as long "
            f"({ratio.least:.2f} to {ratio.greatest:.2f}), wanted {TARGETS[name]:g}"
        )


def _milliseconds(spread: Spread) -> str:
    extremes = f"({spread.least * 1e3:.0f} to {spread.greatest * 1e3:.0f})"
    return f"{spread.median * 1e3:8.0f} ms {extremes:>18}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer tasks, one repeat")
    parser.add_argument("--repeats", type=int, default=5, help="of everything (default: 5)")
    parser.add_argument("--threads", type=int, default=0, help="of torch (default: its own)")
    parser.add_argument("--warm-up", type=int, default=2, help="updates before (default: 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
