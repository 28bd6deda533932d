"""What is installed: extras, pinned versions, the marker of types, and what CI runs."""

import os
import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import ROOT

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
ALL_EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

# It pins MuJoCo to another release than the constraints.
APART = "metaworld"
EXTRAS = {name: packages for name, packages in ALL_EXTRAS.items() if name != APART}


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


CONSTRAINTS = [Requirement(line) for line in constraint_lines()]
PINS = {canonicalize_name(pin.name): str(pin.specifier) for pin in CONSTRAINTS}


def required(requirements: list[str]) -> list[Requirement]:
    """Return the packages of others that are required; our own extras are looked through."""
    packages = []
    for requirement in map(Requirement, requirements):
        if requirement.name == PROJECT["name"]:
            for extra in sorted(requirement.extras):
                packages += required(EXTRAS[extra])
        else:
            packages.append(requirement)
    return packages


EVERYTHING = required(PROJECT["dependencies"] + [one for extra in EXTRAS.values() for one in extra])


@pytest.mark.parametrize("extra", ["mujoco", "cli", "test", "dev", "all"])
def test_extra_exists(extra: str) -> None:
    assert EXTRAS[extra]


def test_all_holds_what_a_user_wants_and_no_tool_of_ours() -> None:
    names = {package.name for package in required(EXTRAS["all"])}
    for extra in EXTRAS.keys() - {"all", "test", "dev"}:
        assert names >= {package.name for package in required(EXTRAS[extra])}
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "pre-commit"}


def test_dev_holds_all_other_extras() -> None:
    packages = {(one.name, *one.extras) for one in required(EXTRAS["dev"])}
    assert packages == {
        (one.name, *one.extras) for extra in EXTRAS for one in required(EXTRAS[extra])
    }


def test_meta_world_is_an_extra_apart_from_all_others_and_from_the_constraints() -> None:
    names = {package.name for package in required(ALL_EXTRAS[APART])}
    assert names == {"metaworld", "packaging"}
    assert "metaworld" not in {package.name for package in EVERYTHING} | PINS.keys()


def test_torch_is_pinned_to_the_build_for_cpus() -> None:
    assert PINS[canonicalize_name("torch")] == "==2.13.0"


@pytest.mark.parametrize("name", sorted({package.name for package in EVERYTHING}))
def test_what_is_required_is_pinned_within_its_range(name: str) -> None:
    pin = PINS[canonicalize_name(name)].removeprefix("==")
    for package in EVERYTHING:
        if package.name == name:
            assert package.specifier.contains(pin)


def test_what_the_extra_of_gymnasium_brings_is_pinned() -> None:
    assert {"mujoco", "imageio"} <= PINS.keys()


def test_every_constraint_is_one_exact_version_and_no_url() -> None:
    for pin in CONSTRAINTS:
        assert pin.url is None, pin
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), pin
    assert len(PINS) == len(CONSTRAINTS), "a package is pinned twice"
    assert "://" not in (ROOT / "constraints.txt").read_text()


def test_pyproject_pins_nothing_itself() -> None:
    assert [str(package) for package in EVERYTHING if "==" in str(package.specifier)] == []


def test_marker_of_types_is_shipped() -> None:
    assert (ROOT / "asyncmaml" / "py.typed").is_file()
    # Hatch ships what lies in the package and is not ignored by git.
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["asyncmaml"]}
    assert "py.typed" not in (ROOT / ".gitignore").read_text()


def test_ci_is_executable_and_runs_what_the_readme_says() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    script = path.read_text()
    assert "<!-- the test command -->" in script
    assert "README.md" in script
    assert "-m pytest" not in script, "a second copy of the README's command"
    for tool in ('ruff" check', 'ruff" format --check', 'mypy"'):
        assert f"$venv/bin/{tool}" in script
