"""Arbitrary interleavings, drawn by hypothesis: of bytes, commands, replies and deaths."""

import asyncio
import mmap
import os
import pickle
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from fakes import CountingEnv
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import assert_same, lockstep, policy_of
from processes import PATIENCE

from asyncmaml import BatchEpisodes
from asyncmaml.envs.making import EnvMaker
from asyncmaml.errors import WorkerDiedError
from asyncmaml.intraop import one_intraop_thread
from asyncmaml.sampling.actor import Actor, to_environment
from asyncmaml.sampling.coordinator import Coordinator
from asyncmaml.sampling.lane import Lane, RowTable
from asyncmaml.sampling.links import Link, layout_of
from asyncmaml.sampling.pacing import Pace
from asyncmaml.sampling.requests import Request, Task, Terms
from asyncmaml.sampling.snapshot import Snapshots
from asyncmaml.sampling.streams import Seeds
from asyncmaml.sampling.transitions import TransitionLog
from asyncmaml.worker.fleet import Fleet
from asyncmaml.worker.layout import WorkerLayout, nameless_memory
from asyncmaml.worker.main import Setup, _Server, describe
from asyncmaml.worker.protocol import (
    CLOSE,
    NO_TASK,
    STEP,
    FrameReader,
    Kind,
    Order,
    Outcome,
    frame,
)

# --- bytes

MESSAGES = st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=40)), max_size=12)


@given(MESSAGES, st.lists(st.integers(1, 30)))
def test_messages_arrive_whole_in_whatever_pieces_their_bytes_come(
    messages: list[tuple[Kind, bytes]], sizes: list[int]
) -> None:
    stream = b"".join(frame(kind, payload) for kind, payload in messages)
    reader = FrameReader()
    found: list[tuple[Kind, bytes]] = []
    for size in sizes:
        piece, stream = stream[:size], stream[size:]
        found += reader.feed(piece)
    found += reader.feed(stream)
    assert found == messages
    assert reader.is_between_messages


# --- transitions


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=6),
    st.data(),
)
def test_episodes_are_the_same_in_whatever_order_their_transitions_are_stored(
    shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Of each episode: its length, and the steps that a try which was lost has left before."""

    def row(batch_id: int, step: int) -> dict[str, Any]:
        value = 100.0 * batch_id + step
        return {
            "observations": [[value, -value]],
            "actions": [step],
            "rewards": [value / 7],
            "log_probs": [-value],
        }

    def end(batch_id: int, length: int) -> tuple[Any, Any, Any, Any, Any]:
        last, is_even = [[batch_id, 0.5]], batch_id % 2 == 0
        return [batch_id], last, [is_even], [not is_even], [length]

    wanted, found = BatchEpisodes(len(shapes)), BatchEpisodes(len(shapes))
    deeds: list[list[Callable[[], None]]] = []
    for batch_id, (length, num_lost) in enumerate(shapes):
        for step in range(length):
            wanted.append(**row(batch_id, step), batch_ids=[batch_id])
        wanted.finish(*end(batch_id, length))
        lost = [partial(found.store, [step], [batch_id], **row(9, 9)) for step in range(num_lost)]
        steps = data.draw(st.permutations(range(length)))
        real = [partial(found.store, [step], [batch_id], **row(batch_id, step)) for step in steps]
        finish = partial(found.finish, *end(batch_id, length))
        deeds.append([*lost, *real, finish])
    while deeds:
        episode = data.draw(st.sampled_from(deeds))
        episode.pop(0)()
        if not episode:
            deeds.remove(episode)
    assert_same(found, wanted)


# --- a worker and its commands

NUM_ROWS, NUM_GROUPS = 4, 2
ROWS = range(NUM_ROWS // NUM_GROUPS)
SEEDS = st.integers(0, 1000)


class Driver(RuleBasedStateMachine):
    """Drives the loop of a worker with any legal commands, cut into any pieces."""

    @initialize(first=st.integers(1, 400))
    def open(self, first: int) -> None:
        self.pipe, theirs = socket.socketpair()
        self.pipe.settimeout(PATIENCE)
        self.worker = threading.Thread(target=self.serve, args=(theirs,))
        self.worker.start()
        setup = Setup(EnvMaker(partial(CountingEnv, None), {}), NUM_ROWS, NUM_GROUPS, [])
        message = frame(Kind.SETUP, pickle.dumps(setup))
        self.pipe.sendall(message[:first])
        self.pipe.sendall(message[first:])
        self.reader = FrameReader()
        self.unsent = b""
        self.known: dict[int, float] = {}
        self.in_flight: list[tuple[int, Callable[[], None]]] = []
        kind, payload = self.receive()
        assert kind is Kind.READY
        ready = pickle.loads(payload)
        layout = WorkerLayout(ready.group_sizes, ready.observation_space, ready.action_space)
        descriptor = nameless_memory(layout.num_bytes)
        self.block = mmap.mmap(descriptor, layout.num_bytes)
        self.arrays = layout.views(self.block)
        socket.send_fds(self.pipe, [frame(Kind.ATTACH)], [descriptor])
        os.close(descriptor)
        self.models = [[CountingEnv(None) for _ in ROWS] for _ in range(NUM_GROUPS)]
        self.is_in_episode = [[False for _ in ROWS] for _ in range(NUM_GROUPS)]

    @staticmethod
    def serve(pipe: socket.socket) -> None:
        with pipe:
            _Server(pipe).serve()

    def receive(self) -> tuple[Kind, bytes]:
        data = b""  # a message may have come along with the one before
        while True:
            for message in self.reader.feed(data):
                return message
            data = self.pipe.recv(1 << 16)
            assert data

    @rule(number=st.integers(0, 3), value=st.integers(1, 9).map(float))
    def make_known(self, number: int, value: float) -> None:
        if number not in self.known:
            self.known[number] = value
            task = pickle.dumps((number, pickle.dumps({"number": value})))
            self.unsent += frame(Kind.TASK, task)

    @rule(count=st.integers(1, 20))
    def push(self, count: int) -> None:
        self.pipe.sendall(self.unsent[:count])
        self.unsent = self.unsent[count:]

    @precondition(lambda self: len(self.in_flight) < NUM_GROUPS)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        busy = {group for group, _ in self.in_flight}
        group = data.draw(st.sampled_from([one for one in range(NUM_GROUPS) if one not in busy]))
        arrays = self.arrays[group]
        numbers = st.sampled_from([NO_TASK, *self.known]) if self.known else st.just(NO_TASK)
        num_offers = data.draw(st.integers(0, 3))
        offers = [(data.draw(SEEDS), data.draw(numbers)) for _ in range(num_offers)]
        arrays.offers[:] = 0, num_offers
        for index, (seed, number) in enumerate(offers):
            arrays.offer_seed[index], arrays.offer_task[index] = seed, number
        orders = []
        for row in ROWS:
            may = [Order.IDLE, Order.START] + [Order.STEP] * 3 * self.is_in_episode[group][row]
            order = data.draw(st.sampled_from(may))
            arrays.orders[row] = order
            seed, number = data.draw(SEEDS), data.draw(numbers)
            arrays.start_seed[row], arrays.start_task[row] = seed, number
            orders.append((order, seed, number))
        self.unsent += STEP[group]
        known = dict(self.known)
        self.in_flight.append((group, lambda: self.check(group, orders, offers, known)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        self.push(len(self.unsent))
        group, check = self.in_flight.pop(0)  # in the order in which they were sent
        assert self.receive() == (Kind.STEPPED, bytes((group,)))
        check()

    def check(
        self,
        group: int,
        orders: list[tuple[Order, int, int]],
        offers: list[tuple[int, int]],
        known: dict[int, float],
    ) -> None:
        """Do with a model of each row what its worker was told, and compare."""
        arrays = self.arrays[group]

        def begin(row: int, seed: int, number: int) -> Any:
            model = self.models[group][row] = CountingEnv(None)
            if number != NO_TASK:
                model.reset_task({"number": known[number]})
            return model.reset(seed=seed)[0]

        for row, (order, seed, number) in enumerate(orders):
            outcome = Outcome(0)
            if order is Order.START:
                np.testing.assert_array_equal(arrays.observations[row], begin(row, seed, number))
                self.is_in_episode[group][row] = True
            elif order is Order.STEP:
                observation, reward, ended, _, _ = self.models[group][row].step(0)
                assert arrays.rewards[row] == reward
                if ended:
                    outcome = Outcome.TERMINATED
                    np.testing.assert_array_equal(arrays.last_observations[row], observation)
                    self.is_in_episode[group][row] = bool(offers)
                    if offers:
                        outcome |= Outcome.NEXT
                        observation = begin(row, *offers.pop(0))
                if not ended or Outcome.NEXT in outcome:
                    np.testing.assert_array_equal(arrays.observations[row], observation)
            assert arrays.outcomes[row] == outcome

    @invariant()
    def worker_lives(self) -> None:
        if hasattr(self, "worker"):
            assert self.worker.is_alive()

    def teardown(self) -> None:
        if hasattr(self, "worker"):
            while self.in_flight:
                self.collect()
            self.push(len(self.unsent))
            self.pipe.sendall(CLOSE)
            self.worker.join(PATIENCE)
            assert not self.worker.is_alive()
            self.pipe.close()
            self.arrays = []
            self.block.close()


def test_worker_does_what_it_is_told_in_whatever_order_it_is_told() -> None:
    run_state_machine_as_test(Driver, settings=settings(max_examples=40, stateful_step_count=30))


# --- the coordinator and its workers

CALLS: list[dict[str, Any]] = [
    {"batch_size": size, "seed": seed, "task": {"number": float(seed % 3)}}
    for seed, size in enumerate([5, 1, 7, 3, 9])
]
POLICY = policy_of(CountingEnv())
WANTED = lockstep(partial(CountingEnv, None), POLICY, CALLS, seed=0)
NUMBERS = range(len(CALLS))
NUM_WORKERS = 2
WORKERS = range(NUM_WORKERS)
MAX_DEATHS = 6


class SlowLink(Link):
    """Rows that answer when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet.make(EnvMaker(partial(CountingEnv, None), {}), NUM_ROWS, NUM_GROUPS)
        self.ready = describe(self.fleet)
        layout = layout_of(self.ready)
        self.arrays = layout.views(bytearray(layout.num_bytes))
        self.fleet.attach(self.arrays)
        self.commands: list[int] = []

    def step(self, group: int) -> None:
        self.commands.append(group)

    def answer(self) -> None:
        group = self.commands.pop(0)
        self.on_stepped(group, self.fleet.groups[group].step())

    def _keep_task(self, number: int, payload: bytes) -> None:
        self.fleet.tasks[number] = pickle.loads(payload)

    def _forget_task(self, number: int) -> None:
        del self.fleet.tasks[number]

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.fleet.close()


class ChosenPace(Pace):
    """Has a reply wait where that may be, and it is chosen so."""

    def __init__(self, num_workers: int, choose: Callable[[], bool]) -> None:
        super().__init__(num_workers)
        self._choose = choose

    def should_wait(self, waiting: set[int], now: float) -> bool:
        return self.may_wait(waiting) and self._choose()


class Stage:
    """A coordinator with rows that do nothing by themselves, and waits as it is told."""

    def __init__(self, row_block: int, choose: Callable[[], bool]) -> None:
        ready = SlowLink().ready
        table = RowTable(NUM_WORKERS * NUM_ROWS)
        size = NUM_ROWS // NUM_GROUPS
        self.lanes = [
            [
                Lane(worker, group, worker * NUM_ROWS + group * size, size, table)
                for group in range(NUM_GROUPS)
            ]
            for worker in range(NUM_WORKERS)
        ]
        layout = layout_of(ready)
        num_rows = NUM_WORKERS * NUM_ROWS
        device = torch.device("cpu")
        self.coordinator = Coordinator(
            [lane for lanes in self.lanes for lane in lanes],
            table,
            Actor(ready.action_space, num_rows, device, row_block),
            to_environment(ready.action_space, clip_actions=True),
            TransitionLog(num_rows, layout.observation, layout.action),
            MAX_DEATHS,
            None,
            ChosenPace(NUM_WORKERS, choose),
        )
        self.snapshots, self.seeds = Snapshots(device), Seeds(0)
        self.links = [SlowLink() for _ in range(NUM_WORKERS)]
        for worker in range(NUM_WORKERS):
            self.connect(worker)
        self.results: dict[int, Any] = {}
        """None for one that was cancelled."""
        self.requests: dict[int, Request] = {}
        self.num_deaths = 0

    def connect(self, worker: int) -> None:
        link, lanes = self.links[worker], self.lanes[worker]
        link.on_stepped = lambda group, failures: self.coordinator.stepped(lanes[group], failures)
        for lane in lanes:
            lane.link = link

    def submit(self, number: int) -> None:
        call = CALLS[number]
        request = self.requests[number] = Request(
            self.snapshots.of(POLICY, None),
            self.seeds.next_request(call["seed"]),
            Task.of(call["task"]),
            Terms(call["batch_size"], 0.95, "cpu", call["batch_size"], "raise"),
            lambda result: self.results.update({number: result}),
        )
        self.coordinator.submit(request)

    def cancel(self, number: int) -> None:
        self.coordinator.cancel(self.requests[number])
        self.results[number] = None

    def answer(self, worker: int) -> None:
        self.links[worker].answer()

    def lose(self, worker: int) -> None:
        """Have a worker die, and another take its place."""
        self.num_deaths += 1
        self.coordinator.lose(self.lanes[worker], WorkerDiedError("it died"))
        self.links[worker].kill()
        self.links[worker] = SlowLink()
        self.connect(worker)
        self.coordinator.rejoin()

    def moves(self) -> list[tuple[str, int]]:
        """Return what may happen next; the more often it stands there, the likelier it is."""
        moves = [("answer", worker) for worker in WORKERS if self.links[worker].commands] * 6
        moves += [("submit", number) for number in NUMBERS if number not in self.requests][:1] * 3
        if self.num_deaths < MAX_DEATHS:
            moves += [("lose", worker) for worker in WORKERS]
        under_way = sorted(self.requests.keys() - self.results.keys())
        if list(self.results.values()).count(None) < 2:
            moves += [("cancel", number) for number in under_way[:1]]
        return moves


@settings(max_examples=30)
@given(data=st.data())
def test_episodes_are_the_same_in_whatever_order_workers_answer_and_die(
    data: st.DataObject,
) -> None:
    async def main(row_block: int) -> dict[int, Any]:
        stage = Stage(row_block, lambda: data.draw(st.booleans()))
        while len(stage.results) < len(CALLS):
            moves = stage.moves()
            if moves:
                name, argument = data.draw(st.sampled_from(moves))
                getattr(stage, name)(argument)
            if not moves or data.draw(st.booleans()):
                await asyncio.sleep(0)  # the tick that is due
        for link in stage.links:
            link.kill()
        return stage.results

    with one_intraop_thread() as row_block, torch.inference_mode():
        results = asyncio.run(main(row_block))
    for number, found in results.items():
        if found is not None:
            assert_same(found, WANTED[number])
