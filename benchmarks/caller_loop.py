"""What sampling and its caller's event loop do to each other.

    python benchmarks/caller_loop.py            # about a minute
    python benchmarks/caller_loop.py --quick    # some 15 seconds

How long sampling holds the caller's loop: a task of the caller asks for its turn every half
millisecond, while eight `sample()` calls are always under way in another. Of each round of the loop
the wall time is taken, which other processes prolong as well, and the CPU time of the caller's
thread, which is what sampling itself does there. The loop without sampling is measured in turn.

What a blocked loop does to sampling: transitions a second while the caller does nothing, while it
sleeps for 200 of every 250 ms, and while it computes in Python for 200 of every 250 ms. Such a
computation holds Python's lock, which the sampler's thread needs.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from measuring import Spread
from reporting import in_words, machine_facts, plain_table

import asyncmaml
import asyncmaml.envs  # registers Navigation2D

_PAUSE = 0.0005
_NUM_CALLS = 8
_BLOCKED, _PERIOD = 0.2, 0.25
_MOST = 0.005
"""Seconds that sampling may hold the caller's loop."""

SETTINGS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"num_workers": 2},
    "asyncmaml/Navigation2D-v0": {"num_workers": 0, "envs_per_worker": 400},
}


@dataclass
class Rounds:
    """Seconds that each round of the loop took, by the clock and of the thread's CPU time."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    async def watch(self, seconds: float) -> None:
        """Take the times of rounds for so long."""
        end = time.perf_counter() + seconds
        before, cpu_before = time.perf_counter(), time.thread_time()
        while before < end:
            await asyncio.sleep(_PAUSE)
            now, cpu_now = time.perf_counter(), time.thread_time()
            self.wall.append(now - before - _PAUSE)
            self.cpu.append(cpu_now - cpu_before)
            before, cpu_before = now, cpu_now


@asynccontextmanager
async def kept_sampling(
    sampler: asyncmaml.AsyncSampler, policy: Any, batch_size: int
) -> AsyncIterator[None]:
    """Keep calls of so many episodes under way."""

    async def keep() -> None:
        while True:
            await sampler.sample(policy, batch_size=batch_size)

    calls = [asyncio.create_task(keep()) for _ in range(_NUM_CALLS)]
    await asyncio.sleep(0.2)  # away from the start
    try:
        yield
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def compute(seconds: float) -> None:
    """Compute in Python."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def rate(
    sampler: asyncmaml.AsyncSampler, block: Callable[[float], None] | None, seconds: float
) -> float:
    """Return the transitions a second while the caller's loop is blocked for most of the time."""
    before, began = sampler.statistics, time.perf_counter()
    while time.perf_counter() < began + seconds:
        if block is not None:
            block(_BLOCKED)
            await asyncio.sleep(_PERIOD - _BLOCKED)
        else:
            await asyncio.sleep(_PERIOD)
    return (sampler.statistics - before).steps_per_second


async def measure(env_id: str, repeats: int, seconds: float) -> None:
    """Measure one environment, and print what was found."""
    idle, sampling = Rounds(), Rounds()
    ways = {"free": None, "sleeping": time.sleep, "computing": compute}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    async with asyncmaml.AsyncSampler(env_id, seed=0, **SETTINGS[env_id]) as sampler:
        torch.manual_seed(0)
        policy = asyncmaml.policy_for_spaces(sampler.observation_space, sampler.action_space)
        for _ in range(repeats):
            await idle.watch(seconds)
            async with kept_sampling(sampler, policy, 20):
                await sampling.watch(seconds)
            async with kept_sampling(sampler, policy, 1000):  # enough for a blocked loop
                for way, block in ways.items():
                    rates[way].append(await rate(sampler, block, seconds))
    rows = [
        [
            name,
            kind,
            str(len(times)),
            *(f"{1e3 * _quantile(times, q):.2f}" for q in (0.5, 0.999, 1)),
        ]
        for name, rounds in (("idle", idle), ("sampling", sampling))
        for kind, times in (("wall", rounds.wall), ("CPU", rounds.cpu))
    ]
    header = ("loop", "time", "rounds", "median ms", "99.9 %", "longest")
    print(plain_table(f"\n{env_id}, {SETTINGS[env_id]}", header, rows, range(2, 6)))
    held = max(sampling.cpu)
    verdict = "ok" if held <= _MOST else "MISSED"
    print(f"  sampling holds the loop for {1e3 * held:.2f} ms at most, wanted 5: {verdict}")
    for way in list(ways)[1:]:
        pairs = zip(rates[way], rates["free"], strict=True)
        ratio = in_words(Spread.of(blocked / free for blocked, free in pairs))
        print(f"  caller {way} for 200 of every 250 ms: {ratio} of the rate with a free loop")


def _quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="some 15 seconds, less exact")
    parser.add_argument("--envs", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine_facts().items()))
    repeats, seconds = (1, 1.0) if arguments.quick else (5, 1.0)
    for env_id in arguments.envs:
        asyncio.run(measure(env_id, repeats, seconds))


if __name__ == "__main__":
    main()
