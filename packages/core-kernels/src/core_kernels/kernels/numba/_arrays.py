"""From torch tensors to what kernels take."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["array", "fill_through_float32", "is_half"]

_HALF = (torch.float16, torch.bfloat16)


def array(tensor: torch.Tensor | None) -> np.ndarray | None:
    """Return the tensor's memory as a NumPy array, without a copy; None stays None."""
    return None if tensor is None else tensor.detach().numpy()


def is_half(tensor: torch.Tensor) -> bool:
    """Return whether the kernels compute this dtype through float32."""
    return tensor.dtype in _HALF


def fill_through_float32(function, *args, num_outputs: int = 1) -> None:
    """Call an implementation with half-precision tensors widened and round its outputs back.

    Args:
        function: The implementation; fills its last ``num_outputs`` arguments.
        *args: Its arguments.
        num_outputs: How many outputs end the argument list.
    """
    inputs = [arg.float() if isinstance(arg, torch.Tensor) and is_half(arg) else arg for arg in args[:-num_outputs]]
    outputs = args[-num_outputs:]
    wide = [torch.empty(out.shape, dtype=torch.float32) if is_half(out) else out for out in outputs]
    function(*inputs, *wide)
    for out, value in zip(outputs, wide, strict=True):
        if value is not out:
            out.copy_(value)
