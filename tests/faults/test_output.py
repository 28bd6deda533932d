"""What workers say: on stdout and stderr, in warnings and log records, and as they die."""

import asyncio
import io
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fakes import CountingEnv
from faulty import FLOOD_BYTES, DoingEnv, DoingWhenMadeEnv, OrphaningEnv, PartingEnv
from oracle import assert_same, lockstep, uniform
from processes import PATIENCE, children, is_alive, resident_mebibytes, until

from asyncmaml import AsyncSampler
from asyncmaml.cli_progress import Sampled, sampling_bar
from asyncmaml.errors import (
    ConfigurationError,
    EnvironmentFailedError,
    WorkerDiedError,
    WorkerStartError,
    WorkerTimeoutError,
)
from asyncmaml.worker.surroundings import MAX_TEXT


async def sample_one(env: Any, deed: str = "", **settings: Any) -> None:
    """Have one episode sampled in which the deed is done."""
    settings = {"num_workers": 1, "envs_per_worker": 1, "batch_size": 1} | settings
    async with AsyncSampler(env, {"deed": deed} if deed else None, **settings) as sampler:
        await sampler.sample(uniform)


# --- streams


async def test_output_is_passed_on_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    await sample_one(DoingEnv, "speak")
    output, complaints = capsys.readouterr()
    assert output == "from Python\nfrom C\n"
    assert complaints == "complaint of Python\ncomplaint of a child\n"


async def test_output_can_be_kept_back(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    await sample_one(DoingEnv, "speak", worker_output="capture")
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


async def test_output_can_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await sample_one(DoingEnv, "speak", worker_output="log")
    told = {(record.levelname, record.getMessage()) for record in caplog.records}
    assert told == {
        ("INFO", "worker 0: from Python"),
        ("INFO", "worker 0: from C"),
        ("WARNING", "worker 0: complaint of Python"),
        ("WARNING", "worker 0: complaint of a child"),
    }


def test_unknown_mode_of_output_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="worker_output is 'show'; wanted one of pass"):
        AsyncSampler(CountingEnv, worker_output="show")  # type: ignore[arg-type]


async def test_words_at_the_close_of_a_worker_are_not_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "asyncmaml.worker")
    await sample_one(PartingEnv, worker_output="log")
    told = {record.getMessage() for record in caplog.records if "worker" in record.name}
    assert told == {"worker 0: goodbye", "worker 0: closed"}


async def test_lines_of_several_workers_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    await sample_one(DoingEnv, "speak", num_workers=3, envs_per_worker=2, batch_size=40)
    output, complaints = capsys.readouterr()
    assert sorted(output.splitlines()) == ["from C"] * 40 + ["from Python"] * 40
    assert set(complaints.splitlines()) == {"complaint of Python", "complaint of a child"}


@pytest.mark.parametrize("stream", [None, "closed"])
async def test_output_that_nobody_takes_does_not_matter(
    stream: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = (tmp_path / "closed").open("w")
    closed.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None if stream is None else closed)
    await sample_one(DoingEnv, "speak")


async def test_worker_that_floods_its_output_goes_on_and_fills_no_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = resident_mebibytes(0)
    await sample_one(DoingEnv, "flood", worker_output="capture", batch_size=10)
    grown = resident_mebibytes(0) - before
    assert grown < 8 < 20 * FLOOD_BYTES / 2**20  # 80 MiB went through
    assert capsys.readouterr() == ("", "")


async def test_worker_that_floods_its_output_does_not_keep_close_waiting(tmp_path: Path) -> None:
    async with AsyncSampler(
        DoingEnv, {"deed": "flood", "length": None}, num_workers=2, worker_output="capture"
    ) as sampler:
        sampling = asyncio.create_task(sampler.sample(uniform, batch_size=10_000))
        await until(lambda: sampler.statistics.transitions > 10)
        pids = children()
        async with asyncio.timeout(PATIENCE):
            await sampler.close()
        assert not any(map(is_alive, pids))
        with pytest.raises(RuntimeError, match="closed"):
            await sampling


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_output_does_not_mix_with_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is redrawn in the last line of a terminal; a worker's line must go above it."""
    terminal, threads = Terminal(), set(threading.enumerate())
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with sampling_bar(3, lambda: Sampled("sampling", 1, 2, 3.0)):
        await sample_one(DoingEnv, "speak", batch_size=3)
    for thread in set(threading.enumerate()) - threads:
        thread.join()  # rich tells its own to end, and does not wait for that
    lines = terminal.getvalue().replace("\r", "\n").split("\n")
    spoken = [line for line in lines if "complaint" in line or "from" in line]
    assert len(spoken) == 12, lines
    # What precedes a line is what erases the bar; no part of the bar itself is in it.
    assert not any("sampling" in line or "episodes" in line for line in spoken), spoken
    assert any("sampling" in line and "/3 episodes" in line for line in lines)  # it was there


# --- log records


async def test_warning_of_a_worker_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    await sample_one(DoingEnv, "warn")
    (record,) = caplog.records
    assert record.name == "asyncmaml.worker"
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("worker 0: UserWarning: the model is old (")
    assert (record.filename, vars(record)["worker"]) == ("faulty.py", 0)


async def test_log_record_of_a_worker_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    await sample_one(DoingEnv, "log")
    (record,) = caplog.records
    assert record.name == "asyncmaml.worker"
    assert record.levelname == "ERROR"
    text = record.getMessage()
    assert text.startswith("worker 0: no contact with the ground\nTraceback")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert vars(record)["worker_logger"] == "simulator.physics"


async def test_level_of_the_logger_decides_what_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncmaml.worker")
    await sample_one(DoingEnv, "log")
    assert caplog.records[0].getMessage() == "worker 0: nobody wants to know"
    caplog.clear()
    caplog.set_level(logging.CRITICAL, "asyncmaml.worker")
    await sample_one(DoingEnv, "log")
    assert not caplog.records


async def test_each_record_tells_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    await sample_one(DoingEnv, "warn", num_workers=3, batch_size=60)
    assert {vars(record)["worker"] for record in caplog.records} == {0, 1, 2}


async def test_record_that_is_too_long_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    await sample_one(DoingEnv, "log_too_much")
    text = caplog.records[0].getMessage()
    assert text.endswith(f"({200_000 - MAX_TEXT} more characters)")
    assert len(text) < MAX_TEXT + 100


async def test_flood_of_records_arrives_whole(caplog: pytest.LogCaptureFixture) -> None:
    await sample_one(DoingEnv, "flood_log")
    numbers = [int(record.getMessage().split()[2]) for record in caplog.records]
    assert numbers == list(range(2000))


async def test_record_that_cannot_be_formatted_is_told_as_python_tells_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await sample_one(DoingEnv, "log_what_cannot_be_formatted")
    assert "--- Logging error ---" in capsys.readouterr().err


# --- last words


@pytest.mark.parametrize(
    ("deed", "how", "words"),
    [
        ("segfault", "SIGSEGV", ["Fatal Python error: Segmentation fault", "in segfault", "step"]),
        ("abort", "SIGABRT", ["assertion of a C library failed", "Fatal Python error: Aborted"]),
        ("exit_hard", "exit code 7", []),
        ("kill", "SIGKILL", ["these are my last words"]),
    ],
)
@pytest.mark.parametrize("worker_output", ["pass", "capture"])
async def test_error_tells_how_a_worker_died_and_its_last_words(
    deed: str,
    how: str,
    words: list[str],
    worker_output: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(WorkerDiedError, match=how) as caught:
        await sample_one(DoingEnv, deed, max_restarts=0, worker_output=worker_output)
    error = caught.value
    assert (error.batch_id, error.step) == (0, 1)
    assert error.seed is not None
    assert f"step 1, seed {error.seed}" in str(error)
    notes = "".join(getattr(error, "__notes__", []))
    shown = capsys.readouterr().err
    for word in words:
        assert word in error.stderr_tail
        assert word in notes
        assert (word in shown) == (worker_output == "pass")
    assert bool(notes) == bool(words)


async def test_process_that_outlives_its_worker_holds_nothing_up(tmp_path: Path) -> None:
    told = tmp_path / "told"
    async with AsyncSampler(
        OrphaningEnv, {"told": told}, num_workers=1, worker_output="capture", seed=0
    ) as sampler:
        found = await sampler.sample(uniform, batch_size=3)
    orphan = int(told.read_text())
    assert is_alive(orphan)  # all was over before its end
    os.kill(orphan, signal.SIGKILL)
    assert_same(found, lockstep(lambda: CountingEnv(length=3), uniform, seed=0, batch_size=3)[0])


@pytest.mark.usefixtures("leaping_clock")
async def test_error_tells_the_last_words_of_a_worker_that_hangs() -> None:
    with pytest.raises(WorkerTimeoutError) as caught:
        await sample_one(
            DoingEnv, "hang", max_restarts=0, step_timeout=0.3, worker_output="capture"
        )
    assert caught.value.stderr_tail == "I will think about it"
    assert caught.value.step == 1


async def test_error_tells_the_last_words_of_a_worker_that_does_not_start() -> None:
    with pytest.raises(WorkerStartError, match="SIGSEGV") as caught:
        await sample_one(DoingWhenMadeEnv, "segfault", worker_output="capture")
    assert "in segfault" in caught.value.stderr_tail


async def test_tail_is_bounded() -> None:
    def make() -> DoingEnv:
        import os

        for number in range(10_000):
            os.write(2, b"line %d\n" % number)
        return DoingEnv("kill", 0)

    with pytest.raises(WorkerDiedError) as caught:
        await sample_one(make, max_restarts=0, worker_output="capture")
    lines = caught.value.stderr_tail.splitlines()
    assert lines[-2:] == ["line 9999", "these are my last words"]
    assert 500 < len(lines) < 1000
    assert all(line.startswith("line ") for line in lines[:-1])


async def test_memory_that_runs_out_is_an_exception_of_the_environment() -> None:
    with pytest.raises(EnvironmentFailedError, match="MemoryError"):
        await sample_one(DoingEnv, "use_up_memory")
