"""Checkpoints are atomic and complete, whenever the process that writes one ends."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_script

from asyncmaml import TrainConfig, train
from asyncmaml.checkpoint import Checkpoint, write_atomically

# Torch is loaded once, and each save is done, and cut off, in a fork of that process.
WRITER = """
import asyncio, json, os, resource, signal, sys
from pathlib import Path

import torch

from asyncmaml import TrainConfig, train
from asyncmaml.checkpoint import Checkpoint


def checkpoint(iterations):
    learner = {"policy": {str(n): torch.full((300, 100), float(iterations)) for n in range(3)}}
    return Checkpoint.of(TrainConfig(), learner, [{"iteration": n} for n in range(iterations)])


def found():
    loaded = Checkpoint.load(path)
    values = torch.cat([*loaded.learner["policy"].values()]).unique().tolist()
    return sorted({loaded.iterations, len(loaded.history), *values})


def save_in_a_fork(prepare):
    # Says how the child ended, what can be loaded then, and what else lies in the folder.
    for other in folder.iterdir():
        other.unlink()
    old.save(path)
    pid = os.fork()
    if not pid:
        try:
            prepare()
            new.save(path)
        except Exception as error:
            os._exit(9)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    others = sorted(other.name for other in folder.iterdir() if other != path)
    try:
        return {"status": status, "found": found(), "others": others}
    except Exception as error:
        return {"status": status, "found": repr(error), "others": others}


def count_calls(stop_at=None):
    # All calls and returns, those of torch's and the system's functions too.
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        if calls == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

    sys.setprofile(count)
    return lambda: (sys.setprofile(None), calls)[1]


def limit_files(num_bytes, action):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def train_until_killed(config, folder):
    # Dies in the moment in which a second checkpoint would take the first one's name.
    replace = os.replace

    def replace_or_die(source, target):
        if Path(target).name == "checkpoint.pt" and Path(target).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    pid = os.fork()
    if not pid:
        os.replace = replace_or_die
        asyncio.run(train(TrainConfig.from_json(config), folder))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


training = train_until_killed(*sys.argv[2:])

folder = Path(sys.argv[1])
folder.mkdir()
path = folder / "checkpoint.pt"
old, new = checkpoint(1), checkpoint(2)
old.save(path)
size = path.stat().st_size

counted = count_calls()
new.save(path)
total = counted()
# Few of those that do the pickling and of the last ones; each of those that sync and rename.
moments = sorted(
    {*range(0, total, total // 15), *range(total - 45, total - 20), *range(total - 20, total, 5)}
)
places = [0, 1, 100, size // 3, size // 2, size - 1000, size - 1]
print(
    json.dumps(
        {
            "training": training,
            "killed": [save_in_a_fork(lambda: count_calls(moment)) for moment in moments],
            "cut off": [
                save_in_a_fork(lambda: limit_files(place, signal.SIG_DFL)) for place in places
            ],
            "full disk": [
                save_in_a_fork(lambda: limit_files(place, signal.SIG_IGN)) for place in places
            ],
        }
    )
)
"""

OLD, NEW = [1], [2]
TINY = TrainConfig(
    max_episode_steps=4,
    hidden_sizes=(4,),
    tasks_per_iteration=2,
    episodes_per_task=3,
    iterations=3,
    num_workers=0,
    evaluation_interval=0,
    checkpoint_interval=1,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the writer writes."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def outcomes(place: Path) -> dict[str, Any]:
    """Return what became of one checkpoint while the next one was written, by what ended that.

    And how a training ended that was killed then, whose folder is `killed`.
    """
    arguments = str(place / "folder"), TINY.to_json(), str(place / "killed")
    # Python warns of forks where there are threads; those of torch have not begun.
    return dict(json.loads(run_script(place / "writer.py", WRITER, *arguments, warnings="default")))


def test_writer_killed_at_any_call_leaves_the_old_checkpoint_or_the_new_one_whole(
    outcomes: dict[str, Any],
) -> None:
    killed = outcomes["killed"]
    assert {each["status"] for each in killed} == {-signal.SIGKILL}
    loaded = [each["found"] for each in killed]
    assert [each for each in loaded if each not in (OLD, NEW)] == []
    # The old one until the new one takes its name, and never again; both were seen.
    assert loaded == sorted(loaded)
    assert loaded[0] == OLD
    assert loaded[-1] == NEW
    for each in killed:
        # At most the one that was being written, which has lost its other name at the end.
        assert len(each["others"]) <= (each["found"] == OLD)


def test_writer_that_dies_at_any_byte_leaves_the_old_checkpoint_whole(
    outcomes: dict[str, Any],
) -> None:
    for each in outcomes["cut off"]:
        assert (each["status"], each["found"]) == (-signal.SIGXFSZ, OLD)


def test_full_disk_raises_and_leaves_the_old_checkpoint_and_nothing_else(
    outcomes: dict[str, Any],
) -> None:
    for each in outcomes["full disk"]:
        assert each == {"status": 9, "found": OLD, "others": []}


async def test_training_killed_while_it_writes_resumes_as_if_it_had_not_been(
    outcomes: dict[str, Any], place: Path
) -> None:
    folder = place / "killed"
    assert outcomes["training"] == -signal.SIGKILL
    (stray,) = folder.glob(".checkpoint.pt.*")
    assert stray.stat().st_size > 0
    assert Checkpoint.load(folder / "checkpoint.pt").iterations == 1
    resumed = await train(TINY, folder, resume=True)
    straight = await train(TINY)
    for name, value in straight.policy.state_dict().items():
        assert torch.equal(resumed.policy.state_dict()[name], value), name
    assert [row["return_0"] for row in resumed.history] == [
        row["return_0"] for row in straight.history
    ]
    assert Checkpoint.load(folder / "checkpoint.pt").iterations == 3


def test_new_file_is_on_the_disk_before_it_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of power cannot be had here; what it would find is decided by this order."""
    path = tmp_path / "checkpoint.pt"
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def told_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("synced", os.readlink(f"/proc/self/fd/{descriptor}")))

    def told_replace(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(("renamed", str(source)))

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(os, "replace", told_replace)
    write_atomically(path, lambda new: new.write_text("all of it"))
    (_, name), *_ = done
    assert done == [("synced", name), ("renamed", name), ("synced", str(tmp_path))]
    assert Path(name).parent == tmp_path
    assert path.read_text() == "all of it"
