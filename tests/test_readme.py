"""The README: its example runs as it stands, its commands are marked, its table is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE, ROOT

from asyncmaml.cli import _parser

PACKAGE = ROOT / "asyncmaml"
README = (ROOT / "README.md").read_text()

# What every place passes through, and so belongs to no row of the table.
NOBODYS = {"__init__.py", "__main__.py", "errors.py", "py.typed"}


def example() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    (script,) = [block for block in blocks if "def main(" in block]
    return str(script)


def marked_command(mark: str) -> str:
    """Return the one line of the block right behind a mark; `.ci/run` reads it the same way."""
    (block,) = re.findall(
        rf"^<!-- {mark} -->\n```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE
    )
    (line,) = str(block).splitlines()
    return line


def rows_of_places() -> list[list[str]]:
    """Return what each row of "Where a change goes" names: its folder, then all else in code."""
    section = README.partition("## Where a change goes")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [re.findall(r"`([^`]+)`", line) for line in lines[2:]]
    assert len(rows) > 3
    return [[name for name in row if "/" in name or name.endswith(".py")] for row in rows]


def found(name: str, row: list[str]) -> list[Path]:
    """Return what a name of a row stands for: below the root, the package, or the row's folder."""
    own = ROOT / row[0]
    places = (ROOT, PACKAGE, own if own.is_dir() else own.parent)
    return [path for place in places for path in place.glob(name.rstrip("/"))]


def test_example_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example())
    ended = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second = ended.stdout.splitlines()
    assert first.startswith("torch.Size([100, 20, 2]) tensor(-")
    assert len(second.strip("[]").split(", ")) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["example.py"]


@pytest.mark.parametrize("mark", ["the main command", "the test command"])
def test_marked_command_installs_as_it_is_pinned(mark: str) -> None:
    command = marked_command(mark)
    assert command.startswith(
        "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt"
    )


def test_main_command_meta_trains() -> None:
    parts = marked_command("the main command").split(" && ")
    assert parts[1].endswith("-e '.[all]'")
    (train,) = parts[2:]
    assert train.startswith(".venv/bin/asyncmaml train navigation-2d ")
    arguments = train.split()[1:]
    parsed = _parser().parse_args(arguments)
    assert parsed.resume, "a second run of the command must not be refused"


def test_test_command_ends_with_pytest() -> None:
    parts = marked_command("the test command").split(" && ")
    assert parts[1].endswith("-e '.[dev]'")
    assert parts[-1] == ".venv/bin/python -m pytest -n 2"


@pytest.mark.parametrize("row", rows_of_places(), ids=lambda row: row[0])
def test_every_path_of_the_table_exists(row: list[str]) -> None:
    missing = [name for name in row if not found(name, row)]
    assert not missing


def test_every_file_of_the_package_belongs_to_a_row() -> None:
    named = {path for row in rows_of_places() for name in row for path in found(name, row)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    homeless = [
        str(path.relative_to(ROOT))
        for path in sorted(files)
        if not {path, *path.parents} & (named - {ROOT, PACKAGE})
        and str(path.relative_to(PACKAGE)) not in NOBODYS
    ]
    assert not homeless


@pytest.mark.parametrize("name", re.findall(r"\]\((?!https?:)([^)#]+)", README))
def test_every_link_to_a_file_leads_somewhere(name: str) -> None:
    assert (ROOT / name).exists()
