"""Tables, features and the layout of all rows: what TorchRec calls ``EmbeddingBagConfig`` and ``KeyedJaggedTensor``.

Rows of all tables of one width form one row space. A row's *place* is its number multiplied by a constant coprime to
the size of the space: a bijection that scatters neighbouring rows. Rank ``r`` owns one contiguous range of places, so
the owner and the local slot of any row follow from arithmetic; popular low ids do not pile up on rank 0.

Anything with ``keys()``, ``values()`` and ``lengths()`` is taken for a batch, TorchRec's class included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_embed.errors import IdRangeError, input_error
from recsys_embed.kernels.rows import place_ids

__all__ = ["ID_POLICIES", "EmbeddingBagConfig", "KeyedJaggedTensor", "KeyedTensor", "RowLayout", "check_tables"]

ID_POLICIES = ("strict", "clamp", "modulo")
_MAX_ROWS = 3_000_000_000  # places are products of two numbers below this, in 64 bits


@dataclass(frozen=True)
class EmbeddingBagConfig:
    """One table, by TorchRec's names.

    Attributes:
        name: Name of the table.
        num_embeddings: Rows.
        embedding_dim: Width of a row.
        feature_names: Features looked up in this table; several share its rows.
        pooling: ``"sum"`` or ``"mean"``; an empty bag gives 0.
        init_range: Rows start uniform in plus or minus this; ``sqrt(1 / num_embeddings)`` when None.

    >>> EmbeddingBagConfig("film", num_embeddings=100, embedding_dim=8, feature_names=["seen"]).pooling
    'sum'
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str] = field(default_factory=list)
    pooling: str = "sum"
    init_range: float | None = None

    def __post_init__(self) -> None:
        pooling = str(getattr(self.pooling, "value", self.pooling)).lower()  # TorchRec passes an enumeration
        if pooling not in ("sum", "mean"):
            raise input_error("pooling", self.pooling, "'sum' or 'mean'", f"change table {self.name!r}")
        if self.num_embeddings < 1 or self.embedding_dim < 1 or not self.feature_names:
            found = (self.num_embeddings, self.embedding_dim, list(self.feature_names))
            expected = "at least one row, one column and one feature"
            raise input_error(f"table {self.name!r}", found, expected, "correct the configuration")
        object.__setattr__(self, "pooling", pooling)
        object.__setattr__(self, "feature_names", tuple(self.feature_names))

    @property
    def init_bound(self) -> float:
        """Rows start uniform in plus or minus this."""
        return math.sqrt(1 / self.num_embeddings) if self.init_range is None else self.init_range


def check_tables(tables: Sequence[Any]) -> list[EmbeddingBagConfig]:
    """Return the tables as this package's configurations, names and features checked for uniqueness.

    Raises:
        InputError: No table, or a name or feature that appears twice.
    """
    names = ("name", "num_embeddings", "embedding_dim", "feature_names", "pooling")
    configs = [
        t if isinstance(t, EmbeddingBagConfig) else EmbeddingBagConfig(**{n: getattr(t, n) for n in names})
        for t in tables
    ]
    for label, items in (
        ("table names", [t.name for t in configs]),
        ("features", [f for t in configs for f in t.feature_names]),
    ):
        twice = sorted({item for item in items if items.count(item) > 1})
        if twice or not items:
            raise input_error(label, twice or items, "distinct names, at least one", "rename or add tables")
    return configs


class KeyedJaggedTensor:
    """Ids of several features for a batch: feature by feature, sample by sample, any number of ids each.

    Args:
        keys: Feature names.
        values: Ids [n], feature-major.
        lengths: Ids per (feature, sample), int [features * batch].
        weights: A factor per id, or None.

    >>> batch = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 6, 7]), torch.tensor([1, 0, 1, 1]))
    >>> batch.stride()
    2
    """

    def __init__(self, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None):
        self._keys, self._values, self._lengths, self._weights = list(keys), values, lengths, weights
        if lengths.dim() != 1 or not keys or len(lengths) % len(keys):
            expected = f"one length per feature and sample, a multiple of {len(keys)}"
            raise input_error("lengths.shape", tuple(lengths.shape), expected, "give every feature the same batch")
        if int(lengths.sum()) != len(values):
            raise input_error("lengths.sum()", int(lengths.sum()), f"{len(values)}, the ids", "count every id once")
        if weights is not None and weights.shape != values.shape:
            raise input_error("weights.shape", tuple(weights.shape), f"{tuple(values.shape)}", "pass a factor per id")

    @classmethod
    def from_dense(cls, keys: Sequence[str], ids: Tensor) -> KeyedJaggedTensor:
        """Make a batch of one id per sample and feature from a matrix [batch, features]."""
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        return cls(keys, ids.t().contiguous().view(-1), lengths)

    def keys(self) -> list[str]:
        """Return the feature names."""
        return self._keys

    def values(self) -> Tensor:
        """Return the ids."""
        return self._values

    def lengths(self) -> Tensor:
        """Return ids per (feature, sample)."""
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        """Return the factors, if any."""
        return self._weights

    def stride(self) -> int:
        """Return the number of samples."""
        return len(self._lengths) // len(self._keys)


class KeyedTensor:
    """Pooled rows of several features: ``values()`` [batch, sum of widths], ``[feature]`` [batch, width]."""

    def __init__(self, keys: Sequence[str], widths: Sequence[int], values: Tensor):
        self._keys, self._widths, self._values = list(keys), list(widths), values

    def keys(self) -> list[str]:
        """Return the feature names, in the order of the columns."""
        return self._keys

    def values(self) -> Tensor:
        """Return all columns."""
        return self._values

    def to_dict(self) -> dict[str, Tensor]:
        """Return the columns of every feature."""
        return dict(zip(self._keys, self._values.split(self._widths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        start = sum(self._widths[: self._keys.index(key)])
        return self._values[:, start : start + self._widths[self._keys.index(key)]]


class RowLayout:
    """All rows of tables of one width, scattered over ranks.

    Args:
        tables: Tables of one width.
        world_size: Number of ranks.

    Attributes:
        first_row: Number of the first row of each table, by name.
        bounds: int64 [ranks + 1]; rank r owns the places from ``bounds[r]`` to ``bounds[r + 1]``.

    >>> layout = RowLayout([EmbeddingBagConfig("t", 10, 4, ["f"])], world_size=2)
    >>> layout.bounds.tolist(), sorted(layout.places(torch.arange(10)).tolist()) == list(range(10))
    ([0, 5, 10], True)
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig], world_size: int):
        self.tables, self.world_size = list(tables), world_size
        self.width = self.tables[0].embedding_dim
        self.num_rows = sum(t.num_embeddings for t in tables)
        if self.num_rows > _MAX_ROWS:
            raise input_error("tables", self.num_rows, f"at most {_MAX_ROWS} rows of one width", "use two widths")
        starts = np.concatenate([[0], np.cumsum([t.num_embeddings for t in tables])])
        self.first_row = {t.name: int(start) for t, start in zip(tables, starts, strict=False)}
        self.bounds = np.array([self.num_rows * r // world_size for r in range(world_size + 1)], np.int64)
        # One rank owns all rows: no need to scatter them.
        self.multiplier = _coprime_near_golden(self.num_rows) if world_size > 1 else 1
        self._inverse = pow(self.multiplier, -1, self.num_rows) if self.num_rows > 1 else 0
        self._table_of_feature = {f: t for t in self.tables for f in t.feature_names}

    @property
    def features(self) -> list[str]:
        """Features of all tables, in table order."""
        return list(self._table_of_feature)

    def places(self, rows: Tensor) -> Tensor:
        """Return the places of row numbers."""
        return rows.long() * self.multiplier % self.num_rows

    def rows(self, places: Tensor) -> Tensor:
        """Return the row numbers of places."""
        return places.long() * self._inverse % self.num_rows

    def own_rows(self, rank: int) -> Tensor:
        """Return the row numbers that a rank owns, in the order of its slots."""
        return self.rows(torch.arange(int(self.bounds[rank]), int(self.bounds[rank + 1])))

    def place_batch(self, features: Sequence[str], values: Tensor, starts: np.ndarray, policy: str) -> Tensor:
        """Return the place of every id of a batch.

        Args:
            features: Feature of each run of values.
            values: Ids, run by run.
            starts: Where runs start, int64 [features + 1].
            policy: What to do with ids outside a table: ``"strict"`` raises, ``"clamp"``, ``"modulo"``.

        Raises:
            IdRangeError: An id outside its table under the strict policy; names table, feature, id and bound.
        """
        tables = [self._table_of_feature[f] for f in features]
        first = np.array([self.first_row[t.name] for t in tables], np.int64)
        bound = np.array([t.num_embeddings for t in tables], np.int64)
        places = torch.empty(len(values), dtype=torch.int64)
        numbers = values.numpy()
        code = ID_POLICIES.index(policy)
        bad = place_ids(numbers, starts, first, bound, code, self.multiplier, self.num_rows, places.numpy())
        if bad >= 0:
            which = int(np.searchsorted(starts, bad, side="right")) - 1
            raise IdRangeError(
                f"feature {features[which]!r} holds the id {int(values[bad])}; expected ids in [0, {bound[which]}), "
                f"the rows of table {tables[which].name!r}; enlarge the table, or pass id_policy='clamp' or 'modulo'"
            )
        return places


def read_batch(batch: Any, known: Sequence[str]) -> tuple[list[str], Tensor, Tensor, Tensor | None, int]:
    """Return (features, ids, lengths, weights, batch size) of anything like a KeyedJaggedTensor.

    Raises:
        InputError: Unknown or missing features, ids that are not integers, or weights that are not numbers.
    """
    keys, values, lengths = list(batch.keys()), batch.values(), batch.lengths()
    weights = batch.weights_or_none() if hasattr(batch, "weights_or_none") else None
    if sorted(keys) != sorted(known):
        raise input_error("batch.keys()", keys, f"the features {sorted(known)}", "pass every feature once")
    if values.dtype not in (torch.int32, torch.int64):
        raise input_error("values.dtype", values.dtype, "int32 or int64", "convert with values.long()")
    if weights is not None and not bool(torch.isfinite(weights).all()):
        position = int((~torch.isfinite(weights)).nonzero()[0])
        raise input_error(f"weights[{position}]", float(weights[position]), "a finite factor", "clean the batch")
    return keys, values, lengths.long(), weights, len(lengths) // len(keys)


def _coprime_near_golden(num_rows: int) -> int:
    """Return a multiplier near ``num_rows`` over the golden ratio: its multiples spread most evenly."""
    candidate = max(1, int(num_rows * 0.6180339887498949))
    while math.gcd(candidate, num_rows) != 1:
        candidate += 1
    return candidate
