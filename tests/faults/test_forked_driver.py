"""What a worker finds of its driver's torch: nothing, or in a fork what it must not touch.

A CUDA context does not survive a fork: any use of it in the child is an error, or worse. No GPU is
needed to see that nobody tries.
"""

import gc
import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from faulty import DoingEnv
from oracle import uniform
from processes import children, mappings

from asyncmaml import AsyncSampler


class Reports:
    """What any process, this one or a fork of it, has reported."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)

    def tell(self, what: str) -> None:
        os.write(self.write_end, f"{os.getpid()} {what}\n".encode())

    def of_others(self) -> set[str]:
        """Return what forks have reported since the last call."""
        try:
            lines = os.read(self.read_end, 1 << 16).decode().splitlines()
        except BlockingIOError:
            return set()
        told = [line.split(maxsplit=1) for line in lines]
        return {what for pid, what in told if int(pid) != os.getpid()}


@pytest.fixture
def reports() -> Iterator[Reports]:
    made = Reports()
    yield made
    os.close(made.read_end)
    os.close(made.write_end)


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
async def test_worker_maps_no_library_of_torch(method: Any) -> None:
    async with AsyncSampler(DoingEnv, num_workers=1, batch_size=2, start_method=method) as sampler:
        await sampler.sample(uniform)
        (worker,) = children()
        mapped = mappings(worker)
    assert "numpy" in mapped
    assert "libtorch" not in mapped
    assert "libcuda" not in mapped


async def test_forked_worker_touches_no_cuda(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every function of `torch.cuda` reports its use, the one that the first tensor calls too."""

    def reporting(name: str, function: Any) -> Any:
        def report(*args: Any, **kwargs: Any) -> Any:
            reports.tell(name)
            return function(*args, **kwargs)

        return report

    for name, function in list(vars(torch.cuda).items()):
        if inspect.isfunction(function):
            monkeypatch.setattr(torch.cuda, name, reporting(name, function))
    async with AsyncSampler(
        DoingEnv, num_workers=1, envs_per_worker=2, batch_size=5, start_method="fork"
    ) as sampler:
        await sampler.sample(uniform)
        for deed in ("speak", "log", "collect_garbage"):
            await sampler.sample(uniform, task={"deed": deed})
        assert reports.of_others() == set()
        await sampler.sample(uniform, task={"deed": "touch_cuda"})
        assert "_lazy_init" in reports.of_others()  # so it would have been seen
    assert reports.of_others() == set()
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


async def test_forked_worker_does_not_end_what_its_driver_has_let_go_of(reports: Reports) -> None:
    """Memory of a GPU, or a temporary folder, in garbage that the driver has not yet collected."""

    class Resource:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            reports.tell("ended")

    gc.disable()
    try:
        Resource()
        async with AsyncSampler(
            DoingEnv, {"deed": "collect_garbage"}, num_workers=1, batch_size=2, start_method="fork"
        ) as sampler:
            await sampler.sample(uniform)
    finally:
        gc.enable()
    gc.collect()
    assert reports.of_others() == set()
