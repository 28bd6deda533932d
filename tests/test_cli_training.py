"""`asyncmaml train`, `evaluate`, `plot` and `render`: flags, lines, files and signals."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE, ROOT, is_alive, start_command, wait_until

from asyncmaml import TrainConfig, evaluation
from asyncmaml.checkpoint import Checkpoint
from asyncmaml.cli import main
from asyncmaml.cli_training_report import iteration_heading, iteration_lines
from asyncmaml.config import options
from asyncmaml.training.run_folder import read_progress

TINY = [
    *("--iterations", "2", "--tasks-per-iteration", "2", "--episodes-per-task", "3"),
    *("--max-episode-steps", "4", "--hidden-sizes", "8", "--num-workers", "0"),
    *("--evaluation-tasks", "2", "--evaluation-episodes", "2", "--evaluation-interval", "2"),
]


def trained(folder: Path, *arguments: str) -> None:
    """Train in this process, without the long evaluation at the end."""
    command = ["train", "navigation-2d", "--output", str(folder), "--no-evaluation", *TINY]
    assert main([*command, *arguments]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run what fails with a message; return it."""
    assert main(arguments) == 1
    return capsys.readouterr().err


def saved(folder: Path) -> TrainConfig:
    return TrainConfig.load(folder / "config.json")


# ---- flags ----


def test_help_is_quick_and_names_every_field_and_every_preset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for option in options():
        flag = "--env-kwarg" if option.name == "env_kwargs" else "--" + option.name
        assert flag.replace("_", "-") in text
    for name in ("navigation-2d", "bandit", "tabular-mdp", "halfcheetah-vel", "ant-goal"):
        assert f"\n  {name}" in text


@pytest.mark.parametrize("command", ["train", "evaluate", "plot", "render"])
def test_help_loads_neither_torch_nor_numpy(command: str) -> None:
    script = (
        "import sys; from asyncmaml.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'gymnasium', 'rich', 'matplotlib', 'yaml'}\n"
        "assert not heavy & sys.modules.keys()\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, command, "--help"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )


# A value for each field other than that of the preset; a learner's own comes with the learner.
FLAGS: dict[str, tuple[list[str], Any]] = {
    "env_id": (["--env-id", "asyncmaml/Bandit-v0"], "asyncmaml/Bandit-v0"),
    "env_kwargs": (
        ["-k", "high=0.7", "--env-kwarg", "name=text"],
        {"low": -0.5, "high": 0.7, "action_scale": 0.1, "name": "text"},
    ),
    "max_episode_steps": (["--max-episode-steps", "none"], None),
    "gamma": (["--gamma", "0.9"], 0.9),
    "hidden_sizes": (["--hidden-sizes", "64,32"], (64, 32)),
    "nonlinearity": (["--nonlinearity", "tanh"], "tanh"),
    "init_std": (["--init-std", "0.5"], 0.5),
    "learner": (["--learner", "reptile"], "reptile"),
    "step_sizes": (["--step-sizes", "0.5,0.25"], (0.5, 0.25)),
    "objective": (["--objective", "dice"], "dice"),
    "first_order": (["--first-order"], True),
    "gae_lambda": (["--gae-lambda", "0.97"], 0.97),
    "bootstrap_truncated": (["--bootstrap-truncated"], True),
    "exploration": (["--exploration", "0.1"], 0.1),
    "max_kl": (["--max-kl", "2e-2"], 0.02),
    "max_pre_kl": (["--max-pre-kl", "0.05"], 0.05),
    "curvature": (["--curvature", "cheap"], "cheap"),
    "cg_iterations": (["--cg-iterations", "5"], 5),
    "cg_damping": (["--cg-damping", "1e-3"], 1e-3),
    "line_search_steps": (["--line-search-steps", "9"], 9),
    "line_search_ratio": (["--line-search-ratio", "0.5"], 0.5),
    "learning_rate": (["--learner", "promp", "--learning-rate", "0.01"], 0.01),
    "epochs": (["--learner", "promp", "--epochs", "3"], 3),
    "clip": (["--learner", "promp", "--clip", "0.2"], 0.2),
    "inner_kl": (["--learner", "promp", "--inner-kl", "0"], 0.0),
    "outer_step_size": (["--learner", "reptile", "--outer-step-size", "0.5"], 0.5),
    "iterations": (["--iterations", "1_000"], 1000),
    "tasks_per_iteration": (["--tasks-per-iteration", "40"], 40),
    "episodes_per_task": (["--episodes-per-task", "10"], 10),
    "seed": (["--seed", "7"], 7),
    "num_workers": (["--num-workers", "3"], 3),
    "envs_per_worker": (["--envs-per-worker", "64"], 64),
    "step_timeout": (["--step-timeout", "5"], 5.0),
    "device": (["--device", "cuda:1"], "cuda:1"),
    "on_task_error": (["--on-task-error", "skip"], "skip"),
    "evaluation_interval": (["--evaluation-interval", "0"], 0),
    "evaluation_tasks": (["--evaluation-tasks", "40"], 40),
    "evaluation_episodes": (["--evaluation-episodes", "40"], 40),
    "checkpoint_interval": (["--checkpoint-interval", "1"], 1),
}


@pytest.mark.parametrize("name", [option.name for option in options()])
def test_every_field_has_a_flag_that_goes_before_the_preset(name: str, tmp_path: Path) -> None:
    import argparse

    from asyncmaml import cli_train
    from asyncmaml.cli_config import config_of

    parser = argparse.ArgumentParser()
    cli_train.add_parser(parser.add_subparsers())
    flags, wanted = FLAGS[name]
    command = ["train", "navigation-2d", "--output", str(tmp_path)]
    preset = TrainConfig.preset("navigation-2d")
    config = config_of(parser.parse_args([*command, *flags]))
    assert getattr(config, name) == wanted != getattr(preset, name)
    # Nothing else has changed but the learner that comes along.
    assert config == preset.replace(**{"learner": config.learner, name: wanted})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["navigation"], "invalid choice: 'navigation'"),
        (["bandit", "--gamma", "2"], "wanted a number between 0 and 1, got '2'"),
        (["bandit", "--gamma", "x"], "wanted a number between 0 and 1, got 'x'"),
        (["bandit", "--step-sizes", ""], "wanted one number above 0 for each update"),
        (["bandit", "--learner", "maml"], "wanted one of maml-trpo, promp, reptile, got 'maml'"),
        (["bandit", "--iterations", "0"], "wanted a whole number of at least 1, got '0'"),
    ],
)
def test_wrong_flag_exits_with_2_and_says_what_was_wanted(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--output", "runs/x", *arguments])
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


def test_what_to_train_must_be_said_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    assert "what to train is not said" in refused(capsys, "train", "--output", folder)
    both = refused(capsys, "train", "bandit", "--config", "a.json", "--output", folder)
    assert "leave one of them out" in both
    nothing = refused(capsys, "train", "--resume", "--output", folder)
    assert "there is no run to resume" in nothing
    others = refused(capsys, "train", "bandit", "--clip", "0.1", "--output", folder)
    assert "clip is 0.1, which the learner maml-trpo does not know" in others
    assert not (tmp_path / "run").exists()


# ---- training ----


THEIR_ENVIRONMENTS = {
    "2DNavigation-v0": {"low": -0.5, "high": 0.5},
    "Bandit-K5-v0": {},
    "TabularMDP-v0": {},
    "HalfCheetahDir-v2": {"normalization_scale": 10.0, "max_episode_steps": 100},
    "HalfCheetahVel-v2": {"low": 0.0, "high": 2.0, "normalization_scale": 10.0},
    "AntDir-v2": {"normalization_scale": 10.0, "max_episode_steps": 100},
    "AntVel-v2": {"low": 0.0, "high": 3.0, "normalization_scale": 10.0},
    "AntPos-v1": {"low": -3.0, "high": 3.0, "normalization_scale": 10.0},
}


@pytest.mark.parametrize("name", THEIR_ENVIRONMENTS)
def test_each_family_of_pytorch_maml_rl_trains_from_its_yaml(name: str, tmp_path: Path) -> None:
    keywords = THEIR_ENVIRONMENTS[name]
    lines = [f'env-name: "{name}"', "gamma: 0.99", "hidden-sizes: [8]", "fast-lr: 0.1"]
    if keywords:
        lines += ["env-kwargs:", *(f"  {key}: {value}" for key, value in keywords.items())]
    (tmp_path / "theirs.yaml").write_text("\n".join([*lines, "first-order: false", ""]))
    command = ["train", "--config", str(tmp_path / "theirs.yaml"), "--output", str(tmp_path)]
    assert main([*command, "--no-evaluation", *TINY, "--iterations", "1"]) == 0
    assert len(read_progress(tmp_path / "progress.csv")) == 1


def test_saved_config_trains_the_same_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trained(tmp_path / "first", "--seed", "3")
    command = ["train", "--config", str(tmp_path / "first" / "config.json"), "--no-evaluation"]
    assert main([*command, "--output", str(tmp_path / "second"), "--quiet"]) == 0
    assert saved(tmp_path / "first") == saved(tmp_path / "second")
    rows = [read_progress(tmp_path / name / "progress.csv") for name in ("first", "second")]
    assert [row["return_1"] for row in rows[0]] == [row["return_1"] for row in rows[1]]


def test_yaml_of_pytorch_maml_rl_trains(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "env-name: 2DNavigation-v0\nenv-kwargs: {low: -0.5, high: 0.5}\nhidden-sizes: [8]\n"
        "nonlinearity: tanh\nfast-batch-size: 3\nfast-lr: 0.1\nnum-batches: 1\nmeta-batch-size: 2\n"
    )
    folder = tmp_path / "run"
    command = ["train", "--config", str(path), "--output", str(folder), "--no-evaluation"]
    assert main([*command, "--max-episode-steps", "3"]) == 0
    config = saved(folder)
    assert (config.env_id, config.tasks_per_iteration) == ("asyncmaml/Navigation2D-v0", 2)
    assert len(read_progress(folder / "progress.csv")) == 1


def test_resume_goes_on_with_what_the_folder_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trained(tmp_path / "straight", "--iterations", "3")
    trained(tmp_path / "resumed")
    assert "resume it" in refused(capsys, "train", "bandit", "--output", str(tmp_path / "resumed"))
    command = ["train", "--output", str(tmp_path / "resumed"), "--resume", "--no-evaluation"]
    assert main([*command, "--iterations", "3"]) == 0
    kept = [Checkpoint.load(tmp_path / name / "checkpoint.pt") for name in ("straight", "resumed")]
    assert repr(kept[0].learner) == repr(kept[1].learner)


def test_every_iteration_is_a_line_with_where_its_time_went(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trained(tmp_path / "run")
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        *("iter", "before", "after", "KL", "pre-KL"),
        *("seconds", "sample", "adapt", "outer", "idle"),
    ]
    rows = [line.split() for line in lines if re.match(r" +\d+ ", line)]
    assert [row[0] for row in rows] == ["1", "2"]
    for row in rows:
        total, *parts = map(float, row[5:])
        assert sum(parts) == pytest.approx(total, abs=0.03)  # each rounded to a hundredth
    assert re.search(r"held-out tasks: -\d\.\d\d before, -\d\.\d\d after", lines[-1])
    trained(tmp_path / "quiet", "--quiet")
    assert capsys.readouterr().out == ""


def test_line_of_an_iteration_tells_what_is_unusual_in_80_columns() -> None:
    row = {
        "iteration": 1234,
        "return_0": -1234.5,
        "return_2": 9876.5,
        "kl": float("nan"),
        "pre_kl": 0.01234,
        "seconds": 1234.5,
        "sampling_seconds": 100.25,
        "adaptation_seconds": 0.0,
        "outer_seconds": 1000.0,
        "idle_seconds": 34.25,
        "accepted": 0.0,
        "reason": "the gradient is 0",
        "skipped_tasks": 3.0,
        "evaluation_return_0": None,
    }
    assert [iteration_heading(), *iteration_lines(row, 2)] == [
        " iter   before    after      KL  pre-KL  seconds  sample  adapt  outer  idle",
        "1,234 -1,234.5  9,876.5       -  0.0123 1,234.50  100.25   0.001,000.00 34.25",
        "      the policy stays as it was: the gradient is 0",
        "      3 tasks were skipped",
    ]
    row |= {"accepted": 1.0, "reason": "1 of 20 tasks left out"}
    assert "      1 of 20 tasks left out" in iteration_lines(row, 2)


def test_training_ends_with_a_table_and_pictures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert main(["train", "navigation-2d", "--output", str(folder), "--quiet", *TINY]) == 0
    output = capsys.readouterr().out
    assert "40 held-out tasks, 40 episodes each, seed 1\nstep sizes: 0.5, 0.25, 0.25\n" in output
    for steps in range(4):
        assert re.search(
            rf"^{steps} +-\d\.\d\d +± +\d\.\d\d +-\d\.\d\d \.\. -\d\.\d\d$", output, re.M
        )
    for name in ("learning_curve.png", "evaluation.png", "trajectories.png", "evaluation.json"):
        assert (folder / name).is_file()
    assert max(map(len, output.partition("wrote")[0].splitlines())) <= 80


def test_training_without_matplotlib_ends_with_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    quick = partial(evaluation.evaluate, num_tasks=2, num_episodes=2, num_updates=1)
    monkeypatch.setattr(evaluation, "evaluate", quick)
    folder = tmp_path / "run"
    assert main(["train", "navigation-2d", "--output", str(folder), "--quiet", *TINY]) == 0
    output = capsys.readouterr().out
    assert "2 held-out tasks, 2 episodes each, seed 1\n" in output
    assert "no pictures: drawing needs matplotlib" in output


# ---- signals ----


def test_signal_ends_a_training_with_a_checkpoint_that_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    """Ctrl-C and SIGTERM, at once, since both processes take a second to load torch."""
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143}
    long = ["--iterations", "100000", "--num-workers", "1", "--envs-per-worker", "8"]
    done = {}
    with ExitStack() as stack:
        processes = {}
        for number in codes:
            command = ["train", "navigation-2d", "--output", str(tmp_path / number.name)]
            processes[number] = stack.enter_context(
                start_command(
                    *command, *TINY, *long, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
        for number, process in processes.items():
            assert process.stdout is not None
            while not re.match(r" +3 ", process.stdout.readline()):
                assert process.poll() is None
            process.send_signal(number)
        for number, process in processes.items():
            _, complaints = process.communicate(timeout=PATIENCE)
            folder = tmp_path / number.name
            assert process.returncode == codes[number]
            assert complaints.endswith("asyncmaml: interrupted\n")
            assert f"`asyncmaml train --output {folder} --resume` goes on with it" in complaints
            assert not is_alive(process.pid)
            done[folder] = Checkpoint.load(folder / "checkpoint.pt").iterations
    assert min(done.values()) >= 3
    last = str(max(done.values()) + 2)
    trained(tmp_path / "straight", "--quiet", "--iterations", last)
    wanted = Checkpoint.load(tmp_path / "straight" / "checkpoint.pt").learner
    for folder in done:
        command = ["train", "--output", str(folder), "--resume", "--iterations", last]
        assert main([*command, "--no-evaluation", "--quiet", "--num-workers", "0"]) == 0
        assert repr(Checkpoint.load(folder / "checkpoint.pt").learner) == repr(wanted)


def test_terminal_shows_a_bar_with_returns_kl_speed_and_the_time_left(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    long = ["--iterations", "100000", "--quiet"]
    command = ["train", "navigation-2d", "--output", str(tmp_path / "run"), *TINY, *long]
    with start_command(*command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        returns = rb"-\d\.\d\d \xe2\x86\x92 -\d\.\d\d"
        wanted = rb"training .* \d+/100,000 " + returns + rb" +KL 0\.\d{4} +[\d,]+ steps/s"
        while not re.search(wanted, re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", seen)):
            seen += os.read(terminal, 1 << 16)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None)
        os.close(terminal)
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert process.returncode == 130


# ---- the other commands ----


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "nav"
    trained(folder, "--quiet")
    return folder


def test_evaluation_is_a_table_and_its_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--tasks", "3", "--episodes", "2", "--updates", "1", "--seed", "5"]
    assert main(["evaluate", str(run), *quick, "--step-sizes", "0.2"]) == 0
    output = capsys.readouterr().out
    assert "3 held-out tasks, 2 episodes each, seed 5\nstep sizes: 0.2\n" in output
    assert f"wrote {run / 'evaluation.json'}, {run / 'evaluation.png'}" in output
    assert [
        one["steps"] for one in json.loads((run / "evaluation.json").read_text())["returns"]
    ] == [0, 1]
    assert main(["evaluate", str(run), *quick, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_sizes"] == [0.5]


def test_plot_draws_one_run_into_its_folder_and_several_where_it_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plot", str(run)]) == 0
    assert "learning_curve.png" in capsys.readouterr().out
    trained(tmp_path / "other", "--seed", "1", "--quiet")
    both = [str(run), str(tmp_path / "other")]
    assert "name it with --output" in refused(capsys, "plot", *both)
    assert main(["plot", *both, "--output", str(tmp_path / "both.pdf")]) == 0
    assert (tmp_path / "both.pdf").is_file()


def test_render_of_what_draws_nothing_says_so(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    message = refused(capsys, "render", str(run), "--output", str(tmp_path / "a.gif"))
    assert "asyncmaml/Navigation2D-v0 draws no images" in message


@pytest.mark.slow
def test_render_films_a_half_cheetah_without_a_screen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, film = tmp_path / "run", tmp_path / "film.mp4"
    command = ["train", "halfcheetah-vel", "--output", str(folder), "--no-evaluation", "--quiet"]
    assert main([*command, *TINY, "--envs-per-worker", "2"]) == 0
    quick = ["--tasks", "1", "--episodes", "2"]
    # A process of its own: MuJoCo reads MUJOCO_GL once, when it is first imported.
    with start_command("render", str(folder), "--output", str(film), *quick) as process:
        assert process.wait(timeout=PATIENCE) == 0
    assert b"ftyp" in film.read_bytes()[:12]


@pytest.mark.parametrize("command", ["evaluate", "plot"])
def test_folder_without_a_run_is_named(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert str(tmp_path) in refused(capsys, command, str(tmp_path))
