"""Steps raw environments and nothing else: no policy, no messages. The limit of any sampler.

As a script, one such process: for each number of seconds read from stdin it steps for so long
and prints a line of JSON. `python raw_stepping.py Navigation2D 200 vectorized` steps 200 rows as
one natively vectorised environment; `python raw_stepping.py HalfCheetah 32 single` steps 32 single
ones in turn, of which each finds the caches cold. Actions are drawn uniformly over the space;
`python raw_stepping.py HalfCheetah 32 single 1.0` draws them from a normal distribution of that
standard deviation, as a policy does that has not learned yet.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np
from gymnasium.spaces import Box, Space
from workloads import SOURCES, Source

from asyncmaml.envs.making import EnvMaker

_STEPS_BETWEEN_LOOKS = 16  # at the clock
_NUM_ACTIONS = 1024  # drawn beforehand
_VECTORIZED = "vectorized"


@dataclass(frozen=True)
class RawForm:
    """What one process steps: single environments in turn, or one natively vectorised."""

    num_rows: int = 1
    is_vectorized: bool = False
    action_std: float | None = None
    """Of single environments' actions, normal around 0; None: uniform over the space. A simulator's
    step may cost more or less where they lead it."""

    @property
    def in_words(self) -> str:
        """For people."""
        actions = "" if self.action_std is None else f", actions N(0, {self.action_std:g})"
        return f"{self.num_rows} {'vectorised' if self.is_vectorized else 'single'}{actions}"

    @property
    def arguments(self) -> list[str]:
        """For the script, after the workload."""
        kind = _VECTORIZED if self.is_vectorized else "single"
        std = [] if self.action_std is None else [str(self.action_std)]
        return [str(self.num_rows), kind, *std]


@dataclass(frozen=True)
class RawMeasurement:
    """Steps of all processes together."""

    steps: int
    process_seconds: float
    """Wall time, summed over the processes."""
    cpu_seconds: float

    @property
    def cpu_us(self) -> float:
        """CPU time of a step."""
        return self.cpu_seconds / self.steps * 1e6

    @property
    def wall_us(self) -> float:
        """Wall time of a step within its process."""
        return self.process_seconds / self.steps * 1e6


class RawStepping:
    """Processes that step raw environments at the same time.

    Args:
        workload: A key of `SOURCES`.
        num_processes: As many as there are cores.
        form: What each process steps.
    """

    def __init__(self, workload: str, num_processes: int, form: "RawForm") -> None:
        self._command = [sys.executable, __file__, workload, *form.arguments]
        self._num_processes = num_processes
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for _ in range(self._num_processes):
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            # On the way out its stdin is closed, which ends it.
            self._processes.append(self._stack.enter_context(process))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            _end(process.stdin).close()
        self._stack.close()

    def measure(self, seconds: float) -> RawMeasurement:
        """Step for so long in all processes at once."""
        for process in self._processes:
            stdin = _end(process.stdin)
            stdin.write(f"{seconds}\n")
            stdin.flush()
        replies = [json.loads(_end(process.stdout).readline()) for process in self._processes]
        return RawMeasurement(
            sum(reply["steps"] for reply in replies),
            sum(reply["seconds"] for reply in replies),
            sum(reply["cpu_seconds"] for reply in replies),
        )


def _end(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def drawn_actions(space: "Space[Any]", std: float | None, count: int) -> list[Any]:
    """Return actions: uniform over the space, or normal around 0 and clipped to a Box."""
    if std is not None:
        assert isinstance(space, Box)
        normal = std * np.random.default_rng(0).standard_normal((count, *space.shape))
        return list(normal.clip(space.low, space.high).astype(space.dtype))
    space.seed(0)
    drawn = [space.sample() for _ in range(count)]
    return [int(action) for action in drawn] if isinstance(drawn[0], np.integer) else drawn


def single_stepper(
    source: Source, num_envs: int, action_std: float | None = None
) -> Callable[[], int]:
    """Return a function that makes one step of each environment, and returns their number."""
    envs = [source.make() for _ in range(num_envs)]
    actions = itertools.cycle(drawn_actions(envs[0].action_space, action_std, _NUM_ACTIONS))
    for row, env in enumerate(envs):
        env.reset(seed=os.getpid() + row)

    def step() -> int:
        for env in envs:
            _, _, terminated, truncated, _ = env.step(next(actions))
            if terminated or truncated:
                env.reset()
        return num_envs

    return step


def vector_stepper(source: Source, num_rows: int) -> Callable[[], int]:
    """Return a function that makes one step of all rows, and returns their number."""
    maker = EnvMaker.resolve(source.env, source.env_kwargs, source.max_episode_steps)
    env = maker.make_rows(num_rows)
    assert env is not None
    env.action_space.seed(0)
    actions = env.action_space.sample()
    env.reset(seed=os.getpid())

    def step() -> int:
        _, _, terminated, truncated, _ = env.step(actions)
        ended = terminated | truncated
        if ended.any():
            env.reset(options={"reset_mask": ended})
        return num_rows

    return step


def main() -> None:
    workload, num_rows = sys.argv[1], int(sys.argv[2])
    if sys.argv[3] == _VECTORIZED:
        step = vector_stepper(SOURCES[workload], num_rows)
    else:
        std = float(sys.argv[4]) if len(sys.argv) > 4 else None
        step = single_stepper(SOURCES[workload], num_rows, std)
    for line in sys.stdin:
        steps = 0
        began, cpu_began = time.perf_counter(), time.process_time()
        until = began + float(line)
        while (now := time.perf_counter()) < until:
            for _ in range(_STEPS_BETWEEN_LOOKS):
                steps += step()
        reply = {
            "steps": steps,
            "seconds": now - began,
            "cpu_seconds": time.process_time() - cpu_began,
        }
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
