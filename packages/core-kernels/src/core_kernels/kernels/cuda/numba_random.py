"""Random bits on a GPU by Numba: the CPU kernels' own Python functions, compiled for the device.

The generator is a few lines of integer arithmetic that Numba already inlines into CPU kernels; compiling the same
functions is simpler than a kernel of its own, and cannot drift from them. One launch replaces some thirty torch calls.

``numba.cuda`` is imported at the first call. Callers may not assume a cheap launch: Numba takes tens of microseconds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from core_kernels.errors import MissingDependencyError, argument_error

__all__ = ["compile_random_bits", "random_bits"]

_BLOCK_THREADS = 128


@functools.cache
def _numba_cuda() -> Any:
    try:
        import numba_cuda  # noqa: F401  numba's own CUDA target is frozen; this package replaces it
        from numba import cuda
    except ImportError as missing:
        raise MissingDependencyError(
            f"Numba kernels on a GPU need numba-cuda, which is not installed ({missing}); install core-kernels[cuda13]"
        ) from missing
    return cuda


@functools.cache
def _kernel() -> Any:
    cuda = _numba_cuda()
    from core_kernels.kernels.numba.random import absorb, row_key, stream_key

    def fill_random_bits(rows, draws, seed, step, layer, out):
        i = cuda.grid(1)
        if i < out.shape[0]:
            out[i] = absorb(row_key(stream_key(seed, step, layer), rows[i]), draws[i])

    return fill_random_bits


@functools.cache
def _compiled_kernel() -> Any:
    return _numba_cuda().jit(_kernel())


def random_bits(seed: int, step: int, layer: int, rows: Tensor, draws: Tensor) -> Tensor:
    """Return the 64 random bits of every (row, draw): :func:`core_kernels.random.random_bits` in one launch.

    Args:
        seed: Seed.
        step: Training step or epoch.
        layer: Layer, hop or purpose.
        rows: int64 [n] on a CUDA device.
        draws: int64 [n] on the same device.

    Returns:
        int64 [n], bit-equal to the CPU's.

    Raises:
        ArgumentError: A tensor is not on a CUDA device.
        MissingDependencyError: numba-cuda is not installed.
    """
    for name, tensor in (("rows", rows), ("draws", draws)):
        if not tensor.is_cuda:
            raise argument_error(name, tensor.device, "a CUDA tensor", "use core_kernels.random.random_bits on the CPU")
    cuda = _numba_cuda()
    out = torch.empty_like(rows)
    if out.numel():
        stream = cuda.external_stream(torch.cuda.current_stream(rows.device).cuda_stream)
        arrays = [cuda.as_cuda_array(one) for one in (rows.contiguous(), draws.contiguous(), out)]
        launched = _compiled_kernel()[-(-out.numel() // _BLOCK_THREADS), _BLOCK_THREADS, stream]
        launched(*arrays[:2], seed, step, layer, arrays[2])
    return out


def compile_random_bits(capability: tuple[int, int]) -> str:
    """Compile the kernel to PTX; needs no device.

    Args:
        capability: Compute capability, for example ``(9, 0)``.

    Returns:
        The PTX text.

    Raises:
        MissingDependencyError: numba-cuda is not installed.
    """
    cuda = _numba_cuda()
    from numba import types

    vector = types.int64[::1]
    signature = types.void(vector, vector, types.int64, types.int64, types.int64, vector)
    return cuda.compile_ptx(_kernel(), signature, cc=capability)[0]
