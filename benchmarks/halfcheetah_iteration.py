"""Whole training iterations of the preset halfcheetah-dir, beside the limit of the machine.

    python benchmarks/halfcheetah_iteration.py            # some 2 minutes on 2 cores
    python benchmarks/halfcheetah_iteration.py --quick    # within one, fewer tasks

`asyncmaml.train` runs the preset at full size, 40 tasks of 20 episodes of 100 steps, each sampled
before and after the update; only evaluations are left out. After an iteration that warms up come
those that are timed, as the trainer divides them in its `progress.csv`: sampling, the adaptation
that sticks out behind it, the outer step, and idle. After each of them, while the sampler stands
still, raw environments are stepped on all cores at once, as many in a process as a worker holds,
and the policy's forward and draw are measured by themselves: together they are the limit, as
`compare_samplers.py` has it. Actions are drawn from the distribution that the policy begins with:
those over the whole space throw the cheetah about, and a step is cheaper in the air (0.6 contacts
with the ground, 1.9 with the policy's actions). The limits by such actions, and by one environment
alone in each process, are told beside it. The trainer's forwards after the update stack
parameters, which costs more; the limit does not know of it. Shares are taken within a pair of
iteration and limit.

Sampling's share of the limit is told in two ways:

- wall time: the transitions of both phases over the seconds in which a request was in flight,
  against the limit's rate. In an iteration adaptation runs in that time, on the same cores: what
  it takes is missing here. So the same requests are also sampled with no learner beside them.
  Both lack what rows without an episode leave idle at the end of a phase.
- CPU time: the limit's CPU time of a transition against what sampling took of it, which is that
  of all workers, of the sampler's thread and of the event loop's, over the whole iteration.

The first is the second times the part of the cores' time that sampling got while it had work.

Memory is watched in the iteration that warms up, from before the start of the workers on, and in
one more at the end, which is not timed either. No process that steps raw environments lives then.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib.util import find_spec
from types import TracebackType
from typing import Self

import torch
from comparison import Limit
from iteration_shares import PARTS, Sampled, TimedIteration, timed_iterations
from machine_limits import MachineLimits
from measuring import SamplingCpu, SamplingMeter, Spread
from memory_watch import Memory, MemoryWatch, greatest_resident_kibibytes
from reporting import in_words, machine_facts, plain_table, short
from torch import Tensor, nn

import asyncmaml
from asyncmaml import TrainConfig
from asyncmaml.checkpoint import Row
from asyncmaml.sampling.arguments import usable_cores
from asyncmaml.training.run_folder import RunFolder, read_progress
from asyncmaml.training.setup import make_policy, make_sampler

PRESET = "halfcheetah-dir"
WORKLOAD = "HalfCheetahDir"
SHARE_WANTED = 0.75
MOST_WAITING = 0.10
MOST_GIBIBYTES = 2.0

_QUICK_TASKS = 16  # more episodes than two workers have rows
_CHANGE = 0.01
"""Standard deviation of what parameters are changed by, where no learner changes them."""


class BetweenIterations:
    """What `train` calls after each iteration; the block is the whole training.

    Args:
        iterations: To be timed, after the first one.
        limits: Measured after each of them.
    """

    def __init__(self, iterations: int, limits: MachineLimits) -> None:
        self.cpu: dict[int, SamplingCpu] = {}
        self.watches: list[MemoryWatch] = []
        self._last_timed = 1 + iterations
        self._limits = limits
        self._meter: SamplingMeter | None = None
        self._watching = ExitStack()

    def __enter__(self) -> Self:
        self._watch_memory()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watching.close()

    def __call__(self, row: Row) -> None:
        """Read what was measured of an iteration, measure the limit, begin with the next one."""
        if self._meter is None:
            self._watching.close()  # the warm-up is over, or the last iteration
        else:
            self.cpu[row["iteration"]] = self._meter.read()
            self._limits.measure(row["sampler_rows_per_tick"])
        if row["iteration"] < self._last_timed:
            self._meter = SamplingMeter()
        elif row["iteration"] == self._last_timed:
            self._meter = None
            self._watch_memory()

    def _watch_memory(self) -> None:
        self.watches.append(self._watching.enter_context(MemoryWatch()))


async def sampled_alone(config: TrainConfig, repeats: int, limits: MachineLimits) -> list[Sampled]:
    """Sample what an iteration samples, with no learner beside it.

    Each task's second phase begins when its first one is in, under parameters of its own. The
    limit is measured after each repeat.
    """
    found = []
    async with make_sampler(config) as sampler:
        policy = make_policy(config, sampler)

        async def both_phases(task: object, params: dict[str, Tensor]) -> None:
            await sampler.sample(policy, task=task)
            await sampler.sample(policy, params, task=task)

        for repeat in range(1 + repeats):  # the first one warms up
            tasks = sampler.sample_tasks(config.tasks_per_iteration)
            adapted = [_changed(policy) for _ in tasks]
            before, meter = sampler.statistics, SamplingMeter()
            began = time.perf_counter()
            await asyncio.gather(*map(both_phases, tasks, adapted))
            seconds = time.perf_counter() - began
            cpu, passed = meter.read(), sampler.statistics - before
            if repeat:
                found.append(Sampled(passed.transitions, seconds, usable_cores(), cpu))
                limits.measure(passed.rows_per_tick)
    return found


def _changed(policy: nn.Module) -> dict[str, Tensor]:
    """Return parameters like those after an adaptation: near the policy's own."""
    own = policy.named_parameters()
    return {name: value.detach() + _CHANGE * torch.randn_like(value) for name, value in own}


def main() -> None:
    arguments = _parse()
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    preset = TrainConfig.preset(PRESET)
    config = preset.replace(
        iterations=1 + arguments.iterations + 1,
        tasks_per_iteration=_QUICK_TASKS if arguments.quick else preset.tasks_per_iteration,
        evaluation_interval=0,
        seed=arguments.seed,
    )
    size = f"{config.tasks_per_iteration} tasks x {config.episodes_per_task} episodes"
    fewer = f" (of {preset.tasks_per_iteration}: --quick)" if arguments.quick else ""
    print(f"{PRESET}: {size} x {config.max_episode_steps} steps{fewer}, seed {config.seed}")
    raw_seconds = 0.5 if arguments.quick else 3.0
    with (
        closing(MachineLimits(WORKLOAD, config, raw_seconds)) as limits,
        closing(MachineLimits(WORKLOAD, config, raw_seconds)) as limits_alone,
    ):
        alone = asyncio.run(sampled_alone(config, arguments.iterations, limits_alone))
        with tempfile.TemporaryDirectory() as folder:
            between = BetweenIterations(arguments.iterations, limits)
            with between:
                asyncio.run(asyncmaml.train(config, folder, on_iteration=between))
            rows = read_progress(RunFolder(folder).progress)
    iterations = timed_iterations(rows, between.cpu, usable_cores())
    show_times(iterations)
    show_limits(
        [each.sampled for each in iterations], limits, "in an iteration, a learner beside it"
    )
    show_meanwhile(iterations)
    show_limits(alone, limits_alone, "with no learner beside it")
    show_memory(between)
    show_targets(iterations, limits, alone, limits_alone, between)


def show_times(iterations: list[TimedIteration]) -> None:
    """Print where the iterations' time went."""
    table = []
    for name, title in PARTS.items():
        share = in_words(Spread.of(each.part(name) for each in iterations))
        table.append([title, in_words(_logged(iterations, name)), share])
    table.append(["whole", in_words(_logged(iterations, "seconds")), "1"])
    header = ("part", "seconds", "share")
    about = f"\nAn iteration: median (least..greatest) of {len(iterations)}"
    print(plain_table(about, header, table, range(1, len(header))))
    hidden = in_words(_logged(iterations, "overlap_seconds"))
    print(f"  adaptation hidden behind sampling: {hidden} s")


def show_limits(runs: list[Sampled], limits: MachineLimits, when: str) -> None:
    """Print the machine's limit, and what sampling reaches of it."""
    table = []
    for form, of_form in limits.limits.items():
        raw = limits.raw[form]
        table.append(
            [
                form.in_words,
                in_words(Spread.of(each.cpu_us for each in raw), "{:.1f}"),
                in_words(Spread.of(each.wall_us for each in raw), "{:.1f}"),
                f"{Spread.of(each.policy_us for each in of_form).median:.1f}",
                _rates(Spread.of(each.rate for each in of_form)),
                in_words(_shares(runs, of_form, Sampled.wall_share)),
                in_words(_shares(runs, of_form, Sampled.cpu_share)),
            ]
        )
    header = (
        "each process steps",
        "raw step, us CPU",
        "us wall",
        "+ policy, us",
        "limit, transitions/s",
        "share: wall",
        "share: CPU",
    )
    title = f"\nThe limit of {usable_cores()} cores, and sampling's share of it {when}"
    print(plain_table(title, header, table, range(1, len(header))))
    rate = _rates(Spread.of(each.rate for each in runs))
    cpu = in_words(Spread.of(each.cpu_us for each in runs), "{:.1f}")
    workers = Spread.of(each.us_each(each.cpu.workers) for each in runs).median
    sampler = Spread.of(each.us_each(each.cpu.sampler) for each in runs).median
    event_loop = Spread.of(each.us_each(each.cpu.event_loop) for each in runs).median
    print(
        f"  sampling: {rate} transitions/s, {cpu} us CPU each: {workers:.1f} in the workers, "
        f"{sampler:.1f} in the sampler's thread, {event_loop:.1f} in the event loop's"
    )
    cores = in_words(Spread.of(each.cores_share for each in runs))
    print(f"  meanwhile it had {cores} of the cores' time")


def show_meanwhile(iterations: list[TimedIteration]) -> None:
    """Print what the trainer says of its sampler."""
    busy = in_words(_logged(iterations, "sampler_worker_busy_share"))
    rows = _logged(iterations, "sampler_rows_per_tick").median
    others = Spread.of(each.sampled.cpu.others / each.row["seconds"] for each in iterations).median
    print(
        f"  workers were in environments {busy} of the time; {rows:.0f} rows a tick; other "
        f"processes took {others:.1f} cores"
    )


def show_memory(between: BetweenIterations) -> None:
    """Print the peaks."""
    peaks = [watch.peak for watch in between.watches]
    everything = ", ".join(f"{_gibibytes(peak.all_processes):.2f}" for peak in peaks)
    alone = ", ".join(f"{_gibibytes(peak.this_process):.2f}" for peak in peaks)
    print("\nPeak memory, proportional set size, of the first iteration and the last one")
    print(f"  all processes {everything} GiB; this process {alone} GiB")
    resident = _gibibytes(greatest_resident_kibibytes())
    print(f"  this process's greatest resident size, of the whole run: {resident:.2f} GiB")


def show_targets(
    iterations: list[TimedIteration],
    limits: MachineLimits,
    alone: list[Sampled],
    limits_alone: MachineLimits,
    between: BetweenIterations,
) -> None:
    """Print what was promised, with what was measured; the limit is the first one."""
    peak = Memory(0, 0)
    for watch in between.watches:
        peak = peak.peak_with(watch.peak)
    wall = _shares(alone, limits_alone.first, Sampled.wall_share)
    cpu_alone = _shares(alone, limits_alone.first, Sampled.cpu_share)
    cpu = _shares([each.sampled for each in iterations], limits.first, Sampled.cpu_share)
    waiting = Spread.of(each.waiting_share for each in iterations)
    idle = Spread.of(each.part("idle_seconds") for each in iterations)
    gibibytes = _gibibytes(peak.all_processes)
    share = "share of the limit"
    rows = [
        _target(f"sampling alone, {share}: wall", ">=", SHARE_WANTED, wall),
        _target(f"sampling alone, {share}: CPU", ">=", SHARE_WANTED, cpu_alone),
        _target(f"sampling in an iteration, {share}: CPU", ">=", SHARE_WANTED, cpu),
        _target("idle, share of the iteration", "<", MOST_WAITING, idle),
        _target("sampler without work, share before the outer step", "<", MOST_WAITING, waiting),
        _target("peak memory of all processes, GiB", "<", MOST_GIBIBYTES, Spread.of([gibibytes])),
    ]
    print(plain_table("\nTargets", ("what", "wanted", "measured", ""), rows, range(1, 3)))


def _target(what: str, sign: str, wanted: float, found: Spread) -> list[str]:
    is_met = found.median < wanted if sign == "<" else found.median >= wanted
    measured = in_words(found) if found.least < found.greatest else f"{found.median:.2f}"
    return [what, f"{sign} {wanted:g}", measured, "met" if is_met else "missed"]


def _logged(iterations: list[TimedIteration], name: str) -> Spread:
    return Spread.of(iteration.row[name] for iteration in iterations)


def _shares(
    runs: list[Sampled],
    limits: list[Limit],
    share: Callable[[Sampled, Limit], float],
) -> Spread:
    return Spread.of(share(*pair) for pair in zip(runs, limits, strict=True))


def _rates(rates: Spread) -> str:
    return f"{short(rates.median)} ({short(rates.least)}..{short(rates.greatest)})"


def _gibibytes(kibibytes: int) -> float:
    return kibibytes / (1 << 20)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="within a minute: fewer tasks")
    parser.add_argument("--iterations", type=int, help="to be timed: 3, or 2 with --quick")
    parser.add_argument("--seed", type=int, default=0, help="of the training (default: 0)")
    arguments = parser.parse_args()
    if arguments.iterations is None:
        arguments.iterations = 2 if arguments.quick else 3
    if arguments.iterations < 1 or arguments.seed < 0:
        parser.error("--iterations must be 1 or more, --seed 0 or more")
    if find_spec("mujoco") is None:
        parser.error("MuJoCo is missing: install the extra asyncmaml[mujoco]")
    return arguments


if __name__ == "__main__":
    main()
