"""The workspace's own checks: they pass on this repository, and each fails on a tree that breaks its rule."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small_tree(tmp_path):
    """Two packages of this repository, enough for every check."""
    for package in ("core-kernels", "gnn-eval"):
        shutil.copytree(
            ROOT / "packages" / package,
            tmp_path / "packages" / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc"),
        )
    return tmp_path


def test_leaves_import_only_the_core():
    assert load_tool("check_imports").violations(ROOT) == []


def test_an_import_between_leaves_is_found(small_tree):
    planted = small_tree / "packages/gnn-eval/src/gnn_eval/planted.py"
    planted.write_text("from gnn_comm.plan import Plan\n")
    assert load_tool("check_imports").violations(small_tree) == [
        "packages/gnn-eval/src/gnn_eval/planted.py:1: gnn_eval imports gnn_comm"
    ]


def test_versions_agree():
    assert load_tool("check_versions").problems(ROOT, None) == []


def test_a_tag_that_names_another_version_is_found(small_tree):
    check = load_tool("check_versions")
    version = check.read_versions(small_tree)["gnn-eval"]
    assert check.problems(small_tree, f"gnn-eval-v{version}") == []
    assert check.problems(small_tree, "gnn-eval-v99.0.0") == [
        f"tag gnn-eval-v99.0.0 does not match: gnn-eval is at {version}"
    ]


def test_a_missing_changelog_heading_is_found(small_tree):
    changelog = small_tree / "packages/gnn-eval/CHANGELOG.md"
    changelog.write_text("# Changelog\n")
    assert "gnn-eval/CHANGELOG.md has no heading" in load_tool("check_versions").problems(small_tree, None)[0]


def test_a_new_package_has_the_kit_and_passes_the_checks(small_tree):
    folder = load_tool("new_package").lay_out(small_tree, "graph-store", "Keeps a graph and its rows in tiers.")
    kit = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src", "tests", "benchmarks"}
    assert {path.name for path in folder.iterdir()} == kit
    assert load_tool("check_versions").problems(small_tree, "graph-store-v0.1.0") == []


@pytest.mark.parametrize("name", ["Graph", "graph_store", "-x", ""])
def test_a_new_package_with_a_bad_name_is_refused(small_tree, name):
    with pytest.raises(SystemExit, match="lower-case words joined by hyphens"):
        load_tool("new_package").lay_out(small_tree, name, "Keeps a graph and its rows in tiers.")
