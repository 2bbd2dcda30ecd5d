"""Every CUDA kernel instance compiles to machine code, without a device, within its bounds of registers and spills."""

import json
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from core_kernels.cli import main
from core_kernels.errors import ArgumentError, MissingDependencyError
from core_kernels.kernels.cuda import _device, compiler, doctor, numba_random, report
from core_kernels.kernels.cuda._source import kernel_source, registered_instances


def _compiler_or_none():
    try:
        return compiler.find_compiler()
    except MissingDependencyError:
        return None


COMPILER = _compiler_or_none()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="neither NVRTC (cuda-bindings) nor nvcc is installed")


def check_bounds(architectures, instances):
    rows = report.compile_report(architectures, instances)
    assert len(rows) == len(architectures) * len(instances)
    assert report.find_problems(rows, COMPILER) == []
    assert {row["spill_bytes"] for row in rows} == {0}


@needs_compiler
@pytest.mark.timeout(400)
def test_every_instance_compiles_within_its_bounds():
    check_bounds(["sm_90"], registered_instances())


@needs_compiler
@pytest.mark.timeout(400)
def test_every_kernel_compiles_for_the_other_architectures():
    # One instance of each: what differs between architectures is the assembler. The next test takes them all.
    first_of = {one.labels["kernel"]: one for one in reversed(registered_instances())}
    check_bounds([arch for arch in report.ARCHITECTURES if arch != "sm_90"], list(first_of.values()))


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_instance_compiles_for_every_architecture():
    check_bounds(report.ARCHITECTURES, registered_instances())


def test_the_bounds_bite():
    golden = json.loads(report.GOLDEN_FILE.read_text())["nvcc"]
    kernel, dtype, index = "spmm_sum[vec=4]", "float32", "int64"
    expected = golden[f"{kernel} {dtype} {index}"]["sm_90"]
    row = {"kernel": kernel, "dtype": dtype, "index": index, "arch": "sm_90", "registers": expected, "spill_bytes": 0}
    assert report.find_problems([row], "nvcc") == []
    for change, message in (
        ({"registers": expected + 9}, "expected"),
        ({"registers": expected - 9}, "expected"),
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"kernel": "unheard_of"}, "not in the golden file"),
    ):
        (problem,) = report.find_problems([{**row, **change}], "nvcc")
        assert message in problem


@needs_compiler
def test_text_of_a_generated_kernel_compiles_and_runs_through_the_same_checks():
    text = """
    #include "rows.cuh"
    template <class T>
    __global__ void scale(const T* x, T* out, core::i64 count, double factor) {
        core::i64 i = core::global_thread();
        if (i < count) out[i] = core::narrow<T>(core::widen(x[i]) * core::Accumulator<T>(factor));
    }
    """
    names = ("scale<float>", "scale<core::bf16>")
    compiled = compiler.compile_kernels(text, names, "sm_90")
    assert set(compiled.symbols) == set(compiled.usage) == set(names)
    assert compiled.cubin[:4] == b"\x7fELF"
    with pytest.raises(compiler.CompileError, match="nonsense"):
        compiler.compile_kernels("__global__ void k() { nonsense(); }", ("k",), "sm_90")
    if shutil.which("g++"):
        from core_kernels.testing import emulator

        x, out = torch.randn(200).bfloat16(), torch.empty(200, dtype=torch.bfloat16)
        emulator.run_source(text, "scale<core::bf16>", (2,), (128,), [x, out, 200, 3.0])
        torch.testing.assert_close(out, x * 3)


@needs_compiler
def test_compile_command_writes_the_report(tmp_path, monkeypatch, capsys):
    few = [one for one in registered_instances() if one.source == "relabel.cuh"]
    monkeypatch.setattr(report, "registered_instances", lambda: few)
    file = tmp_path / "out" / "registers.json"
    assert main(["compile", "--arch", "sm_80,sm_90", "--report", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert len(rows) == 2 * len(few)
    assert all(set(row) == {"kernel", "dtype", "index", "arch", "registers", "spill_bytes"} for row in rows)
    assert main(["compile", "--arch", "volta"]) == 2
    assert "sm_90" in capsys.readouterr().err


def test_architectures_are_checked():
    with pytest.raises(ArgumentError, match="sm_90"):
        report.compile_report(["compute_90"])


def test_compiler_log_is_read():
    log = (
        "ptxas info    : Compiling entry function '_Zk' for 'sm_90'\n"
        "ptxas info    : Function properties for _Zk\n"
        "    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 0 barriers\n"
    )
    assert compiler._usage(log, {"k": "_Zk"}) == {"k": compiler.KernelUsage(40, 16)}
    assert compiler._usage(log, {"other": "_Zother"}) == {}


def test_a_report_without_registers_is_an_error(monkeypatch):
    monkeypatch.setattr(report, "compile_kernels", lambda *_: compiler.Compiled(b"", {}, {}))
    with pytest.raises(compiler.CompileError, match="no registers"):
        report.compile_report(["sm_90"], registered_instances(["relabel"]))


def test_doctor_shows_findings_with_remedies(tmp_path, capsys):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["libraries"]["torch"] == torch.__version__
    assert all(one["ok"] or one["remedy"] for one in found["findings"])
    assert "What works" in capsys.readouterr().out


def test_doctor_survives_broken_libraries(monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("this library\nis broken")

    monkeypatch.setattr(doctor, "_version", lambda _: None)
    for probe in ("_driver", "_torch_cuda", "_devices", "_nvrtc_version", "_tool_version"):
        monkeypatch.setattr(doctor, probe, broken)
    found = doctor.examine()
    assert found["driver"] == "unusable: RuntimeError: this library"
    assert not any(one["ok"] for one in found["findings"])


class _FakeCupy(types.ModuleType):
    """Records what would reach the driver."""

    def __init__(self):
        super().__init__("cupy")
        self.launches, self.modules = [], []

        class Context:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                return None

        class Stream(Context):
            @classmethod
            def from_external(cls, stream):
                assert stream.__cuda_stream__() == (0, 77)
                return cls()

        self.cuda = types.SimpleNamespace(Device=lambda index: Context(), Stream=Stream)

    def RawModule(self, **arguments):
        self.modules.append(arguments)
        record = lambda grid, block, args: self.launches.append((grid, block, args))  # noqa: E731
        return types.SimpleNamespace(get_function=lambda name: record)


@pytest.mark.parametrize("with_nvrtc", [False, True])
def test_device_launch_hands_source_or_cubin_and_64_bit_arguments_to_cupy(monkeypatch, tmp_path, with_nvrtc):
    fake = _FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: types.SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(_device, "_has_nvrtc", lambda: with_nvrtc)
    monkeypatch.setenv("SEXTET_CACHE", str(tmp_path))
    compiled = compiler.Compiled(b"code", {"core::mark_first": "_Zmark"}, {})
    monkeypatch.setattr(_device, "compile_kernels", lambda *_: compiled)
    monkeypatch.setattr(_device, "compiler_version", lambda: "nvrtc 13.0")
    for cached in (_device._cupy, _device._kernel, _device._function_of):
        cached.cache_clear()
    instance = next(one for one in registered_instances() if one.kernel == "mark_first")
    x = torch.zeros(3)
    try:
        _device.launch(instance, (5, 1), 128, (x, None, 7, 0.5, True), torch.device("cuda", 0))
    finally:
        for cached in (_device._cupy, _device._kernel, _device._function_of):
            cached.cache_clear()
    ((grid, block, args),) = fake.launches
    assert (grid, block) == ((5, 1, 1), (128, 1, 1))
    assert [type(one) for one in args] == [np.uint64, np.uint64, np.int64, np.float64, np.int64]
    assert list(args) == [x.data_ptr(), 0, 7, 0.5, 1]
    (arguments,) = fake.modules
    if with_nvrtc:
        assert Path(arguments["path"]).read_bytes() == b"code"
    else:
        assert arguments["name_expressions"] == ("core::mark_first",)
        assert arguments["code"] == kernel_source("relabel.cuh")
        assert "#include" not in arguments["code"]


#: CPU sessions fetch no CUDA libraries. The NVVM of a toolkit is not enough: numba-cuda asks NVRTC which devices exist.
NO_NUMBA_CUDA = "numba-cuda is not installed: NVRTC and NVVM, 350 MB, would come with it; install core-kernels[cuda13]"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_numba_kernels_compile_to_ptx_without_a_device(capability):
    pytest.importorskip("numba_cuda", reason=NO_NUMBA_CUDA)
    ptx = numba_random.compile_random_bits(capability)
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert ".visible .entry" in ptx


def test_numba_kernels_name_what_is_missing(monkeypatch):
    numba_random._numba_cuda.cache_clear()
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    with pytest.raises(MissingDependencyError, match=r"core-kernels\[cuda13\]"):
        numba_random.compile_random_bits((9, 0))
    with pytest.raises(ArgumentError, match="CUDA tensor"):
        numba_random.random_bits(0, 0, 0, torch.arange(3), torch.arange(3))


def test_emulator_and_compiler_see_the_same_files():
    assert {one.source for one in registered_instances()} == {
        path.name for path in report.GOLDEN_FILE.parent.glob("*.cuh") if "__global__" in path.read_text()
    }
