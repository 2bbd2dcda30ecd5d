"""Click data in memory or mapped from disk: dense numbers, one id per field, a label; and batches of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core_kernels.random import permutation
from recsys_embed.errors import input_error
from recsys_embed.tables import EmbeddingBagConfig, KeyedJaggedTensor

__all__ = ["ClickBatch", "ClickData"]


@dataclass(frozen=True)
class ClickBatch:
    """One rank's samples.

    Attributes:
        dense: Numbers, float32 [samples, num_dense].
        features: Ids.
        labels: 0 or 1, float32 [samples].
    """

    dense: Tensor
    features: KeyedJaggedTensor
    labels: Tensor


@dataclass(frozen=True)
class ClickData:
    """Samples with one id per field.

    Attributes:
        dense: float32 [samples, num_dense], may have no column.
        ids: int32 or int64 [samples, fields], from 0 within each field.
        labels: [samples].
        fields: Name of every field.
        num_rows: Rows of every field's table.

    >>> data = ClickData(np.zeros((2, 0)), np.array([[0, 1], [2, 0]]), np.array([0, 1]), ("a", "b"), (3, 2))
    >>> [table.num_embeddings for table in data.tables(8)]
    [3, 2]
    """

    dense: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    fields: tuple[str, ...]
    num_rows: tuple[int, ...]

    def __post_init__(self) -> None:
        shapes = (self.dense.shape[0], self.ids.shape[0], len(self.labels))
        if len(set(shapes)) > 1 or self.ids.shape[1] != len(self.fields) or len(self.fields) != len(self.num_rows):
            found = (*shapes, self.ids.shape, len(self.fields), len(self.num_rows))
            raise input_error("shapes", found, "equally many samples, and a name and size per field", "align them")

    def __len__(self) -> int:
        return len(self.labels)

    def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        """Return one table per field."""
        pairs = zip(self.fields, self.num_rows, strict=True)
        return [EmbeddingBagConfig(name, rows, embedding_dim, [name]) for name, rows in pairs]

    def split(self, test_share: float = 0.2, seed: int = 0) -> tuple[ClickData, ClickData]:
        """Return a training and a test part, drawn at random."""
        order = permutation(len(self), seed).numpy()
        cut = int(len(self) * (1 - test_share))
        return self._take(order[:cut]), self._take(order[cut:])

    def _take(self, rows: np.ndarray) -> ClickData:
        return ClickData(self.dense[rows], self.ids[rows], self.labels[rows], self.fields, self.num_rows)

    def batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1, seed: int | None = None, epoch: int = 0
    ) -> Iterator[ClickBatch]:
        """Yield a rank's batches: every global batch is cut into equal contiguous runs.

        Args:
            batch_size: Samples per rank.
            rank: This rank.
            world_size: Ranks.
            seed: Shuffle with this seed; None keeps the order.
            epoch: Another shuffle per epoch.

        The last samples that do not fill a global batch are split evenly; what is left over by that is dropped.
        """
        order = None if seed is None else permutation(len(self), seed, epoch).numpy()
        step = batch_size * world_size
        for start in range(0, len(self), step):
            size = min(step, len(self) - start) // world_size
            if size == 0:
                return
            chosen = np.arange(start + rank * size, start + (rank + 1) * size)
            rows = chosen if order is None else order[chosen]
            yield self.batch(rows)

    def batch(self, rows: np.ndarray) -> ClickBatch:
        """Return the samples at the given positions."""
        ids = torch.from_numpy(np.ascontiguousarray(self.ids[rows]))
        return ClickBatch(
            torch.from_numpy(np.ascontiguousarray(self.dense[rows], dtype=np.float32)),
            KeyedJaggedTensor.from_dense(self.fields, ids),
            torch.from_numpy(np.ascontiguousarray(self.labels[rows], dtype=np.float32)),
        )

    def save(self, folder: str | Path) -> None:
        """Write ``dense.npy``, ``ids.npy``, ``labels.npy`` and ``fields.json``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("dense", "ids", "labels"):
            np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)
        header = {"fields": list(self.fields), "num_rows": [int(n) for n in self.num_rows]}
        (folder / "fields.json").write_text(json.dumps(header, indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> ClickData:
        """Map what :meth:`save` wrote; rows are read when batches are made."""
        folder = Path(folder)
        header = json.loads((folder / "fields.json").read_text())
        names = ("dense", "ids", "labels")
        dense, ids, labels = (np.load(folder / f"{n}.npy", mmap_mode="r", allow_pickle=False) for n in names)
        return cls(dense, ids, labels, tuple(header["fields"]), tuple(header["num_rows"]))


def number_ids(raw: np.ndarray, min_count: int = 1) -> tuple[np.ndarray, int]:
    """Number the values of a column from 1 in sorted order; those rarer than ``min_count`` share id 0.

    >>> number_ids(np.array([7, 5, 7, 9]), min_count=2)
    (array([1, 0, 1, 0], dtype=int32), 2)
    """
    _, inverse, counts = np.unique(raw, return_inverse=True, return_counts=True)
    kept = counts >= min_count
    numbers = np.where(kept, kept.cumsum(), 0).astype(np.int32)
    return numbers[inverse.reshape(-1)], int(kept.sum()) + 1


def join_columns(
    dense: Sequence[np.ndarray], ids: Sequence[np.ndarray], labels: np.ndarray, fields: Sequence[str], min_count: int
) -> ClickData:
    """Make click data of raw columns."""
    numbered = [number_ids(column, min_count) for column in ids]
    matrix = np.stack([n for n, _ in numbered], axis=1)
    numbers = np.stack(dense, axis=1).astype(np.float32) if dense else np.zeros((len(labels), 0), np.float32)
    return ClickData(numbers, matrix, labels.astype(np.int8), tuple(fields), tuple(rows for _, rows in numbered))
