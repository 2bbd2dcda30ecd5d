"""The ``core-kernels`` command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_kernels._version import __version__
from core_kernels.console import CommandLine, format_bytes, format_seconds, progress, say, table
from core_kernels.errors import argument_error
from core_kernels.kernels.cuda.commands import add_compile, add_doctor

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    description = "Measure this machine, compile the CUDA kernels, and see what is installed."
    cli = CommandLine("core-kernels", description, __version__)
    _add_calibrate(cli)
    add_compile(cli)
    add_doctor(cli)
    return cli.run(argv)


def _add_calibrate(cli: CommandLine) -> None:
    parser = cli.command(
        "calibrate",
        _calibrate,
        "measure collectives, copies, row gathers and kernel rates, and save them for planners",
        """
        core-kernels calibrate --ranks 2 --out interconnect.json
        torchrun --nproc-per-node 8 -m core_kernels calibrate --out interconnect.json
        """,
    )
    parser.add_argument("--ranks", type=int, default=2, help="local ranks to start; ignored under torchrun or Slurm")
    parser.add_argument("--out", metavar="FILE", help="where to save the interconnect")
    parser.add_argument("--shape", metavar="HxR", help="hosts and ranks of each; found out if left out")
    parser.add_argument("--budget-seconds", type=float, default=12.0, metavar="S", help="about how long to measure")


def _calibrate(args: argparse.Namespace) -> dict[str, Any] | None:
    from core_kernels.interconnect import Interconnect
    from core_kernels.launch import current_group, run_ranks

    _check(args)
    if "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        group = current_group()
        _check_shape(args.shape, group.size)
        document = _measure(group, args.shape, args.budget_seconds)
        if group.rank != 0:
            return None
    else:
        _check_shape(args.shape, args.ranks)
        with progress(f"measuring on {args.ranks} ranks", None):
            document = run_ranks(_measure, args.ranks, args.shape, args.budget_seconds)[0]
    interconnect = Interconnect.from_dict(document)
    _show(interconnect)
    if args.out:
        interconnect.save(args.out)
        say(f"saved {args.out} (fingerprint {interconnect.fingerprint})")
    return {**document, "fingerprint": interconnect.fingerprint}


def _check(args: argparse.Namespace) -> None:
    """Refuse before minutes of measuring what would fail after them."""
    if args.ranks < 1:
        raise argument_error("--ranks", args.ranks, "at least 1", "pass the number of local ranks, such as 2")
    if not args.budget_seconds > 0:
        raise argument_error("--budget-seconds", args.budget_seconds, "a positive number", "pass for example 12")
    if args.out and not Path(args.out).resolve().parent.is_dir():
        raise argument_error("--out", args.out, "a file in a folder that exists", "make the folder first")


def _check_shape(shape: str | None, num_ranks: int) -> None:
    parts = shape.split("x") if shape else []
    if shape and not (
        len(parts) == 2 and all(p.isdigit() for p in parts) and int(parts[0]) * int(parts[1]) == num_ranks
    ):
        expected = f"HxR, H hosts with R ranks each, {num_ranks} ranks together"
        raise argument_error("--shape", shape, expected, f"pass for example 1x{num_ranks}, or leave it out")


def _measure(group: Any, shape: str | None, budget_seconds: float) -> dict[str, Any]:
    from core_kernels.interconnect import Interconnect

    return Interconnect.measure(group, shape, budget_seconds).to_dict()


def _show(interconnect: Any) -> None:
    rows = []
    for shape, curves in interconnect.curves.items():
        for name, curve in curves.items():
            largest, slowest = curve.num_bytes[-1], curve.seconds[-1]
            rate = f"{format_bytes(largest / slowest)}/s"
            rows.append((name, shape, format_seconds(curve.seconds[0]), format_bytes(largest), rate))
    table("Interconnect, measured", ["operation", "shape", "latency", "largest size", "rate there"], rows)
    table("Kernel rates", ["rate", "per second"], [(name, f"{rate:.3g}") for name, rate in interconnect.rates.items()])
