"""Runs CUDA C++ kernels on the CPU: a thread block out of fibers, compiled by g++ from the unmodified sources."""

from __future__ import annotations

from core_kernels.testing.emulator.runner import (
    EmulatorError,
    block_window,
    build,
    build_all,
    compiler_skip_reason,
    run_library,
    run_source,
    sanitizer_environment,
    shuffle_seed,
)

__all__ = [
    "EmulatorError",
    "block_window",
    "build",
    "build_all",
    "compiler_skip_reason",
    "run_library",
    "run_source",
    "sanitizer_environment",
    "shuffle_seed",
]
