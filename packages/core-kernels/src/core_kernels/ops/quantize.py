"""Row quantisation: each row becomes 8- or 4-bit codes, a scale and an offset.

The codes split the row's range into ``2**bits - 1`` equal steps; a value is rounded to the nearest. The error of a
value is at most half a step, ``scale / 2``, and the row's minimum is exact. Values must be finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError, argument_error
from core_kernels.ops import _library
from core_kernels.ops._checks import check_floating

__all__ = ["dequantize_rows", "quantize_rows"]


def quantize_rows(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise each row to its own range.

    Args:
        x: Rows, floating point (computed in fp32), finite.
        bits: 8, or 4: two codes per byte, the even column in the low half.

    Returns:
        ``(codes, scale, offset)``: uint8 codes, fp32 step and minimum of each row.

    Raises:
        ArgumentError: Other ``bits``, or ``x`` is not a matrix.
        ArgumentTypeError: ``x`` is not floating point.

    Shapes: ``x`` [rows, width] -> codes [rows, width] or [rows, ceil(width / 2)], scale and offset [rows].

    >>> codes, scale, offset = quantize_rows(torch.tensor([[0.0, 1.0, 2.55]]))
    >>> codes.tolist()
    [[0, 100, 255]]
    """
    _check_bits(bits)
    check_floating("x", x)
    if x.dim() != 2:
        raise argument_error(
            "x.shape", tuple(x.shape), "(rows, width)", "flatten trailing dimensions with x.flatten(1)"
        )
    return _quantize(x, bits)


def dequantize_rows(codes: Tensor, scale: Tensor, offset: Tensor, bits: int = 8, width: int | None = None) -> Tensor:
    """Return the values that codes stand for: ``offset + scale * code``.

    Args:
        codes: uint8 codes of :func:`quantize_rows`.
        scale: fp32 [rows].
        offset: fp32 [rows].
        bits: As quantised.
        width: Columns of the result; needed for an odd width at 4 bits, left out otherwise.

    Returns:
        fp32 [rows, width].

    Raises:
        ArgumentError: Other ``bits``, or shapes that do not fit.
        ArgumentTypeError: Codes are not uint8.

    >>> dequantize_rows(*quantize_rows(torch.tensor([[0.0, 5.0, 15.0]]), bits=4), bits=4, width=3).tolist()
    [[0.0, 5.0, 15.0]]
    """
    _check_bits(bits)
    if codes.dtype != torch.uint8:
        raise ArgumentTypeError(f"codes are {codes.dtype}; expected uint8; pass what quantize_rows returned")
    per_byte = 8 // bits
    if width is None:
        width = codes.shape[1] * per_byte
    if codes.dim() != 2 or -(-width // per_byte) != codes.shape[1]:
        raise argument_error(
            "width", width, f"{per_byte} columns per byte of codes {tuple(codes.shape)}", "pass the width quantised"
        )
    for name, values in (("scale", scale), ("offset", offset)):
        if values.shape != codes.shape[:1] or values.dtype != torch.float32:
            found = f"{values.dtype} {tuple(values.shape)}"
            raise argument_error(name, found, f"fp32 [{codes.shape[0]}]", "pass what quantize_rows returned")
    return _dequantize(codes, scale, offset, bits, width)


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise argument_error("bits", bits, "8 or 4", "use 8 unless memory is the limit")


def _dispatch_quantize(x, bits):
    codes, scale, offset = _fake_quantize(x, bits)
    x = _library.contiguous_rows("quantize_rows", "x", x)
    _library.run("quantize_rows", x, x, bits, codes, scale, offset)
    return codes, scale, offset


def _fake_quantize(x, bits):
    width = x.shape[1] if bits == 8 else (x.shape[1] + 1) // 2
    codes = x.new_empty(x.shape[0], width, dtype=torch.uint8)
    return codes, x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32)


def _dispatch_dequantize(codes, scale, offset, bits, width):
    out = scale.new_empty(codes.shape[0], width)
    arrays = (codes.contiguous(), scale.contiguous(), offset.contiguous())
    _library.run("dequantize_rows", codes, *arrays, bits, width, out)
    return out


def _fake_dequantize(codes, scale, offset, bits, width):
    return scale.new_empty(codes.shape[0], width)


_quantize = _library.register("quantize_rows", _dispatch_quantize, _fake_quantize)
_dequantize = _library.register("dequantize_rows", _dispatch_dequantize, _fake_dequantize)
