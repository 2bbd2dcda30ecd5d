"""Kernel sources as one self-contained string: included files are put in place, each once.

NVRTC and CuPy then need no include path, and the hash of the string names the compiled module in every cache.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from core_kernels.kernels.cuda._instances import Instance

__all__ = ["FAMILIES", "SOURCE_DIR", "digest", "flatten", "kernel_source", "registered_instances"]

SOURCE_DIR = Path(__file__).parent
_INCLUDE = re.compile(r'^[ \t]*#include "([\w.]+)"[ \t]*$', re.MULTILINE)

# Modules of this package that declare KERNELS, one for each operator family.
FAMILIES = ("spmm", "segment", "sddmm", "sampling", "relabel", "gather", "pack", "embedding", "quantize", "sketch")


def flatten(text: str, seen: set[str] | None = None) -> str:
    """Replace every ``#include "x.cuh"`` by that file's text, the second time by nothing.

    >>> "struct Lanes" in flatten('#include "rows.cuh"')
    True
    """
    seen = set() if seen is None else seen

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return flatten((SOURCE_DIR / name).read_text(), seen).replace("#pragma once\n", "")

    return _INCLUDE.sub(replace, text)


@functools.cache
def kernel_source(*names: str) -> str:
    """Return the self-contained text of ``.cuh`` files."""
    return flatten("".join(f'#include "{name}"\n' for name in names))


def digest(*parts: str | bytes) -> str:
    """Return 20 hexadecimal digits that identify the parts.

    >>> digest("a", "b") == digest("ab")
    False
    """
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()[:20]


def registered_instances(names: Iterable[str] = FAMILIES) -> list[Instance]:
    """Return every instance of the given launcher modules, each once, in a fixed order."""
    import importlib

    found: dict[str, Instance] = {}
    for name in names:
        module = importlib.import_module(f"core_kernels.kernels.cuda.{name}")
        for kernel in module.KERNELS:
            for instance in kernel.instances():
                found.setdefault(f"{instance.source} {instance.expression}", instance)
    return list(found.values())
