"""Worker processes: how little they load, and what their death costs."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fakes import (
    CountingEnv,
    DeadlyEnv,
    ImageEnv,
    RaisingEnv,
    SecondWaitsEnv,
    WaitingEnv,
)
from oracle import assert_same, lockstep, policy_of, uniform
from processes import (
    ROOT,
    children,
    descriptors,
    is_alive,
    resident_mebibytes,
    run_script,
    start_script,
    until,
    wait_until,
)
from torch import Tensor
from torch.distributions import Categorical, Distribution

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import (
    EnvironmentFailedError,
    PolicyError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from asyncmaml.learning.policies import MLPPolicy

CARTPOLE = "CartPole-v1"


@pytest.fixture(scope="module")
def policy() -> MLPPolicy:
    """One for CartPole."""
    return policy_of(gymnasium.make(CARTPOLE).unwrapped)


# --- what a worker loads

SCRIPT_WITHOUT_GUARD = """
    import asyncio
    import json
    import sys

    import torch

    from asyncmaml import AsyncSampler, CategoricalMLPPolicy

    print("script is run")

    def make():
        import sys

        import gymnasium

        class TellingEnv(gymnasium.Wrapper):
            def sample_tasks(self, num_tasks):
                return [None] * num_tasks

            def reset_task(self, task):
                import json, os

                main = sys.modules["__main__"]
                with open(f"{task}/{os.getpid()}", "w") as file:
                    json.dump([sorted(sys.modules), sorted(vars(main))], file)

        return TellingEnv(gymnasium.make("CartPole-v1"))

    async def main():
        async with AsyncSampler(make, num_workers=2, envs_per_worker=2) as sampler:
            policy = CategoricalMLPPolicy(4, 2)
            episodes = await sampler.sample(policy, batch_size=8, task=sys.argv[1])
            assert episodes.is_complete

    asyncio.run(main())
"""


def test_worker_loads_neither_torch_nor_asyncio_nor_a_script_without_guard(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.mkdir()
    output = run_script(tmp_path / "script.py", SCRIPT_WITHOUT_GUARD, str(told))
    assert output == "script is run\n"  # once, not in each worker
    files = list(told.iterdir())
    assert len(files) == 2
    for file in files:
        modules, names_of_main = json.loads(file.read_text())
        roots = {module.partition(".")[0] for module in modules}
        assert {"numpy", "gymnasium", "asyncmaml"} <= roots
        assert not roots & {"torch", "asyncio", "aiomultiprocess", "script"}
        assert "AsyncSampler" not in names_of_main


async def test_worker_stays_small(policy: MLPPolicy) -> None:
    async with AsyncSampler(CARTPOLE, num_workers=2, envs_per_worker=64) as sampler:
        await sampler.sample(policy, batch_size=200)
        sizes = [resident_mebibytes(pid) for pid in children()]
    print(f"workers of {sizes} MiB")
    assert len(sizes) == 2
    assert max(sizes) <= 60


THREAD_NUMBERS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


async def test_worker_has_one_thread_for_numerics_and_the_parent_keeps_its_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> CountingEnv:
        numbers = [os.environ.get(name, "0") for name in THREAD_NUMBERS]
        return CountingEnv(offset=float("".join(numbers)))

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")  # a number of the user's stands
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = dict(os.environ)
    async with AsyncSampler(make, num_workers=1, batch_size=1) as sampler:
        episodes = await sampler.sample(uniform)
    assert episodes.observations[0, 0, 2] == 131
    assert dict(os.environ) == before


def test_importing_what_starts_workers_leaves_the_environment_variables_alone() -> None:
    script = """
        import os

        before = dict(os.environ)
        import asyncmaml.sampling.process
        import asyncmaml.worker.main

        assert dict(os.environ) == before, set(os.environ) - set(before)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=True,
        timeout=20,
    )


async def test_main_module_stays_as_it_is_while_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the user's may look at `__file__` in that moment."""
    changes = []

    class WatchedModule(types.ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            changes.append(name)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            changes.append(name)
            super().__delattr__(name)

    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(4)")  # nor does a worker import it
    main = WatchedModule("__main__")
    vars(main)["__file__"] = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    async with AsyncSampler(CountingEnv, num_workers=1):
        pass
    assert changes == []
    assert main.__file__ == str(script)


async def test_worker_starts_where_its_scheduling_class_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in some sandboxes."""
    refused = tmp_path / "refused"
    # Python imports a module of this name at its start.
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import os
            from pathlib import Path

            def refuse(*args):
                Path({str(refused)!r}).touch()
                raise PermissionError(1, "not here")

            os.sched_setscheduler = refuse
        """)
    )
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{before}")
    async with AsyncSampler(CountingEnv, num_workers=1, batch_size=2) as sampler:
        assert (await sampler.sample(uniform)).is_complete
    assert refused.exists()


# --- death


def slow_to_end(max_episode_steps: int = 200) -> dict[str, Any]:
    return {"env": "Pendulum-v1", "max_episode_steps": max_episode_steps, "seed": 0}


@pytest.fixture(scope="module")
def pendulum() -> tuple[MLPPolicy, BatchEpisodes]:
    """A policy, and the episodes that it should come to."""
    pendulum_policy = policy_of(gymnasium.make("Pendulum-v1").unwrapped)
    settings = slow_to_end()
    env = settings.pop("env")
    return pendulum_policy, lockstep(env, pendulum_policy, batch_size=60, **settings)[0]


async def test_killed_worker_is_replaced_and_changes_nothing(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(**slow_to_end(), num_workers=2, envs_per_worker=5) as sampler:
        before = children()
        sampling = asyncio.create_task(sampler.sample(used, batch_size=60))
        await until(lambda: sampler.statistics.transitions > 300)
        os.kill(min(before), signal.SIGKILL)
        noticed = await until(lambda: sampler.statistics.restarts == 1)
        assert noticed < 1
        print(f"noticed after {noticed} s")
        assert_same(await sampling, wanted)
        assert sampler.statistics.restarts == 1
        assert len(children() - before) == 1


async def test_killed_only_worker_is_replaced_too(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(**slow_to_end(), num_workers=1, envs_per_worker=20) as sampler:
        sampling = asyncio.create_task(sampler.sample(used, batch_size=60))
        await until(lambda: sampler.statistics.transitions > 300)
        os.kill(min(children()), signal.SIGKILL)
        await until(lambda: sampler.statistics.restarts == 1)
        stood = sampler.statistics.transitions
        recovered = await until(lambda: sampler.statistics.transitions > stood)
        print(f"sampled again after {recovered} s")
        assert_same(await sampling, wanted)


async def test_worker_that_dies_in_idleness_is_replaced(policy: MLPPolicy) -> None:
    async with AsyncSampler(CARTPOLE, num_workers=1, seed=0, batch_size=3) as sampler:
        os.kill(min(children()), signal.SIGKILL)
        await until(lambda: sampler.statistics.restarts == 1)
        found = await sampler.sample(policy)
    assert_same(found, lockstep(CARTPOLE, policy, seed=0, batch_size=3)[0])


async def test_worker_that_dies_while_others_are_still_starting_is_replaced(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def make() -> CountingEnv:
        for number in range(100):  # how many were made before, in all processes
            try:
                with open(tmp_path / f"{number}", "x") as file:
                    file.write(f"{os.getpid()} ")
            except FileExistsError:
                continue
            break
        if number == 1:
            gate.read_bytes()
        return CountingEnv()

    def is_ready() -> bool:
        """Whether the first worker has got its shared arrays, which come after its READY."""
        written = tmp_path / "0"
        if not written.exists() or not written.read_text():
            return False
        return "memfd:" in Path(f"/proc/{written.read_text().strip()}/maps").read_text()

    sampler = AsyncSampler(make, num_workers=2, envs_per_worker=1, groups_per_worker=1, seed=0)
    starting = asyncio.create_task(sampler.start())
    await until(is_ready)
    pid = int((tmp_path / "0").read_text())
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_alive(pid))
    await asyncio.to_thread(gate.write_bytes, b".")
    await starting
    try:
        await until(lambda: sampler.statistics.restarts == 1, 3)
        async with asyncio.timeout(5):
            found = await sampler.sample(uniform, batch_size=6)
    finally:
        await sampler.close()
    assert_same(found, lockstep(CountingEnv, uniform, seed=0, batch_size=6)[0])


async def test_all_workers_killed_at_once_are_replaced(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(**slow_to_end(), num_workers=3, envs_per_worker=4) as sampler:
        sampling = asyncio.create_task(sampler.sample(used, batch_size=60))
        await until(lambda: sampler.statistics.transitions > 300)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        assert_same(await sampling, wanted)
        assert sampler.statistics.restarts == 3


async def test_worker_killed_by_its_environment_once_changes_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    async with AsyncSampler(
        DeadlyEnv,
        env_kwargs={"marker": str(marker)},
        num_workers=2,
        envs_per_worker=2,
        seed=0,
        batch_size=9,
    ) as sampler:
        found = await sampler.sample(uniform)
        assert sampler.statistics.restarts >= 1
    assert marker.exists()
    wanted = lockstep(lambda: CountingEnv(length=8), uniform, seed=0, batch_size=9)[0]
    assert_same(found, wanted)


async def test_requests_with_tasks_survive_the_death_of_their_worker(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    calls: list[dict[str, Any]] = [
        {"batch_size": 5, "task": {"number": float(number)}} for number in (1, 2)
    ]
    async with AsyncSampler(
        DeadlyEnv, env_kwargs={"marker": str(marker)}, num_workers=1, envs_per_worker=3, seed=0
    ) as sampler:
        found = await asyncio.gather(*(sampler.sample(uniform, **call) for call in calls))
    wanted = lockstep(lambda: CountingEnv(length=8), uniform, calls, seed=0)
    for left, right in zip(found, wanted, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("max_restarts", [0, 1])
async def test_environment_that_always_kills_its_worker_is_given_up(max_restarts: int) -> None:
    async with AsyncSampler(
        DeadlyEnv, num_workers=1, envs_per_worker=2, seed=0, max_restarts=max_restarts
    ) as sampler:
        task = {"number": 3.0}
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            await sampler.sample(uniform, batch_size=1, task=task)
        assert f"{max_restarts + 1} times" in str(caught.value)
        assert caught.value.batch_id == 0
        assert caught.value.seed is not None
        assert f"seed {caught.value.seed}" in str(caught.value)
        assert caught.value.task == task
        await until(lambda: sampler.statistics.restarts == max_restarts + 1)


async def test_sampler_stays_usable_after_giving_up(tmp_path: Path) -> None:
    marker = tmp_path / "died"
    async with AsyncSampler(
        DeadlyEnv,
        env_kwargs={"marker": str(marker)},
        num_workers=1,
        envs_per_worker=2,
        max_restarts=0,
    ) as sampler:
        with pytest.raises(WorkerDiedError):
            await sampler.sample(uniform, batch_size=1)
        assert (await sampler.sample(uniform, batch_size=3)).is_complete


async def test_worker_that_cannot_be_replaced_fails_all_calls(tmp_path: Path) -> None:
    marker = tmp_path / "no more licences"

    def make() -> DeadlyEnv:
        if marker.exists():
            raise SystemExit(3)
        return DeadlyEnv()

    async with AsyncSampler(make, num_workers=1, max_restarts=1, seed=0) as sampler:
        marker.touch()
        with pytest.raises(WorkerStartError, match="exit code 3"):
            await sampler.sample(uniform, batch_size=1)
        with pytest.raises(WorkerStartError):
            await sampler.sample(uniform, batch_size=1)


# --- silence


async def test_stopped_worker_is_killed_and_changes_nothing(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(
        **slow_to_end(), num_workers=2, envs_per_worker=5, step_timeout=1
    ) as sampler:
        stopped = min(children())
        sampling = asyncio.create_task(sampler.sample(used, batch_size=60))
        await until(lambda: sampler.statistics.transitions > 300)
        os.kill(stopped, signal.SIGSTOP)
        assert_same(await sampling, wanted)
        assert sampler.statistics.restarts == 1
        assert not is_alive(stopped)


async def test_environment_that_never_answers_is_given_up(tmp_path: Path) -> None:
    gates = tmp_path / "arrived", tmp_path / "gate"
    for gate in gates:
        os.mkfifo(gate)
    # Held open for reading, so that nobody waits to say that he has arrived.
    arrived = os.open(gates[0], os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with AsyncSampler(
            WaitingEnv,
            env_kwargs={"arrived": gates[0], "gate": gates[1]},
            num_workers=1,
            envs_per_worker=1,
            step_timeout=0.3,
            max_restarts=1,
        ) as sampler:
            with pytest.raises(
                WorkerTimeoutError, match=r"within 0\.3 s .*raise step_timeout"
            ) as caught:
                await sampler.sample(uniform, batch_size=1)
        assert caught.value.batch_id == 0
        assert f"seed {caught.value.seed}" in str(caught.value)
    finally:
        os.close(arrived)


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_hung_worker_is_given_up_though_its_other_group_has_answered(
    num_workers: int, tmp_path: Path
) -> None:
    gates = tmp_path / "arrived", tmp_path / "gate"
    for gate in gates:
        os.mkfifo(gate)
    arrived = os.open(gates[0], os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with AsyncSampler(
            SecondWaitsEnv,
            env_kwargs={"arrived": gates[0], "gate": gates[1], "length": 1000},
            num_workers=num_workers,
            envs_per_worker=4,
            groups_per_worker=2,
            step_timeout=0.3,
            max_restarts=0,
        ) as sampler:
            with pytest.raises(WorkerTimeoutError):
                async with asyncio.timeout(3):
                    await sampler.sample(uniform, batch_size=2)
    finally:
        os.close(arrived)


async def test_policy_slower_than_the_step_timeout_costs_no_worker() -> None:
    """The time of a worker's answer does not include that of a forward for another."""

    def slow(observations: Tensor) -> Distribution:
        time.sleep(0.25)
        return uniform(observations)

    async with AsyncSampler(
        lambda: CountingEnv(length=2), num_workers=2, envs_per_worker=1, step_timeout=0.2
    ) as sampler:
        # One after the other, so that the workers are not in step with each other.
        first = asyncio.create_task(sampler.sample(slow, batch_size=1))
        await until(lambda: sampler.statistics.ticks > 0)
        await asyncio.gather(first, sampler.sample(slow, batch_size=1))
        assert sampler.statistics.restarts == 0


async def test_stopped_worker_does_not_keep_close_waiting() -> None:
    async with AsyncSampler(CountingEnv, num_workers=2) as sampler:
        stopped = min(children())
        os.kill(stopped, signal.SIGSTOP)
        async with asyncio.timeout(4):
            await sampler.close()
    assert not is_alive(stopped)


# --- the end of the driver

ENDLESS = """
    import asyncio
    import sys

    import torch
    from fakes import CountingEnv
    from processes import children

    from asyncmaml import AsyncSampler

    def policy(observations):
        return torch.distributions.Categorical(logits=torch.zeros(len(observations), 2))

    async def main():
        sampler = AsyncSampler(lambda: CountingEnv(length=10**9), num_workers=2)
        await sampler.start()
        sampling = asyncio.create_task(sampler.sample(policy))
        while sampler.statistics.transitions < 100:
            await asyncio.sleep(0.001)
        print(*children(), flush=True)
        if "exit" in sys.argv:
            return
        if "exit hard" in sys.argv:
            raise SystemExit(0)
        await sampling

    asyncio.run(main())
"""


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    return pids


def test_workers_of_a_killed_driver_end_by_themselves(tmp_path: Path) -> None:
    with start_script(tmp_path / "script.py", ENDLESS) as process:
        pids = workers_of(process)
        process.kill()
        process.communicate(timeout=10)
    wait_until(lambda: not any(map(is_alive, pids)), 3)


@pytest.mark.parametrize("how", ["exit", "exit hard"])
def test_driver_that_ends_without_close_ends_quietly(how: str, tmp_path: Path) -> None:
    with start_script(tmp_path / "script.py", ENDLESS, how) as process:
        pids = workers_of(process)
        _, complaints = process.communicate(timeout=10)
    assert (process.returncode, complaints) == (0, "")
    assert not any(map(is_alive, pids))


def test_ctrl_c_ends_the_driver_and_its_workers(tmp_path: Path) -> None:
    with start_script(tmp_path / "script.py", ENDLESS) as process:
        pids = workers_of(process)
        os.killpg(process.pid, signal.SIGINT)
        _, complaints = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT
    assert complaints.count("Traceback") <= 2  # asyncio.run's two, one caused by the other
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    assert "worker" not in complaints
    assert not any(map(is_alive, pids))


# --- wear


async def test_opening_and_closing_wears_nothing_out() -> None:
    def are_native_threads_gone() -> bool:
        return len(os.listdir("/proc/self/task")) <= threads

    counts = set()
    for cycle in range(30):
        async with AsyncSampler(CountingEnv, num_workers=1, envs_per_worker=2) as sampler:
            await sampler.sample(uniform, batch_size=2)
        if not cycle:  # what libraries open once is open now
            threads = len(os.listdir("/proc/self/task"))
        counts.add((len(descriptors()), threading.active_count()))
        wait_until(are_native_threads_gone, 1)  # the last one may still end
    assert len(counts) == 1


async def test_large_task_crosses_the_pipe() -> None:
    table = np.random.default_rng(0).bytes(300 << 10)
    tasks = [{"number": float(number), "table": table} for number in range(5)]
    async with AsyncSampler(
        CountingEnv, num_workers=2, envs_per_worker=1, batch_size=4, seed=0
    ) as sampler:
        results = await asyncio.gather(*(sampler.sample(uniform, task=task) for task in tasks))
    for number, episodes in enumerate(results):
        assert (episodes.observations[..., 2] == number).all()


async def test_observations_of_a_mebibyte_are_carried() -> None:
    async with AsyncSampler(
        lambda: ImageEnv(size=592, length=4), num_workers=2, envs_per_worker=2, batch_size=6
    ) as sampler:
        episodes = await sampler.sample(uniform)
    assert episodes.observations[0, 0].nbytes > 1 << 20
    firsts = episodes.observations.flatten(2)[..., 0]
    assert firsts.T.tolist() == [[0, 100, 200, 44]] * 6
    assert (episodes.observations.flatten(2) == firsts[..., None]).all()


@pytest.mark.parametrize(("num_workers", "num_rows", "num_deaths"), [(0, 3, 0), (2, 3, 2)])
async def test_results_are_the_same_among_cancellations_failures_and_deaths(
    num_workers: int, num_rows: int, num_deaths: int
) -> None:
    chance = random.Random(0)
    calls: list[dict[str, Any]] = [
        {"batch_size": chance.randint(1, 12), "seed": seed, "task": {"number": float(seed % 4)}}
        for seed in range(40)
    ]
    wanted = lockstep(lambda: RaisingEnv(length=None), uniform, calls, seed=0)

    async def later(rounds: int) -> None:
        for _ in range(chance.randrange(rounds)):
            await asyncio.sleep(0)

    async def good(call: dict[str, Any], episodes: BatchEpisodes) -> None:
        await later(60)
        assert_same(await sampler.sample(uniform, **call), episodes)

    async def cancelled() -> None:
        await later(60)
        sampling = asyncio.create_task(sampler.sample(uniform, batch_size=30, seed=1))
        await later(200)
        sampling.cancel()
        await asyncio.wait([sampling])

    async def failing(phase: str) -> None:
        await later(60)
        with pytest.raises(EnvironmentFailedError):
            await sampler.sample(uniform, batch_size=5, task={"phase": phase, "at": 0})

    def three(observations: Tensor) -> Distribution:
        return Categorical(logits=torch.zeros(len(observations), 3))

    async def misfit() -> None:
        await later(60)
        with pytest.raises(PolicyError):
            await sampler.sample(three, batch_size=5)

    async def deadly() -> None:
        await later(300)
        os.kill(chance.choice(sorted(children())), signal.SIGKILL)

    jobs = [good(call, episodes) for call, episodes in zip(calls, wanted, strict=True)]
    jobs += [cancelled() for _ in range(20)]
    jobs += [failing(phase) for phase in ("reset_task", "reset", "step") for _ in range(4)]
    jobs += [misfit() for _ in range(5)]
    jobs += [deadly() for _ in range(num_deaths)]
    chance.shuffle(jobs)
    async with AsyncSampler(
        lambda: RaisingEnv(length=None),
        num_workers=num_workers,
        envs_per_worker=num_rows,
        seed=0,
        max_restarts=20,
    ) as sampler:
        async with asyncio.timeout(15):
            await asyncio.gather(*jobs)
        await until(lambda: "0 rows busy" in repr(sampler) and "0 requests" in repr(sampler))
