"""`evaluate()`, the pictures and the films of a run."""

import asyncio
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from fakes import CountingEnv
from PIL import Image

from asyncmaml import EvaluationReport, TrainConfig, evaluate, load_policy, train
from asyncmaml.errors import ConfigurationError, MissingExtraError
from asyncmaml.evaluation import adapted_tasks, halving_step_sizes, load_report
from asyncmaml.learning.policies import NormalMLPPolicy
from asyncmaml.plots.gradient_steps import draw_gradient_steps
from asyncmaml.plots.learning_curves import Run, curve, draw_learning_curves, grouped
from asyncmaml.plots.of_runs import draw_run
from asyncmaml.plots.trajectories import _reach, one_goal_of_each_quadrant
from asyncmaml.rendering import render, side_by_side
from asyncmaml.training.run_folder import RunFolder

TINY = TrainConfig(
    max_episode_steps=4,
    hidden_sizes=(8,),
    step_sizes=(0.1,),
    tasks_per_iteration=2,
    episodes_per_task=3,
    iterations=2,
    num_workers=0,
    evaluation_interval=2,
    evaluation_tasks=2,
    evaluation_episodes=2,
)
QUICK: dict[str, Any] = {"num_tasks": 3, "num_episodes": 4, "num_updates": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "nav"
    asyncio.run(train(TINY, folder))
    return folder


@pytest.fixture
def policy() -> Iterator[NormalMLPPolicy]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield NormalMLPPolicy(2, 2, (8,))


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


# ---- evaluation ----


def test_later_steps_are_half_of_the_last_one_of_training() -> None:
    assert halving_step_sizes(TINY.replace(step_sizes=(0.5,)), 3) == (0.5, 0.25, 0.25)
    assert halving_step_sizes(TINY.replace(step_sizes=(0.4, 0.2)), 3) == (0.4, 0.2, 0.1)
    assert halving_step_sizes(TINY.replace(step_sizes=(0.4, 0.2)), 1) == (0.4,)
    assert halving_step_sizes(TINY, 0) == ()


async def test_report_tells_mean_sd_and_interval_of_the_tasks_returns(run: Path) -> None:
    report = await evaluate(run, **QUICK)
    content = json.loads((run / "evaluation.json").read_text())
    assert [one["steps"] for one in content["returns"]] == [0, 1, 2]
    for told, of_tasks in zip(content["returns"], content["task_returns"], strict=True):
        assert len(of_tasks) == 3
        assert told["mean"] == pytest.approx(statistics.fmean(of_tasks))
        assert told["sd"] == pytest.approx(statistics.stdev(of_tasks))
        # Student's t for 3 tasks.
        reach = 4.303 * statistics.stdev(of_tasks) / 3**0.5
        assert told["high"] - told["mean"] == pytest.approx(reach, rel=1e-3)
    assert (content["tasks"], content["episodes"], content["seed"]) == (3, 4, 1)
    assert content["step_sizes"] == [0.1, 0.05]
    assert load_report(run / "evaluation.json") == report


async def test_returns_before_adaptation_are_those_of_the_policy_itself(
    policy: NormalMLPPolicy,
) -> None:
    none = await evaluate(policy, TINY, **QUICK | {"num_updates": 0})
    some = await evaluate(policy, TINY, **QUICK)
    assert some.task_returns[0] == none.task_returns[0]
    assert some.task_returns[1] != none.task_returns[0]


async def test_same_seed_evaluates_on_the_same_tasks_whatever_the_run(
    policy: NormalMLPPolicy,
) -> None:
    first = await evaluate(policy, TINY, **QUICK)
    again = await evaluate(policy, TINY.replace(seed=9, num_workers=1, envs_per_worker=3), **QUICK)
    other = await evaluate(policy, TINY, **QUICK, seed=2)
    assert first.task_returns == again.task_returns
    assert first.task_returns != other.task_returns


async def test_vanishing_step_sizes_leave_the_policy_as_it_is(policy: NormalMLPPolicy) -> None:
    adapted = await adapted_tasks(
        policy, TINY, 2, num_episodes=2, step_sizes=(1e-12,), seed=0, keeps_episodes=True
    )
    for one in adapted:
        assert one.params is not None
        assert len(one.episodes) == 2
        for name, value in policy.named_parameters():
            torch.testing.assert_close(one.params[name], value.detach())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tasks": 0}, "num_tasks is 0"),
        ({"num_episodes": 0}, "num_episodes is 0"),
        ({"num_updates": -1}, "num_updates is -1"),
        ({"step_sizes": (0.1, 0.2, 0.3)}, "wanted one for each of 2 updates"),
        ({"step_sizes": (0.0,)}, "step_sizes is"),
        ({"seed": -1}, "seed is -1"),
    ],
)
async def test_bad_argument_of_an_evaluation_is_named(
    changes: dict[str, Any], reason: str, policy: NormalMLPPolicy
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        await evaluate(policy, TINY, **QUICK | changes)


async def test_one_step_size_is_for_all_steps(policy: NormalMLPPolicy) -> None:
    assert (await evaluate(policy, TINY, **QUICK, step_sizes=0.3)).step_sizes == (0.3, 0.3)  # type: ignore[arg-type]


async def test_folder_without_a_run_and_policy_without_a_config_are_named(
    tmp_path: Path, policy: NormalMLPPolicy
) -> None:
    with pytest.raises(ConfigurationError, match=r"no run that could be .* no config\.json"):
        await evaluate(tmp_path)
    with pytest.raises(ConfigurationError, match="a policy was given without a config"):
        await evaluate(policy)
    with pytest.raises(ConfigurationError, match="holds no run: there is no checkpoint"):
        RunFolder(tmp_path).load_checkpoint()
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="holds no evaluation"):
        load_report(tmp_path / "evaluation.json")


async def test_task_that_fails_in_an_evaluation_is_left_out_if_that_is_wanted(
    register: Any, policy: NormalMLPPolicy
) -> None:
    class Failing(CountingEnv):
        def reset_task(self, task: Any) -> None:
            if task["number"] > 0.5:
                message = "refused"
                raise OSError(message)

    register("test/Failing-v0", Failing)
    config = TINY.replace(env_id="test/Failing-v0", max_episode_steps=None, on_task_error="skip")
    own = await train(config.replace(iterations=1, tasks_per_iteration=6))
    report = await evaluate(own.policy, config, num_tasks=8, num_episodes=2, num_updates=1)
    assert 0 < report.skipped_tasks < 8
    assert len(report.task_returns[0]) == 8 - report.skipped_tasks


# ---- pictures ----


async def test_run_gets_its_three_pictures(run: Path) -> None:
    await evaluate(run, **QUICK)
    names = [path.name for path in await draw_run(run)]
    assert names == ["learning_curve.png", "evaluation.png", "trajectories.png"]
    assert all(is_png(run / name) for name in names)


async def test_folder_without_a_run_is_named_and_what_to_name_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json in it; name the folder that"):
        await draw_run(tmp_path / "nowhere")


def test_picture_shows_all_that_is_walked_unless_it_is_far_away() -> None:
    def reach(farthest: float) -> float:
        walk = np.array([[0.0, 0.0], [0.1, -farthest]])
        return _reach([[[walk, walk / 2]]], [(0.4, 0.2)])

    assert reach(0.3) == 0.6  # a margin around the goal
    assert 0.85 < reach(0.85) <= 1.0
    assert reach(30.0) == 1.0


@pytest.mark.parametrize(("ending", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_picture_is_what_its_ending_says(
    ending: str, start: bytes, run: Path, tmp_path: Path
) -> None:
    draw_learning_curves([run], tmp_path / f"curve.{ending}")
    assert (tmp_path / f"curve.{ending}").read_bytes().startswith(start)


def test_picture_of_an_unknown_kind_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="its ending must be one of"):
        draw_learning_curves([run], tmp_path / "curve.doc")


def test_missing_matplotlib_is_told_with_its_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"drawing needs matplotlib.*'asyncmaml\[plot\]'"):
        draw_learning_curves([run], tmp_path / "curve.png")


def test_one_task_alone_has_a_picture_without_an_interval(tmp_path: Path) -> None:
    report = EvaluationReport("a/B-v0", 1, 5, (0.1,), ((-3.0,), (-2.0,)), 0)
    draw_gradient_steps(report, tmp_path / "one.png")
    assert is_png(tmp_path / "one.png")
    assert json.loads(report.to_json())["returns"][0]["sd"] is None


def row(iteration: int, value: float, sd: float | None = 2.0) -> dict[str, Any]:
    return {"iteration": iteration, "return_0": value, "return_sd_0": sd}


def test_band_of_one_run_is_the_interval_over_its_tasks() -> None:
    # 2 tasks with an s.d. of 2: 12.706 * 2 / sqrt(2)
    found = curve([Run(TINY, [row(1, 5.0)])], "return", 0)
    assert (found.iterations, found.middle) == ([1], [5.0])
    assert found.high[0] - 5 == 5 - found.low[0] == pytest.approx(12.706 * 2**0.5, rel=1e-4)


def test_band_of_one_run_counts_the_tasks_that_did_not_fail() -> None:
    # 3 tasks of 9 with an s.d. of 2: 4.3027 * 2 / sqrt(3)
    of_nine = Run(TINY.replace(tasks_per_iteration=9), [{**row(1, 5.0), "tasks": 3.0}])
    assert curve([of_nine], "return", 0).high[0] - 5 == pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)


def test_band_of_held_out_tasks_counts_these() -> None:
    row = {"iteration": 1, "evaluation_return_0": 5.0, "evaluation_return_sd_0": 2.0}
    run = Run(TINY.replace(evaluation_tasks=3), [row])
    wanted = pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)
    assert curve([run], "evaluation_return", 0).high[0] - 5 == wanted
    counted = Run(TINY.replace(evaluation_tasks=9), [{**row, "evaluation_tasks": 3.0}])
    assert curve([counted], "evaluation_return", 0).high[0] - 5 == wanted


def test_band_of_many_runs_is_one_deviation_over_the_runs_as_far_as_all_have_come() -> None:
    runs = [Run(TINY, [row(1, 1.0), row(2, 5.0)]), Run(TINY, [row(1, 3.0)])]
    found = curve(runs, "return", 0)
    assert (found.iterations, found.middle) == ([1], [2.0])
    assert found.high[0] == pytest.approx(2 + 2**0.5)


def test_runs_that_differ_in_the_seed_alone_are_one_group() -> None:
    runs = [Run(TINY.replace(seed=seed), []) for seed in range(3)]
    runs.append(Run(TINY.replace(gamma=0.5, iterations=9), []))
    groups = grouped(runs)
    assert {name: len(group) for name, group in groups.items()} == {"gamma=0.99": 3, "gamma=0.5": 1}


async def test_curves_of_several_groups_are_drawn(run: Path, tmp_path: Path) -> None:
    await train(TINY.replace(gamma=0.5, iterations=1), tmp_path / "other")
    draw_learning_curves([run, tmp_path / "other"], tmp_path / "both.png")
    assert is_png(tmp_path / "both.png")


def test_one_goal_of_each_quadrant_is_the_first_there() -> None:
    goals = [(1, 1), (2, 2), (-1, 1), (1, -1), (-1, -1), (-2, -2)]
    tasks = [{"goal": np.array(goal)} for goal in goals]
    chosen = one_goal_of_each_quadrant(tasks)
    assert [tuple(task["goal"]) for task in chosen] == [(1, 1), (-1, 1), (-1, -1), (1, -1)]
    assert len(one_goal_of_each_quadrant(tasks[:2])) == 1


# ---- films ----


class DrawnEnv(CountingEnv):
    """Draws its step as a grey level."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(length=5)
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.full((32, 32, 3), 40 * self.steps, np.uint8)


@pytest.mark.parametrize("ending", ["mp4", "gif"])
async def test_film_shows_every_task_before_and_after(
    ending: str, register: Any, tmp_path: Path
) -> None:
    register("test/Drawn-v0", DrawnEnv)
    config = TINY.replace(env_id="test/Drawn-v0", max_episode_steps=None, iterations=1)
    await train(config, tmp_path / "run")
    film = await render(tmp_path / "run", tmp_path / f"film.{ending}", num_tasks=2, num_episodes=2)
    assert film.num_frames == 2 * 6  # the reset and five steps
    assert film.returns == [(15.0, 15.0)] * 2
    if ending == "mp4":
        assert imageio_ffmpeg.count_frames_and_secs(str(film.path)) == (12, 1.2)
        return
    with Image.open(film.path) as picture:
        assert picture.size == (68, 32)
        picture.seek(5)
        assert np.asarray(picture.convert("L"))[16, 16] == 200


def test_film_that_is_over_first_stands_still() -> None:
    frames = [np.full((2, 2, 3), value, np.uint8) for value in range(3)]
    joined = side_by_side(frames[:1], frames)
    assert [(frame[0, 0, 0], frame[0, -1, 0]) for frame in joined] == [(0, 0), (0, 1), (0, 2)]


async def test_environment_that_draws_nothing_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Navigation2D-v0 draws no images"):
        await render(run, tmp_path / "film.gif")
    with pytest.raises(ConfigurationError, match="is no directory; make it first"):
        await render(run, tmp_path / "nowhere" / "film.gif")


async def test_film_of_another_kind_is_refused_before_the_work(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"film\.txt: its ending must be \.mp4 or \.gif"):
        await render(run, tmp_path / "film.txt")


async def test_missing_writer_of_films_is_told_with_its_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match=r"needs imageio_ffmpeg, .*'asyncmaml\[video\]'"):
        await render(run, tmp_path / "film.mp4")


def test_saved_policy_is_that_of_the_run(run: Path) -> None:
    assert load_policy(run / "policy.pt").hidden_sizes == (8,)
    assert math.isfinite(json.loads((run / "config.json").read_text())["gamma"])
