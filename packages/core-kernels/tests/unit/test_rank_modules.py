"""Functions of files that are in no package reach the ranks, however the test runner named the file."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys

import pytest

from core_kernels._rank_main import load_module

SOURCE = "def answer(group):\n    return group.size\n"


@pytest.fixture
def no_new_modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("no_new_modules")
def test_pickle_finds_what_a_file_in_folders_defines(tmp_path):
    path = tmp_path / "test_x.py"
    path.write_text(SOURCE)
    name = "no_package.with-a-dash.test_x"
    module = load_module(name, str(path))
    assert load_module(name, str(path)) is module
    assert pickle.loads(pickle.dumps(module.answer)) is module.answer


@pytest.mark.usefixtures("no_new_modules")
def test_without_parents_pickle_would_fail(tmp_path, monkeypatch):
    path = tmp_path / "test_x.py"
    path.write_text(SOURCE)
    monkeypatch.setattr("core_kernels._rank_main._register_parents", lambda name: None)
    module = load_module("another_folder.test_x", str(path))
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(module.answer)


@pytest.mark.usefixtures("no_new_modules")
def test_real_packages_are_not_replaced(tmp_path, monkeypatch):
    package = tmp_path / "a_real_package"
    package.mkdir()
    (package / "__init__.py").write_text("MARK = 7\n")
    (package / "elsewhere.py").write_text(SOURCE)
    other = tmp_path / "other.py"
    other.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    load_module("a_real_package.elsewhere", str(other))
    assert sys.modules["a_real_package"].MARK == 7


def test_bare_pytest_runs_ranks_of_a_test_file(tmp_path):
    folder = tmp_path / "checks" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\n")
    (folder / "test_ranks.py").write_text(
        "from core_kernels.launch import run_ranks\n\n\n"
        "def size_of(group):\n    return group.size\n\n\n"
        "def test_ranks():\n    assert run_ranks(size_of, 1) == [1]\n"
    )
    command = shutil.which("pytest")
    if command is None:
        pytest.skip("the pytest command is not on the path")
    # The command, not python -m pytest: the latter would put the current folder on the module path.
    done = subprocess.run(
        [command, "-q", "checks"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
