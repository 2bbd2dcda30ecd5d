"""Initial values of weights, as the layers of PyTorch Geometric draw them."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["glorot_", "linear"]


@torch.no_grad()
def glorot_(weight: torch.Tensor | None) -> None:
    """Fill a weight uniformly on +-sqrt(6 / (fan in + fan out)), the fans being its last two sizes."""
    if weight is not None:
        bound = math.sqrt(6 / max(weight.size(-2) + weight.size(-1), 1))
        weight.uniform_(-bound, bound)


def linear(in_channels: int, out_channels: int, bias: bool = False, glorot: bool = False) -> nn.Linear:
    """Return a linear map; ``glorot`` draws its weight so and sets its bias to 0."""
    layer = nn.Linear(in_channels, out_channels, bias=bias)
    if glorot:
        glorot_(layer.weight)
        if bias:
            nn.init.zeros_(layer.bias)
    return layer
