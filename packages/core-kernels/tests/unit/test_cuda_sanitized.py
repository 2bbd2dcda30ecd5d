"""The CUDA C++ sources under AddressSanitizer and UndefinedBehaviorSanitizer, each run in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core_kernels.errors import MissingDependencyError
from core_kernels.testing import emulator

SAN = "core_kernels.testing.emulator.sanitized"
FAULTS = Path(__file__).parent / "planted_fault.cuh"


@pytest.fixture(scope="module")
def sanitized_python():
    """Run ``python -m core_kernels.testing.emulator.sanitized`` with the sanitizers' runtime preloaded."""
    if reason := emulator.compiler_skip_reason():
        pytest.skip(reason)
    try:
        environment = {**os.environ, **emulator.sanitizer_environment()}
    except MissingDependencyError as missing:
        pytest.skip(str(missing))

    def run(*arguments):
        command = [sys.executable, "-m", SAN, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)

    return run


def test_sanitized_kernels_run_every_operator_clean(sanitized_python):
    done = sanitized_python("operators", "float32", "int32")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "operators clean" in done.stdout


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("read_past_the_end", "heap-buffer-overflow"),
        ("read_unaligned", "misaligned address"),
        ("overflow", "signed integer overflow"),
    ],
)
def test_sanitized_build_stops_at_planted_faults(sanitized_python, kernel, message):
    done = sanitized_python("fault", FAULTS, kernel)
    assert done.returncode == 99, f"{kernel} was not caught: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert message in done.stderr
    assert "planted_fault.cuh" in done.stderr or "common.cuh" in done.stderr, done.stderr[:3000]


def test_sanitized_build_lets_a_correct_kernel_pass(sanitized_python):
    done = sanitized_python("fault", FAULTS, "correct")
    assert done.returncode == 0, done.stderr[-3000:]
