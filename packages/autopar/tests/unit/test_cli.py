"""The command line, the README's program and the documented examples."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
from pathlib import Path

import pytest

import autopar
from autopar.cli import main

PROBLEM = ["--model", "autopar.models:mlp", "--cluster", "loopback-cpu"]


def run(capsys, *arguments):
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_search_explain_and_frontier(capsys, tmp_path):
    plan = str(tmp_path / "plan.json")
    code, found = run(capsys, "search", *PROBLEM, "--out", plan)
    assert code == 0
    assert found["points"] > 2
    code, explained = run(capsys, "explain", plan)
    assert "network.0.weight: stored" in explained["text"]
    code, frontier = run(capsys, "frontier", *PROBLEM, "--csv", str(tmp_path / "frontier.csv"))
    assert len(frontier["points"]) == found["points"]
    assert (tmp_path / "frontier.csv").read_text().startswith("memory,seconds\n")
    code, bench = run(capsys, "bench", *PROBLEM)
    assert bench["fastest"]["seconds"] <= bench["data"]["seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", *PROBLEM, "--memory", "1"], "least memory of any plan"),
        (["search", *PROBLEM, "--mesh", "3"], "expected num_devices=2"),
        (["search", *PROBLEM, "--mesh", "two"], "expected sizes such as 2x4"),
        (["search", "--model", "autopar.models:none", "--cluster", "loopback-cpu"], "expected package.module:factory"),
        (["search", "--model", "autopar.models:mlp", "--cluster", "none"], "name='none' is not valid"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_python_m_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["autopar", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("autopar", run_name="__main__")
    assert ended.value.code == 0
    assert autopar.__version__ in capsys.readouterr().out


def test_readme_program_prints_what_it_says():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.S)
    output = re.search(r"```text\n(.*?)```", text, re.S)
    assert program is not None
    assert output is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program.group(1), {})
    assert printed.getvalue() == output.group(1)
