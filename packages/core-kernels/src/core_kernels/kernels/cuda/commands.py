"""The sub-commands ``core-kernels compile`` and ``core-kernels doctor``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from core_kernels.console import CheckFailedError, CommandLine, emit, progress, say, table
from core_kernels.errors import argument_error

__all__ = ["add_compile", "add_doctor"]


def add_compile(cli: CommandLine) -> None:
    """Add ``compile`` to a command line."""
    parser = cli.command(
        "compile",
        _compile,
        "compile every CUDA kernel to machine code, no device needed, and bound registers and spills",
        """
        core-kernels compile --arch sm_80,sm_90,sm_100 --report registers.json
        core-kernels compile --arch sm_90 --update-golden
        """,
    )
    parser.add_argument("--arch", default="sm_80,sm_90,sm_100", metavar="LIST", help="architectures, comma-separated")
    parser.add_argument("--report", metavar="FILE", help="write the list of kernels as JSON")
    parser.add_argument("--update-golden", action="store_true", help="make this result the one later runs compare with")


def _compile(args: argparse.Namespace) -> dict[str, Any]:
    from core_kernels.kernels.cuda import report
    from core_kernels.kernels.cuda.compiler import compiler_version, find_compiler

    architectures = [arch.strip() for arch in args.arch.split(",") if arch.strip()]
    if not architectures:
        raise argument_error("--arch", args.arch, "at least one architecture", "pass for example sm_90")
    if args.report and Path(args.report).is_dir():
        raise argument_error("--report", args.report, "a file, not a folder", "add a file name")
    started = time.perf_counter()
    total = len(report.compile_groups()) * len(architectures)
    with progress(f"compiling with {compiler_version()}", total) as advance:
        rows = report.compile_report(architectures, advance=advance)
    seconds = time.perf_counter() - started
    if args.report:
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
        emit(rows, args.report)
    if args.update_golden:
        report.write_golden(rows, find_compiler())
    problems = report.find_problems(rows, find_compiler())
    _show_report(rows)
    say(f"{len(rows)} instances compiled in {seconds:.1f} s with {compiler_version()}; {len(problems)} problems")
    for problem in problems:
        say(f"  {problem}")
    result = {"compiler": compiler_version(), "seconds": seconds, "instances": len(rows), "problems": problems}
    if problems:
        raise CheckFailedError(f"{len(problems)} kernels leave their bounds, the first: {problems[0]}", result)
    return result


def _show_report(rows: list[dict[str, Any]]) -> None:
    shown: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        shown.setdefault((row["kernel"].split("[")[0], row["arch"]), []).append(row)
    lines = [
        (kernel, arch, len(group), max(row["registers"] for row in group), sum(row["spill_bytes"] for row in group))
        for (kernel, arch), group in shown.items()
    ]
    table("CUDA kernels", ["kernel", "arch", "instances", "most registers", "spilled bytes"], lines)


def add_doctor(cli: CommandLine) -> None:
    """Add ``doctor`` to a command line."""
    cli.command(
        "doctor",
        _doctor,
        "show installed libraries, driver and compilers, what would fail, and the remedy",
        "core-kernels doctor\ncore-kernels doctor --json doctor.json",
    )


def _doctor(args: argparse.Namespace) -> dict[str, Any]:
    from core_kernels.kernels.cuda.doctor import examine

    found = examine()
    versions = [(name, version or "not installed") for name, version in found["libraries"].items()]
    versions += [(name, version or "not found") for name, version in found["compilers"].items()]
    table("Installed", ["library or compiler", "version"], versions)
    rows = [("yes" if one["ok"] else "no", one["what"], one["fact"], one["remedy"]) for one in found["findings"]]
    table("What works", ["works", "what", "found", "remedy"], rows)
    return found
