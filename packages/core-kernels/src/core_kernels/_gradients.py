"""Gradients that cannot be differentiated again, and say so.

Kernels of gradients have no gradient formula of their own. Asked for second derivatives, torch would warn and go on
with numbers that may be wrong; here the second backward pass is refused. A first one with ``create_graph=True`` works.
"""

from __future__ import annotations

from typing import Any

import torch

from core_kernels.errors import CoreKernelsError

__all__ = ["first_derivative"]


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: str, gradient: torch.Tensor, *_: Any) -> torch.Tensor:
        ctx.operator = operator
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise CoreKernelsError(
            f"a second derivative of {ctx.operator} was asked for; expected first derivatives only; write this part "
            "with ops.spmm (sum or mean), ops.sddmm and ops.segment_softmax, which have second ones"
        )


def first_derivative(operator: str, gradient: torch.Tensor, *parents: torch.Tensor | None) -> torch.Tensor:
    """Return ``gradient``, such that differentiating it raises.

    Args:
        operator: What the message names.
        gradient: Computed without recording a graph.
        *parents: What the gradient depends on.
    """
    if not torch.is_grad_enabled():
        return gradient
    return _FirstDerivative.apply(operator, gradient, *parents)
