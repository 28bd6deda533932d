"""The command line: what it prints, where, and with which exit code."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from fakes import that_raises, without_mujoco
from processes import PATIENCE, ROOT, is_alive, start_command, wait_until

from asyncmaml import BatchEpisodes, NormalMLPPolicy, __version__
from asyncmaml.cli import main
from asyncmaml.cli_report import plain, report, summarize_times
from asyncmaml.sampling.statistics import Statistics

NAVIGATION = "asyncmaml/Navigation2D-v0"
QUICK = ["--workers", "0", "--episodes", "7", "--max-episode-steps", "5", "--seed", "1"]


@pytest.fixture
def registered() -> Iterator[None]:
    entries = dict(gymnasium.registry)
    gymnasium.register("test/Raises-v0", that_raises)
    gymnasium.register("test/WithoutMujoco-v0", without_mujoco)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(entries)


def sampled(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Sample in this process; return what --json tells."""
    assert main(["sample", NAVIGATION, *QUICK, "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Sample what cannot be sampled; return the message."""
    assert main(["sample", *arguments]) == 1
    output, complaints = capsys.readouterr()
    assert output == ""
    return complaints


# ---- help and usage ----


def test_help_loads_neither_torch_nor_numpy_nor_gymnasium() -> None:
    script = (
        "import sys; from asyncmaml.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'gymnasium', 'rich'} & sys.modules.keys()\n"
    )
    for arguments in (["--help"], ["--version"], ["sample", "--help"]):
        subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )


def test_module_is_the_command() -> None:
    with start_command("--version", stdout=subprocess.PIPE) as process:
        assert process.communicate(timeout=PATIENCE)[0] == f"asyncmaml {__version__}\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "required: COMMAND"),
        (["simple"], "invalid choice: 'simple'"),
        (["sample"], "required: ENV_ID"),
        (["sample", "A-v0", "--episodes", "0"], "a whole number of at least 1, got '0'"),
        (["sample", "A-v0", "--workers", "two"], "a whole number of at least 0, got 'two'"),
        (["sample", "A-v0", "--hidden", "8,x"], "sizes of layers such as 100,100, got '8,x'"),
        (["sample", "A-v0", "-k", "low"], "wanted KEY=VALUE, got 'low'"),
        (["sample", "A-v0", "--task", "{goal"], "wanted JSON, got '{goal'"),
        (["sample", "A-v0", "--task", "1", "--tasks", "2"], "not allowed with argument --task"),
        (["sample", "A-v0", "--policy", "p", "--hidden", "8"], "not allowed with argument --pol"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


# ---- what it prints ----


def test_table_tells_counts_returns_and_where_the_time_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sample", NAVIGATION, *QUICK]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{NAVIGATION}, seed 1\nNormalMLPPolicy (100, 100), fresh\n\n")
    assert re.search(r"^episodes +7$", output, re.MULTILINE)
    assert re.search(r"^return +-\d\.\d\d ± \d\.\d\d +\(-\d\.\d\d \.\. -\d\.\d\d\)$", output, re.M)
    assert re.search(r"^length in steps +5\.00 ± 0\.00 +\(5 \.\. 5\)$", output, re.MULTILINE)
    assert re.search(r"^terminated +0$", output, re.MULTILINE)
    assert re.search(r"^truncated +7$", output, re.MULTILINE)
    assert re.search(r"^transitions +35$", output, re.MULTILINE)
    for name in ("environment", "policy", "recording", "waiting"):
        assert re.search(rf"^{name} +\d+\.\d\d +\d+\.\d %  of the one thread", output, re.M)


def test_output_that_is_no_terminal_has_no_bar_and_no_escape_codes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of the descriptors, so that what a worker might write is seen as well."""
    assert main(["sample", NAVIGATION, "--episodes", "5", "--workers", "1"]) == 0
    output, complaints = capfd.readouterr()
    assert complaints == ""
    assert "\x1b" not in output
    assert "of the sampler's own thread" in output


def test_table_of_large_numbers_is_aligned_in_80_columns() -> None:
    spread = {"mean": -123456.7, "sd": 2345.6, "min": -999999.5, "max": 1.0}
    result = {
        "environment": "A-v0",
        "seed": 2**31 - 1,
        "policy": {"class": "CategoricalMLPPolicy", "hidden_sizes": [], "file": "a.pt"},
        "episodes": 10_000,
        "transitions": 12_345_678,
        "return": spread,
        "length": {"mean": 12.25, "sd": None, "min": 3, "max": 1000},
        "terminated": 1,
        "truncated": 9_999,
        "seconds": 100.0,
        "steps_per_second": 123_456.78,
        "workers": 64,
        "restarts": 2,
        "time": {
            "environment_seconds": 3200.0,
            "policy_seconds": 40.0,
            "recording_seconds": 10.0,
            "waiting_seconds": 50.0,
        },
        "tasks": [
            {"task": {"goal": [0.123456, 2.0]}, "return": spread, "length": spread},
            {"task": "long " * 20, "return": spread, "length": spread},
        ],
        "files": ["a.npz"],
    }
    assert report(result) == (
        "A-v0, seed 2147483647\n"
        "CategoricalMLPPolicy (no hidden layer), from a.pt\n"
        "\n"
        "episodes               10,000\n"
        "return             -123,456.7 ± 2,345.6  (-999,999.5 .. 1.0)\n"
        "length in steps          12.2            (3 .. 1,000)\n"
        "terminated                  1\n"
        "truncated               9,999\n"
        "transitions        12,345,678\n"
        "steps per second      123,457            in 100.00 s with 64 workers\n"
        "restarts                    2            workers were lost and replaced\n"
        "\n"
        "time spent          seconds     share\n"
        "environment        3,200.00    50.0 %  sum over 64 workers, share of their time\n"
        "policy                40.00    40.0 %  of the sampler's own thread\n"
        "recording             10.00    10.0 %  of the sampler's own thread\n"
        "waiting               50.00    50.0 %  of the sampler's own thread\n"
        "\n"
        "task                                                return                length\n"
        '{"goal": [0.123, 2.0]}                -123,456.7 ± 2,345.6  -123,456.7 ± 2,345.6\n'
        '"long long long long long long lo...  -123,456.7 ± 2,345.6  -123,456.7 ± 2,345.6\n'
        "\n"
        "wrote a.npz"
    )
    assert max(map(len, report(result).splitlines())) <= 80


def test_waiting_is_what_is_left_of_the_time() -> None:
    statistics = Statistics(
        record_seconds=1, forward_seconds=2, scatter_seconds=1, worker_seconds=[3, 2]
    )
    in_workers = summarize_times(statistics, 10.0, num_workers=2)["time"]
    assert in_workers["waiting_seconds"] == 10 - 4
    in_one_thread = summarize_times(statistics, 10.0, num_workers=0)["time"]
    assert in_one_thread["waiting_seconds"] == 10 - 4 - 5


def test_task_of_whatever_kind_becomes_json() -> None:
    task = {"goal": torch.ones(2), 3: (True, None), "class": Path("a"), "speed": torch.ones(1)[0]}
    assert plain(task) == {
        "goal": [1.0, 1.0],
        "3": [True, None],
        "class": repr(Path("a")),
        "speed": 1.0,
    }


def test_no_bar_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["sample", NAVIGATION, *QUICK]) == 0
    assert capsys.readouterr().err == ""


def test_reader_that_goes_away_is_not_an_error_with_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    streams: dict[str, Any] = {"stdout": writing, "stderr": subprocess.PIPE}
    with start_command("sample", NAVIGATION, *QUICK, **streams) as process:
        os.close(writing)
        assert process.communicate(timeout=PATIENCE)[1] == ""
    assert process.returncode == 1


# ---- what it samples ----


def test_json_tells_what_the_file_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "episodes.npz"
    result = sampled(capsys, "--output", str(path))
    episodes = BatchEpisodes.load(path)
    assert episodes.is_complete
    assert (result["environment"], result["seed"]) == (NAVIGATION, 1)
    assert result["episodes"] == episodes.batch_size == 7
    assert result["transitions"] == episodes.num_transitions == 35
    assert result["return"]["mean"] == pytest.approx(episodes.episode_returns.mean().item())
    assert result["return"]["sd"] == pytest.approx(episodes.episode_returns.std().item())
    assert result["length"] == {"mean": 5.0, "sd": 0.0, "min": 5, "max": 5}
    assert (result["terminated"], result["truncated"], result["tasks"]) == (0, 7, [])
    assert result["files"] == [str(path)]


def test_saved_policy_gives_the_same_returns_with_the_same_seed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "policy.pt")
    fresh = sampled(capsys, "--hidden", "8", "--save-policy", path)
    saved = sampled(capsys, "--policy", path)
    assert saved["policy"] == fresh["policy"] | {"file": path}
    assert saved["return"] == fresh["return"]
    assert sampled(capsys, "--policy", path, "--seed", "2")["return"] != fresh["return"]


def test_same_seed_gives_the_same_fresh_policy_for_any_number_of_workers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sampled(capsys)["return"] == sampled(capsys, "--workers", "1")["return"]


def test_seed_that_was_not_given_is_told_and_leads_to_the_same_episodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["sample", NAVIGATION, *QUICK[:-2], "--json"]
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--seed", str(first["seed"])]) == 0
    assert json.loads(capsys.readouterr().out)["return"] == first["return"]


def test_fresh_policy_leaves_the_random_numbers_of_the_process_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = torch.get_rng_state()
    sampled(capsys)
    assert torch.equal(torch.get_rng_state(), before)


def test_keywords_reach_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    # Without a task the goal is (high, high): some 99 away, for each of five steps.
    result = sampled(capsys, "-k", "high=70", "-k", "low=-1.5")
    assert result["return"]["mean"] == pytest.approx(-5 * 70 * 2**0.5, rel=0.01)


def test_task_reaches_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    result = sampled(capsys, "--task", '{"goal": [30, 40]}')
    assert result["return"]["mean"] == pytest.approx(-5 * 50, rel=0.01)
    assert result["tasks"][0]["task"] == {"goal": [30, 40]}


def test_tasks_are_drawn_and_each_one_has_its_episodes_and_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = sampled(capsys, "--tasks", "3", "--output", str(tmp_path / "a.npz"))
    assert result["episodes"] == 21
    assert [entry["episodes"] for entry in result["tasks"]] == [7, 7, 7]
    goals = [tuple(entry["task"]["goal"]) for entry in result["tasks"]]
    assert len(set(goals)) == 3
    for index, entry in enumerate(result["tasks"]):
        episodes = BatchEpisodes.load(tmp_path / f"a-{index}.npz")
        mean = episodes.episode_returns.mean().item()
        assert entry["return"]["mean"] == pytest.approx(mean)
    first = sampled(capsys, "--task", "random")["tasks"]
    assert [tuple(entry["task"]["goal"]) for entry in first] == goals[:1]


def test_tasks_need_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    result = sampled(capsys, "--tasks", "3")
    assert len(result["tasks"]) == 3
    assert result["files"] == []


# ---- what goes wrong ----


def test_unknown_environment_exits_with_1_and_lists_near_matches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = failed(capsys, "CartPol-v1")
    assert message.startswith("asyncmaml: error: no environment goes by the id 'CartPol-v1'")
    assert "Near matches: CartPole-v1" in message
    assert message.count("\n") == 1


def test_tasks_of_an_environment_without_any_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "no tasks can be drawn" in failed(capsys, "CartPole-v1", *QUICK, "--tasks", "2")


def test_policy_for_another_environment_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "policy.pt"
    NormalMLPPolicy(2, 2, (8,)).save(path)
    assert failed(capsys, "CartPole-v1", *QUICK, "--policy", str(path)) == (
        f"asyncmaml: error: {path} holds a NormalMLPPolicy of 2 inputs and 2 outputs, where "
        "CartPole-v1 needs a CategoricalMLPPolicy of 4 inputs and 2 outputs; name a policy that "
        "was saved for this environment\n"
    )


def test_policy_file_that_does_not_exist_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "nothing.pt"
    message = failed(capsys, NAVIGATION, *QUICK, "--policy", str(path))
    assert message == f"asyncmaml: error: {path}: No such file or directory\n"


@pytest.mark.parametrize("option", ["--output", "--save-policy"])
def test_place_that_cannot_be_written_is_told_before_anything_is_sampled(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    assert "lies in no directory" in failed(capsys, "Nothing-v0", option, str(tmp_path / "a" / "b"))
    assert "it is a directory" in failed(capsys, "Nothing-v0", option, str(tmp_path))


def test_extra_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], registered: None
) -> None:
    for workers in ("0", "1"):
        message = failed(capsys, "test/WithoutMujoco-v0", "--workers", workers)
        assert "test/WithoutMujoco-v0 needs MuJoCo" in message
        assert "run pip install 'asyncmaml[mujoco]'" in message.splitlines()[-1]


def test_error_of_a_worker_comes_after_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = failed(capsys, NAVIGATION, "--workers", "1", "-k", "colour=red")
    assert message.startswith("the worker's traceback:\nTraceback (most recent call last):\n")
    last = message.splitlines()[-1]
    assert last.startswith("asyncmaml: error: ")
    assert "unexpected keyword argument 'colour'" in last


def test_samples_that_fail_together_give_one_message(
    capsys: pytest.CaptureFixture[str], registered: None
) -> None:
    message = failed(capsys, "test/Raises-v0", *QUICK, "--tasks", "3")
    assert message.count("asyncmaml: error:") == 1
    assert "out of order" in message.splitlines()[-1]


def test_ctrl_c_ends_the_bar_and_every_process_and_exits_with_130() -> None:
    terminal, theirs = pty.openpty()
    arguments = ["sample", "Pendulum-v1", "--episodes", "50000", "--workers", "2"]
    with start_command(*arguments, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while not re.search(rb"sampling[^/]*/50,000 episodes [1-9][\d,]* steps", plain_text(seen)):
            seen += os.read(terminal, 1 << 16)
        group = processes_of_group(process.pid)
        assert len(group) >= 3  # itself and two workers, and multiprocessing's resource tracker
        os.killpg(process.pid, signal.SIGINT)
        rest = b""
        try:
            while read := os.read(terminal, 1 << 16):
                rest += read
        except OSError:  # the other end is closed: nobody is left to write there
            pass
        os.close(terminal)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert output == ""
    assert plain_text(rest).endswith(b"asyncmaml: interrupted\r\n")
    assert b"Traceback" not in rest
    wait_until(lambda: not any(map(is_alive, group)))


def plain_text(written: bytes) -> bytes:
    """Without the codes that move the cursor and choose colours."""
    return re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", written)


def processes_of_group(number: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == number:
                found.append(int(entry.name))
        except ProcessLookupError:  # it has ended meanwhile
            continue
    return found
