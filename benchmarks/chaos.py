"""A storm of faults against the sampler, for as long as asked: nothing may differ, nothing leak.

    python benchmarks/chaos.py --minutes 10 --seed 0

Rounds of 2 to 10 seconds, each with a sampler of its own: workers, rows, groups and start method
are drawn. In each some 140 calls overlap, of which some are cancelled, meet an exception or a
policy that does not fit, or an environment that exits, crashes or hangs; meanwhile workers are
killed, stopped and crashed from outside. What should succeed is compared with `BatchSampler`, bit
for bit. Between rounds it is counted what the process holds.

Exits with 1 where anything differed, was left behind, or did not end.
"""

import argparse
import asyncio
import gc
import logging
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from memory_watch import kibibytes
from storm import Oracle, Round, Tally

_NUM_CALLS = 150
_WARM_UP = ("spawn", "forkserver", "fork")
"""Until libraries have opened what they keep, a fork server for one."""
_RSS_GROWTH = 0.10
"""What an allocator may do over a run; a leak of one request a round is far above."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("asyncmaml.worker").setLevel(logging.CRITICAL)  # it tells of each loss
    chance = random.Random(options.seed)
    tally, leaks = Tally(), Counter[str]()
    oracle = Oracle(_NUM_CALLS, chance)
    until = time.monotonic() + 60 * options.minutes
    num_rounds, before, rss = 0, Counter[Any](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until or num_rounds <= len(_WARM_UP):
            method = _WARM_UP[num_rounds] if num_rounds < len(_WARM_UP) else None
            asyncio.run(Round(oracle, tally, chance, Path(folder), workers, method).run())
            num_rounds += 1
            gc.collect()
            if num_rounds == len(_WARM_UP):
                before, rss = belongings(), resident_mebibytes()
            if num_rounds > len(_WARM_UP):
                for kind, number in (belongings() - before).items():
                    leaks[kind] = max(leaks[kind], number)
            _show(num_rounds, tally, leaks)
    grown = resident_mebibytes() / rss - 1
    if grown > _RSS_GROWTH:
        leaks["resident memory"] += 1
    print(report(options, num_rounds, tally, leaks, grown))
    if tally.mismatches or leaks:
        sys.exit(1)


def workers() -> set[int]:
    """Return the processes of all workers: ours, and those that the fork server made for us."""
    tracker: Any = resource_tracker._resource_tracker
    server: Any = forkserver._forkserver
    found = _children_of(os.getpid())
    if server._forkserver_pid in found:
        found |= _children_of(server._forkserver_pid)
    return found - {tracker._pid, server._forkserver_pid}


def _children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.update(map(int, (thread / "children").read_text().split()))
        except FileNotFoundError:  # it has ended meanwhile
            continue
    return found


def belongings() -> Counter[Any]:
    """Return how much of everything this process has that could be left behind."""
    return Counter(
        {
            "processes": len(workers()),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "shared memory": sum("memfd" in line for line in open("/proc/self/maps")),
            "names in /dev/shm": len(os.listdir("/dev/shm")),
        }
    )


def resident_mebibytes() -> float:
    return kibibytes(Path("/proc/self/status").read_text(), "VmRSS") / 1024


def _show(num_rounds: int, tally: Tally, leaks: Counter[str]) -> None:
    if sys.stderr.isatty():
        told = f"\rround {num_rounds}: {tally.episodes:,} episodes, {tally.restarts} restarts, "
        told += f"{len(tally.mismatches)} mismatches, {sum(leaks.values())} leaks "
        print(told, end="", file=sys.stderr)


def report(
    options: argparse.Namespace, num_rounds: int, tally: Tally, leaks: Counter[str], grown: float
) -> str:
    """Return what the storm has come to, as text."""
    lines = [
        f"seed {options.seed}, {options.minutes:g} minutes, {num_rounds} rounds, "
        f"{os.cpu_count()} cores",
        f"episodes checked   {tally.episodes:,} in {tally.calls:,} calls",
        f"faults injected    {sum(tally.faults.values()):,}",
    ]
    lines += [f"  {number:6,}  {kind}" for kind, number in tally.faults.most_common()]
    lines.append(f"workers replaced   {tally.restarts:,}")
    lines.append("recovery           until the workers that it hit are replaced")
    for kind, seconds in sorted(tally.recoveries.items()):
        median, worst = statistics.median(seconds), max(seconds)
        lines.append(f"  {kind:10s}  median {median:.3f} s, worst {worst:.3f} s, n {len(seconds)}")
    lines.append(f"resident memory    {grown:+.1%} since round {len(_WARM_UP)}")
    lines.append(f"mismatches         {len(tally.mismatches)}")
    lines += [f"  {text}" for text in tally.mismatches[:20]]
    lines.append(f"leaked resources   {sum(leaks.values())}")
    lines += [f"  {number}  {kind}" for kind, number in leaks.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
