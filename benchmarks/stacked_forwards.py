"""What parameters of their own cost the requests of one tick: stacked, against shared and apart.

    python benchmarks/stacked_forwards.py            # some 40 s
    python benchmarks/stacked_forwards.py --quick    # some 10 s
    python benchmarks/stacked_forwards.py --sets 40 --rows 4

First the selection of one tick's actions alone, by the engine's own coordinator: M sets of
parameters with R rows each in one stacked forward; the same M x R rows under one set; and one
forward after the other, a set each. CPU time of the thread, whole blocks of action noise, in
turn, repeat after repeat.

Then the whole sampler, on an environment that costs nothing, its rows in this process: M
overlapping `sample()` calls with parameters of their own; with the same ones; and the calls of
the first kind one after the other. CPU time of the process, and what the sampler itself counts as
the forward of a tick.

All ways must return the same actions, bit for bit, where they act under the same parameters.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space
from measuring import Spread
from numpy.typing import NDArray
from reporting import in_words, machine_facts, plain_table
from torch import Tensor, nn
from workloads import NULL_STEPS, SOURCES

import asyncmaml
from asyncmaml.intraop import one_intraop_thread
from asyncmaml.sampling.actor import ActionWriter, Actor
from asyncmaml.sampling.coordinator import Coordinator
from asyncmaml.sampling.lane import Lane, RowTable
from asyncmaml.sampling.requests import Request, Terms
from asyncmaml.sampling.snapshot import PolicySnapshot
from asyncmaml.sampling.streams import Seeds
from asyncmaml.sampling.transitions import Pending, TransitionLog
from asyncmaml.worker.layout import record_type

MOST_OF_SHARED = 1.5
LEAST_OF_APART = 5.0
_TICKS = 64  # a block of action noise: each row draws its next one once
_CPU = torch.device("cpu")
STACKED, SHARED, APART = "stacked", "shared", "apart"
WAYS = (STACKED, SHARED, APART)
ANEW = "stacked, formed anew"
"""As if no tick had the rows of an earlier one: who acts together is found out each time."""

SPACES: dict[str, tuple["Space[Any]", "Space[Any]", str]] = {
    "normal": (
        Box(-np.inf, np.inf, (17,), np.float32),
        Box(-1, 1, (6,), np.float32),
        "MLP 2 x 100, 17 numbers to 6, as HalfCheetah's",
    ),
    "categorical": (
        Box(-np.inf, np.inf, (4,), np.float32),
        Discrete(2),
        "MLP 2 x 100, 4 numbers to 2 logits, as CartPole's",
    ),
}


def perturbed(policy: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return parameters a little off the policy's own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value.detach() + 0.01 * torch.randn(value.shape, generator=generator)
        for name, value in policy.named_parameters()
    }


class Selection:
    """The selection of actions for M requests with R rows each, tick after tick.

    It is the coordinator's own, on the rows of a lane that no worker stands behind.

    Args:
        sets: The parameters of each of the M requests.
        num_rows: R.
        spaces: Of observations and actions.
        row_block: See `asyncmaml.sampling.row_places`.
        is_apart: A selection for each request, though they could share one.
        is_anew: Nothing that an earlier tick has found out is used.
    """

    def __init__(
        self,
        sets: Sequence[PolicySnapshot],
        num_rows: int,
        spaces: tuple["Space[Any]", "Space[Any]"],
        row_block: int,
        *,
        is_apart: bool = False,
        is_anew: bool = False,
    ) -> None:
        count = len(sets) * num_rows
        observation = record_type(spaces[0], "observation")
        self._log = TransitionLog(count, observation, record_type(spaces[1], "action"))
        table = RowTable(count)
        self._lane = Lane(0, 0, 0, count, table)
        self._coordinator = Coordinator(
            [self._lane],
            table,
            Actor(spaces[1], count, _CPU, row_block),
            ActionWriter(),
            self._log,
            max_attempts=0,
            trace=None,
        )
        seeds = Seeds(0)
        terms = Terms(num_rows, 0.95, "cpu", num_rows, "raise")
        self._requests = {
            slot: Request(each, seeds.next_request(None), None, terms, lambda _: None)
            for slot, each in enumerate(sets)
        }
        for slot, request in self._requests.items():
            request.slot = slot
        self._coordinator._requests = self._requests
        self._rows = np.arange(count)
        self._owners = np.repeat(np.arange(len(sets), dtype=np.int32), num_rows)
        self._ids = np.tile(np.arange(num_rows), len(sets))
        self._steps = np.zeros(count, np.int64)
        self._size = num_rows if is_apart else count
        self._is_anew = is_anew
        generator = np.random.default_rng(0)
        shape = (_TICKS, count, *observation[0])
        self._observations = generator.standard_normal(shape, dtype=np.float32)

    def run(self) -> tuple[float, NDArray[Any]]:
        """Select for one block of ticks; return the CPU microseconds of a tick, and the actions."""
        seconds, drawn = 0.0, []
        count, size, lane = len(self._rows), self._size, self._lane
        for observations in self._observations:
            if not self._log.has_room(count):
                self._log.empty(self._requests, ())
            start = self._log.append(self._owners, self._ids, self._steps)
            self._log.observations[start : start + count] = observations
            if self._is_anew:
                self._coordinator._formations.clear()
            began = time.thread_time()
            for first in range(0, count, size):
                lane.pending = Pending(start + first, start + first + size)
                self._coordinator._act(self._rows[first : first + size], [lane])
            seconds += time.thread_time() - began
            drawn.append(self._log.actions[start : start + count].copy())
            self._steps += 1
        return seconds / _TICKS * 1e6, np.stack(drawn)


@dataclass
class Costs:
    """Microseconds of a tick's M x R rows, of each way, by repeat."""

    of: dict[str, list[float]]

    def ratio(self, left: str, right: str) -> Spread:
        """Return how many times as much the left one costs, within each repeat."""
        return Spread.of(a / b for a, b in zip(self.of[left], self.of[right], strict=True))


async def measure_selection(
    kind: str, num_sets: int, num_rows: int, repeats: int
) -> tuple[Costs, dict[str, bool]]:
    """Return the CPU time of a tick's selection, and what is the same as it should be."""
    observation_space, action_space, _ = SPACES[kind]
    torch.manual_seed(0)
    policy = asyncmaml.policy_for_spaces(observation_space, action_space)
    own = [PolicySnapshot(policy, perturbed(policy, number), _CPU) for number in range(num_sets)]
    sets = {STACKED: own, SHARED: [own[0]] * num_sets, APART: own, ANEW: own}
    costs = Costs({way: [] for way in sets})
    is_same = {"stacked = apart": True, "shared = stacked, first set": True}
    with one_intraop_thread() as row_block, torch.inference_mode():
        selections = {
            way: Selection(
                sets[way],
                num_rows,
                (observation_space, action_space),
                row_block,
                is_apart=way == APART,
                is_anew=way == ANEW,
            )
            for way in sets
        }
        for repeat in range(repeats + 1):
            actions = {}
            for way, selection in selections.items():
                cost, actions[way] = selection.run()
                if repeat:  # the first one warms up
                    costs.of[way].append(cost)
            is_same["stacked = apart"] &= np.array_equal(actions[STACKED], actions[APART])
            first = slice(0, num_rows)
            is_same["shared = stacked, first set"] &= np.array_equal(
                actions[SHARED][:, first], actions[STACKED][:, first]
            )
    return costs, is_same


async def measure_sampler(
    kind: str, num_sets: int, num_rows: int, repeats: int
) -> tuple[Costs, Costs, bool]:
    """Return CPU time of the process and forward of a tick's rows, and whether all is the same."""
    source = SOURCES["NullBox" if kind == "normal" else "Null"]
    cpu, forward = Costs({way: [] for way in WAYS}), Costs({way: [] for way in WAYS})
    is_same = True
    torch.manual_seed(0)
    async with asyncmaml.AsyncSampler(
        source.env, num_workers=0, envs_per_worker=num_sets * num_rows, batch_size=num_rows, seed=0
    ) as sampler:
        policy = asyncmaml.policy_for_spaces(sampler.observation_space, sampler.action_space)
        sets = [perturbed(policy, number) for number in range(num_sets)]
        ticks = NULL_STEPS  # of M x R rows, since episodes are cut at this many steps

        async def sampled(number: int, params: dict[str, Tensor] | None) -> Tensor:
            return (await sampler.sample(policy, params, seed=number)).actions

        async def overlapping(own: bool) -> list[Tensor]:
            return await asyncio.gather(
                *(sampled(number, sets[number] if own else None) for number in range(num_sets))
            )

        async def one_by_one() -> list[Tensor]:
            return [await sampled(number, sets[number]) for number in range(num_sets)]

        ways: dict[str, Callable[[], Any]] = {
            STACKED: lambda: overlapping(own=True),
            SHARED: lambda: overlapping(own=False),
            APART: one_by_one,
        }
        for repeat in range(repeats + 1):
            actions: dict[str, list[Tensor]] = {}
            for way, run in ways.items():
                before, began = sampler.statistics.forward_seconds, time.process_time()
                actions[way] = await run()
                spent = time.process_time() - began
                if repeat:
                    cpu.of[way].append(spent / ticks * 1e6)
                    after = sampler.statistics.forward_seconds
                    forward.of[way].append((after - before) / ticks * 1e6)
            is_same &= all(map(torch.equal, actions[STACKED], actions[APART]))
    return cpu, forward, is_same


def row_of(text: str, costs: Costs) -> list[str]:
    """Return a row of the table."""
    return [
        text,
        *(in_words(Spread.of(costs.of[way]), "{:.0f}") for way in WAYS),
        in_words(costs.ratio(STACKED, SHARED)),
        in_words(costs.ratio(APART, STACKED), "{:.1f}"),
    ]


def main() -> None:
    arguments = _parse()
    facts = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    num_sets, num_rows, repeats = arguments.sets, arguments.rows, arguments.repeats
    rows: list[list[str]] = []
    targets: list[list[str]] = []
    for kind in SPACES:
        costs, is_same = asyncio.run(measure_selection(kind, num_sets, num_rows, repeats))
        rows.append(row_of(f"{kind}: selection, CPU", costs))
        anew = Costs(costs.of | {STACKED: costs.of[ANEW]})
        rows.append(row_of(f"{kind}: the same, formed anew each tick", anew))
        targets += _targets(f"{kind}, selection", costs, is_same)
    for kind in SPACES:
        cpu, forward, same = asyncio.run(measure_sampler(kind, num_sets, num_rows, repeats))
        rows.append(row_of(f"{kind}: sampler, forward (wall)", forward))
        rows.append(row_of(f"{kind}: sampler, whole tick, CPU", cpu))
        targets += _targets(f"{kind}, whole tick", cpu, {"overlapping = alone": same})
    print()
    for kind, (_, _, text) in SPACES.items():
        print(f"{kind}: {text}; the sampler's environment has 4 numbers and 2 (actions)")
    header = ("us a tick", *WAYS, "stacked / shared", "apart / stacked")
    title = (
        f"\n{num_sets} sets of parameters x {num_rows} rows: median (least..greatest) of {repeats}"
    )
    print(plain_table(title, header, rows, range(1, len(header))))
    print(plain_table("\nTargets", ("of", "what", "wanted", "measured", ""), targets, range(2, 4)))


def _targets(what: str, costs: Costs, is_same: dict[str, bool]) -> list[list[str]]:
    shared, apart = costs.ratio(STACKED, SHARED), costs.ratio(APART, STACKED)
    found = [
        (
            "stacked / shared",
            f"<= {MOST_OF_SHARED}",
            in_words(shared),
            shared.median <= MOST_OF_SHARED,
        ),
        (
            "apart / stacked",
            f">= {LEAST_OF_APART}",
            in_words(apart),
            apart.median >= LEAST_OF_APART,
        ),
        *((text, "the same bits", "yes" if same else "no", same) for text, same in is_same.items()),
    ]
    return [
        [what, text, wanted, measured, "met" if is_met else "missed"]
        for text, wanted, measured, is_met in found
    ]


def _parse() -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="within 10 s, less exact")
    parser.add_argument("--sets", type=int, default=20, help="sets of parameters, M")
    parser.add_argument("--rows", type=int, default=20, help="rows of each, R")
    parser.add_argument("--repeats", type=int, help="15, or 3 with --quick")
    arguments = parser.parse_args()
    if arguments.repeats is None:
        arguments.repeats = 3 if arguments.quick else 15
    if min(arguments.sets - 1, arguments.rows, arguments.repeats) < 1:
        parser.error("--rows and --repeats must be 1 or more, --sets 2 or more")
    return arguments


if __name__ == "__main__":
    main()
