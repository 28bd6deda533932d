"""`train()`: its rows and files; that neither stops nor workers nor failures change a result."""

import asyncio
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import CountingEnv, Step
from processes import PATIENCE, until

from asyncmaml import (
    AsyncSampler,
    BatchSampler,
    TrainConfig,
    TrainResult,
    evaluate,
    load_policy,
    train,
)
from asyncmaml.checkpoint import Checkpoint, Row
from asyncmaml.config import LEARNERS
from asyncmaml.errors import ConfigurationError, EnvironmentFailedError, NotFiniteError
from asyncmaml.learning.learner import MetaLearner, UpdateReport
from asyncmaml.learning.phases import Phase
from asyncmaml.learning.policies import CategoricalMLPPolicy
from asyncmaml.presets import PRESETS
from asyncmaml.training.draws import Purpose, draw_number
from asyncmaml.training.learner_thread import LearnerThread
from asyncmaml.training.rollouts import Plan, Rollouts
from asyncmaml.training.run_folder import RunFolder, read_progress
from asyncmaml.training.spans import Clock

TINY = TrainConfig(
    max_episode_steps=4,
    hidden_sizes=(4,),
    step_sizes=(0.1, 0.05),
    tasks_per_iteration=2,
    episodes_per_task=3,
    iterations=2,
    num_workers=0,
    evaluation_interval=2,
    evaluation_tasks=2,
    evaluation_episodes=2,
)
ENDLESS = TINY.replace(iterations=10**6)


class TroublesomeEnv(CountingEnv):
    """Fails, or rewards with NaN, where the task's number is above `limit`."""

    def __init__(self, limit: float = 1.0, gives_nan: bool = False) -> None:
        super().__init__()
        self.fault_limit, self.gives_nan = limit, gives_nan

    def step(self, action: Any) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        # Rewards that depend on the action, so that there is something to learn.
        reward += float(action)
        if self.task["number"] > self.fault_limit:
            if not self.gives_nan:
                message = "out of order"
                raise OSError(message)
            reward = math.nan
        return observation, reward, terminated, truncated, info


class ConstantRewardEnv(CountingEnv):
    """Rewards whatever is done with 1."""

    def step(self, action: Any) -> Step:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 1.0, terminated, truncated, info


class HoldingOutEnv(CountingEnv):
    """Draws tasks below 1 for training and above it otherwise; a step of those is worth 10."""

    def step(self, action: Any) -> Step:
        observation, _, terminated, truncated, info = super().step(action)
        reward = float(action) + 10.0 * (self.task["number"] >= 1)
        return observation, reward, terminated, truncated, info

    def sample_held_out_tasks(self, num_tasks: int) -> list[dict[str, float]]:
        return [{"number": 1 + task["number"]} for task in self.sample_tasks(num_tasks)]


@pytest.fixture
def troublesome(register: Any) -> TrainConfig:
    register("test/Troublesome-v0", TroublesomeEnv)
    return TINY.replace(
        env_id="test/Troublesome-v0",
        tasks_per_iteration=4,
        evaluation_interval=0,
        max_episode_steps=None,
    )


def parameters(result: TrainResult) -> dict[str, torch.Tensor]:
    return result.policy.state_dict()


def assert_same(first: TrainResult, second: TrainResult) -> None:
    """Bitwise the same parameters, and rows that differ in times alone."""
    for name, value in parameters(first).items():
        assert torch.equal(value, parameters(second)[name]), name
    assert len(first.history) == len(second.history)
    for row, other in zip(map(timeless, first.history), map(timeless, second.history), strict=True):
        assert {name: (row[name], other[name]) for name in row if row[name] != other[name]} == {}


def timeless(row: Row) -> Row:
    """Leave the times out; NaN as text, since it does not equal itself."""
    return {
        name: repr(value)
        for name, value in row.items()
        if not name.endswith(("seconds", "_per_second")) and not name.startswith("sampler_")
    }


# ---- what it tells and writes ----


async def test_rows_tell_returns_by_updates_and_all_steps_of_all_phases() -> None:
    told: list[Row] = []
    result = await train(TINY, on_iteration=told.append)
    assert told == list(result.history)
    assert [row["iteration"] for row in told] == [1, 2]
    # 2 tasks, 3 episodes, 4 steps, before, between and after two updates.
    assert [row["env_steps"] for row in told] == [2 * 3 * 4 * 3, 2 * 2 * 3 * 4 * 3]
    assert [row["episodes"] for row in told] == [2 * 3 * 3] * 2
    for row in told:
        assert all(-8 < row[f"return_{updates}"] < 0 for updates in range(3))
        assert all(row[f"return_sd_{updates}"] >= 0 for updates in range(3))
        assert "return_3" not in row


async def test_parts_of_an_iterations_time_add_up_to_it() -> None:
    result = await train(TINY)
    for row in result.history:
        parts = [row[f"{part}_seconds"] for part in ("sampling", "adaptation", "outer", "idle")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(row["seconds"], rel=1e-9)
        assert row["outer_seconds"] > 0
        assert row["overlap_seconds"] <= row["sampling_seconds"]
        assert row["steps_per_second"] == pytest.approx(72 / row["seconds"])
    first, last = (row["elapsed_seconds"] for row in result.history)
    assert last > first >= result.history[0]["seconds"]


async def test_held_out_tasks_are_evaluated_where_it_is_time() -> None:
    first, second = (await train(TINY)).history
    assert first["evaluation_return_0"] is None
    assert all(second[f"evaluation_return_{updates}"] < 0 for updates in range(3))
    assert first["evaluation_seconds"] == 0 < second["evaluation_seconds"]


async def test_held_out_tasks_are_none_of_the_training() -> None:
    async with AsyncSampler(TINY.env_id, num_workers=0, seed=TINY.seed) as sampler:

        def goals(purpose: Purpose, iteration: int) -> list[tuple[float, ...]]:
            tasks = sampler.sample_tasks(5, seed=draw_number(purpose, iteration))
            return [tuple(task["goal"]) for task in tasks]

        drawn = [goal for i in range(20) for goal in goals(Purpose.TRAINING, i)]
        for purpose in (Purpose.EVALUATION, Purpose.FINAL_EVALUATION, Purpose.PICTURE):
            drawn += goals(purpose, 0)
    assert len(set(drawn)) == 5 * 23


async def test_what_the_environment_holds_out_is_evaluated_and_never_trained_on(
    register: Any,
) -> None:
    register("test/HoldingOut-v0", HoldingOutEnv)
    config = TINY.replace(env_id="test/HoldingOut-v0", max_episode_steps=None)
    result = await train(config)
    for row in result.history:
        assert all(0 <= row[f"return_{updates}"] <= 5 for updates in range(3))
    last = result.history[-1]
    assert all(50 <= last[f"evaluation_return_{updates}"] <= 55 for updates in range(3))
    report = await evaluate(result.policy, config, num_tasks=4, num_episodes=2)
    assert all(50 <= value <= 55 for values in report.task_returns for value in values)


def test_both_samplers_draw_the_same_held_out_tasks() -> None:
    settings: dict[str, Any] = {"num_workers": 0, "seed": 3}

    async def drawn(env: Any) -> tuple[list[Any], list[Any]]:
        async with AsyncSampler(env, **settings) as sampler:
            return sampler.sample_tasks(4, seed=5, held_out=True), sampler.sample_tasks(4, seed=5)

    held_out, others = asyncio.run(drawn(HoldingOutEnv))
    with BatchSampler(HoldingOutEnv, batch_size=1, **settings) as lock_step:
        assert lock_step.sample_tasks(4, seed=5, held_out=True) == held_out
    assert [task["number"] - 1 for task in held_out] == pytest.approx(
        [task["number"] for task in others]
    )
    # One that holds nothing out draws as for training.
    assert asyncio.run(drawn(CountingEnv)) == (others, others)


async def test_folder_holds_all_of_the_run(tmp_path: Path) -> None:
    result = await train(TINY, tmp_path / "deep" / "run")
    folder = RunFolder(tmp_path / "deep" / "run")
    assert result.output == folder.path
    names = {path.name.partition(".tfevents")[0] for path in folder.path.iterdir()}
    assert names == {
        ".lock",
        "checkpoint.pt",
        "config.json",
        "events.out",
        "policy.pt",
        "progress.csv",
    }
    assert TrainConfig.load(folder.config) == TINY
    policy = load_policy(folder.policy)
    for name, value in policy.state_dict().items():
        assert torch.equal(value, parameters(result)[name])
    rows = read_progress(folder.progress)
    assert [row["return_1"] for row in rows] == [row["return_1"] for row in result.history]
    checkpoint = torch.load(folder.checkpoint, weights_only=True)
    assert checkpoint["iterations"] == 2


async def test_tensorboard_shows_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = await train(TINY, tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    shown = events.Scalars("return/1")
    assert [event.step for event in shown] == [1, 2]
    for event, row in zip(shown, result.history, strict=True):
        assert event.value == pytest.approx(row["return_1"])
    tags = set(events.Tags()["scalars"])
    assert {"evaluation_return/0", "training/kl", "time/idle_seconds"} <= tags
    assert "sampler/worker_busy_share" in tags


@pytest.mark.parametrize("learner", LEARNERS)
async def test_every_learner_moves_the_policy(learner: str) -> None:
    config = TINY.replace(learner=learner, iterations=1, evaluation_interval=0)
    result = await train(config)
    start = await train(config.replace(step_sizes=(1e-12,))) if learner == "reptile" else None
    other = await train(config.replace(seed=1))
    assert result.history[0]["accepted"] == 1
    for name, value in parameters(result).items():
        assert value.isfinite().all()
        if start is not None:
            assert not torch.equal(value, parameters(start)[name])
        assert not torch.equal(value, parameters(other)[name])


@pytest.mark.parametrize("name", PRESETS)
async def test_every_preset_trains(name: str) -> None:
    config = TrainConfig.preset(name).replace(
        tasks_per_iteration=2,
        episodes_per_task=2,
        max_episode_steps=5,
        iterations=1,
        num_workers=0,
        envs_per_worker=2,
    )
    (row,) = (await train(config)).history
    assert math.isfinite(row["return_1"])
    # Bandits last one step.
    assert row["env_steps"] == 2 * 2 * 2 * (1 if name == "bandit" else 5)


async def test_trace_shows_sampling_adaptation_and_outer_updates(tmp_path: Path) -> None:
    await train(TINY, trace=tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert text.count('"outer update"') == 2
    assert text.count('"adapt"') == 2 * (2 * 3) + 2 * 2  # training, and one evaluation


# ---- the same, bit for bit ----


async def test_number_of_workers_changes_nothing() -> None:
    alone = await train(TINY)
    for changes in ({"envs_per_worker": 1}, {"num_workers": 1, "envs_per_worker": 4}):
        assert_same(alone, await train(TINY.replace(**changes)))


@pytest.mark.parametrize("learner", LEARNERS)
async def test_resumed_run_ends_as_if_it_had_never_stopped(learner: str, tmp_path: Path) -> None:
    config = TINY.replace(learner=learner, iterations=4)
    straight = await train(config, tmp_path / "straight")
    await train(config.replace(iterations=2), tmp_path / "resumed")
    resumed = await train(config, tmp_path / "resumed", resume=True)
    assert_same(straight, resumed)
    rows = [read_progress(tmp_path / name / "progress.csv") for name in ("straight", "resumed")]
    assert [timeless(row) for row in rows[0]] == [timeless(row) for row in rows[1]]
    kept = [Checkpoint.load(tmp_path / name / "checkpoint.pt") for name in ("straight", "resumed")]
    assert repr(kept[0].learner) == repr(kept[1].learner)
    assert resumed.history[2]["elapsed_seconds"] > resumed.history[1]["elapsed_seconds"]


@pytest.mark.parametrize("turns", [0, 3, 40, 200])
async def test_run_that_is_cancelled_anywhere_resumes_to_the_same_end(
    turns: int, tmp_path: Path
) -> None:
    training = asyncio.create_task(train(ENDLESS, tmp_path))
    await until((tmp_path / "progress.csv").exists, pause=0)
    for _ in range(turns):
        await asyncio.sleep(0)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    rows = max(0, len((tmp_path / "progress.csv").read_text().splitlines()) - 1)
    if (tmp_path / "checkpoint.pt").exists():  # else not one iteration was complete
        assert Checkpoint.load(tmp_path / "checkpoint.pt").iterations == rows
    whole = TINY.replace(iterations=rows + 1)
    assert_same(await train(whole), await train(whole, tmp_path, resume=True))


async def test_rows_behind_the_last_checkpoint_are_done_again_and_not_told_twice(
    tmp_path: Path,
) -> None:
    """As after a SIGKILL: the CSV is further than the checkpoint."""
    straight = await train(TINY, tmp_path)
    await train(TINY.replace(iterations=1), tmp_path / "one")
    (tmp_path / "checkpoint.pt").write_bytes((tmp_path / "one" / "checkpoint.pt").read_bytes())
    assert_same(straight, await train(TINY, tmp_path, resume=True))
    assert [row["iteration"] for row in read_progress(tmp_path / "progress.csv")] == [1, 2]


async def test_training_leaves_the_random_numbers_of_the_process_alone() -> None:
    before = torch.get_rng_state()
    await train(TINY)
    assert torch.equal(torch.get_rng_state(), before)


# ---- resuming ----


async def test_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    await train(TINY, tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(ConfigurationError, match="holds a run already, of 2 iterations; resume"):
        await train(TINY, tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


async def test_resumed_run_may_change_its_length_but_not_what_it_learns(tmp_path: Path) -> None:
    await train(TINY, tmp_path)
    with pytest.raises(ConfigurationError, match=r"trained with gamma=0\.99 and cannot go on with"):
        await train(TINY.replace(gamma=0.5), tmp_path, resume=True)
    changed = TINY.replace(iterations=3, envs_per_worker=2, checkpoint_interval=1)
    assert len((await train(changed, tmp_path, resume=True)).history) == 3
    assert TrainConfig.load(tmp_path / "config.json") == changed


async def test_run_that_another_version_began_goes_on_with_the_columns_of_both(
    tmp_path: Path,
) -> None:
    await train(TINY, tmp_path)
    kept = Checkpoint.load(tmp_path / "checkpoint.pt")
    for row in kept.history:
        del row["tasks"]
        row["of_before"] = 7.0
    kept.save(tmp_path / "checkpoint.pt")
    await train(TINY.replace(iterations=3), tmp_path, resume=True)
    rows = read_progress(tmp_path / "progress.csv")
    assert [row["tasks"] for row in rows] == [None, None, 2.0]
    assert [row["of_before"] for row in rows] == [7.0, 7.0, None]


async def test_resumed_run_without_a_config_goes_on_with_its_own(tmp_path: Path) -> None:
    await train(TINY, tmp_path)
    result = await train(output=tmp_path, resume=True)
    assert result.config == TINY
    assert len(result.history) == 2


async def test_resume_without_a_run_starts_one(tmp_path: Path) -> None:
    assert_same(await train(TINY, tmp_path, resume=True), await train(TINY))
    with pytest.raises(ConfigurationError, match="neither a config nor an output"):
        await train(output=tmp_path / "nothing", resume=True)


async def test_folder_that_another_training_writes_to_is_refused(tmp_path: Path) -> None:
    training = asyncio.create_task(train(ENDLESS, tmp_path))
    await until((tmp_path / "progress.csv").exists)
    with pytest.raises(ConfigurationError, match="another process trains into"):
        await train(TINY, tmp_path, resume=True)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training


@pytest.mark.parametrize(
    ("content", "reason"),
    [({"format": 99}, "format 99, this version reads"), ({"a": 1}, "holds no checkpoint")],
)
async def test_checkpoint_of_another_kind_is_named(
    content: dict[str, int], reason: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigurationError, match=reason):
        await train(TINY, tmp_path, resume=True)
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(ConfigurationError, match=r"checkpoint\.pt holds no checkpoint"):
        await train(TINY, tmp_path, resume=True)


# ---- tasks that fail ----


async def test_task_that_fails_ends_the_run_and_says_which(
    troublesome: TrainConfig, tmp_path: Path
) -> None:
    # With this seed the first two iterations draw no task above the limit.
    config = troublesome.replace(env_kwargs={"limit": 0.9}, iterations=50, seed=3)
    with pytest.raises(EnvironmentFailedError, match="out of order") as told:
        await train(config, tmp_path)
    notes = " ".join(told.value.__notes__)
    assert Checkpoint.load(tmp_path / "checkpoint.pt").iterations == 2
    assert len(read_progress(tmp_path / "progress.csv")) == 2
    assert re.search(r"task \d of iteration 3 \(training\): {'number': 0\.9", notes)


async def test_task_that_fails_is_skipped_if_that_is_wanted(
    troublesome: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = troublesome.replace(env_kwargs={"limit": 0.6}, on_task_error="skip")
    result = await train(config)
    skipped = [row["skipped_tasks"] for row in result.history]
    assert sum(skipped) > 0
    assert [row["tasks"] for row in result.history] == [4 - number for number in skipped]
    assert caplog.text.count("is skipped: ") == sum(skipped)
    assert "out of order" in caplog.text
    for row in result.history:
        assert row["accepted"] == 1
        # A task that fails is heard of after its first step; the others have 3 x 3 episodes.
        assert row["episodes"] == (4 - row["skipped_tasks"]) * 9


async def test_skipped_task_leaves_the_others_as_they_would_be(troublesome: TrainConfig) -> None:
    """Rewards of NaN never reach the learner: what is left is trained on, and nothing else."""
    failing = troublesome.replace(env_kwargs={"limit": 0.6}, on_task_error="skip")
    nan = failing.replace(env_kwargs={"limit": 0.6, "gives_nan": True})
    assert_same(await train(failing), await train(nan))


async def test_nan_reward_is_raised_and_never_trained_on(troublesome: TrainConfig) -> None:
    with pytest.raises(NotFiniteError, match="reward"):
        await train(troublesome.replace(env_kwargs={"limit": 0.6, "gives_nan": True}, iterations=9))


async def test_iteration_whose_tasks_all_fail_ends_the_run_even_if_they_are_skipped(
    troublesome: TrainConfig,
) -> None:
    config = troublesome.replace(env_kwargs={"limit": -1.0}, on_task_error="skip")
    with pytest.raises(EnvironmentFailedError, match="out of order") as told:
        await train(config)
    assert "all 4 tasks failed" in told.value.__notes__[-1]


async def test_update_that_is_not_accepted_is_told_and_leaves_the_policy(
    register: Any,
) -> None:
    register("test/Constant-v0", ConstantRewardEnv)
    config = TINY.replace(env_id="test/Constant-v0", max_episode_steps=None, iterations=1)
    result = await train(config)
    (row,) = result.history
    assert row["accepted"] == 0
    assert "gradient is 0" in row["reason"]


async def test_error_of_the_callback_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    def complain(row: Row) -> None:
        raise KeyError(row["iteration"])

    with pytest.raises(KeyError):
        await train(TINY, tmp_path, on_iteration=complain)
    assert Checkpoint.load(tmp_path / "checkpoint.pt").iterations == 1


async def test_run_that_fails_at_once_leaves_nothing_to_resume(
    troublesome: TrainConfig, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFailedError):
        await train(troublesome.replace(env_kwargs={"limit": -1.0}), tmp_path)
    assert not (tmp_path / "checkpoint.pt").exists()
    corrected = troublesome.replace(iterations=1)
    assert len((await train(corrected, tmp_path)).history) == 1


# ---- overlap ----


class WaitingEnv(CountingEnv):
    """With the task "late" its episodes do not end before a file is there."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = Path(gate)

    def reset_task(self, task: Any) -> None:
        self.is_late = task == "late"
        super().reset_task({"number": 0.0})

    def step(self, action: Any) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        is_over = terminated and (not self.is_late or self.gate.exists())
        return observation, reward, is_over, truncated, info


class GateOpeningLearner(MetaLearner):
    """Opens the gate when it adapts."""

    gate: Path

    def adapt(self, phase: Phase, *args: Any, **keywords: Any) -> dict[str, torch.Tensor]:
        self.gate.touch()
        return super().adapt(phase, *args, **keywords)

    def update(self, tasks: Sequence[Sequence[Phase]]) -> UpdateReport:
        return UpdateReport(True)


async def test_task_adapts_while_others_still_sample(tmp_path: Path, register: Any) -> None:
    """The late task ends only once the early one has adapted, or never."""
    register("test/Waiting-v0", WaitingEnv)
    learner = GateOpeningLearner(CategoricalMLPPolicy(3, 2, (4,)))
    learner.gate = tmp_path / "gate"
    plan = Plan(Purpose.TRAINING, 0, 2, 0.9, num_updates=1, keeps_phases=True)
    sampler = AsyncSampler("test/Waiting-v0", {"gate": str(learner.gate)}, num_workers=0, seed=1)
    clock = Clock()
    async with asyncio.timeout(PATIENCE), LearnerThread() as thread, sampler:
        late, early = await Rollouts(sampler, learner, thread).adapt(["late", "early"], plan, clock)
    assert (late.task, early.task) == ("late", "early")
    assert late.env_steps > early.env_steps == 2 * 2 * 5
    assert clock.seconds()["overlap_seconds"] > 0
