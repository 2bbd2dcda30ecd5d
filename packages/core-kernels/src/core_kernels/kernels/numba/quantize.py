"""Row quantisation to 8 or 4 bits on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from core_kernels.kernels.numba._arrays import array
from core_kernels.kernels.numba._threads import run_ranges

__all__ = ["dequantize_rows", "quantize_rows"]

_HALF, _ZERO = np.float32(0.5), np.float32(0)


def quantize_rows(x, bits, codes, scale, offset):
    """Fill codes, scales and offsets of every row."""
    outputs = (array(codes), array(scale), array(offset))
    kernel = _quantize_8 if bits == 8 else _quantize_4
    run_ranges(kernel, x.shape[0], None, array(x.float()), *outputs, unit=x.shape[1] + 1)


def dequantize_rows(codes, scale, offset, bits, width, out):
    """Fill ``out`` with the values the codes stand for."""
    kernel = _dequantize_8 if bits == 8 else _dequantize_4
    run_ranges(kernel, out.shape[0], None, array(codes), array(scale), array(offset), array(out), unit=width + 1)


@njit(cache=True, nogil=True)
def _extremes(values):
    lowest = highest = values[0]
    for value in values:
        lowest = value if value < lowest else lowest
        highest = value if value > highest else highest
    return lowest, highest


@njit(cache=True, nogil=True)
def _quantize_row(values, levels, codes):
    """Write one code per value; return scale and offset."""
    lowest, highest = _extremes(values)
    scale = (highest - lowest) / levels
    if scale > _ZERO:
        for column in range(len(values)):
            code = np.floor((values[column] - lowest) / scale + _HALF)
            codes[column] = np.uint8(np.int32(min(code, levels)))
    else:
        codes[:] = 0
    return scale, lowest


@njit(cache=True, nogil=True)
def _quantize_8(start, stop, x, codes, scale, offset):
    for row in range(start, stop):
        if x.shape[1] > 0:
            scale[row], offset[row] = _quantize_row(x[row], np.float32(255), codes[row])
        else:
            scale[row] = offset[row] = 0


@njit(cache=True, nogil=True)
def _quantize_4(start, stop, x, codes, scale, offset):
    width = x.shape[1]
    row_codes = np.zeros(width + width % 2, np.uint8)
    for row in range(start, stop):
        if width > 0:
            scale[row], offset[row] = _quantize_row(x[row], np.float32(15), row_codes[:width])
        else:
            scale[row] = offset[row] = 0
        for pair in range(len(row_codes) // 2):
            codes[row, pair] = row_codes[2 * pair] | (row_codes[2 * pair + 1] << 4)


@njit(cache=True, nogil=True)
def _dequantize_8(start, stop, codes, scale, offset, out):
    for row in range(start, stop):
        for column in range(out.shape[1]):
            out[row, column] = offset[row] + scale[row] * np.float32(codes[row, column])


@njit(cache=True, nogil=True)
def _dequantize_4(start, stop, codes, scale, offset, out):
    for row in range(start, stop):
        for column in range(out.shape[1]):
            code = (codes[row, column // 2] >> (4 * (column % 2))) & 15
            out[row, column] = offset[row] + scale[row] * np.float32(code)
