"""Launches on a GPU: machine code from this package's cache or CuPy's compiler, run by CuPy on torch's current stream.

Instances of one source that share their types are compiled together, at the first use of one of them. With NVRTC from
``cuda.bindings`` the cubin is kept in this package's cache under the hash of source, architecture and compiler; without
it CuPy compiles the same text and keeps it in its own cache.

Nothing here is imported before a CUDA tensor arrives.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_kernels._user_cache import cache_subfolder, write_atomically
from core_kernels.errors import MissingDependencyError
from core_kernels.kernels.cuda._instances import Instance
from core_kernels.kernels.cuda._source import digest, flatten, kernel_source, registered_instances
from core_kernels.kernels.cuda.compiler import compile_kernels, compiler_version, find_compiler

__all__ = ["cubin_of", "launch", "launch_source"]

_OPTIONS = ("-std=c++17",)
_lock = threading.Lock()


class _TorchStream:
    """Hands torch's stream to CuPy by the CUDA stream protocol, which older torch streams do not speak."""

    def __init__(self, pointer: int):
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.pointer)


@functools.cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as missing:
        version = (torch.version.cuda or "13").split(".")[0]
        raise MissingDependencyError(
            f"CUDA kernels need CuPy, which cannot be imported ({missing}); torch is built for CUDA "
            f"{torch.version.cuda}; install core-kernels[cuda{version}]"
        ) from missing
    return cupy


def _stream(cupy: Any, device: torch.device) -> Any:
    pointer = torch.cuda.current_stream(device).cuda_stream
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_TorchStream(pointer))
    return cupy.cuda.ExternalStream(pointer)  # CuPy before 14


def launch(
    instance: Instance, grid: tuple[int, int], block: int, args: Sequence[Tensor | float | None], device: torch.device
) -> None:
    """Start a kernel on the current stream of ``device``; see :func:`core_kernels.kernels.cuda._launch.launch`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    kernel = _kernel(instance, index)
    _start(kernel, (*grid, 1), (block, 1, 1), args, index)


def launch_source(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Tensor | float | None],
    device: torch.device,
) -> None:
    """Compile CUDA C++ text and start one of its kernels on the current stream of ``device``.

    Args:
        source: The text; may include this package's ``.cuh`` files by name.
        kernel: C++ name of the kernel, with its template arguments.
        grid: Blocks along x, y, z; missing ones are 1.
        block: Threads along x, y, z; missing ones are 1.
        args: The kernel's arguments: pointers (tensors, ``None``) and 64-bit scalars.
        device: A CUDA device.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _function_of(source, (kernel,), index)(kernel)
    _start(function, (*grid, 1, 1, 1)[:3], (*block, 1, 1, 1)[:3], args, index)


def _start(kernel: Any, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], index: int) -> None:
    cupy = _cupy()
    packed = tuple(_pack(arg) for arg in args)
    with cupy.cuda.Device(index), _stream(cupy, torch.device("cuda", index)):
        kernel(tuple(grid), tuple(block), packed)


def _pack(arg: Tensor | float | None) -> np.generic:
    if arg is None:
        return np.uint64(0)
    if isinstance(arg, Tensor):
        return np.uint64(arg.data_ptr())
    return np.float64(arg) if isinstance(arg, float) else np.int64(arg)


@functools.cache
def _kernel(instance: Instance, index: int) -> Any:
    group = tuple(
        other.expression
        for other in registered_instances()
        if (other.source, other.dtype, other.index) == (instance.source, instance.dtype, instance.index)
    )
    return _function_of(kernel_source(instance.source), group, index)(instance.expression)


@functools.cache
def _function_of(source: str, expressions: tuple[str, ...], index: int) -> Callable[[str], Any]:
    """Compile and load kernels on a device; returns the function from an expression to the loaded kernel."""
    cupy = _cupy()
    with _lock, cupy.cuda.Device(index):
        if _has_nvrtc():
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability(index))
            path, symbols = cubin_of(source, expressions, arch)
            module = cupy.RawModule(path=path)
            return lambda expression: module.get_function(symbols[expression])
        module = cupy.RawModule(code=flatten(source), options=_OPTIONS, name_expressions=expressions)
        return module.get_function


def _has_nvrtc() -> bool:
    try:
        return find_compiler() == "nvrtc"
    except MissingDependencyError:
        return False


def cubin_of(source: str, expressions: Sequence[str], arch: str) -> tuple[str, dict[str, str]]:
    """Return the path of a cached cubin, compiled if needed, and the symbol of each kernel expression.

    Args:
        source: CUDA C++ text.
        expressions: C++ names of its kernels.
        arch: For example ``"sm_90"``.
    """
    folder = cache_subfolder("cubin")
    name = digest(flatten(source), *expressions, arch, compiler_version())
    cubin, index = folder / f"{name}.cubin", folder / f"{name}.json"
    if not index.exists():
        compiled = compile_kernels(source, expressions, arch)
        write_atomically(cubin, compiled.cubin)
        write_atomically(index, json.dumps(compiled.symbols).encode())  # last: a reader that sees it finds the cubin
    return str(cubin), json.loads(index.read_text())
