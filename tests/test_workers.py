"""Worker processes: how little they load, and what their death costs."""

import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from fakes import (
    CountingEnv,
)
from oracle import policy_of, uniform
from processes import (
    PATIENCE,
    ROOT,
    children,
    resident_mebibytes,
)

from asyncmaml import AsyncSampler
from asyncmaml.learning.policies import MLPPolicy

CARTPOLE = "CartPole-v1"


@pytest.fixture(scope="module")
def policy() -> MLPPolicy:
    """One for CartPole."""
    return policy_of(gymnasium.make(CARTPOLE).unwrapped)


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
        timeout=PATIENCE,
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
