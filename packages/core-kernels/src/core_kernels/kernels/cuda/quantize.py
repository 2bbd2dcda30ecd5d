"""Launchers of ``quantize.cuh``: rows to 8 or 4 bits and back."""

from __future__ import annotations

from torch import Tensor

from core_kernels.kernels.cuda._instances import FLOATS, Kernel
from core_kernels.kernels.cuda._launch import launch_threads

__all__ = ["KERNELS", "dequantize_rows", "quantize_rows"]

_QUANTIZE = Kernel("quantize_rows", "quantize.cuh", FLOATS)
_DEQUANTIZE = Kernel("dequantize_rows", "quantize.cuh")
KERNELS = (_QUANTIZE, _DEQUANTIZE)


def _lanes(width: int) -> int:
    return min(32, 1 << max(0, width - 1).bit_length())


def quantize_rows(x: Tensor, bits: int, codes: Tensor, scale: Tensor, offset: Tensor) -> None:
    """Fill codes, scales and offsets of each row."""
    num_rows, width = x.shape
    if width == 0:
        scale.zero_()
        offset.zero_()
        return
    lanes = _lanes(width)
    args = (x, codes, scale, offset, num_rows, width, bits, lanes)
    launch_threads(_QUANTIZE.instance(x.dtype), num_rows * lanes, args, x.device)


def dequantize_rows(codes: Tensor, scale: Tensor, offset: Tensor, bits: int, width: int, out: Tensor) -> None:
    """Fill ``out`` with ``offset + scale * code``."""
    lanes = _lanes(width)
    args = (codes, scale, offset, out, out.shape[0], width, bits, lanes)
    launch_threads(_DEQUANTIZE.instance(), out.shape[0] * lanes if width else 0, args, codes.device)
