"""Check that versions, changelogs and the ranges between the packages agree.

With a tag such as ``gnn-eval-v0.2.0`` as argument, also check that the tag names the version in that package.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_versions(root: Path) -> dict[str, str]:
    """Map each distribution to the version its source declares."""
    versions = {}
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        data = tomllib.loads(project.read_text())
        source = project.parent / data["tool"]["hatch"]["version"]["path"]
        match = re.search(r'__version__ = "([^"]+)"', source.read_text())
        if match is None:
            raise SystemExit(f'{source}: no line of the form __version__ = "..."')
        versions[data["project"]["name"]] = match[1]
    return versions


def problems(root: Path, tag: str | None) -> list[str]:
    """List every disagreement."""
    versions = read_versions(root)
    found = []
    core_series = ".".join(versions["core-kernels"].split(".")[:2])
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        data = tomllib.loads(project.read_text())["project"]
        changelog = (project.parent / "CHANGELOG.md").read_text()
        if f"## {versions[data['name']]}" not in changelog:
            found.append(f"{project.parent.name}/CHANGELOG.md has no heading for {versions[data['name']]}")
        found += [
            f"{data['name']} depends on {dependency}, the core is at {versions['core-kernels']}"
            for dependency in data["dependencies"]
            if dependency.startswith("core-kernels") and f">={core_series}" not in dependency
        ]
    if tag is not None:
        name, _, version = tag.rpartition("-v")
        if versions.get(name) != version:
            found.append(f"tag {tag} does not match: {name or '(no package)'} is at {versions.get(name)}")
    return found


if __name__ == "__main__":
    found = problems(ROOT, sys.argv[1] if len(sys.argv) > 1 else None)
    print("\n".join(found) or "versions: sources, changelogs and ranges agree")
    sys.exit(bool(found))
