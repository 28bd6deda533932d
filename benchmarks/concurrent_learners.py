"""Many learners at once on one sampler: sample, one policy-gradient step, sample again.

    python benchmarks/concurrent_learners.py            # some 3 minutes
    python benchmarks/concurrent_learners.py --quick    # within one
    python benchmarks/concurrent_learners.py --env CartPole-v1 --horizon 200 --learners 40

A task group of coroutines, each with a seed of its own, samples HalfCheetah-v5 with the policy's
parameters, takes a step of its own in one thread that all learners share, and samples with what
came of it. Then the same, one coroutine after the other, which must give the same episodes, bit
for bit. In turn, repeat after repeat.

How busy the workers are is told in three ways, as a mean of the workers:

- with work: they run, or would if they had a core; they do not wait for the sampler. From
  /proc/PID/schedstat, so from outside.
- on a core: CPU time over wall time. With fewer cores than busy threads it cannot reach 1.
- in environments: as `sampler.statistics` counts it, by wall time.
"""

import argparse
import asyncio
import hashlib
import itertools
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import Meter, Spread
from reporting import in_words, machine_facts, plain_table, short
from torch import Tensor

import asyncmaml
from asyncmaml.learning.policies import MLPPolicy
from asyncmaml.sampling.arguments import usable_cores
from asyncmaml.worker.fleet import DEFAULT_ROWS

BUSY_WANTED = 0.9
_STEP_SIZE = 0.1
_LOOKS_PER_SECOND = 20
_TENTHS = 10

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """What every learner does."""

    learners: int
    batch_size: int
    horizon: int
    rounds: int
    """Gradient steps of each; it samples once more."""


@dataclass(frozen=True)
class Usage:
    """Seconds of all workers together, since their start."""

    wall: float
    on_core: float
    waiting_for_core: float

    @classmethod
    def now(cls, pids: Iterable[int]) -> "Usage":
        """Read it."""
        on_core = waiting = 0.0
        for pid in pids:
            # Of its only thread that works: nanoseconds on a core, and in a core's queue.
            fields = Path(f"/proc/{pid}/schedstat").read_text().split()
            on_core += int(fields[0]) / 1e9
            waiting += int(fields[1]) / 1e9
        return cls(time.perf_counter(), on_core, waiting)


@dataclass(frozen=True)
class Run:
    """What came of all learners, concurrent or one by one."""

    seconds: float
    transitions: int
    digests: list[str]
    """Of each learner's episodes and parameters."""
    with_work: float
    on_core: float
    in_environments: float
    tenths: list[float]
    """The share with work in each tenth of the run."""
    learner_cores: float
    """Cores that the learners' thread took."""
    others_cores: float
    rows_per_tick: float
    sampler_waiting: float
    """Share of the time in which the sampler's thread had nothing to do."""

    @property
    def rate(self) -> float:
        """Transitions a second."""
        return self.transitions / self.seconds


class Learners:
    """The learners of one sampler, and the thread in which they all compute."""

    def __init__(self, sampler: asyncmaml.AsyncSampler, policy: MLPPolicy, plan: Plan) -> None:
        self._sampler = sampler
        self._policy = policy
        self._plan = plan
        self._executor = ThreadPoolExecutor(1, "learner", initializer=_one_torch_thread)
        # By the processes themselves, since there are helpers of multiprocessing's beside them.
        self._pids = [child.pid for child in multiprocessing.active_children() if child.pid]
        self.learner_seconds = 0.0

    async def learn(self, number: int) -> tuple[int, str]:
        """Sample, step, sample; return the transitions, and a digest of all that was seen."""
        digest = hashlib.sha256()
        params: Params | None = None
        transitions = 0
        loop = asyncio.get_running_loop()
        rounds = self._plan.rounds
        for index in range(rounds + 1):
            episodes = await self._sampler.sample(
                self._policy, params, seed=number * (rounds + 1) + index
            )
            transitions += episodes.num_transitions
            params = await loop.run_in_executor(
                self._executor, self._step, episodes, params, digest, index < rounds
            )
        return transitions, digest.hexdigest()

    def _step(
        self,
        episodes: asyncmaml.BatchEpisodes,
        params: Params | None,
        digest: "hashlib._Hash",
        is_to_step: bool,
    ) -> Params | None:
        """Take one step of the policy gradient; note all that there was to see."""
        began = time.thread_time()
        with self._sampler.span("gradient step" if is_to_step else "last look"):
            for tensor in (episodes.observations, episodes.actions, episodes.rewards):
                digest.update(tensor.numpy().tobytes())
            if is_to_step:
                params = self._stepped(episodes, params)
                for value in params.values():
                    digest.update(value.detach().numpy().tobytes())
        self.learner_seconds += time.thread_time() - began
        return params

    def _stepped(self, episodes: asyncmaml.BatchEpisodes, params: Params | None) -> Params:
        """Source: Williams (1992), REINFORCE, with the batch's mean return as baseline."""
        mask = episodes.mask
        returns = episodes.returns
        mean = (returns * mask).sum() / mask.sum()
        deviation = (((returns - mean) * mask).square().sum() / mask.sum()).sqrt()
        advantages = (returns - mean) / (deviation + 1e-6)
        log_probs = self._policy(episodes.observations, params).log_prob(episodes.actions)
        loss = -(log_probs * advantages * mask).sum() / mask.sum()
        updated = self._policy.update_params(loss, params, _STEP_SIZE, first_order=True)
        return {name: value.detach().requires_grad_() for name, value in updated.items()}

    async def run(self, way: Callable[["Learners"], Awaitable[list[tuple[int, str]]]]) -> Run:
        """Measure all learners, in one of the ways below."""
        began = self.learner_seconds
        before = self._sampler.statistics
        meter = Meter()
        looks = [Usage.now(self._pids)]
        looking = asyncio.create_task(self._look(looks), name="look")
        found = await way(self)
        looking.cancel()
        looks.append(Usage.now(self._pids))
        reading = meter.read()
        passed = self._sampler.statistics - before
        seconds = looks[-1].wall - looks[0].wall
        workers = len(self._pids)
        return Run(
            seconds,
            sum(transitions for transitions, _ in found),
            [digest for _, digest in found],
            _with_work(looks[0], looks[-1], workers),
            (looks[-1].on_core - looks[0].on_core) / seconds / workers,
            passed.worker_busy_share,
            _by_tenths(looks, workers),
            (self.learner_seconds - began) / seconds,
            reading.others_cpu_seconds / seconds,
            passed.rows_per_tick,
            passed.waiting_seconds / seconds,
        )

    async def _look(self, looks: list[Usage]) -> None:
        while True:
            await asyncio.sleep(1 / _LOOKS_PER_SECOND)
            looks.append(Usage.now(self._pids))

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()

    async def concurrent(self) -> list[tuple[int, str]]:
        """All learners at once."""
        async with asyncio.TaskGroup() as group:
            learning = [
                group.create_task(self.learn(number), name=f"learner-{number}")
                for number in range(self._plan.learners)
            ]
        return [each.result() for each in learning]

    async def sequential(self) -> list[tuple[int, str]]:
        """One learner after the other."""
        return [await self.learn(number) for number in range(self._plan.learners)]


def _one_torch_thread() -> None:
    # In the learners' thread alone: more of them would take the cores from the workers.
    torch.set_num_threads(1)


def _with_work(first: Usage, last: Usage, workers: int) -> float:
    runnable = last.on_core + last.waiting_for_core - first.on_core - first.waiting_for_core
    return runnable / (last.wall - first.wall) / workers


def _by_tenths(looks: list[Usage], workers: int) -> list[float]:
    began, seconds = looks[0].wall, looks[-1].wall - looks[0].wall
    edges = []
    for tenth in range(_TENTHS + 1):
        wanted = began + seconds * tenth / _TENTHS
        edges.append(min(looks, key=lambda look: abs(look.wall - wanted)))
    return [
        _with_work(first, last, workers) if last.wall > first.wall else float("nan")
        for first, last in itertools.pairwise(edges)
    ]


async def measure(arguments: argparse.Namespace, plan: Plan) -> dict[str, list[Run]]:
    """Run both ways in turn."""
    runs: dict[str, list[Run]] = {"concurrent": [], "sequential": []}
    async with asyncmaml.AsyncSampler(
        arguments.env,
        batch_size=plan.batch_size,
        num_workers=arguments.workers,
        envs_per_worker=arguments.rows,
        groups_per_worker=arguments.groups,
        max_episode_steps=plan.horizon,
        seed=0,
        trace=arguments.trace,
    ) as sampler:
        torch.manual_seed(0)
        policy = asyncmaml.policy_for_spaces(sampler.observation_space, sampler.action_space)
        # So many episodes that every row makes its environment.
        rows = (arguments.rows or DEFAULT_ROWS) * (arguments.workers or usable_cores())
        await sampler.sample(policy, batch_size=rows)
        learners = Learners(sampler, policy, plan)
        try:
            for _ in range(arguments.repeats):
                runs["concurrent"].append(await learners.run(Learners.concurrent))
                runs["sequential"].append(await learners.run(Learners.sequential))
        finally:
            learners.close()
    return runs


def show(runs: dict[str, list[Run]], plan: Plan, env: str) -> None:
    """Print both ways, the targets, and the busy share over the run."""
    rows = []
    for way, found in runs.items():
        rates = Spread.of(run.rate for run in found)
        rows.append(
            [
                way,
                f"{short(rates.median)} ({short(rates.least)}..{short(rates.greatest)})",
                in_words(Spread.of(run.seconds for run in found), "{:.1f}"),
                *(
                    in_words(Spread.of(getattr(run, name) for run in found))
                    for name in ("with_work", "on_core", "in_environments")
                ),
                f"{Spread.of(run.sampler_waiting for run in found).median:.2f}",
                f"{Spread.of(run.rows_per_tick for run in found).median:.0f}",
                f"{Spread.of(run.learner_cores for run in found).median:.2f}",
                f"{Spread.of(run.others_cores for run in found).median:.1f}",
            ]
        )
    header = (
        "way",
        "transitions/s",
        "seconds",
        "workers with work",
        "on a core",
        "in environments",
        "sampler idle",
        "rows a tick",
        "learner's cores",
        "others'",
    )
    title = (
        f"\n{env}: {plan.learners} learners, {plan.rounds} steps each, {plan.batch_size} episodes "
        f"of up to {plan.horizon} steps; median (least..greatest) of {len(runs['concurrent'])}"
    )
    print(plain_table(title, header, rows, range(1, len(header))))
    concurrent, sequential = runs["concurrent"], runs["sequential"]
    tenths = [Spread.of(run.tenths[tenth] for run in concurrent).median for tenth in range(_TENTHS)]
    print("  concurrent, workers with work by tenths: " + " ".join(f"{x:.2f}" for x in tenths))
    ratio = Spread.of(a.rate / b.rate for a, b in zip(concurrent, sequential, strict=True))
    busy = Spread.of(run.with_work for run in concurrent)
    is_same = len({tuple(run.digests) for run in (*concurrent, *sequential)}) == 1
    targets = [
        [
            "workers with work, concurrent",
            f">= {BUSY_WANTED}",
            in_words(busy),
            "met" if busy.median >= BUSY_WANTED else "missed",
        ],
        [
            "episodes and parameters, concurrent and sequential",
            "the same bits",
            "yes" if is_same else "no",
            "met" if is_same else "missed",
        ],
        [
            "throughput, concurrent / sequential",
            "> 1",
            in_words(ratio),
            "met" if ratio.median > 1 else "missed",
        ],
    ]
    print(plain_table("\nTargets", ("what", "wanted", "measured", ""), targets, range(1, 3)))


def main() -> None:
    arguments = _parse()
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    plan = Plan(arguments.learners, arguments.batch_size, arguments.horizon, arguments.rounds)
    runs = asyncio.run(measure(arguments, plan))
    show(runs, plan, arguments.env)


def _parse() -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="within a minute, less exact")
    parser.add_argument("--env", default="HalfCheetah-v5", help="a Gymnasium id")
    parser.add_argument("--learners", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=20, help="episodes of each sample()")
    parser.add_argument("--horizon", type=int, help="steps of an episode: 200, or 50 with --quick")
    parser.add_argument("--rounds", type=int, default=1, help="gradient steps of each learner")
    parser.add_argument("--workers", type=int, help="as for AsyncSampler")
    parser.add_argument("--rows", type=int, help="envs_per_worker")
    parser.add_argument("--groups", type=int, help="groups_per_worker")
    parser.add_argument("--trace", type=Path, help="a file for Perfetto; costs some time")
    parser.add_argument("--repeats", type=int, help="3, or 1 with --quick")
    arguments = parser.parse_args()
    if arguments.horizon is None:
        arguments.horizon = 50 if arguments.quick else 200
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 3
    numbers = ("learners", "batch_size", "horizon", "rounds", "repeats")
    if min(getattr(arguments, name) for name in numbers) < 1:
        parser.error("all numbers must be 1 or more")
    return arguments


if __name__ == "__main__":
    main()
