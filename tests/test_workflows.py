"""Workflows, gate and benchmark session call what exists, with parameters and arguments it takes."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
GATE = ROOT / ".ci" / "run"


def sessions() -> dict[str, dict[str, list]]:
    """Return the sessions of the noxfile, each with its parameters and their values."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    constants: dict[str, object] = {}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                code = compile(ast.Expression(node.value), "noxfile.py", "eval")
                constants[node.targets[0].id] = eval(code, {}, constants)
            except Exception:  # a value that needs more than constants is no list of parameters
                continue
        if isinstance(node, ast.FunctionDef):
            marks = [ast.unparse(mark).split("(")[0] for mark in node.decorator_list]
            if "nox.session" in marks:
                calls = [c for c in node.decorator_list if ast.unparse(c).startswith("nox.parametrize")]
                found[node.name] = {
                    call.args[0].value: list(eval(ast.unparse(call.args[1]), {}, constants)) for call in calls
                }
    return found


def commands(workflow: dict) -> list[str]:
    """Return every command of a workflow, once for each entry of a job's matrix that it names."""
    found = []
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            lines = [step["run"]] if "run" in step else []
            for name, values in matrix.items():
                mark = f"${{{{ matrix.{name} }}}}"
                lines = [line.replace(mark, str(v)) for line in lines for v in (values if mark in line else [""])]
            found += [line for text in lines for line in text.splitlines() if line.strip()]
    return found


def wrong_sessions(lines: list[str]) -> list[str]:
    """List what the commands ask of nox and the noxfile does not have."""
    known, wrong = sessions(), []
    for line in lines:
        words = shlex.split(line, comments=True)
        if "nox" not in words or words[words.index("nox") + 1 :][:1] != ["-s"]:
            continue
        asked = words[words.index("-s") + 1 :]
        for name in asked[: asked.index("--")] if "--" in asked else asked:
            match = re.fullmatch(r"(\w+)(?:\((\w+)='?([\w-]+)'?\))?", name)
            parameters = known.get(match[1]) if match else None
            if parameters is None:
                wrong.append(f"session {name}")
            elif match[2] and match[3] not in [str(value) for value in parameters.get(match[2], [])]:
                wrong.append(f"{match[2]}={match[3]} of session {match[1]}")
    return wrong


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_sessions_and_paths_that_exist(path):
    workflow = yaml.safe_load(path.read_text())
    # YAML reads the bare word "on" as true.
    assert set(workflow) <= {"name", True, "env", "jobs", "permissions"}
    assert all(job["runs-on"] and job["steps"] for job in workflow["jobs"].values())
    lines = commands(workflow)
    assert sum("nox -s" in line for line in lines) >= len(workflow["jobs"])
    assert wrong_sessions(lines) == []
    assert not [line for line in lines if "${{" in line]
    for file in re.findall(r"\b(?:packages|docs|tools|tests|constraints|examples)/[\w./-]+", path.read_text()):
        assert (ROOT / file).exists(), file


def test_the_gate_calls_every_session_of_the_tag_ci():
    assert os.access(GATE, os.X_OK)
    lines = [line for line in GATE.read_text().splitlines() if line.startswith("nox ")]
    assert wrong_sessions(lines) == []
    called = {re.sub(r"\(.*", "", word) for line in lines for word in shlex.split(line)}
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    tagged = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("'ci'" in ast.unparse(mark) for mark in node.decorator_list)
    }
    assert tagged
    assert tagged <= called


def test_a_session_or_parameter_that_does_not_exist_is_noticed():
    known = ["nox -s lint \"alone(package='gnn-eval')\" tests -- -k nothing", 'nox -s "distributed(world_size=4)"']
    assert wrong_sessions(known) == []
    assert wrong_sessions(["nox -s lints"]) == ["session lints"]
    assert wrong_sessions(["nox -s \"alone(package='gnn-evil')\""]) == ["package=gnn-evil of session alone"]


def bench_programs() -> list[list[str]]:
    """Return the command lines of the session ``bench``, each as it is started from the root."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    listed = eval(compile(ast.Expression(values["BENCHES"]), "noxfile.py", "eval"), {"CORE": "core-kernels"})
    return [
        [f"packages/{package}/{program}", *arguments] if program.endswith(".py") else [program, *arguments]
        for package, programs in listed.items()
        for program, *arguments in programs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", bench_programs(), ids=" ".join)
def test_a_benchmark_takes_the_arguments_it_is_given(command):
    program = [command[0]]
    if not command[0].endswith(".py"):
        program = ["-c", f"import sys; from {command[0].replace('-', '_')}.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [sys.executable, *program, *command[1:], "--json", "unused.json", "--no-such-option"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("unrecognized arguments: --no-such-option")
