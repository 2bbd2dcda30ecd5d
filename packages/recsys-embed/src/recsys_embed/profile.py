"""Access statistics: how often rows are used, streamed from batches in one pass and three bytes per row.

For every row two counts are kept: accesses, and batches of one rank that touched it at all (``presence``). Presence
over the number of batches is the probability ``q`` that one rank asks for the row in a step, measured and not derived
from an assumption of independence. A cell has a byte per count; a byte that is full carries into an exact table of the
popular rows. Where tables have more rows than ``max_cells``, rows share cells: counts of rare rows may then be too
high, never too low.

Statistics add up: over files, over ranks (:meth:`AccessStats.gather`) and over days.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from core_kernels.comm import Group
from recsys_embed.errors import IdRangeError, input_error
from recsys_embed.kernels.counting import add_counts, count_batch, histogram, read_counts
from recsys_embed.tables import EmbeddingBagConfig, check_tables

__all__ = ["AccessStats", "Histogram"]

_BLOCK_ROWS = 1 << 22
_ACCESSES, _PRESENCE = 0, 1


class Histogram:
    """Rows by how many batches touched them.

    Attributes:
        presence: Distinct positive counts, descending.
        num_rows: Rows with that count.
        accesses: Their accesses together.
    """

    def __init__(self, presence: np.ndarray, num_rows: np.ndarray, accesses: np.ndarray):
        self.presence, self.num_rows, self.accesses = presence, num_rows, accesses


class AccessStats:
    """Access counts of the rows of some tables.

    Args:
        tables: The tables.
        max_cells: Most cells to keep, three bytes each; rows beyond share cells.

    Attributes:
        num_batches: Batches counted.
        num_samples: Samples counted.
        num_accesses: Ids counted.
        num_distinct: Distinct rows per batch, added over batches.

    >>> import torch
    >>> from recsys_embed import EmbeddingBagConfig, KeyedJaggedTensor
    >>> stats = AccessStats([EmbeddingBagConfig("film", 10, 4, ["seen"])])
    >>> stats.add(KeyedJaggedTensor(["seen"], torch.tensor([1, 2, 2]), torch.tensor([2, 1])))
    >>> stats.counts("film").tolist()
    [0, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    """

    def __init__(self, tables: Sequence[Any], max_cells: int = 1_250_000_000):
        self.tables = check_tables(tables)
        ends = list(itertools.accumulate(t.num_embeddings for t in self.tables))
        self.total_rows = ends[-1]
        self._first = dict(zip((t.name for t in self.tables), [0, *ends], strict=False))
        self._table_of = {f: t for t in self.tables for f in t.feature_names}
        self._cells = np.zeros((max(1, min(self.total_rows, max_cells)), 3), np.uint8)
        self._keys, self._carries = np.full(1 << 10, -1, np.int64), np.zeros((1 << 10, 2), np.int64)
        self._num_carries = 0  # at most this many keys are in use
        self._known: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}
        self.num_batches = self.num_samples = self.num_accesses = self.num_distinct = 0

    @classmethod
    def from_batches(cls, loader: Iterable[Any], tables: Sequence[Any], sample: int | None = 200) -> Self:
        """Count the first ``sample`` batches of a loader (all when None); items may be batches or hold ``features``."""
        stats = cls(tables)
        for item in itertools.islice(loader, sample):
            stats.add(item if hasattr(item, "lengths") else getattr(item, "features", None) or item[0])
        return stats

    def add(self, batch: Any) -> None:
        """Count one rank's batch.

        Raises:
            IdRangeError: An id outside its table.
        """
        keys, values, lengths = list(batch.keys()), batch.values().numpy(), batch.lengths()
        unknown = sorted(set(keys) - set(self._table_of))
        if unknown:
            raise input_error("batch.keys()", unknown, f"features of the tables: {sorted(self._table_of)}", "add them")
        per_feature = lengths.view(len(keys), -1).sum(1)
        starts = np.concatenate([[0], per_feature.cumsum(0).numpy()])
        self.add_ids(keys, values, starts, lengths.numel() // len(keys))

    def add_ids(self, features: Sequence[str], values: np.ndarray, starts: np.ndarray, num_samples: int) -> None:
        """Count ids given feature by feature: feature f has ``values[starts[f]:starts[f + 1]]``."""
        first, bound = self._ranges(tuple(features))
        stamp = self.num_batches % 255 + 1
        if stamp == 1 and self.num_batches:
            self._cells[:, 2] = 0
        feature = position = 0
        while feature < len(features):
            self._make_room()
            settings = (stamp, self.total_rows, self._cells, self._keys, self._carries)
            feature, position, carried, distinct = count_batch(
                values, starts, first, bound, *settings, feature, position
            )
            if carried < 0:
                name = features[feature]
                raise IdRangeError(
                    f"feature {name!r} holds the id {int(values[position])}; expected ids in [0, {bound[feature]}), "
                    f"the rows of table {self._table_of[name].name!r}; enlarge the table"
                )
            self._num_carries += carried
            self.num_distinct += int(distinct)
        self.num_batches += 1
        self.num_samples += num_samples
        self.num_accesses += int(starts[-1])

    def _ranges(self, features: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first row and the number of rows of each feature's table."""
        if features not in self._known:
            tables = [self._table_of[f] for f in features]
            first = np.array([self._first[t.name] for t in tables], np.int64)
            self._known[features] = first, np.array([t.num_embeddings for t in tables], np.int64)
        return self._known[features]

    def _make_room(self) -> None:
        """Grow the table of carries when it is a quarter full (a kernel call adds at most another half)."""
        if self._num_carries * 4 < len(self._keys):
            return
        used = self._keys >= 0
        self._num_carries = int(used.sum())
        if self._num_carries * 4 < len(self._keys):
            return
        keys, carries = self._keys[used], self._carries[used]
        size = 4 * len(self._keys)
        self._keys, self._carries = np.full(size, -1, np.int64), np.zeros((size, 2), np.int64)
        for key, carry in zip(keys.tolist(), carries, strict=True):
            place = ((key * 0x9E3779B97F4A7C15) % (1 << 64) >> 20) & (size - 1)
            while self._keys[place] >= 0:
                place = (place + 1) & (size - 1)
            self._keys[place], self._carries[place] = key, carry

    @property
    def batch_size(self) -> float:
        """Samples per batch."""
        return self.num_samples / max(self.num_batches, 1)

    @property
    def dedup_factor(self) -> float:
        """Accesses per distinct row of a batch: what removing duplicates saves."""
        return self.num_accesses / max(self.num_distinct, 1)

    def counts(self, table: str, which: str = "accesses") -> np.ndarray:
        """Return ``"accesses"`` or ``"presence"`` of every row of a table, int64."""
        config = next(t for t in self.tables if t.name == table)
        first = self._first[table]
        return self._read(first, first + config.num_embeddings, ("accesses", "presence").index(which))

    def _read(self, start: int, stop: int, which: int) -> np.ndarray:
        out = np.empty(stop - start, np.int64)
        read_counts(start, stop, self.total_rows, self._cells, self._keys, self._carries, which, out)
        return out

    def _blocks(self, table: EmbeddingBagConfig) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (first row in the table, accesses, presence) block by block."""
        first = self._first[table.name]
        for start in range(0, table.num_embeddings, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, table.num_embeddings)
            ends = (first + start, first + stop)
            yield start, self._read(*ends, _ACCESSES), self._read(*ends, _PRESENCE)

    def histogram(self, tables: Sequence[EmbeddingBagConfig] | None = None) -> Histogram:
        """Return rows and accesses by presence: all a planner needs, whatever the number of rows."""
        num_rows, accesses = np.zeros(self.num_batches + 1, np.int64), np.zeros(self.num_batches + 1, np.int64)
        for table in self.tables if tables is None else tables:
            for _, used, presence in self._blocks(table):
                histogram(np.minimum(presence, self.num_batches), used, num_rows, accesses)
        kept = num_rows.nonzero()[0][::-1]
        kept = kept[kept > 0]
        return Histogram(kept, num_rows[kept], accesses[kept])

    def most_present(self, num_rows: int, tables: Sequence[EmbeddingBagConfig] | None = None) -> dict[str, list[int]]:
        """Return the ``num_rows`` rows with the highest presence by table; ties go to the earlier row.

        Args:
            num_rows: How many.
            tables: The tables to choose from, all when None.
        """
        left, floor = num_rows, 0
        whole = self.histogram(tables)
        for presence, count in zip(whole.presence.tolist(), whole.num_rows.tolist(), strict=True):
            floor = presence
            if count >= left:
                break
            left -= count
        else:
            left, floor = num_rows - int(whole.num_rows.sum()), 0
        chosen: dict[str, list[int]] = {}
        for table in self.tables if tables is None else tables:
            rows: list[int] = []
            for start, _, presence in self._blocks(table):
                above, ties = (presence > floor).nonzero()[0], (presence == floor).nonzero()[0][: max(left, 0)]
                left -= len(ties)
                rows += np.sort(np.concatenate([above, ties]) + start).tolist()
            if rows:
                chosen[table.name] = rows
        return chosen

    def describe(self) -> dict[str, Any]:
        """Return what the skew looks like: head shares, Gini coefficient, Zipf exponent, singletons, duplicates."""
        parts = [used[used > 0] for t in self.tables for _, used, _ in self._blocks(t)]
        used = np.sort(np.concatenate(parts))[::-1] if parts else np.zeros(0, np.int64)
        if not len(used):
            return {"num_batches": self.num_batches, "num_accesses": 0, "num_distinct_rows": 0}
        running = np.cumsum(used)
        total = int(running[-1])
        shares = {f"head_{100 * p:g}_percent": float(running[max(1, int(p * len(used))) - 1] / total) for p in _HEADS}
        n = len(used)
        gini = float((n + 1 - 2 * (np.cumsum(used[::-1]) / total).sum()) / n)
        frequent = used[used >= 5]
        exponent = math.nan
        if len(frequent) > 2:
            rank = np.log(np.arange(1, len(frequent) + 1))
            exponent = float(-np.polyfit(rank, np.log(frequent), 1)[0])
        return {
            "num_batches": self.num_batches,
            "num_accesses": total,
            "num_distinct_rows": n,
            **shares,
            "gini": gini,
            "zipf_exponent": exponent,
            "singleton_share": float((used == 1).mean()),
            "dedup_factor": self.dedup_factor,
        }

    # -- adding up ---------------------------------------------------------------------------------------------------

    def merge(self, other: AccessStats) -> None:
        """Add the counts of another stream over the same tables.

        Raises:
            InputError: Other tables, or cells shared differently.
        """
        mine, theirs = (
            [(t.name, t.num_embeddings) for t in s.tables] + [("cells", len(s._cells))] for s in (self, other)
        )
        if mine != theirs:
            raise input_error("other", theirs, f"statistics of {mine}", "count with the same tables")
        if len(self._cells) == self.total_rows:
            for table in other.tables:
                for start, used, presence in other._blocks(table):
                    rows = used.nonzero()[0]
                    self._add_rows(rows + start + self._first[table.name], np.stack([used, presence], 1)[rows])
        else:
            cells = np.arange(len(self._cells))
            amounts = np.stack([other._read_cells(which) for which in (_ACCESSES, _PRESENCE)], 1)
            self._add_rows(cells, amounts, total_rows=len(cells))
        self._add_totals(other.num_batches, other.num_samples, other.num_accesses, other.num_distinct)

    def _read_cells(self, which: int) -> np.ndarray:
        out = np.empty(len(self._cells), np.int64)
        read_counts(0, len(out), len(out), self._cells, self._keys, self._carries, which, out)
        return out

    def _add_rows(self, rows: np.ndarray, amounts: np.ndarray, total_rows: int | None = None) -> None:
        for start in range(0, len(rows), 1 << 8):
            self._make_room()
            block = slice(start, start + (1 << 8))
            self._num_carries += 1 << 8
            total = total_rows or self.total_rows
            add_counts(rows[block], amounts[block], total, self._cells, self._keys, self._carries)

    def _add_totals(self, num_batches: int, num_samples: int, num_accesses: int, num_distinct: int) -> None:
        self.num_batches += num_batches
        self.num_samples += num_samples
        self.num_accesses += num_accesses
        self.num_distinct += num_distinct
        self._cells[:, 2] = 0

    def gather(self, group: Group) -> Self:
        """Return the statistics of all ranks together, the same on every rank. Collective."""
        rows, amounts = self._sparse()
        all_rows, counts = group.all_gather_v(torch.from_numpy(rows), tag="stats")
        all_amounts = group.all_gather_v(torch.from_numpy(amounts), tag="stats", counts=counts)[0]
        totals = torch.tensor([self.num_batches, self.num_samples, self.num_accesses, self.num_distinct])
        merged = type(self)(self.tables)
        merged._add_rows(all_rows.numpy(), all_amounts.numpy())
        merged._add_totals(*group.all_reduce(totals, tag="stats").tolist())
        return merged

    def _sparse(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that were used and their (accesses, presence)."""
        rows, amounts = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
        for table in self.tables:
            for start, used, presence in self._blocks(table):
                kept = used.nonzero()[0]
                rows.append(kept + start + self._first[table.name])
                amounts.append(np.stack([used, presence], 1)[kept])
        return np.concatenate(rows), np.concatenate(amounts)

    def save(self, path: str | Path) -> None:
        """Write the counts of used rows to one ``.npz`` file."""
        rows, amounts = self._sparse()
        totals = [self.num_batches, self.num_samples, self.num_accesses, self.num_distinct]
        names = np.array([t.name for t in self.tables])
        sizes = np.array([t.num_embeddings for t in self.tables])
        with open(path, "wb") as file:
            np.savez_compressed(file, rows=rows, amounts=amounts, totals=totals, names=names, sizes=sizes)

    @classmethod
    def load(cls, path: str | Path, tables: Sequence[Any]) -> Self:
        """Read counts written by :meth:`save`.

        Raises:
            InputError: The file is of other tables.
        """
        stats = cls(tables)
        with np.load(path, allow_pickle=False) as file:
            found = dict(zip(file["names"].tolist(), file["sizes"].tolist(), strict=True))
            expected = {t.name: t.num_embeddings for t in stats.tables}
            if found != expected:
                raise input_error("path", found, f"statistics of {expected}", "count again")
            stats._add_rows(file["rows"], file["amounts"])
            stats._add_totals(*file["totals"].tolist())
        return stats


_HEADS = (0.001, 0.01, 0.1)
