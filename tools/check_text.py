"""Check the text of the repository: nothing unfinished, no skip without a reason, no code block that nobody runs.

A block of Python in a README or page is run by the tests, a notebook cell by the build of the pages, and a command of
the packages is parsed by the program it names (``tests/test_documents.py``). What cannot be run says so above it:

    <!-- not run: needs two hosts -->

Blocks are fenced, with a word that says what they are, or indented by four spaces, for commands.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN_PROGRAMS = {"core-kernels", "gnn-parallel", "gnn-comm", "gnn-eval", "recsys-embed", "autopar", "elastic-train"}
PROGRAMS = OWN_PROGRAMS | {
    "nox", "pip", "python", "python3", "pytest", "torchrun", "srun", "sbatch", "kubectl", "uv", "cd", "export", "git",
    "ssh", "module", "source", "docker", "nvidia-smi",
}  # fmt: skip
DATA = {"text", "json", "yaml", "toml", "csv", "xml", "console", "mermaid", "bibtex", "ini", "diff"}
SHELL = {"bash", "sh", "shell"}
_UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
_FENCE = re.compile(r"^(?P<fence>`{3,}|:{3,}|~{3,})\s*(?P<info>.*)$")
_MARK = re.compile(r"<!--\s*not run:?\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
        kind: ``cell``, ``directive``, ``python``, ``shell``, ``data`` or ``unknown``.
        code: Its text.
        line: Line it begins on, from 1.
        reason: Why it is not run; ``None`` where it is.
    """

    kind: str
    code: str
    line: int
    reason: str | None


def code_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced and indented blocks of a page."""
    lines, at, reason, in_list = text.splitlines(), 0, None, False
    if lines and lines[0] == "---":
        at = lines.index("---", 1) + 1
    while at < len(lines):
        line = lines[at]
        if mark := _MARK.search(line):
            reason = mark["reason"]
        elif (fence := _FENCE.match(line.lstrip())) and not fence["fence"].startswith(":"):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip().startswith(fence["fence"]))
            code = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
            yield Block(_kind_of(fence["info"].strip()), code, at + 1, reason)
            at, reason = end, None
        elif line.startswith("    ") and not in_list and (at == 0 or not lines[at - 1].strip()):
            end = next((i for i in range(at, len(lines)) if lines[i].strip() and lines[i][:4].strip()), len(lines))
            code = textwrap.dedent("\n".join(lines[at:end])).strip() + "\n"
            yield Block(_guess_kind(code), code, at + 1, reason)
            at, reason = end - 1, None
        elif line.strip():
            in_list = bool(re.match(r"\s*([-*]|\d+\.) ", line)) or (in_list and line.startswith(" "))
            reason = None
        at += 1


def _kind_of(info: str) -> str:
    word = info.split()[0] if info else ""
    if word == "{code-cell}":
        return "cell"
    if word.startswith("{"):
        return "directive"
    if word in SHELL:
        return "shell"
    return "python" if word in ("python", "py", "python3") else "data" if word in DATA else "unknown"


def _guess_kind(code: str) -> str:
    if all(words and words[0] in PROGRAMS for words in map(str.split, commands(code))):
        return "shell"
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return "data"
    # Prose and sample output can be an expression; a program does something.
    simple = (ast.Name, ast.Constant, ast.Compare, ast.Tuple, ast.Subscript, ast.Set, ast.List, ast.BinOp)
    return "data" if all(isinstance(n, ast.Expr) and isinstance(n.value, simple) for n in tree.body) else "python"


def commands(code: str) -> list[str]:
    """Return the commands of a shell block: comments, variables, prompts and continued lines taken apart.

    >>> commands("# try\\nOMP_NUM_THREADS=1 nox -s demo \\\\\\n  -- gnn-eval   # one\\n")
    ['nox -s demo  -- gnn-eval']
    """
    joined = re.sub(r"\\\n\s*", " ", code)
    found = []
    for line in joined.splitlines():
        bare = re.sub(r"(^|\s+)#.*$", "", line).strip().removeprefix("$ ")
        for part in bare.split("&&"):
            part = re.sub(r"^([A-Z_]+=\S*\s+)+", "", part.strip())
            if part:
                found.append(part)
    return found


def pages(root: Path) -> list[Path]:
    """Return every README and page of the documentation."""
    readmes = [root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("packages/*/README.md"))]
    documents = [page for page in sorted((root / "docs").rglob("*.md")) if "_build" not in page.parts]
    return [page for page in [*readmes, *documents] if page.exists()]


def block_problems(root: Path) -> list[str]:
    """List blocks of which nobody can say whether they are run."""
    found = []
    for page in pages(root):
        for block in code_blocks(page.read_text()):
            where = f"{page.relative_to(root)}:{block.line}"
            if block.kind == "unknown":
                found.append(f"{where}: a block without a known language; expected python, bash, text, json, ...")
            if block.reason is not None and len(block.reason) < 5:
                found.append(f"{where}: marked as not run without a reason; write <!-- not run: why -->")
            if block.kind == "shell" and block.reason is None:
                strange = [c for c in commands(block.code) if c.split()[0] not in PROGRAMS]
                found += [f"{where}: {command!r} is no known program; mark the block" for command in strange]
    return found


def tracked(root: Path) -> list[Path]:
    """Return the text files under version control, or all of a tree without any."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=root)
    names = listed.stdout.splitlines() if listed.returncode == 0 and listed.stdout else None
    files = [root / name for name in names] if names is not None else [f for f in root.rglob("*") if f.is_file()]
    return [f for f in files if f.suffix in {".py", ".md", ".toml", ".cuh", ".yml", ".cff"} and f.exists()]


def unfinished(root: Path) -> list[str]:
    """List marks of unfinished work."""
    return [
        f"{path.relative_to(root)}:{number}: {match[0]}; finish it, or say under Limits what is missing"
        for path in tracked(root)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := _UNFINISHED.search(line))
    ]


def bare_skips(root: Path) -> list[str]:
    """List skipped tests that give no reason, and bare NotImplementedErrors."""
    found = []
    for path in tracked(root):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and _is_bare_skip(node):
                found.append(f"{where}: a skip without a reason; say what is missing")
            if isinstance(node, ast.Raise) and ast.unparse(node) in ("raise NotImplementedError", _EMPTY):
                found.append(f"{where}: a bare NotImplementedError; say what a subclass must do")
            if (
                isinstance(node, ast.Attribute)
                and ast.unparse(node) == "pytest.mark.skip"
                and not _is_called(path, node)
            ):
                found.append(f"{where}: pytest.mark.skip without a reason")
    return found


_EMPTY = "raise NotImplementedError()"


def _is_bare_skip(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name in ("pytest.skip", "unittest.skip"):
        return not call.args and not call.keywords
    if name in ("pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"):
        return not any(keyword.arg == "reason" for keyword in call.keywords)
    return False


def _is_called(path: Path, attribute: ast.Attribute) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(isinstance(f, ast.Attribute) and f.lineno == attribute.lineno for f in calls)


if __name__ == "__main__":
    faults = [*block_problems(ROOT), *unfinished(ROOT), *bare_skips(ROOT)]
    print("\n".join(faults) or "text: nothing unfinished, every skip has a reason, every block is run or says why not")
    sys.exit(bool(faults))
