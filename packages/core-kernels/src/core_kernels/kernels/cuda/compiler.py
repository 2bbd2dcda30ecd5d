"""Compiles kernel sources to machine code without a device: NVRTC when ``cuda.bindings`` is installed, nvcc otherwise.

Both report what ptxas measured of each kernel: registers per thread and bytes spilled to memory. The result is a cubin,
never PTX: machine code has no version that an older driver could refuse.

Callers may not assume equal registers from different compiler versions: comparisons need a tolerance.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_kernels.errors import CoreKernelsError, MissingDependencyError
from core_kernels.kernels.cuda._source import flatten

__all__ = ["CompileError", "Compiled", "KernelUsage", "compile_kernels", "compiler_version", "find_compiler"]

_OPTIONS = ("-std=c++17", "-lineinfo")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class CompileError(CoreKernelsError, RuntimeError):
    """CUDA C++ text does not compile; the message holds the compiler's own."""


@dataclass(frozen=True)
class KernelUsage:
    """What one kernel takes of a multiprocessor: registers per thread, bytes spilled (stores and loads)."""

    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Compiled:
    """Machine code of some kernels.

    Attributes:
        cubin: The code for one architecture.
        symbols: Name in the cubin of each kernel expression.
        usage: Registers and spills of each kernel expression that ptxas reported; a compiler that answers from a cache
            of its own may report none.
    """

    cubin: bytes
    symbols: dict[str, str]
    usage: dict[str, KernelUsage]


@functools.cache
def find_compiler() -> str:
    """Return ``"nvrtc"`` or ``"nvcc"``, whichever this machine has.

    Raises:
        MissingDependencyError: Neither is installed.
    """
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
        return "nvrtc"
    except Exception:  # the library behind the bindings is loaded at the first call and may be absent in many ways
        if shutil.which("nvcc"):
            return "nvcc"
    raise MissingDependencyError(
        "no CUDA compiler was found: expected NVRTC through cuda-bindings, or nvcc on PATH; "
        "install core-kernels[cuda13] (or [cuda12]), or a CUDA toolkit"
    )


@functools.cache
def compiler_version() -> str:
    """Return the compiler and its version, for example ``"nvrtc 13.0"``."""
    if find_compiler() == "nvrtc":
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        return f"nvrtc {major}.{minor}"
    shown = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+\.\d+)", shown)
    return f"nvcc {found[1] if found else 'of unknown version'}"


def compile_kernels(source: str, expressions: Sequence[str], arch: str) -> Compiled:
    """Compile kernels of one text for one architecture.

    Args:
        source: CUDA C++ text; may include this package's ``.cuh`` files by name.
        expressions: C++ names of the kernels, with template arguments.
        arch: For example ``"sm_90"``.

    Returns:
        The code and what ptxas says of it.

    Raises:
        CompileError: The text does not compile.
        MissingDependencyError: There is no compiler.
    """
    text = flatten(source)
    if find_compiler() == "nvrtc":
        return _compile_nvrtc(text, expressions, arch)
    return _compile_nvcc(text, expressions, arch)


def _compile_nvrtc(text: str, expressions: Sequence[str], arch: str) -> Compiled:
    from cuda.bindings import nvrtc

    def checked(result: tuple) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC answers {result[0].name} for {arch}: {log()[:4000]}")
        return result[1] if len(result) == 2 else None

    def log() -> str:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = b" " * size
        nvrtc.nvrtcGetProgramLog(program, buffer)
        return buffer.decode(errors="replace").strip("\0 \n")

    error, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], [])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC cannot make a program: {error.name}")
    try:
        for expression in expressions:
            checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *_OPTIONS, "--ptxas-options=-v")]
        checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        symbols = {}
        for expression in expressions:
            symbols[expression] = checked(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode()
        cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return Compiled(cubin, symbols, _usage(log(), symbols))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compile_nvcc(text: str, expressions: Sequence[str], arch: str) -> Compiled:
    # Host code that mentions a kernel makes nvcc instantiate it; the order of its symbols tells which is which.
    mentions = "".join(f"    (const void*)&{expression},\n" for expression in expressions)
    text += f"\nconst void* core_kernels_instances[] = {{\n{mentions}}};\n"
    with tempfile.TemporaryDirectory() as scratch:
        code, cubin = Path(scratch) / "kernels.cu", Path(scratch) / "kernels.cubin"
        code.write_text(text)
        command = ["nvcc", f"-arch={arch}", *_OPTIONS, "-Xptxas=-v", "-cubin", str(code), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": scratch})
        if done.returncode:
            raise CompileError(f"nvcc fails for {arch}: {done.stderr[:4000]}")
        log = done.stdout + done.stderr
        symbols = _match_symbols(expressions, [match[1] for match in _ENTRY.finditer(log)])
        return Compiled(cubin.read_bytes(), symbols, _usage(log, symbols))


def _match_symbols(expressions: Sequence[str], mangled: Sequence[str]) -> dict[str, str]:
    shown = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    symbol_of = {_plain_name(name): symbol for name, symbol in zip(shown.splitlines(), mangled, strict=True)}
    try:
        return {expression: symbol_of[_plain_name(expression)] for expression in expressions}
    except KeyError as missing:
        raise CompileError(f"nvcc made no kernel {missing}; it made {sorted(symbol_of)}") from None


def _plain_name(name: str) -> str:
    """Spell a kernel's name and template arguments in one way, without parameters."""
    name = re.sub(r"\((?:int|bool)\)", "", name.removeprefix("void "))
    name = name[: _end_of_name(name)]
    for typedef, plain in (("core::i64", "long long"), ("core::i32", "int"), ("core::u64", "unsigned long long")):
        name = name.replace(typedef, plain)
    return re.sub(r"\s+", "", name)


def _end_of_name(name: str) -> int:
    depth = 0
    for position, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return position
    return len(name)


def _usage(log: str, symbols: dict[str, str]) -> dict[str, KernelUsage]:
    expression_of = {symbol: expression for expression, symbol in symbols.items()}
    usage: dict[str, KernelUsage] = {}
    current, spilled = None, 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            current = expression_of.get(match[1])
        elif match := _SPILLS.search(line):
            spilled = int(match[1]) + int(match[2])
        elif (match := _REGISTERS.search(line)) and current is not None:
            usage[current] = KernelUsage(int(match[1]), spilled)
            current, spilled = None, 0
    return usage
