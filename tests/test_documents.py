"""Every README and page keeps its word: programs run and print what is shown, commands parse, links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import check_text
import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = re.compile(
    r"(?P<mark><!-- not run[^\n]*\n+)?```python\n(?P<code>.*?)```"
    r"(?:\s*(?:prints|which prints|Output)?:?\s*```text\n(?P<output>.*?)```)?",
    re.DOTALL,
)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
MODULES = {
    "core-kernels": "core_kernels.cli",
    "gnn-parallel": "gnn_parallel.cli",
    "gnn-comm": "gnn_comm.cli",
    "gnn-eval": "gnn_eval.cli",
    "recsys-embed": "recsys_embed.cli",
    "autopar": "autopar.cli",
    "elastic-train": "elastic_train.cli",
}


PAGES = check_text.pages(ROOT)
READMES = [page for page in PAGES if page.name == "README.md"]


def is_run_by_its_package(page: Path) -> bool:
    """Whether a package's own tests run the first program of its README and compare what it prints to the letter."""
    if page.parent == ROOT:
        return False
    return any("README.md" in file.read_text() for file in page.parent.glob("tests/**/test_*.py"))


def programs():
    for page in READMES:
        first = 1 if is_run_by_its_package(page) else 0
        for position, match in enumerate(PROGRAM.finditer(page.read_text())):
            if not match["mark"] and position >= first:
                yield pytest.param(match["code"], match["output"], id=f"{page.parent.name}-{position}")


@pytest.mark.parametrize(("code", "output"), list(programs()))
def test_program_prints_what_the_readme_shows(code, output, tmp_path):
    done = run_program(code, tmp_path)
    assert done.returncode == 0, done.stderr
    if output is not None:
        assert shape_of(done.stdout) == shape_of(output)


def run_program(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def shape_of(text: str) -> list[str]:
    """Reduce output to what may not differ between machines: words and the places of numbers."""
    return [re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip() for line in text.splitlines() if line.strip()]


def test_shape_of_output_keeps_the_words():
    assert shape_of("loss 0.25 in 3 s\n\n") == ["loss # in # s"]
    assert shape_of("loss 0.25") != shape_of("gain 0.25")


def pages_with_programs():
    for page in PAGES:
        blocks = [b for b in check_text.code_blocks(page.read_text()) if b.kind == "python" and b.reason is None]
        if blocks and page not in READMES:
            yield pytest.param("\n\n".join(block.code for block in blocks), id=page.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("code", list(pages_with_programs()))
def test_the_programs_of_a_page_run(code, tmp_path, monkeypatch):
    """Run the blocks of a page one after another; in this process, which has torch loaded, unless they start ranks."""
    if "__main__" in code:
        done = run_program(code, tmp_path)
        assert done.returncode == 0, done.stderr
        return
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text(code)
    runpy.run_path(str(script), run_name="page")


def shell_commands():
    for page in PAGES:
        for block in check_text.code_blocks(page.read_text()):
            if block.kind == "shell" and block.reason is None:
                yield from ((page, command) for command in check_text.commands(block.code))


def test_commands_of_the_packages_parse(monkeypatch, capsys):
    """Hand each shown command to the parser of its program, which then does nothing."""
    from core_kernels.console import CommandLine

    monkeypatch.setattr(CommandLine, "run", lambda self, argv=None: self.parser.parse_args(argv) and 0)
    wrong = []
    for page, command in shell_commands():
        program, *arguments = shlex.split(command)
        if program not in MODULES:
            continue
        # "plan | verify" lists sub-commands.
        lists = [[word, "--help"] for word in arguments if word != "|"] if "|" in arguments else [arguments]
        main = importlib.import_module(MODULES[program]).main
        for listed in lists:
            try:
                main(listed)
            except SystemExit as stop:
                if stop.code:
                    wrong.append(f"{page.relative_to(ROOT)}: {command}: {capsys.readouterr().err.strip()[-200:]}")
    assert wrong == []


def test_a_command_with_a_wrong_option_is_noticed():
    from elastic_train.cli import main

    with pytest.raises(SystemExit), contextlib.redirect_stderr(None):
        main(["simulate", "--trase", "x.csv"])


def test_sessions_and_scripts_that_pages_name_exist():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    wrong = []
    for page in PAGES:
        shown = [
            command for block in check_text.code_blocks(page.read_text()) for command in check_text.commands(block.code)
        ]
        for command in [*shown, *re.findall(r"`(nox -s [^`]+)`", page.read_text())]:
            if command.startswith("nox -s "):
                asked = re.sub(r"\([^)]*\)", "", re.split(r"  | -- ", command.removeprefix("nox -s "))[0])
                wrong += [f"{page.name}: session {name}" for name in re.findall(r"\w+", asked) if name not in sessions]
        for script in re.findall(r"python ((?:examples|packages|benchmarks|tools|tests)/\S+?\.py)", page.read_text()):
            if not any((base / script).exists() for base in (ROOT, page.parent)):
                wrong.append(f"{page.relative_to(ROOT)}: {script}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", prose)
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []
