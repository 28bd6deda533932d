"""How workers are started: three methods, in threads, in daemons, from scripts without guard."""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from fakes import CountingEnv
from faulty import DoingEnv, NestedEnv, ThreadCountEnv
from oracle import PENDULUM, assert_same, lockstep, uniform
from processes import children, is_alive, run_script, until, wait_until

from asyncmaml import AsyncSampler, BatchEpisodes, BatchSampler
from asyncmaml.errors import ConfigurationError, WorkerDiedError
from asyncmaml.learning.policies import MLPPolicy

METHODS = ["spawn", "forkserver", "fork"]
pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("method", METHODS)
async def test_episodes_are_the_same_however_workers_are_started(
    method: Any, pendulum: tuple[MLPPolicy, BatchEpisodes]
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(**PENDULUM, num_workers=2, start_method=method) as sampler:
        assert_same(await sampler.sample(used, batch_size=30), wanted)


@pytest.mark.parametrize("method", METHODS)
async def test_killed_worker_is_replaced_however_it_was_started(
    method: Any, pendulum: tuple[MLPPolicy, BatchEpisodes]
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(**PENDULUM, num_workers=2, start_method=method) as sampler:
        sampling = asyncio.create_task(sampler.sample(used, batch_size=30))
        await until(lambda: sampler.statistics.transitions > 300)
        os.kill(min(children()), signal.SIGKILL)
        await until(lambda: sampler.statistics.restarts == 1)
        assert_same(await sampling, wanted)
        await until(lambda: len(children()) == 2)


@pytest.mark.filterwarnings("default")  # a fork takes the filters along
@pytest.mark.parametrize("method", METHODS)
async def test_output_and_log_arrive_however_a_worker_was_started(
    method: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncSampler(
        DoingEnv, num_workers=1, batch_size=1, start_method=method, max_restarts=0
    ) as sampler:
        for deed in ("speak", "warn", "log"):
            await sampler.sample(uniform, task={"deed": deed})
        with pytest.raises(WorkerDiedError, match="SIGSEGV") as caught:
            await sampler.sample(uniform, task={"deed": "segfault"})
    assert "in segfault" in caught.value.stderr_tail
    output, complaints = capfd.readouterr()
    assert output == "from Python\nfrom C\n"
    assert complaints.startswith("complaint of Python\ncomplaint of a child\nFatal Python error")
    told = [record.levelno for record in caplog.records]
    assert told == [logging.WARNING, logging.ERROR, logging.WARNING]  # the last one of its death


@pytest.mark.parametrize("method", METHODS)
async def test_closed_sampler_leaves_no_process_however_it_was_started(method: Any) -> None:
    async with AsyncSampler(CountingEnv, num_workers=2, start_method=method) as sampler:
        pids = children()
        assert len(pids) == 2
        await sampler.sample(uniform, batch_size=3)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
async def test_numeric_libraries_have_one_thread_in_a_worker(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by the kernel after a product of matrices, which is where OpenBLAS uses them."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    async with AsyncSampler(
        ThreadCountEnv, num_workers=1, batch_size=1, start_method=method
    ) as sampler:
        episodes = await sampler.sample(uniform)
    assert episodes.observations[0, 0, 2] == 1


def test_unknown_start_method_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="start_method is 'thread'; wanted one of spawn, forkserver, fork"
    ):
        AsyncSampler(CountingEnv, start_method="thread")  # type: ignore[arg-type]


SCRIPT_WITHOUT_GUARD = """
    import asyncio
    import json
    import os
    import sys

    import gymnasium
    import torch

    from asyncmaml import AsyncSampler, BatchSampler, CategoricalMLPPolicy

    print("script is run")

    class OwnEnv(gymnasium.Wrapper):
        def __init__(self):
            super().__init__(gymnasium.make("CartPole-v1"))

        def sample_tasks(self, num_tasks):
            return [None] * num_tasks

        def reset_task(self, folder):
            with open(f"{folder}/{os.getpid()}", "w") as file:
                names = sorted(vars(sys.modules["__main__"]))
                json.dump([sorted(sys.modules), names], file)

    policy = CategoricalMLPPolicy(4, 2)

    async def sample(method):
        folder = f"{sys.argv[1]}/{method}"
        os.mkdir(folder)
        async with AsyncSampler(OwnEnv, num_workers=2, start_method=method, seed=0) as sampler:
            return await sampler.sample(policy, batch_size=8, task=folder)

    found = [asyncio.run(sample(method)) for method in sys.argv[2:]]
    with BatchSampler(OwnEnv, num_workers=2, seed=0) as sampler:
        wanted = sampler.sample(policy, batch_size=8)
    assert len(found) == 3
    for episodes in found:
        assert torch.equal(wanted.rewards, episodes.rewards)
"""


def test_script_without_guard_is_run_once_and_not_loaded_however_workers_are_started(
    tmp_path: Path,
) -> None:
    """Nor do workers load torch or asyncio; those that are forked have them of the script."""
    output = run_script(tmp_path / "script.py", SCRIPT_WITHOUT_GUARD, str(tmp_path), *METHODS)
    assert output == "script is run\n"
    for method in ("spawn", "forkserver"):
        files = list((tmp_path / method).iterdir())
        assert len(files) == 2
        for file in files:
            modules, names_of_main = json.loads(file.read_text())
            roots = {module.partition(".")[0] for module in modules}
            assert {"numpy", "gymnasium", "asyncmaml"} <= roots
            assert not roots & {"torch", "asyncio", "aiomultiprocess", "script"}
            assert "AsyncSampler" not in names_of_main


# --- where a sampler may be


async def test_samplers_of_all_methods_at_once_do_not_mix() -> None:
    async def sample(method: Any, seed: int) -> BatchEpisodes:
        async with AsyncSampler(
            lambda: CountingEnv(length=None), num_workers=1, start_method=method, seed=seed
        ) as sampler:
            return await sampler.sample(uniform, batch_size=30)

    found = await asyncio.gather(*(sample(method, seed) for seed, method in enumerate(METHODS)))
    for seed, episodes in enumerate(found):
        env = lambda: CountingEnv(length=None)  # noqa: E731
        assert_same(episodes, lockstep(env, uniform, seed=seed, batch_size=30)[0])


@pytest.mark.parametrize("method", METHODS)
def test_sampler_in_a_thread_samples(method: Any) -> None:
    results = []

    def run() -> None:
        async def main() -> None:
            async with AsyncSampler(
                CountingEnv, num_workers=1, start_method=method, seed=0
            ) as sampler:
                results.append(await sampler.sample(uniform, batch_size=3))

        asyncio.run(main())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = lockstep(CountingEnv, uniform, seed=0, batch_size=3)[0]
    assert len(results) == 3
    for found in results:
        assert_same(found, wanted)


async def test_sampler_inside_a_worker_of_another_sampler_samples() -> None:
    """Workers are daemons, which multiprocessing allows no children."""
    async with AsyncSampler(NestedEnv, num_workers=1, batch_size=1) as sampler:
        episodes = await sampler.sample(uniform)
    assert episodes.observations[0, 0, 2] == 15  # the sum of 5 rewards


def _sample_in_a_pool(method: Any) -> float:
    async def main() -> float:
        async with AsyncSampler(CountingEnv, num_workers=1, start_method=method) as sampler:
            return float((await sampler.sample(uniform, batch_size=2)).rewards.sum())

    return asyncio.run(main())


def test_sampler_inside_a_worker_of_a_pool_samples() -> None:
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.map(_sample_in_a_pool, METHODS) == [30.0] * 3


def test_sampler_inside_a_worker_of_an_executor_samples() -> None:
    context = multiprocessing.get_context("fork")  # the others would load torch again
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        assert list(executor.map(_sample_in_a_pool, ["spawn", "fork"])) == [30.0] * 2


def _sample_by_fork_server() -> None:
    assert _sample_in_a_pool("forkserver") == 30
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # nobody else of this process


def test_fork_of_a_process_with_a_fork_server_gets_its_own() -> None:
    process = multiprocessing.get_context("fork").Process(target=_sample_by_fork_server)
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()


async def test_forked_worker_does_not_have_the_signal_handlers_of_its_driver() -> None:
    heard: list[str] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, heard.append, "the driver")
    try:
        async with AsyncSampler(CountingEnv, num_workers=1, start_method="fork") as sampler:
            os.kill(min(children()), signal.SIGTERM)
            await until(lambda: sampler.statistics.restarts == 1)
            assert (await sampler.sample(uniform, batch_size=2)).is_complete
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    assert heard == []


@pytest.mark.parametrize("method", ["spawn", "fork"])
async def test_ctrl_c_at_no_moment_of_its_start_ends_a_worker(method: Any) -> None:
    """It reaches the whole group of processes, but who ends is the driver's decision.

    A fork server restores the handler, not the mask: its forks have some milliseconds without.
    """
    has_started = threading.Event()

    def interrupt() -> None:
        while not has_started.is_set():
            for pid in children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        async with AsyncSampler(
            CountingEnv, num_workers=2, batch_size=2, start_method=method
        ) as sampler:
            assert (await sampler.sample(uniform)).is_complete
            assert sampler.statistics.restarts == 0
    finally:
        has_started.set()
        interrupting.join()


# --- the lock-step sampler


def test_lock_step_sampler_forks_no_process_with_threads() -> None:
    before = children()
    with BatchSampler(CountingEnv, num_workers=2, batch_size=3, seed=0) as sampler:
        pids = children() - before
        for pid in pids:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            assert b"--multiprocessing-fork" in command
        found = sampler.sample(uniform)
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)))
    assert_same(found, lockstep(CountingEnv, uniform, batch_size=3, seed=0)[0])
