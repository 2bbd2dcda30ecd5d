"""Gather the fragments of a package's changes into its changelog with towncrier.

    python tools/changelog.py gnn-eval            # show what a release of gnn-eval would add
    python tools/changelog.py gnn-eval --write    # write it and remove the fragments
    python tools/changelog.py --check             # every fragment has a known type and a text

A fragment is a file ``packages/<name>/changes/+short-name.TYPE.md`` with one sentence; TYPE is added, changed, fixed or
removed. The version is that of ``_version.py``, so it is raised first.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"\+[a-z0-9-]+\.(?P<type>[a-z]+)\.md")


def known_types(root: Path) -> list[str]:
    """Return the types of fragments."""
    config = tomllib.loads((root / "tools" / "towncrier.toml").read_text())
    return [entry["directory"] for entry in config["tool"]["towncrier"]["type"]]


def problems(root: Path) -> list[str]:
    """List fragments that would be left out or say nothing, and changelogs without the line fragments go below."""
    types, found = known_types(root), []
    for fragment in sorted(root.glob("packages/*/changes/*")):
        shown, match = fragment.relative_to(root), _NAME.fullmatch(fragment.name)
        if match is None or match["type"] not in types:
            found.append(f"{shown} is not a fragment: expected +short-name.TYPE.md, TYPE one of {', '.join(types)}")
        elif not fragment.read_text().strip():
            found.append(f"{shown} is empty: expected one sentence on what changed for users")
    marker = "<!-- newest release below -->"
    changelogs = sorted(root.glob("packages/*/CHANGELOG.md"))
    lacking = [path.relative_to(root) for path in changelogs if path.read_text().count(marker) != 1]
    return found + [f"{path} lacks the line {marker}: put it above the newest release" for path in lacking]


def build(root: Path, package: str, is_draft: bool) -> int:
    """Run towncrier for one package; returns its exit code."""
    folder = root / "packages" / package
    if not folder.is_dir():
        names = sorted(path.name for path in root.glob("packages/*"))
        raise SystemExit(f"package={package!r} is not valid: expected one of {', '.join(names)}; correct the name")
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    source = (folder / project["tool"]["hatch"]["version"]["path"]).read_text()
    version = re.findall(r'__version__ = "([^"]+)"', source)[0]
    where = ["--config", str(root / "tools" / "towncrier.toml"), "--dir", str(folder)]
    what = ["--version", version, "--name", project["project"]["name"], "--draft" if is_draft else "--yes"]
    return subprocess.run([sys.executable, "-m", "towncrier", "build", *where, *what], cwd=root).returncode


def main(arguments: list[str]) -> int:
    """Check, show or write."""
    if arguments == ["--check"]:
        faults = problems(ROOT)
        print("\n".join(faults) or "changelog: every fragment has a known type and a text")
        return bool(faults)
    packages = [argument for argument in arguments if not argument.startswith("-")]
    if len(packages) != 1 or set(arguments) - {"--write", *packages}:
        raise SystemExit("usage: changelog.py PACKAGE [--write] | --check")
    return build(ROOT, packages[0], is_draft="--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
