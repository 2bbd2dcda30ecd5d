"""Click data with given cardinalities and skew: ids of every field follow a Zipf law, clicks a logistic model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recsys_embed.data.clicks import ClickData
from recsys_embed.errors import input_error

__all__ = ["FieldSpec", "draw_zipf", "make_clicks"]


@dataclass(frozen=True)
class FieldSpec:
    """One field of synthetic data.

    Attributes:
        name: Name of the field.
        num_rows: Distinct ids.
        exponent: Zipf exponent: id number k (by popularity) has a share proportional to k to the minus exponent.
    """

    name: str
    num_rows: int
    exponent: float = 1.05


def draw_zipf(generator: np.random.Generator, num_rows: int, exponent: float, size: int) -> np.ndarray:
    """Draw ids in [0, num_rows), 0 the most popular, by inverting the continuous law.

    >>> int(draw_zipf(np.random.default_rng(0), 1000, 1.05, 10_000).max()) < 1000
    True
    """
    u = generator.random(size)
    if abs(exponent - 1) < 1e-9:
        ranks = np.exp(u * np.log(num_rows + 1))
    else:
        power = 1 - exponent
        ranks = (1 + u * ((num_rows + 1) ** power - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64) - 1, num_rows - 1)


def make_clicks(num_samples: int, fields: Sequence[FieldSpec], num_dense: int = 13, seed: int = 0) -> ClickData:
    """Draw samples; every id and every dense number has a hidden weight that makes clicks learnable.

    >>> data = make_clicks(100, [FieldSpec("a", 50)], num_dense=2)
    >>> data.ids.shape, data.dense.shape
    ((100, 1), (100, 2))
    """
    if num_samples < 1 or not fields:
        raise input_error("num_samples, fields", (num_samples, len(fields)), "at least 1 each", "ask for more")
    generator = np.random.default_rng(seed)
    dense = generator.standard_normal((num_samples, num_dense)).astype(np.float32)
    score = dense @ generator.standard_normal(num_dense).astype(np.float32) * 0.3
    ids = np.empty((num_samples, len(fields)), np.int32)
    for column, spec in enumerate(fields):
        by_popularity = draw_zipf(generator, spec.num_rows, spec.exponent, num_samples)
        multiplier = 0x9E3779B1  # ids are shuffled: popularity must not show in the number
        ids[:, column] = (by_popularity * multiplier + column) % spec.num_rows
        effects = generator.standard_normal(min(spec.num_rows, 1 << 16)).astype(np.float32)
        score += 0.6 * effects[ids[:, column] % len(effects)]
    labels = (generator.random(num_samples) < 1 / (1 + np.exp(-score + 1.0))).astype(np.int8)
    names, rows = tuple(f.name for f in fields), tuple(f.num_rows for f in fields)
    return ClickData(dense, ids, labels, names, rows)
