"""The reference pages are complete: every environment variable that is read, every sub-command, every how-to page."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
PROGRAMS = {"elastic": "elastic-train"}


def variables_read(folder: Path) -> set[str]:
    """Return the environment variables that the sources of a folder read or write, by name."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            keys = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                keys = node.args[:1]
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                keys = [node.slice]
            elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
                keys = [node.left]
            found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return found


def variables_shown() -> set[str]:
    """Return the variables of the page; after a full name ``_X`` stands for another of the same prefix."""
    found = set()
    for row in re.findall(r"^\| (`.+?) \|", (REFERENCE / "environment.md").read_text(), re.MULTILINE):
        names = re.findall(r"`(\w+)`", row)
        prefix = re.match(r"[A-Z]+_TRAIN|[A-Z]+", names[0])[0]
        found |= {prefix + name if name.startswith("_") else name for name in names}
    return found


@pytest.mark.parametrize("package", sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
def test_every_environment_variable_of_a_package_is_shown(package):
    read = variables_read(ROOT / "packages" / package / "src")
    assert sorted(read - variables_shown()) == []


def test_a_variable_that_is_read_is_noticed(tmp_path):
    lines = ['os.environ.get("A_ONE", "x")', 'os.environ["A_TWO"]', '"A_THREE" in os.environ', 'os.getenv("A_FOUR")']
    (tmp_path / "module.py").write_text("import os\n" + "\n".join(lines))
    assert variables_read(tmp_path) == {"A_ONE", "A_TWO", "A_THREE", "A_FOUR"}


@pytest.mark.parametrize("package", sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
def test_every_sub_command_of_a_program_is_shown(package, monkeypatch):
    from core_kernels.console import CommandLine

    name, seen = PROGRAMS.get(package, package), []
    monkeypatch.setattr(CommandLine, "run", lambda self, argv=None: seen.extend(self._commands.choices) or 0)
    importlib.import_module(f"{name.replace('-', '_')}.cli").main([])
    (shown,) = re.findall(rf"^\| `{name}` \| (.+) \|$", (REFERENCE / "command-line.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", shown)) == sorted(seen)


def test_every_how_to_page_is_in_the_list():
    folder = ROOT / "docs" / "how-to"
    listed = set(re.findall(r"\((\S+\.md)\)", (folder / "index.md").read_text()))
    assert listed == {path.name for path in folder.glob("*.md")} - {"index.md"}
