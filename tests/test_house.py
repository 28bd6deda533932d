"""The house: a folder is a place where code runs, and imports go one way."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT

import asyncmaml

PACKAGE = ROOT / "asyncmaml"

# Each place, and what it may import of ours; "" stands for the modules at the top.
BELOW_ALL = {"errors", "option_kinds", "episodes", "intraop"}
ALLOWED = {
    "errors": set[str](),
    "option_kinds": {"errors"},
    "intraop": set[str](),
    "episodes": BELOW_ALL,
    "envs": {"errors", "option_kinds", "envs"},
    "worker": {"errors", "option_kinds", "envs", "worker"},
    "sampling": BELOW_ALL | {"envs", "worker", "sampling"},
    "learning": BELOW_ALL | {"learning"},
    "config": {"errors", "option_kinds", "config"},
    "checkpoint": {"errors", "config"},
}
# The caller's event loop: training, and what is made of it.
ALLOWED["training"] = BELOW_ALL | {
    "config",
    "checkpoint",
    "sampling",
    "envs",
    "learning",
    "training",
}
ALLOWED["trainer"] = ALLOWED["evaluation"] = ALLOWED["training"]
ALLOWED["rendering"] = ALLOWED["training"] | {"evaluation"}
ALLOWED["plots"] = BELOW_ALL | {"config", "checkpoint", "training", "evaluation", "plots"}
# What `episodes.py` and `config.py` are made of lies beside them.
PARTS = {
    "checked_rows": "episodes",
    "discounting": "episodes",
    "padded_episodes": "episodes",
    "storage": "episodes",
    "presets": "config",
    "yaml_config": "config",
}


def place_of(module: str) -> str:
    """Return the folder or top-level module of a dotted name below `asyncmaml`."""
    place = module.split(".")[1] if "." in module else ""
    return PARTS.get(place, place)


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


MODULES = modules()
IN_WORKERS_OR_FLAGS = ("envs", "worker", "errors", "option_kinds", "config")


def imports_of(path: Path, *, all_of_them: bool = True) -> Iterator[str]:
    """Yield the dotted names that a file imports, those for type checkers left out."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not all_of_them:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            assert node.module is not None
            yield node.module
            for alias in node.names:  # `from asyncmaml.envs import tasks` imports a module
                if f"{node.module}.{alias.name}" in MODULES:
                    yield f"{node.module}.{alias.name}"
        nodes.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module: str) -> None:
    allowed = ALLOWED.get(place_of(module))
    if allowed is None:  # the command line, above all
        return
    ours = [name for name in imports_of(MODULES[module]) if name.startswith("asyncmaml.")]
    wrong = [name for name in ours if place_of(name) not in allowed]
    assert not wrong


@pytest.mark.parametrize(
    "module",
    sorted(name for name in MODULES if place_of(name) in IN_WORKERS_OR_FLAGS),
)
def test_what_runs_in_a_worker_or_makes_flags_imports_neither_torch_nor_asyncio(
    module: str,
) -> None:
    roots = {name.partition(".")[0] for name in imports_of(MODULES[module])}
    assert not roots & {"torch", "asyncio", "aiomultiprocess", "concurrent"}


@pytest.mark.parametrize("module", sorted(name for name in MODULES if place_of(name) == "learning"))
def test_learning_knows_neither_processes_nor_asyncio(module: str) -> None:
    roots = {name.partition(".")[0] for name in imports_of(MODULES[module])}
    assert not roots & {"asyncio", "multiprocessing", "aiomultiprocess", "threading"}


def test_one_module_knows_aiomultiprocess() -> None:
    knowing = [name for name, path in MODULES.items() if "aiomultiprocess" in imports_of(path)]
    assert knowing == ["asyncmaml.sampling.process"]


def test_imports_make_no_cycle() -> None:
    """At import time; a function may import what would close a cycle."""
    graph = {
        name: {found for found in imports_of(path, all_of_them=False) if found in MODULES} - {name}
        for name, path in MODULES.items()
    }
    left = dict(graph)
    while left:
        ready = [name for name, needs in left.items() if not needs & left.keys()]
        assert ready, f"a cycle among {sorted(left)}"
        for name in ready:
            del left[name]


def loaded_by(statement: str) -> set[str]:
    """Return the roots of all modules that a fresh interpreter loads over a statement."""
    script = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(output.stdout.split())


def test_import_of_the_package_is_light() -> None:
    heavy = {
        "torch",
        "numpy",
        "gymnasium",
        "aiomultiprocess",
        "asyncio",
        "rich",
        "matplotlib",
        "yaml",
    }
    assert not loaded_by("import asyncmaml") & heavy


def test_import_of_what_a_worker_runs_loads_no_torch() -> None:
    loaded = loaded_by("import asyncmaml.worker.main, asyncmaml.worker.rows, asyncmaml.envs")
    assert not loaded & {"torch", "asyncio", "aiomultiprocess", "mujoco"}


@pytest.mark.parametrize("name", asyncmaml.__all__)
def test_public_name_is_there(name: str) -> None:
    assert getattr(asyncmaml, name).__doc__
    assert name in dir(asyncmaml)


def test_what_is_not_there_is_told_as_python_tells_it() -> None:
    with pytest.raises(AttributeError, match="'asyncmaml' has no attribute 'Sampler'"):
        asyncmaml.Sampler  # noqa: B018


def test_public_names_are_sorted_and_each_has_a_home() -> None:
    assert list(asyncmaml.__all__) == sorted(asyncmaml.__all__)
    assert asyncmaml._HOMES.keys() == set(asyncmaml.__all__)


def test_version_is_that_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == asyncmaml.__version__


def test_extras_that_the_package_names_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {"all", "cli", "dev", "mujoco", "plot", "tensorboard", "test", "video"} <= extras.keys()
    named: set[str] = set()
    texts = [path.read_text() for path in MODULES.values()]
    texts += [requirement for group in extras.values() for requirement in group]
    for text in texts:
        for found in re.findall(r"asyncmaml\[([a-z,]+)\]", text):
            named.update(found.split(","))
    assert named <= extras.keys()
