"""The end of the driver, by whatever cause: its workers end as well, quietly."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from processes import (
    is_alive,
    start_script,
    wait_until,
)

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
