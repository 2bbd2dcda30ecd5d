"""The examples run, tell what they measured, and write a page that needs no other file."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.py") if p.stem not in ("chapter", "demo"))


def run_example(name: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--report", str(folder / "report.html")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tour_has_a_chapter_per_package_and_every_chapter_is_an_example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    demo = importlib.import_module("demo")
    folders = {path.name for path in (ROOT / "packages").iterdir() if (path / "pyproject.toml").exists()}
    assert {name.removesuffix("-train") for name in demo.CHAPTERS} == folders
    assert sorted([*demo.CHAPTERS.values(), "four_together"]) == EXAMPLES


def test_the_tour_refuses_an_unknown_package_by_name(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "gnn-evil"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 2
    assert "packages=['gnn-evil'] is not valid" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(310)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_finds_nothing_wrong(name, tmp_path):
    output = run_example(name, tmp_path)
    assert "measured" in output
    assert "DIFFER" not in output
    assert "False" not in output
    page = (tmp_path / "report.html").read_text()
    assert 'src="data:image/png;base64,' in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []


@pytest.mark.slow
@pytest.mark.timeout(310)
@pytest.mark.parametrize("name", ["own_layer", "full_graph_exchange", "evaluate_every_node"])
def test_graph_examples_take_planetoid_files(name, tmp_path):
    folder = Path(os.environ.get("SEXTET_DATA", ROOT.parent / "shared" / "data")) / "planetoid"
    if not folder.is_dir():
        pytest.skip(f"no Planetoid files in {folder}; point SEXTET_DATA at a folder that has them")
    assert "cora" in run_example(name, tmp_path, "--planetoid", str(folder), "cora")


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_the_click_model_takes_criteo_rows(tmp_path):
    file = Path(os.environ.get("SEXTET_DATA", ROOT.parent / "shared" / "data")) / "criteo_8192.npz"
    if not file.exists():
        pytest.skip(f"there is no {file}; set SEXTET_DATA to the folder that holds criteo_8192.npz")
    assert "bitwise equal" in run_example("click_model", tmp_path, "--dataset", f"criteo:{file}")
