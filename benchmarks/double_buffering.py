"""Groups of rows: a worker steps one while the actions of the others are computed. Worth it?

    python benchmarks/double_buffering.py            # some 8 minutes on 2 cores
    python benchmarks/double_buffering.py --quick    # some 2 minutes
    python benchmarks/double_buffering.py --envs HalfCheetah --workers 2 --rows 128

Each environment with 1, 2, 4 and 8 workers, whose rows are in 1, 2 or 4 groups: transitions a
second, and CPU time a transition of all processes together. The contenders of one number of
workers are measured in turn, repeat after repeat; ratios are taken within a repeat, to one group.
Two groups are measured twice: as they are, where a reply waits for others to share its forward
as long as no worker idles for it (`asyncmaml.sampling.pacing`), and "eager", where none waits.
The one that sleeps needs no cores: it shows what more workers than cores are good for, and what a
group hides where there are cores to spare.

What the package does by default is marked, and judged at the end: it stands unless another number
of groups is more than 3 % faster, in the geometric mean of all numbers of workers.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from unittest.mock import patch

import torch
from contenders import AsyncContender
from measuring import Measurement, Spread
from reporting import in_words, machine_facts, plain_table, short
from workloads import SOURCES

import asyncmaml
from asyncmaml.sampling.pacing import Pace
from asyncmaml.worker.fleet import DEFAULT_ROWS, DEFAULT_VECTOR_ROWS

_GROUPS = (1, 2, 4)
_EAGER = "2 eager"
_WAYS = (*map(str, _GROUPS), _EAGER)
_DEFAULT_GROUPS = {False: 2, True: 1}
"""By whether the environment is natively vectorised; see `Fleet.make`."""
_GAIN_THAT_COUNTS = 1.03


@dataclass(frozen=True)
class Case:
    """An environment, and how it is sampled.

    Args:
        key: Of `SOURCES`.
        title: For people.
        rows: Of a worker.
        quick_rows: The same with `--quick`.
        episodes_per_row: Of one `sample()`.
        vectorized: Whether its natively vectorised form is used.
    """

    key: str
    title: str
    rows: int
    quick_rows: int
    episodes_per_row: int
    vectorized: bool = False

    @property
    def default_groups(self) -> int:
        """What `AsyncSampler` takes."""
        return _DEFAULT_GROUPS[self.vectorized]


CASES = (
    Case("Null", "costs nothing, vectorised", DEFAULT_VECTOR_ROWS, 256, 8, vectorized=True),
    Case("CartPole", "cheap", DEFAULT_ROWS, 128, 40),
    Case("HalfCheetah", "expensive", DEFAULT_ROWS, 32, 4),
    Case("Sleeping", "1 ms a step, no core", 16, 16, 4),
)


@dataclass(frozen=True)
class Cell:
    """One environment with one number of workers: measurements by number of groups, or way."""

    case: Case
    num_workers: int
    rows: int
    measurements: dict[str, list[Measurement]]

    def ratio(self, way: str) -> Spread:
        """Return the throughput over that with one group, within each repeat."""
        pairs = zip(self.measurements[way], self.measurements["1"], strict=True)
        return Spread.of(found.rate / base.rate for found, base in pairs)


def measure(case: Case, num_workers: int, rows: int, repeats: int, seconds: float) -> Cell:
    """Measure all numbers of groups in turn."""
    source = SOURCES[case.key]
    env = source.make()
    torch.manual_seed(0)
    policy = asyncmaml.policy_for_spaces(env.observation_space, env.action_space)
    env.close()
    contenders = {
        groups: AsyncContender(
            source,
            num_workers,
            rows,
            case.episodes_per_row,
            groups_per_worker=groups,
            vectorized=case.vectorized,
        )
        for groups in _GROUPS
    }
    found: dict[str, list[Measurement]] = {way: [] for way in _WAYS}
    opened = []
    try:
        for contender in contenders.values():
            contender.open(policy)
            opened.append(contender)
        for _ in range(repeats):
            for groups, contender in contenders.items():
                found[str(groups)].append(contender.measure(seconds))
            with _eager_ticks():
                found[_EAGER].append(contenders[2].measure(seconds))
    finally:
        for contender in opened:
            contender.close()
    return Cell(case, num_workers, rows, found)


@contextmanager
def _eager_ticks() -> Iterator[None]:
    """Have every reply be answered by the next tick, whoever else could share its forward."""
    with patch.object(Pace, "should_wait", return_value=False):
        yield


def show(cells: Sequence[Cell], repeats: int) -> None:
    """Print all cells, and what they say of the defaults."""
    rows = []
    for cell in cells:
        for way, found in cell.measurements.items():
            rate = Spread.of(each.rate for each in found)
            mark = " *" if way == str(cell.case.default_groups) else ""
            rows.append(
                [
                    cell.case.key,
                    f"{cell.num_workers} x {cell.rows}",
                    f"{way}{mark}",
                    f"{short(rate.median)} ({short(rate.least)}..{short(rate.greatest)})",
                    in_words(cell.ratio(way)),
                    in_words(Spread.of(each.cpu_us for each in found), "{:.1f}"),
                    f"{Spread.of(each.rows_per_forward for each in found).median:.0f}",
                    f"{_share(found, cell.num_workers):.2f}",
                    f"{_others(found):.1f}",
                ]
            )
    header = (
        "environment",
        "workers x rows",
        "groups",
        "transitions/s",
        "ratio to 1 group",
        "CPU us a transition",
        "rows a tick",
        "in environments",
        "others' cores",
    )
    title = f"\nGroups of rows: median (least..greatest) of {repeats}; * is the default"
    print(plain_table(title, header, rows, range(1, len(header))))
    print(plain_table("\nDefaults", *_verdicts(cells), range(2, 8)))


def _share(found: Sequence[Measurement], num_workers: int) -> float:
    shares = (
        (each.environment_seconds or 0.0) / each.reading.wall_seconds / num_workers
        for each in found
    )
    return Spread.of(shares).median


def _others(found: Sequence[Measurement]) -> float:
    return Spread.of(
        each.reading.others_cpu_seconds / each.reading.wall_seconds for each in found
    ).median


def _verdicts(cells: Sequence[Cell]) -> tuple[tuple[str, ...], list[list[str]]]:
    rows = []
    for case in dict.fromkeys(cell.case for cell in cells):
        mine = [cell for cell in cells if cell.case is case]
        means = {
            way: statistics.geometric_mean(cell.ratio(way).median for cell in mine) for way in _WAYS
        }
        best = max(map(str, _GROUPS), key=lambda way: means[way])
        default = str(case.default_groups)
        if best == default:
            verdict = "the fastest"
        elif means[best] < _GAIN_THAT_COUNTS * means[default]:
            verdict = f"as good as {best}, within {_GAIN_THAT_COUNTS - 1:.0%}"
        else:
            verdict = f"{best} would be {means[best] / means[default] - 1:.0%} faster"
        ratios = [f"{means[way]:.2f}" for way in _WAYS]
        waiting = f"{means['2'] / means[_EAGER] - 1:+.0%}"
        rows.append([case.key, case.title, *ratios, waiting, default, verdict])
    header = ("environment", "", *_WAYS, "waiting gains", "default", "verdict")
    return header, rows


def main() -> None:
    arguments = _parse()
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    cells = []
    for case in CASES:
        if case.key not in arguments.envs:
            continue
        if case.key == "HalfCheetah" and find_spec("mujoco") is None:
            print("\nHalfCheetah is left out: install the extra asyncmaml[mujoco] for it")
            continue
        for num_workers in arguments.workers:
            rows = arguments.rows or (case.quick_rows if arguments.quick else case.rows)
            cells.append(measure(case, num_workers, rows, arguments.repeats, arguments.seconds))
    show(cells, arguments.repeats)


def _parse() -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    known = [case.key for case in CASES]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="some 2 minutes, less exact")
    parser.add_argument("--envs", nargs="+", choices=known, default=known)
    parser.add_argument("--workers", nargs="+", type=int, help="1 2 4 8, or 1 2 with --quick")
    parser.add_argument("--rows", type=int, help="of each worker, for all environments")
    parser.add_argument("--repeats", type=int, help="5, or 2 with --quick")
    parser.add_argument("--seconds", type=float, help="of each measurement; 1 or 0.3")
    arguments = parser.parse_args()
    if arguments.workers is None:
        arguments.workers = [1, 2] if arguments.quick else [1, 2, 4, 8]
    if arguments.repeats is None:
        arguments.repeats = 2 if arguments.quick else 5
    if arguments.seconds is None:
        arguments.seconds = 0.3 if arguments.quick else 1.0
    if min([*arguments.workers, arguments.repeats]) < 1 or arguments.seconds <= 0:
        parser.error("--workers and --repeats must be 1 or more, --seconds above 0")
    return arguments


if __name__ == "__main__":
    main()
