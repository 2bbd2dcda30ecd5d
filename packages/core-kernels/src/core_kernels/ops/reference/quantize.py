"""Row quantisation in plain torch."""

from __future__ import annotations

import torch

__all__ = ["dequantize_rows", "quantize_rows"]


def quantize_rows(x, bits, codes, scale, offset):
    """Fill codes, scale and offset: see the operator's meaning."""
    x, levels = x.float(), 2**bits - 1
    if x.shape[1] == 0:
        scale.zero_()
        offset.zero_()
        return
    offset.copy_(x.amin(1))
    scale.copy_((x.amax(1) - offset) / levels)
    steps = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    values = ((x - offset.unsqueeze(1)) / steps + 0.5).floor().clamp(max=levels).to(torch.uint8)
    values[scale <= 0] = 0
    if bits == 4:
        values = torch.nn.functional.pad(values, (0, x.shape[1] % 2))
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    codes.copy_(values)


def dequantize_rows(codes, scale, offset, bits, width, out):
    """Fill ``out``: see the operator's meaning."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, :width]
    out.copy_(offset.unsqueeze(1) + scale.unsqueeze(1) * codes.float())
