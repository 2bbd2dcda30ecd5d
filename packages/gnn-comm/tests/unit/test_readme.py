"""The program in the README must run and print what the README shows."""

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
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.S)
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
