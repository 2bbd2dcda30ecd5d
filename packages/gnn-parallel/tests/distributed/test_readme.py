"""The program in the README runs and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.distributed
def test_the_program_prints_what_the_readme_says(tmp_path):
    text = README.read_text()
    program, expected = re.search(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", text, re.DOTALL).groups()
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "".join(line[4:] for line in expected.splitlines(keepends=True))
