"""Lay out a new leaf package with the same kit as its siblings, version 0.1.0 and no code."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lay_out(root: Path, name: str, sentence: str) -> Path:
    """Create ``packages/<name>`` after the pattern of gnn-eval and return its folder."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise SystemExit(f"name={name!r} is not valid: expected lower-case words joined by hyphens, as in graph-store")
    if len(sentence) < 10:
        raise SystemExit(f"sentence={sentence!r} is not valid: expected one sentence that says what a user gets")
    folder, model = root / "packages" / name, root / "packages" / "gnn-eval"
    if folder.exists():
        raise SystemExit(f"{folder} exists; choose another name or remove it")
    module = name.replace("-", "_")
    source = folder / "src" / module
    for part in ("tests/unit", "tests/properties", "tests/distributed", "tests/gpu", "benchmarks"):
        (folder / part).mkdir(parents=True)
    source.mkdir(parents=True)
    shutil.copy(model / "LICENSE", folder / "LICENSE")
    project = (model / "pyproject.toml").read_text().replace("gnn-eval", name).replace("gnn_eval", module)
    project = re.sub(r'description = ".*"', f'description = "{sentence}"', project)
    project = re.sub(r"\n\[project\.scripts\]\n[^\[]*", "\n", project)
    (folder / "pyproject.toml").write_text(project)
    (folder / "README.md").write_text(f"# {name}\n\n{sentence}\n\nThis package has no code yet.\n")
    (folder / "CHANGELOG.md").write_text(
        f"# Changelog of {name}\n\n<!-- newest release below -->\n\n## 0.1.0 (unreleased)\n\n- First version.\n"
    )
    (source / "py.typed").touch()
    (source / "_version.py").write_text(
        '"""The version of this package, read by the build and by the release check."""\n\n__version__ = "0.1.0"\n'
    )
    (source / "__init__.py").write_text(
        f'"""{sentence}"""\n\nfrom {module}._version import __version__\n\n__all__ = ["__version__"]\n'
    )
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit('usage: new_package.py NAME "One sentence on what a user gets."')
    print(f"laid out {lay_out(ROOT, sys.argv[1], sys.argv[2])}; now add it to LEAVES in noxfile.py")
