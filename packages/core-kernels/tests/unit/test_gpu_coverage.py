"""Without a device: the tests marked ``gpu`` are whole, import, and hold a case for every operator and layer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core_kernels import backend, nn, ops
from core_kernels.ops._schemas import OPERATORS
from core_kernels.testing.emulator import compiler_skip_reason
from core_kernels.testing.operator_cases import operator_cases

GPU_TESTS = Path(__file__).parents[1] / "gpu"


def load(name):
    spec = importlib.util.spec_from_file_location(f"gpu_tests_{name}", GPU_TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_is_marked_and_collects_without_a_device():
    files = sorted(GPU_TESTS.glob("test_*.py"))
    for file in files:
        assert "pytest.mark.gpu" in file.read_text(), file
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(GPU_TESTS)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    order = [line.split("::")[0].rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line]
    assert set(order) == {file.name for file in files}
    assert order[-1] == "test_rates.py", "the table of rates comes last"


def test_every_raw_operator_has_a_case_on_the_device():
    covered = {case.op for case in operator_cases(torch.float32, torch.int64)}
    assert covered == {op for op in OPERATORS if not op.endswith("_out")}
    assert "operator_cases" in (GPU_TESTS / "test_cuda_kernels.py").read_text()


def test_every_public_operator_has_a_call_on_the_device():
    assert set(load("test_public_ops_gpu").CALLS) == set(ops.__all__)


def test_every_layer_has_a_case_on_the_device():
    layers = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)}
    module = load("test_layers_gpu")
    assert {type(case.make(nn, 4)).__name__ for case in module.CASES.values()} == layers
    assert {type(module.CASES[name].make(nn, 4)).__name__ for name in module.COMMON} == layers


def test_calls_on_the_device_are_right_on_the_cpu():
    # Each call gives on one implementation what it gives on another, so that on a device only the device is tested.
    module = load("test_public_ops_gpu")
    for name in module.CALLS:
        with backend("torch"):
            expected = module.results_of(name, "cpu")
        for found, one in zip(module.results_of(name, "cpu"), expected, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(compiler_skip_reason() is not None, reason=str(compiler_skip_reason()))
def test_layer_checks_for_the_device_pass_on_emulated_kernels():
    module = load("test_layers_gpu")
    with backend("emulate"):
        for name in module.COMMON:
            module.check_layer(name, 3, "cpu", num_nodes=12, num_edges=40)
