"""Workers that die: noticed at once, replaced, and bitwise without a trace."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes import (
    CountingEnv,
    DeadlyEnv,
)
from faulty import DoingEnv, HelpedEnv
from oracle import PENDULUM, assert_same, lockstep, uniform
from processes import PATIENCE, children, is_alive, until

from asyncmaml import AsyncSampler, BatchEpisodes
from asyncmaml.errors import WorkerDiedError, WorkerStartError, WorkerTimeoutError
from asyncmaml.learning.policies import MLPPolicy


async def test_killed_worker_is_replaced_and_changes_nothing(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(**PENDULUM, num_workers=2, envs_per_worker=5) as sampler:
        before = children()
        sampling = asyncio.create_task(sampler.sample(used, batch_size=30))
        await until(lambda: sampler.statistics.transitions > 300)
        os.kill(min(before), signal.SIGKILL)
        noticed = await until(lambda: sampler.statistics.restarts == 1)
        assert noticed < 1
        print(f"noticed after {noticed} s")
        assert_same(await sampling, wanted)
        assert sampler.statistics.restarts == 1
        await until(lambda: len(children() - before) == 1)


async def test_killed_only_worker_is_replaced_too(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(**PENDULUM, num_workers=1, envs_per_worker=20) as sampler:
        sampling = asyncio.create_task(sampler.sample(used, batch_size=30))
        await until(lambda: sampler.statistics.transitions > 300)
        os.kill(min(children()), signal.SIGKILL)
        await until(lambda: sampler.statistics.restarts == 1)
        stood = sampler.statistics.transitions
        recovered = await until(lambda: sampler.statistics.transitions > stood)
        print(f"sampled again after {recovered} s")
        assert_same(await sampling, wanted)


async def test_worker_that_dies_in_idleness_is_replaced() -> None:
    async with AsyncSampler(CountingEnv, num_workers=1, seed=0, batch_size=3) as sampler:
        os.kill(min(children()), signal.SIGKILL)
        await until(lambda: sampler.statistics.restarts == 1)
        found = await sampler.sample(uniform)
    assert_same(found, lockstep(CountingEnv, uniform, seed=0, batch_size=3)[0])


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
        await until(lambda: sampler.statistics.restarts == 1)
        async with asyncio.timeout(PATIENCE):
            found = await sampler.sample(uniform, batch_size=6)
    finally:
        await sampler.close()
    assert_same(found, lockstep(CountingEnv, uniform, seed=0, batch_size=6)[0])


async def test_loss_of_a_worker_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncSampler(CountingEnv, num_workers=1) as sampler:
        os.kill(min(children()), signal.SIGKILL)
        await until(lambda: sampler.statistics.restarts == 1)
    (record,) = caplog.records
    assert record.getMessage().startswith("worker 0 was ended by SIGKILL (out of memory, ")
    assert "another takes its place" in record.getMessage()
    assert (record.name, record.levelname) == ("asyncmaml.worker", "WARNING")
    assert vars(record)["worker"] == 0


def helpers(folder: Path) -> dict[int, int]:
    """Return the helper of each worker that has had one."""
    return {int(told.name): int(told.read_text()) for told in folder.iterdir()}


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize(
    ("how", "method"),
    [("os.fork", "spawn"), ("os.fork", "forkserver"), ("os.fork", "fork"), ("os.system", "spawn")],
)
async def test_death_is_noticed_though_another_process_holds_what_the_worker_had_open(
    how: str, method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulator's own process, for one: the end of a pipe does not come before its end."""
    # Longer than we wait here: who takes the worker for one that is ending would be seen.
    monkeypatch.setattr("asyncmaml.sampling.failures.EXIT_SECONDS", 2 * PATIENCE)
    monkeypatch.setattr("asyncmaml.sampling.links.CLOSE_SECONDS", 2 * PATIENCE)
    sampler = AsyncSampler(
        HelpedEnv,
        {"how": how, "folder": tmp_path, "driver": os.getpid()},
        num_workers=1,
        envs_per_worker=1,
        batch_size=3,
        start_method=method,
        seed=0,
    )
    await sampler.start()
    try:
        first = await sampler.sample(uniform)
        os.kill(min(helpers(tmp_path)), signal.SIGKILL)
        noticed = await until(lambda: sampler.statistics.restarts == 1)
        second = await sampler.sample(uniform)
        async with asyncio.timeout(PATIENCE):
            await sampler.close()
    finally:
        await sampler.close()
        for helper in helpers(tmp_path).values():
            os.kill(helper, signal.SIGKILL)
    print(f"noticed after {noticed} s")
    calls: list[dict[str, Any]] = [{"batch_size": 3}] * 2
    wanted = lockstep(CountingEnv, uniform, calls, seed=0)
    assert_same(first, wanted[0])
    assert_same(second, wanted[1])


async def test_all_workers_killed_at_once_are_replaced(
    pendulum: tuple[MLPPolicy, BatchEpisodes],
) -> None:
    used, wanted = pendulum
    async with AsyncSampler(**PENDULUM, num_workers=3, envs_per_worker=4) as sampler:
        sampling = asyncio.create_task(sampler.sample(used, batch_size=30))
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


@pytest.mark.parametrize(
    ("deed", "at"),
    [("exit_hard", 0), ("exit_hard", 2), ("exit_hard", "reset"), ("segfault", 2), ("hang", 0)],
)
@pytest.mark.usefixtures("leaping_clock")
async def test_episode_that_always_kills_its_worker_takes_no_other_with_it(
    deed: str, at: Any
) -> None:
    """They share the worker, and lose it each time; the one that it was at is told."""
    fatal = {"number": 0.0, "deed": deed, "at": at}
    calls: list[dict[str, Any]] = [
        {"batch_size": 40, "seed": seed, "task": {"number": float(seed)}} for seed in range(3)
    ]
    async with AsyncSampler(
        DoingEnv,
        {"length": 12},
        num_workers=1,
        envs_per_worker=8,
        seed=0,
        max_restarts=2,
        step_timeout=0.3,
        worker_output="capture",
    ) as sampler:
        good = [asyncio.create_task(sampler.sample(uniform, **call)) for call in calls]
        with pytest.raises((WorkerDiedError, WorkerTimeoutError)) as caught:
            await sampler.sample(uniform, batch_size=2, task=fatal)
        found = await asyncio.gather(*good)
        assert sampler.statistics.restarts >= 3
    assert caught.value.task == fatal
    assert caught.value.step == (None if at == "reset" else at)
    for left, right in zip(
        found, lockstep(lambda: CountingEnv(length=12), uniform, calls, seed=0), strict=True
    ):
        assert_same(left, right)


async def test_replacement_stalls_no_other_worker(tmp_path: Path) -> None:
    """The new worker waits at a gate in its constructor; the other one samples meanwhile."""
    gate = tmp_path / "gate"

    def make() -> CountingEnv:
        if gate.exists():
            gate.read_bytes()
        return CountingEnv()

    async with AsyncSampler(make, num_workers=2, envs_per_worker=1, batch_size=4) as sampler:
        victim = min(children())
        os.mkfifo(gate)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: sampler.statistics.restarts == 1)
        for _ in range(5):
            assert (await sampler.sample(uniform)).is_complete
        assert len(children()) == 2
        await asyncio.to_thread(gate.write_bytes, b".")
        gate.unlink()
