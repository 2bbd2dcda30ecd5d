"""A plain sampled GNN, for the command line, tests and examples: layers, ReLU and keyed dropout between them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import nn as graph_nn
from gnn_parallel.dropout import keyed_dropout
from gnn_parallel.errors import input_error

__all__ = ["MODELS", "SampledGNN", "make_model"]

MODELS = ("sage", "gcn", "gin", "gat", "gatv2")


class SampledGNN(nn.Module):
    """A stack of graph layers over sampled blocks.

    Args:
        convs: The layers, input layer first.
        dropout: Share of activations zeroed between layers while training, the same on every rank.
    """

    def __init__(self, convs: list[nn.Module], dropout: float = 0.0):
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.dropout = dropout

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        """Return one row per destination of the last block.

        Args:
            blocks: One block per layer, input layer first.
            x: Feature rows of the first block's sources.
        """
        for depth, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv(block, x)
            if depth < len(self.convs) - 1:
                x = F.relu(x)
            if depth < len(self.convs) - 1 and self.training and self.dropout:
                x = keyed_dropout(x, block.dst_ids, self.dropout, layer=depth)
        return x


def make_model(
    name: str,
    in_width: int,
    hidden: int,
    num_classes: int,
    num_layers: int,
    *,
    heads: int = 4,
    dropout: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> SampledGNN:
    """Build a model with equal weights on every rank.

    Args:
        name: One of :data:`MODELS`.
        in_width: Columns of a feature row.
        hidden: Columns between layers; attention layers share them out over heads.
        num_classes: Columns of the result.
        num_layers: Number of layers, at least 1.
        heads: Heads of attention layers; divides ``hidden``.
        dropout: Between layers.
        seed: Seed of the weights.
        dtype: Type of the weights.

    Raises:
        InputError: An unknown name, or heads that do not divide hidden.
    """
    if name not in MODELS:
        raise input_error("model", name, f"one of {', '.join(MODELS)}", "choose one of them")
    for label, value in (("hidden", hidden), ("num_layers", num_layers), ("heads", heads)):
        if value < 1:
            raise input_error(label, value, "at least 1", "pass a positive number")
    if name.startswith("gat") and hidden % heads:
        raise input_error("heads", heads, f"a divisor of hidden={hidden}", "choose another number of heads")
    if not 0 <= dropout < 1:
        raise input_error("dropout", dropout, "a share in [0, 1)", "pass 0 for none")
    widths = [in_width] + [hidden] * (num_layers - 1) + [num_classes]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convs = [
            _make_layer(name, width_in, width_out, heads, is_last=depth == num_layers - 1)
            for depth, (width_in, width_out) in enumerate(itertools.pairwise(widths))
        ]
    return SampledGNN(convs, dropout).to(dtype)


def _make_layer(name: str, width_in: int, width_out: int, heads: int, is_last: bool) -> nn.Module:
    if name == "sage":
        return graph_nn.SAGEConv(width_in, width_out)
    if name == "gcn":
        return graph_nn.GCNConv(width_in, width_out)
    if name == "gin":
        return graph_nn.GINConv(
            nn.Sequential(nn.Linear(width_in, width_out), nn.ReLU(), nn.Linear(width_out, width_out))
        )
    layer = graph_nn.GATConv if name == "gat" else graph_nn.GATv2Conv
    if is_last:
        return layer(width_in, width_out, heads=heads, concat=False)
    return layer(width_in, width_out // heads, heads=heads)
