"""Check built wheels: pure Python, small, one top-level import, a licence, nothing else inside.

A leaf stays under 200 kB. The core carries every CUDA source, the emulator that runs them without a device and
the layer compiler, and stays under 450 kB.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

LEAF_LIMIT_BYTES = 200_000
CORE_LIMIT_BYTES = 450_000


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
    roots = {name.split("/")[0] for name in names}
    packages = {root for root in roots if not root.endswith(".dist-info")}
    if len(packages) != 1:
        found.append(f"has {sorted(packages)} at its top level, expected one package")
    if not any("licenses/LICENSE" in name for name in names):
        found.append("carries no LICENSE")
    found += [f"carries {name}" for name in names if "__pycache__" in name or name.endswith((".so", ".cubin"))]
    return [f"{wheel.name} {fault}" for fault in found]


if __name__ == "__main__":
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    faults = [fault for wheel in wheels for fault in problems(wheel)]
    for wheel in wheels:
        print(f"{wheel.stat().st_size:>8,} bytes  {wheel.name}")
    print("\n".join(faults) or f"wheels: {len(wheels)} checked")
    sys.exit(bool(faults) or not wheels)
