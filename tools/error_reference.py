"""Write the page of error messages from the audit of wrong calls, or check that the page shows enough of every package.

    python tools/error_reference.py --write    # run the audit and write docs/reference/messages.md
    python tools/error_reference.py --live     # run the audit and compare with the page
    python tools/error_reference.py            # count what is on the page

The audit is ``packages/<name>/tests/unit/test_wrong_calls.py`` of every package: each test makes wrong calls and checks
that the message holds the offending name, the value and the remedy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "messages.md"
LEAST = {"core-kernels": 15, "gnn-eval": 12, "gnn-comm": 10, "gnn-parallel": 10}
LEAST_ELSEWHERE = 8
HEAD = """# Messages

What the packages say to wrong calls. The tests make each of these calls and check that the message holds the name, the
value and the remedy; `python tools/error_reference.py --write` writes this page from the same run.
"""


def record(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Run the audit and return the errors of each package, (class, message), without repeats.

    Raises:
        SystemExit: The audit fails.
    """
    audits = sorted(str(path) for path in root.glob("packages/*/tests/unit/test_wrong_calls.py"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "messages.jsonl"
        paths = [str(root / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "SEXTET_MESSAGES": str(file), "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "error_recorder", *audits]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the audit fails, so no page is written:\n{done.stdout[-3000:]}")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    found: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        entry = (line["error"], as_cell(line["message"], root))
        rows = found.setdefault(line["package"], [])
        if entry not in rows:
            rows.append(entry)
    return found


def as_cell(text: str, root: Path) -> str:
    """Write a message into a cell of a table: one line, no place of this machine, nothing of it read as markup."""
    line = text.replace(f"{root}/", "")
    line = re.sub(r"/tmp/[^\s:;,'\"]*?(?=(?:/[\w.-]+)?(?:[\s:;,'\")]|$))", "FOLDER", line)
    line = re.sub(r"0x[0-9a-f]+", "0x...", re.sub(r"\s+", " ", line)).strip()
    line = line if len(line) <= 400 else line[:397] + "..."
    return "`` " + line.replace("|", "\\|").replace("``", "'") + " ``"


def render(found: dict[str, list[tuple[str, str]]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for package in sorted(found):
        rows = [f"| `{kind}` | {message} |" for kind, message in found[package]]
        parts.append("\n".join([f"## {package}\n", "| error | message |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def count_rows(page: Path) -> dict[str, int]:
    """Return how many messages a page shows of each package."""
    counts: dict[str, int] = {}
    package = ""
    for line in page.read_text().splitlines() if page.exists() else []:
        if line.startswith("## "):
            package = line.removeprefix("## ")
        elif line.startswith("| `"):
            counts[package] = counts.get(package, 0) + 1
    return counts


def problems(counts: dict[str, int], packages: list[str]) -> list[str]:
    """List packages of which too few wrong calls are audited."""
    least = {package: LEAST.get(package, LEAST_ELSEWHERE) for package in packages}
    return [
        f"{package} shows {counts.get(package, 0)} wrong calls; expected at least {number}; add to its "
        "tests/unit/test_wrong_calls.py and run python tools/error_reference.py --write"
        for package, number in least.items()
        if counts.get(package, 0) < number
    ]


def main(arguments: list[str]) -> int:
    """Write or check; returns 1 when something is missing."""
    faults = []
    if "--write" in arguments:
        PAGE.write_text(render(record(ROOT)))
    if "--live" in arguments:
        shown = PAGE.read_text()
        live = [f"| `{kind}` | {message} |" for rows in record(ROOT).values() for kind, message in rows]
        faults = [f"the page lacks {row}; run with --write" for row in live if row not in shown]
    counts, packages = count_rows(PAGE), sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    faults += problems(counts, packages)
    for package in packages:
        print(f"{counts.get(package, 0):>4}  {package}")
    print(f"{sum(counts.values()):>4}  wrong calls")
    print("\n".join(faults) or "enough of every package is on the page")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
