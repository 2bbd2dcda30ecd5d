"""DLRM, Wide & Deep, DeepFM and DCN: from dense numbers and pooled rows to a logit per sample.

Every model calls the collection once, in ``forward``, so that a pipeline can fetch ahead around it. All fields share
one width. Sources: "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019; "Wide &
Deep Learning for Recommender Systems", DLRS 2016; "DeepFM", IJCAI 2017; "DCN V2", WWW 2021.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recsys_embed.errors import input_error

__all__ = ["DCN", "DLRM", "MODELS", "ClickModel", "DeepFM", "WideDeep", "make_model"]


def mlp(widths: Sequence[int], last_linear: bool = False) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if last_linear else layers))


class ClickModel(nn.Module):
    """Base: looks up the batch and hands dense numbers and rows to ``score``.

    Args:
        embeddings: A collection whose tables share one width.
        num_dense: Dense numbers per sample.
        hidden: Widths of the hidden layers.
    """

    def __init__(self, embeddings: Any, num_dense: int, hidden: Sequence[int] = (128, 64)):
        super().__init__()
        widths = {table.embedding_dim for table in embeddings.tables}
        if len(widths) != 1:
            raise input_error("tables", sorted(widths), "one width for all", "give all tables one embedding_dim")
        self.embeddings, self.num_dense, self.width = embeddings, num_dense, widths.pop()
        self.num_fields = len(embeddings.features)

    def forward(self, batch: Any) -> Tensor:
        """Return a logit per sample of a batch with ``dense`` and ``features``."""
        rows = self.embeddings(batch.features).values()
        return self.score(batch.dense.to(rows.dtype), rows.view(len(rows), self.num_fields, self.width))

    def score(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return a logit per sample from numbers [samples, num_dense] and rows [samples, fields, width]."""
        raise NotImplementedError(f"{type(self).__name__} must say how it scores a sample")


class DLRM(ClickModel):
    """Dot products between all pairs of fields, and a multilayer perceptron on top."""

    def __init__(self, embeddings: Any, num_dense: int, hidden: Sequence[int] = (128, 64)):
        super().__init__(embeddings, num_dense, hidden)
        self.bottom = mlp([num_dense, hidden[0], self.width]) if num_dense else None
        num_vectors = self.num_fields + bool(num_dense)
        pairs = torch.tril_indices(num_vectors, num_vectors, -1)
        self.pairs: Tensor
        self.register_buffer("pairs", pairs, persistent=False)
        self.top = mlp([self.width * bool(num_dense) + pairs.shape[1], *hidden, 1], last_linear=True)

    def score(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the logits."""
        first = [] if self.bottom is None else [self.bottom(dense)]
        vectors = torch.cat([*(f.unsqueeze(1) for f in first), rows], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([*first, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)


class WideDeep(ClickModel):
    """A linear part beside a multilayer perceptron."""

    def __init__(self, embeddings: Any, num_dense: int, hidden: Sequence[int] = (128, 64)):
        super().__init__(embeddings, num_dense, hidden)
        inputs = num_dense + self.num_fields * self.width
        self.wide, self.deep = nn.Linear(inputs, 1), mlp([inputs, *hidden, 1], last_linear=True)

    def score(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the logits."""
        x = torch.cat([dense, rows.flatten(1)], dim=1)
        return (self.wide(x) + self.deep(x)).squeeze(1)


class DeepFM(WideDeep):
    """Wide & Deep with a factorisation machine over the fields."""

    def score(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the logits."""
        pairs = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1)
        return super().score(dense, rows) + pairs


class DCN(ClickModel):
    """Explicit crosses ``x <- x0 * (W x + b) + x`` beside a multilayer perceptron."""

    def __init__(self, embeddings: Any, num_dense: int, hidden: Sequence[int] = (128, 64), num_crosses: int = 2):
        super().__init__(embeddings, num_dense, hidden)
        inputs = num_dense + self.num_fields * self.width
        self.crosses = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(num_crosses))
        self.deep = mlp([inputs, *hidden])
        self.out = nn.Linear(inputs + hidden[-1], 1)

    def score(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the logits."""
        x = start = torch.cat([dense, rows.flatten(1)], dim=1)
        for cross in self.crosses:
            x = start * cross(x) + x
        return self.out(torch.cat([x, self.deep(start)], dim=1)).squeeze(1)


MODELS: dict[str, type[ClickModel]] = {"dlrm": DLRM, "wide_deep": WideDeep, "deepfm": DeepFM, "dcn": DCN}


def make_model(name: str, embeddings: Any, num_dense: int, hidden: Sequence[int] = (128, 64)) -> ClickModel:
    """Return a model by its name.

    Raises:
        InputError: An unknown name.
    """
    if name not in MODELS:
        raise input_error("model", name, f"one of {', '.join(MODELS)}", "choose one of them")
    return MODELS[name](embeddings, num_dense, hidden)
