"""The program that runs kernels under the sanitizers: ``python -m core_kernels.testing.emulator.sanitized``.

It must be started with :func:`core_kernels.testing.emulator.sanitizer_environment`, because the sanitizers' runtime has
to be loaded before anything allocates. Two forms::

    operators DTYPE INDEX        every operator's cases, compared with the reference
    fault FILE.cuh KERNEL        one kernel of a file, with arguments for the kernels named below

A fault ends the process with exit code 99 and a report on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run one of the two forms and return the exit code."""
    if argv[0] == "operators":
        run_operators(getattr(torch, argv[1]), getattr(torch, argv[2]))
    else:
        run_fault(Path(argv[1]), argv[2])
    return 0


def run_operators(dtype: torch.dtype, index: torch.dtype) -> None:
    """Run all cases of all operators, small and with a hub that is cut into chunks."""
    # Index-only kernels also come with the other index type: offsets and sorted places are int64.
    os.environ["CORE_KERNELS_EMULATOR_DTYPES"] = ",".join(
        str(one).removeprefix("torch.") for one in (dtype, index, torch.int64)
    )
    from core_kernels.testing import emulator
    from core_kernels.testing.operator_cases import compare, operator_cases, run_case

    emulator.build_all()
    count = 0
    for width, heads, hub in ((7, 1, 40), (12, 3, 40), (64, 4, 40), (3, 3, 9000)):
        for case in operator_cases(dtype, index, width, heads, hub=hub):
            compare(case, run_case(case, "emulate"))
            count += 1
    print(f"{count} cases of all operators clean")


def run_fault(source: Path, kernel: str) -> None:
    """Run a kernel of one file on four blocks of 32 threads."""
    from core_kernels.kernels.cuda._source import digest
    from core_kernels.testing import emulator

    x, out, number = torch.ones(100), torch.zeros(100), torch.zeros(1, dtype=torch.int64)
    arguments = {
        "read_past_the_end": [x, out, 100],
        "read_unaligned": [x, out],
        "overflow": [number, 1 << 40, 1 << 40],
    }
    # The file is included, so that reports name it; its hash makes an edited file a new library.
    text = f'#include "{source.resolve()}"\n// {digest(source.read_text())}\n'
    emulator.run_source(text, f"core::{kernel}", (4,), (32,), arguments.get(kernel, [x, out, 100]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
