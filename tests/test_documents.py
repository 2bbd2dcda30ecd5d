"""Every README and page keeps its word: programs run and print what the page shows, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(
    r"```python\n(?P<code>.*?)```(?:\s*(?:prints|which prints|Output)?:?\s*```text\n(?P<output>.*?)```)?", re.S
)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def programs():
    for page in READMES:
        for position, match in enumerate(PROGRAM.finditer(page.read_text())):
            yield pytest.param(match["code"], match["output"], id=f"{page.parent.name}-{position}")


@pytest.mark.parametrize(("code", "output"), list(programs()))
def test_program_prints_what_the_readme_shows(code, output, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr
    if output is not None:
        assert shape_of(done.stdout) == shape_of(output)


def shape_of(text: str) -> list[str]:
    """Reduce output to what may not differ between machines: words and the places of numbers."""
    return [re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip() for line in text.splitlines() if line.strip()]


def test_shape_of_output_keeps_the_words():
    assert shape_of("loss 0.25 in 3 s\n\n") == ["loss # in # s"]
    assert shape_of("loss 0.25") != shape_of("gain 0.25")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", prose)
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []
