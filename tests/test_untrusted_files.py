"""Files of somebody else: reading one runs no code of its own, and names no other file."""

import ast
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CountingEnv
from oracle import lockstep, policy_of, uniform
from test_house import MODULES, place_of

from asyncmaml import BatchEpisodes, TrainConfig, load_policy, train
from asyncmaml.checkpoint import Checkpoint
from asyncmaml.config import options
from asyncmaml.errors import AsyncMAMLError
from asyncmaml.evaluation import evaluate, load_report
from asyncmaml.option_kinds import Text
from asyncmaml.training.run_folder import RunFolder

TINY = TrainConfig(
    max_episode_steps=2,
    hidden_sizes=(2,),
    tasks_per_iteration=1,
    episodes_per_task=2,
    iterations=1,
    num_workers=0,
    evaluation_tasks=1,
    evaluation_episodes=1,
)


class Payload:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


# --- what a file may hold


def as_pickle(path: Path, payload: Payload) -> None:
    path.write_bytes(pickle.dumps(payload, protocol=2))  # which torch writes


def as_torch_file(path: Path, payload: Payload) -> None:
    torch.save(payload, path)


def as_old_torch_file(path: Path, payload: Payload) -> None:
    torch.save(payload, path, _use_new_zipfile_serialization=False)


def as_array(path: Path, payload: Payload) -> None:
    with open(path, "wb") as file:
        np.save(file, np.array([payload], object), allow_pickle=True)


def as_archive(path: Path, payload: Payload) -> None:
    with open(path, "wb") as file:
        np.savez(file, format=np.array([payload], object))


def as_yaml(path: Path, payload: Payload) -> None:
    path.write_text(f"!!python/object/apply:os.mkdir [{payload.marker}]")


def as_policy(path: Path, payload: Payload) -> None:
    policy_of(CountingEnv()).save(path)
    torch.save(torch.load(path) | {"arguments": payload}, path)


def as_checkpoint(path: Path, payload: Payload) -> None:
    Checkpoint.of(TINY, {}, []).save(path)
    torch.save(torch.load(path) | {"history": [payload]}, path)


def as_episodes(path: Path, payload: Payload) -> None:
    lockstep(CountingEnv, uniform, batch_size=1)[0].save(path)
    with open(path, "rb") as file:
        arrays = dict(np.load(file))
    with open(path, "wb") as file:
        np.savez(file, **arrays | {"rewards": np.array([[payload]], object)})


# --- who reads it


def as_run(path: Path) -> Path:
    """Return a run's folder whose checkpoint and policy this is."""
    folder = RunFolder(path.parent / "run")
    folder.path.mkdir()
    TINY.save(folder.config)
    os.link(path, folder.checkpoint)
    os.link(path, folder.policy)
    return folder.path


async def resume(path: Path) -> None:
    await train(TINY, as_run(path), resume=True)


async def evaluate_run(path: Path) -> None:
    await evaluate(as_run(path))


def reading(read: Callable[[Path], object]) -> Any:
    async def later(path: Path) -> None:
        read(path)

    return later


READERS: dict[str, Any] = {
    "load_policy": reading(load_policy),
    "train": resume,
    "evaluate": evaluate_run,
    "BatchEpisodes": reading(BatchEpisodes.load),
    "configuration": reading(TrainConfig.load),
    "report": reading(load_report),
}


@pytest.mark.parametrize(
    "write",
    [
        as_pickle,
        as_torch_file,
        as_old_torch_file,
        as_array,
        as_archive,
        as_yaml,
        as_policy,
        as_checkpoint,
        as_episodes,
    ],
)
@pytest.mark.parametrize("reader", READERS)
async def test_file_that_is_read_runs_no_code_of_its_own(
    reader: str, write: Callable[[Path, Payload], None], tmp_path: Path
) -> None:
    path, marker = tmp_path / ("file.yaml" if write is as_yaml else "file"), tmp_path / "marker"
    write(path, Payload(marker))
    with pytest.raises(AsyncMAMLError):
        await READERS[reader](path)
    assert not marker.exists()


def test_payload_would_run(tmp_path: Path) -> None:
    as_pickle(tmp_path / "file", Payload(tmp_path / "marker"))
    pickle.loads((tmp_path / "file").read_bytes())
    assert (tmp_path / "marker").is_dir()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_messages_between_our_own_processes_are_unpickled(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in ("pickle.loads", "cloudpickle.loads"):
            assert place_of(module) in ("sampling", "worker", "envs")
        assert name not in ("pickle.load", "cloudpickle.load", "pickle.Unpickler", "eval", "exec")
        if name == "torch.load":
            assert keywords["weights_only"] == "True"
        if name in ("np.load", "numpy.load"):
            assert keywords["allow_pickle"] == "False"


# --- paths


@pytest.mark.parametrize(
    "name", [option.name for option in options() if isinstance(option.kind, Text)]
)
async def test_text_of_a_configuration_names_no_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(AsyncMAMLError):
        await train(TINY.replace(**{name: "../escaped"}), folder)
    assert set(os.listdir(tmp_path)) <= {"run"}


async def test_training_writes_into_its_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(elsewhere))
    await train(TINY, tmp_path / "run")
    await evaluate(tmp_path / "run")
    assert os.listdir(elsewhere) == []
    assert set(os.listdir(tmp_path)) == {"run", "elsewhere"}


async def test_link_in_a_folder_leads_no_writing_out_of_it(tmp_path: Path) -> None:
    """As an archive of somebody else's run may hold."""
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.write_text("precious")
    folder.mkdir()
    for name in (".lock", "config.json", "progress.csv", "policy.pt", "evaluation.json"):
        (folder / name).symlink_to(outside)
    await train(TINY, folder)
    await evaluate(folder)
    assert outside.read_text() == "precious"
