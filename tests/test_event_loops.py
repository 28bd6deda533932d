"""The sampler in every kind of running event loop, and what it leaves of the caller's."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import uvloop
from fakes import CountingEnv
from oracle import assert_same, lockstep, policy_of, uniform
from processes import run_script, until, wait_until

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import EventLoopError
from asyncmaml.learning.policies import CategoricalMLPPolicy, MLPPolicy

pytestmark = pytest.mark.usefixtures("quick_workers")

CARTPOLE = "CartPole-v1"
SETTINGS: dict[str, Any] = {"seed": 0, "batch_size": 30}


@pytest.fixture(scope="module")
def policy() -> MLPPolicy:
    """One for CartPole."""
    return policy_of(gymnasium.make(CARTPOLE).unwrapped)


@pytest.fixture(scope="module")
def wanted(policy: MLPPolicy) -> BatchEpisodes:
    """What `sampled` should come to."""
    return lockstep(CARTPOLE, policy, **SETTINGS)[0]


async def sampled(policy: MLPPolicy) -> BatchEpisodes:
    async with AsyncSampler(CARTPOLE, num_workers=2, envs_per_worker=8, **SETTINGS) as sampler:
        return await sampler.sample(policy)


def runner_of(kind: str) -> asyncio.Runner:
    if kind == "uvloop":
        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner(debug=kind == "debug")


@pytest.mark.parametrize("kind", ["asyncio", "uvloop", "debug"])
def test_loop_of_each_kind_gets_the_same_episodes(
    kind: str, policy: MLPPolicy, wanted: BatchEpisodes
) -> None:
    with runner_of(kind) as runner:
        assert_same(runner.run(sampled(policy)), wanted)


def test_cancelling_in_uvloop_leaves_the_sampler_usable(
    policy: MLPPolicy, wanted: BatchEpisodes
) -> None:
    async def main() -> BatchEpisodes:
        async with AsyncSampler(CARTPOLE, num_workers=1, **SETTINGS) as sampler:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03):
                    await sampler.sample(policy, batch_size=10**6, seed=1)
            return await sampler.sample(policy)

    with runner_of("uvloop") as runner:
        assert_same(runner.run(main()), wanted)


CELLS = (
    """
    import gymnasium, torch
    from asyncmaml import AsyncSampler, CategoricalMLPPolicy

    class Generous(gymnasium.Wrapper):
        def step(self, action):
            observation, reward, *rest = self.env.step(action)
            return observation, reward + 1, *rest

    def make():
        return Generous(gymnasium.make("CartPole-v1"))
    """,
    """
    async with AsyncSampler(make, num_workers=1, seed=0) as sampler:
        episodes = await sampler.sample(CategoricalMLPPolicy(4, 2), batch_size=5)
    print(episodes.batch_size, episodes.rewards.max().item())
    """,
)

NOTEBOOK = """
    import asyncio
    import sys
    import textwrap

    from jupyter_client.manager import AsyncKernelManager

    async def main():
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=sys.argv[1])
        await manager.start_kernel()
        client = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=40)
            for cell in sys.argv[2:]:
                reply = await client.execute_interactive(textwrap.dedent(cell), timeout=40)
                assert reply["content"]["status"] == "ok", reply["content"]
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)

    asyncio.run(main())
"""


def test_notebook_cell_samples_with_a_class_of_another_cell(tmp_path: Path) -> None:
    """In a real kernel, whose loop is running when the cell comes."""
    # Warnings of jupyter_client's own are no errors here; ours would come from the kernel.
    output = run_script(
        tmp_path / "notebook.py", NOTEBOOK, str(tmp_path / "kernel"), *CELLS, warnings="ignore"
    )
    assert output == "5 2.0\n"


async def test_two_tasks_sample_at_once(policy: MLPPolicy) -> None:
    async def learner(sampler: AsyncSampler, seed: int) -> list[BatchEpisodes]:
        return [await sampler.sample(policy, seed=10 * seed + call) for call in range(5)]

    async with (
        AsyncSampler(CARTPOLE, num_workers=1, seed=0, batch_size=3) as sampler,
        asyncio.TaskGroup() as group,
    ):
        learners = [group.create_task(learner(sampler, seed)) for seed in range(2)]
    for seed, task in enumerate(learners):
        calls = [{"seed": 10 * seed + call} for call in range(5)]
        expected = lockstep(CARTPOLE, policy, calls, seed=0, batch_size=3)
        for left, right in zip(task.result(), expected, strict=True):
            assert_same(left, right)


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_caller_that_blocks_its_loop_does_not_stall_sampling(num_workers: int) -> None:
    async with AsyncSampler(
        lambda: CountingEnv(length=10**9), num_workers=num_workers, envs_per_worker=8
    ) as sampler:
        sampling = asyncio.create_task(sampler.sample(uniform))
        await until(lambda: sampler.statistics.transitions > 0)
        before = sampler.statistics.transitions
        # A learner's step: this loop does nothing else until they have been sampled.
        wait_until(lambda: sampler.statistics.transitions - before > 300)
        sampling.cancel()


def own_time() -> float:
    """Return the time without what this thread has waited for a core, where the kernel tells it."""
    told = Path("/proc/thread-self/schedstat")
    waited = int(told.read_text().split()[1]) / 1e9 if told.exists() else 0.0
    return time.perf_counter() - waited


async def excess_of_largest_gap(work: Awaitable[Any]) -> float:
    """Return how far the longest round of the loop, while the work was under way, went too far.

    Too far is more than 50 ms and more than a quarter of the work: on a busy machine both take
    longer, and a loop that is held is held for most of the work.
    """
    largest = 0.0
    ending = asyncio.ensure_future(work)
    began, before = time.perf_counter(), own_time()
    while not ending.done():
        await asyncio.sleep(0.0005)
        now = own_time()
        largest = max(largest, now - before)
        before = now
    await ending
    took = time.perf_counter() - began
    print(f"largest gap {largest} s of {took} s")
    return largest - max(0.05, took / 4)


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_starting_sampling_and_closing_never_hold_the_callers_loop(
    num_workers: int, policy: MLPPolicy
) -> None:
    """The best of some tries of each, since the machine has others."""
    holding = {"start", "sample", "close"}
    for _ in range(5):
        sampler = AsyncSampler(CARTPOLE, num_workers=num_workers, start_method="spawn")
        life: dict[str, Callable[[], Awaitable[Any]]] = {
            "start": sampler.start,
            "sample": partial(sampler.sample, policy, batch_size=150),
            "close": sampler.close,
        }
        excesses = {name: await excess_of_largest_gap(part()) for name, part in life.items()}
        holding -= {name for name, excess in excesses.items() if excess <= 0}
        if not holding:
            break
    assert not holding


async def test_sampler_of_another_loop_is_refused(policy: MLPPolicy) -> None:
    async with AsyncSampler(CARTPOLE, num_workers=0, **SETTINGS) as sampler:
        with pytest.raises(EventLoopError, match="one sampler in each event loop"):
            await asyncio.to_thread(lambda: asyncio.run(sampler.sample(policy)))
        assert (await sampler.sample(policy)).is_complete


async def test_call_of_another_thread_can_be_sent_to_the_samplers_loop(
    policy: MLPPolicy, wanted: BatchEpisodes
) -> None:
    """As the error's text says."""
    loop = asyncio.get_running_loop()
    async with AsyncSampler(CARTPOLE, num_workers=0, **SETTINGS) as sampler:

        def call() -> BatchEpisodes:
            return asyncio.run_coroutine_threadsafe(sampler.sample(policy), loop).result()

        assert_same(await asyncio.to_thread(call), wanted)


def test_each_thread_may_have_a_loop_and_a_sampler(
    policy: MLPPolicy, wanted: BatchEpisodes
) -> None:
    async def main() -> list[BatchEpisodes]:
        runs = [asyncio.to_thread(lambda: asyncio.run(sampled(policy))) for _ in range(2)]
        return await asyncio.gather(*runs)

    for found in asyncio.run(main()):
        assert_same(found, wanted)


def test_callers_thread_keeps_out_of_openmp_however_large_the_policy_is() -> None:
    """A second team in the process would slow down that of the learner's thread."""
    policy = CategoricalMLPPolicy(4, 2, (400, 400))
    params = dict(policy.named_parameters())
    grown: list[int] = []

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    async def main() -> None:
        async with AsyncSampler(CARTPOLE, num_workers=0, max_episode_steps=2) as sampler:
            await sampler.sample(lambda rows: uniform(rows), batch_size=1)
            before = threads()
            for given in (None, None, params):
                await sampler.sample(policy, given, batch_size=1)
            grown.append(len(threads() - before))

    def in_a_thread_that_has_no_team_yet() -> None:
        asyncio.run(main())
        before = threads()
        params["layer2.weight"].clone()
        grown.append(len(threads() - before))

    thread = threading.Thread(target=in_a_thread_that_has_no_team_yet)
    thread.start()
    thread.join()
    assert grown == [0, torch.get_num_threads() - 1]  # the second shows that we would have seen it
