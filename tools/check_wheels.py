"""Check built wheels: pure Python, small, one top-level import, a licence, no sibling but the core, nothing else.

    python tools/check_wheels.py FOLDER [FOLDER]        # with a second build of the same sources: equal byte for byte
    python tools/check_wheels.py --installed gnn-eval   # this environment holds what that package needs, and no more

A leaf stays under 200 kB. The core carries every CUDA source, the emulator that runs them without a device and the
layer compiler, and stays under 450 kB.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path

LEAF_LIMIT_BYTES = 200_000
CORE_LIMIT_BYTES = 450_000
CORE = "core-kernels"
LEAVES = {"gnn-parallel", "gnn-comm", "gnn-eval", "recsys-embed", "autopar", "elastic-train"}
# What an installer or Python itself may have put into an empty environment.
GIVEN = {"pip", "setuptools", "wheel"}


def required_names(requirements: list[str]) -> set[str]:
    """Return the distributions that are needed without any extra.

    >>> sorted(required_names(["torch>=2.9", "Core_Kernels<0.2", 'pymetis; extra == "partition"']))
    ['core-kernels', 'torch']
    """
    needed = [line for line in requirements if "extra ==" not in line]
    return {normalized(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in needed}


def normalized(name: str) -> str:
    """Return the form in which names of distributions are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def problems(wheel: Path) -> list[str]:
    """List what is wrong with one wheel."""
    found = []
    if not wheel.name.endswith("-py3-none-any.whl"):
        found.append("is not a pure Python wheel")
    limit = CORE_LIMIT_BYTES if wheel.name.startswith("core_kernels-") else LEAF_LIMIT_BYTES
    if wheel.stat().st_size > limit:
        found.append(f"has {wheel.stat().st_size:,} bytes, the limit is {limit:,}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        description = next((name for name in names if name.endswith(".dist-info/METADATA")), None)
        lines = archive.read(description).decode().splitlines() if description else []
    roots = {name.split("/")[0] for name in names}
    packages = {root for root in roots if not root.endswith(".dist-info")}
    if len(packages) != 1:
        found.append(f"has {sorted(packages)} at its top level, expected one package")
    if not any("licenses/LICENSE" in name for name in names):
        found.append("carries no LICENSE")
    needed = required_names([line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist")])
    found += [f"requires {name}, a sibling; expected the core alone" for name in sorted(needed & LEAVES)]
    found += [f"carries {name}" for name in names if "__pycache__" in name or name.endswith((".so", ".cubin"))]
    return [f"{wheel.name} {fault}" for fault in found]


def differences(first: Path, second: Path) -> list[str]:
    """List wheels that two builds of the same sources do not share byte for byte."""
    sums = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.whl")}
        for folder in (first, second)
    ]
    return [
        f"{name} differs between two builds; expected equal bytes under one SOURCE_DATE_EPOCH"
        for name in sorted({*sums[0], *sums[1]})
        if sums[0].get(name) != sums[1].get(name)
    ]


def superfluous(package: str) -> list[str]:
    """List distributions of this environment that a package does not need."""
    installed = {normalized(found.metadata["Name"]): found for found in metadata.distributions()}
    if package not in installed:
        return [f"{package} is not installed here; install its wheel first"]
    needed, waiting = set(), {package}
    while waiting:
        name = waiting.pop()
        needed.add(name)
        if name in installed:
            waiting |= required_names(installed[name].requires or []) - needed
    return [f"{name} is installed and {package} does not need it" for name in sorted({*installed} - needed - GIVEN)]


def main(arguments: list[str]) -> int:
    """Check and print; returns 1 when something is wrong."""
    if arguments[:1] == ["--installed"]:
        faults = superfluous(arguments[1])
        num_installed = len({normalized(found.metadata["Name"]) for found in metadata.distributions()} - GIVEN)
        print("\n".join(faults) or f"{arguments[1]} needs each of the {num_installed} distributions installed with it")
        return bool(faults)
    folders = [Path(argument) for argument in arguments]
    wheels = sorted(folders[0].glob("*.whl"))
    faults = [fault for wheel in wheels for fault in problems(wheel)]
    faults += differences(*folders) if len(folders) == 2 else []
    for wheel in wheels:
        print(f"{wheel.stat().st_size:>8,} bytes  {hashlib.sha256(wheel.read_bytes()).hexdigest()[:16]}  {wheel.name}")
    print("\n".join(faults) or f"wheels: {len(wheels)} checked{', two builds equal' if len(folders) == 2 else ''}")
    return bool(faults) or not wheels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
