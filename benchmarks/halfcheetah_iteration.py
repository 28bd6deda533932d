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
  against the limit's rate. Adaptation runs in that time, on the same cores: what it takes is
  missing here, and so is what rows without an episode leave idle at the end of a phase.
- CPU time: the limit's CPU time of a transition against what sampling took of it, which is that
  of all workers, of the sampler's thread and of the event loop's, over the whole iteration.

The first is the second times the part of the cores' time that sampling got while it had work.

Memory is watched in the iteration that warms up, from before the start of the workers on, and in
one more at the end, which is not timed either. No process that steps raw environments lives then.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from types import TracebackType
from typing import Self

import torch
from comparison import Limit
from iteration_shares import PARTS, TimedIteration, timed_iterations
from measuring import SamplingCpu, SamplingMeter, Spread
from memory_watch import Memory, MemoryWatch, greatest_resident_kibibytes
from policy_cost import measure_policy
from raw_stepping import RawForm, RawMeasurement, RawStepping
from reporting import in_words, machine_facts, plain_table, short
from workloads import SOURCES

import asyncmaml
from asyncmaml import TrainConfig
from asyncmaml.checkpoint import Row
from asyncmaml.sampling.arguments import usable_cores
from asyncmaml.training.run_folder import RunFolder, read_progress
from asyncmaml.worker.fleet import DEFAULT_ROWS

PRESET = "halfcheetah-dir"
WORKLOAD = "HalfCheetahDir"
SHARE_WANTED = 0.75
MOST_WAITING = 0.10
MOST_GIBIBYTES = 2.0

_QUICK_TASKS = 16  # more episodes than two workers have rows
_WARM_UP_SECONDS = 0.2  # of raw stepping: first steps find no caches
_POLICY_SECONDS = 0.1  # for each way of drawing


class BetweenIterations:
    """What `train` calls after each iteration; the block is the whole training.

    Args:
        config: What is trained.
        iterations: To be timed, after the first one.
        raw_seconds: Of each measurement of raw steps.
    """

    def __init__(self, config: TrainConfig, iterations: int, raw_seconds: float) -> None:
        rows, std = config.envs_per_worker or DEFAULT_ROWS, config.init_std
        # The first one is the limit: what a worker has, moved as a policy moves it at first.
        forms = RawForm(rows, action_std=std), RawForm(rows), RawForm(action_std=std)
        self.raw: dict[RawForm, list[RawMeasurement]] = {form: [] for form in forms}
        self.limits: dict[RawForm, list[Limit]] = {form: [] for form in forms}
        self.cpu: dict[int, SamplingCpu] = {}
        self.watches: list[MemoryWatch] = []
        self._last_timed = 1 + iterations
        self._raw_seconds = raw_seconds
        self._meter: SamplingMeter | None = None
        self._watching = ExitStack()
        self._env = SOURCES[WORKLOAD].make()
        torch.manual_seed(0)
        self._policy = asyncmaml.policy_for_spaces(
            self._env.observation_space,
            self._env.action_space,
            config.hidden_sizes,
            config.nonlinearity,
            init_std=config.init_std,
        )

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
        self._env.close()

    def __call__(self, row: Row) -> None:
        """Read what was measured of an iteration, measure the limit, begin with the next one."""
        if self._meter is None:
            self._watching.close()  # the warm-up is over, or the last iteration
        else:
            self.cpu[row["iteration"]] = self._meter.read()
            self._measure_limits(max(1, round(row["sampler_rows_per_tick"])))
        if row["iteration"] < self._last_timed:
            self._meter = SamplingMeter()
        elif row["iteration"] == self._last_timed:
            self._meter = None
            self._watch_memory()

    def _watch_memory(self) -> None:
        self.watches.append(self._watching.enter_context(MemoryWatch()))

    def _measure_limits(self, rows_per_tick: int) -> None:
        """Block the event loop, in which nothing is under way, and leave no process behind."""
        policy = measure_policy(self._policy, self._env, rows_per_tick, _POLICY_SECONDS)
        for form, measured in self.raw.items():
            with RawStepping(WORKLOAD, usable_cores(), form) as processes:
                processes.measure(_WARM_UP_SECONDS)
                raw = processes.measure(self._raw_seconds)
            measured.append(raw)
            self.limits[form].append(Limit.of_cores(raw, policy))


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
    with tempfile.TemporaryDirectory() as folder:
        between = BetweenIterations(config, arguments.iterations, 0.5 if arguments.quick else 3.0)
        with between:
            asyncio.run(asyncmaml.train(config, folder, on_iteration=between))
        rows = read_progress(RunFolder(folder).progress)
    iterations = timed_iterations(rows, between.cpu, usable_cores())
    show_times(iterations)
    show_limits(iterations, between)
    show_memory(between)
    show_targets(iterations, between)


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


def show_limits(iterations: list[TimedIteration], between: BetweenIterations) -> None:
    """Print the machine's limit, and what sampling reaches of it."""
    table = []
    for form, limits in between.limits.items():
        raw = between.raw[form]
        table.append(
            [
                form.in_words,
                in_words(Spread.of(each.cpu_us for each in raw), "{:.1f}"),
                in_words(Spread.of(each.wall_us for each in raw), "{:.1f}"),
                f"{Spread.of(each.policy_us for each in limits).median:.1f}",
                _rates(Spread.of(each.rate for each in limits)),
                in_words(_shares(iterations, limits, TimedIteration.wall_share)),
                in_words(_shares(iterations, limits, TimedIteration.cpu_share)),
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
    title = f"\nThe limit of {usable_cores()} cores, and sampling's share of it"
    print(plain_table(title, header, table, range(1, len(header))))
    rate = _rates(_over(iterations, lambda each: each.rate))
    cpu = in_words(_over(iterations, lambda each: each.cpu_us), "{:.1f}")
    workers = _over(iterations, lambda each: each.us_each(each.cpu.workers)).median
    sampler = _over(iterations, lambda each: each.us_each(each.cpu.sampler)).median
    event_loop = _over(iterations, lambda each: each.us_each(each.cpu.event_loop)).median
    print(
        f"  sampling: {rate} transitions/s, {cpu} us CPU each: {workers:.1f} in the workers, "
        f"{sampler:.1f} in the sampler's thread, {event_loop:.1f} in the event loop's"
    )
    cores = in_words(_over(iterations, lambda each: each.cores_share))
    busy = in_words(_logged(iterations, "sampler_worker_busy_share"))
    rows = _logged(iterations, "sampler_rows_per_tick").median
    others = _over(iterations, lambda each: each.cpu.others / each.row["seconds"]).median
    print(
        f"  meanwhile it had {cores} of the cores' time; workers were in environments {busy} of "
        f"the time, {rows:.0f} rows a tick; other processes took {others:.1f} cores"
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


def show_targets(iterations: list[TimedIteration], between: BetweenIterations) -> None:
    """Print what was promised, with what was measured; the limit is the first one."""
    limits = next(iter(between.limits.values()))
    peak = Memory(0, 0)
    for watch in between.watches:
        peak = peak.peak_with(watch.peak)
    wall = _shares(iterations, limits, TimedIteration.wall_share)
    cpu = _shares(iterations, limits, TimedIteration.cpu_share)
    waiting = _over(iterations, lambda each: each.waiting_share)
    idle = _over(iterations, lambda each: each.part("idle_seconds"))
    gibibytes = _gibibytes(peak.all_processes)
    rows = [
        _target("sampling, share of the limit: wall", ">=", SHARE_WANTED, wall),
        _target("sampling, share of the limit: CPU", ">=", SHARE_WANTED, cpu),
        _target("idle, share of the iteration", "<", MOST_WAITING, idle),
        _target("sampler without work, share before the outer step", "<", MOST_WAITING, waiting),
        _target("peak memory of all processes, GiB", "<", MOST_GIBIBYTES, Spread.of([gibibytes])),
    ]
    print(plain_table("\nTargets", ("what", "wanted", "measured", ""), rows, range(1, 3)))


def _target(what: str, sign: str, wanted: float, found: Spread) -> list[str]:
    is_met = found.median < wanted if sign == "<" else found.median >= wanted
    measured = in_words(found) if found.least < found.greatest else f"{found.median:.2f}"
    return [what, f"{sign} {wanted:g}", measured, "met" if is_met else "missed"]


def _over(iterations: list[TimedIteration], value: Callable[[TimedIteration], float]) -> Spread:
    return Spread.of(map(value, iterations))


def _logged(iterations: list[TimedIteration], name: str) -> Spread:
    return Spread.of(iteration.row[name] for iteration in iterations)


def _shares(
    iterations: list[TimedIteration],
    limits: list[Limit],
    share: Callable[[TimedIteration, Limit], float],
) -> Spread:
    return Spread.of(share(*pair) for pair in zip(iterations, limits, strict=True))


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
