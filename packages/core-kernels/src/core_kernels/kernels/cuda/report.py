"""Compiles every kernel instance for given architectures and bounds what each takes: registers and spilled bytes.

The golden file ``registers.json`` holds the registers of each instance and architecture, apart for nvcc and NVRTC,
whose front ends differ. A change of more than ``TOLERANCE`` either way, a spill, or an unknown instance is a finding.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from core_kernels.errors import argument_error
from core_kernels.kernels.cuda._instances import Instance
from core_kernels.kernels.cuda._source import registered_instances
from core_kernels.kernels.cuda.compiler import CompileError, compile_kernels

__all__ = ["ARCHITECTURES", "GOLDEN_FILE", "TOLERANCE", "compile_report", "find_problems", "write_golden"]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
GOLDEN_FILE = Path(__file__).parent / "registers.json"
TOLERANCE = 8
# ptxas takes about as long as parsing: groups of this many instances balance both and fill two cores.
_GROUP_SIZE = 14


def compile_report(
    architectures: Sequence[str],
    instances: Sequence[Instance] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[dict[str, str | int]]:
    """Compile instances to machine code and report what ptxas measured.

    Args:
        architectures: For example ``["sm_80", "sm_90"]``.
        instances: What to compile; every registered instance by default.
        advance: Called after each compiled group.

    Returns:
        One dict with ``kernel``, ``dtype``, ``index``, ``arch``, ``registers`` and ``spill_bytes`` for each instance
        and architecture, sorted.

    Raises:
        ArgumentError: An architecture is not of the form ``sm_90``.
        CompileError: An instance does not compile, or the compiler does not say what it takes.
        MissingDependencyError: There is no CUDA compiler.
    """
    for arch in architectures:
        if not (arch.startswith("sm_") and arch[3:].rstrip("af").isdigit()):
            raise argument_error("arch", arch, "sm_ and a number, for example sm_90", "name real architectures")
    jobs = [(arch, group) for arch in architectures for group in compile_groups(instances)]

    def compile_group(job: tuple[str, list[Instance]]) -> list[dict[str, str | int]]:
        arch, group = job
        compiled = compile_kernels(f'#include "{group[0].source}"\n', [one.expression for one in group], arch)
        advance()
        missing = [one.expression for one in group if one.expression not in compiled.usage]
        if missing:
            raise CompileError(f"ptxas reports no registers of {missing} for {arch}")
        return [
            {
                **one.labels,
                "arch": arch,
                "registers": compiled.usage[one.expression].registers,
                "spill_bytes": compiled.usage[one.expression].spill_bytes,
            }
            for one in group
        ]

    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, 16))) as pool:
        rows = [row for rows in pool.map(compile_group, jobs) for row in rows]
    return sorted(rows, key=lambda row: [str(row[key]) for key in ("kernel", "dtype", "index", "arch")])


def compile_groups(instances: Sequence[Instance] | None = None) -> list[list[Instance]]:
    """Return instances in groups of one source that are compiled together."""
    by_source: defaultdict[str, list[Instance]] = defaultdict(list)
    for one in registered_instances() if instances is None else instances:
        by_source[one.source].append(one)
    groups = [
        group[start : start + _GROUP_SIZE]
        for group in by_source.values()
        for start in range(0, len(group), _GROUP_SIZE)
    ]
    return sorted(groups, key=lambda group: -len(group))


def find_problems(rows: Sequence[dict[str, str | int]], compiler: str, golden_file: Path = GOLDEN_FILE) -> list[str]:
    """Compare a report with the golden file; returns one line for each spill, drift or unknown instance.

    Args:
        rows: Result of :func:`compile_report`.
        compiler: ``"nvcc"`` or ``"nvrtc"``, which made it.
        golden_file: What to compare with.
    """
    return list(_problems(rows, json.loads(golden_file.read_text()).get(compiler, {})))


def _problems(rows: Sequence[dict[str, str | int]], golden: dict[str, dict[str, int]]) -> Iterator[str]:
    for row in rows:
        name, arch = _golden_key(row), str(row["arch"])
        if row["spill_bytes"]:
            yield f"{name} for {arch} spills {row['spill_bytes']} bytes; expected 0"
        expected = golden.get(name, {}).get(arch)
        if expected is None:
            known = {arch for archs in golden.values() for arch in archs}
            if arch in known:
                yield f"{name} for {arch} is not in the golden file; add it with --update-golden"
        elif abs(int(row["registers"]) - expected) > TOLERANCE:
            yield f"{name} for {arch} takes {row['registers']} registers; expected {expected} +- {TOLERANCE}"


def _golden_key(row: dict[str, str | int]) -> str:
    return f"{row['kernel']} {row['dtype']} {row['index']}"


def write_golden(rows: Sequence[dict[str, str | int]], compiler: str, golden_file: Path = GOLDEN_FILE) -> None:
    """Write the registers of a report as the new golden file."""
    golden = json.loads(golden_file.read_text()) if golden_file.exists() else {}
    registers: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        registers[_golden_key(row)][str(row["arch"])] = int(row["registers"])
    golden[compiler] = dict(sorted(registers.items()))
    parts = []
    for name, kernels in sorted(golden.items()):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(archs)}" for key, archs in kernels.items())
        parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    golden_file.write_text("{\n" + ",\n".join(parts) + "\n}\n")
