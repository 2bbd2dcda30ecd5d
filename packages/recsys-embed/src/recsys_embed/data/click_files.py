"""Readers of public click data: Criteo text, Avazu text, TorchRec's ``.npy`` days, Parquet.

Text readers number the values of every field from 1 and let rare values share id 0, as the usual preprocessing does.
They hold the file in memory; convert large files once (``recsys-embed convert``) and map the result.
"""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from core_kernels.errors import MissingDependencyError
from recsys_embed.data.clicks import ClickData, join_columns
from recsys_embed.errors import InputError, input_error

__all__ = ["read_avazu", "read_criteo_tsv", "read_npy_days", "read_parquet"]

_NUM_DENSE, _NUM_FIELDS = 13, 26


def read_criteo_tsv(path: str | Path, min_count: int = 1, max_rows: int | None = None) -> ClickData:
    """Read Criteo's text: label, 13 integers, 26 hexadecimal strings, tab-separated, any of them empty.

    Args:
        path: The file, plain or ``.gz``.
        min_count: Values rarer than this share an id.
        max_rows: Read at most so many lines.

    Returns:
        Dense numbers as ``log(1 + max(x, 0))`` (empty: 0), fields ``C1`` to ``C26``.

    Raises:
        InputError: A line with another number of columns, or a value that is no number; the message names the line.
    """
    labels, dense, ids = [], [], []
    with _open(path) as file:
        for number, line in enumerate(itertools.islice(file, max_rows), 1):
            columns = line.rstrip("\n").split("\t")
            if len(columns) != 1 + _NUM_DENSE + _NUM_FIELDS:
                raise InputError(
                    f"{path}, line {number}: {len(columns)} columns; expected 1 + {_NUM_DENSE} + {_NUM_FIELDS} = 40, "
                    "separated by tabs; is this the raw Criteo text?"
                )
            try:
                labels.append(int(columns[0] or 0))
                dense.append([float(x) if x else 0.0 for x in columns[1 : 1 + _NUM_DENSE]])
                ids.append([int(x, 16) if x else -1 for x in columns[1 + _NUM_DENSE :]])
            except ValueError as error:
                expected = f"a label, {_NUM_DENSE} numbers and {_NUM_FIELDS} hexadecimal ids"
                raise InputError(f"{path}, line {number}: {error}; expected {expected}; repair the line") from None
            if not np.isfinite(dense[-1]).all():
                raise InputError(f"{path}, line {number}: {dense[-1]}; expected finite numbers; repair the line")
    numbers = np.log1p(np.maximum(np.array(dense, np.float64).reshape(-1, _NUM_DENSE), 0))
    raw = np.array(ids, np.int64).reshape(-1, _NUM_FIELDS)
    fields = [f"C{i + 1}" for i in range(_NUM_FIELDS)]
    return join_columns(list(numbers.T), list(raw.T), np.array(labels), fields, min_count)


def read_avazu(path: str | Path, min_count: int = 1, max_rows: int | None = None) -> ClickData:
    """Read Avazu's CSV: ``id, click, hour (YYMMDDHH), ...``; every column after ``click`` is a field.

    The hour becomes two fields, hour of day and day.

    Raises:
        InputError: The header lacks ``click`` or ``hour``, or a line is short; the message names it.
    """
    with _open(path) as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if "click" not in header or "hour" not in header:
            raise input_error("header", header, "columns click and hour", "pass Avazu's CSV with its header")
        lines = _checked_lines(rows, path, len(header), max_rows)
        columns = dict(zip(header, zip(*lines, strict=True), strict=True))
    labels = np.array(columns.pop("click"), np.int64)
    columns.pop("id", None)
    hours = columns.pop("hour")
    raw = {"hour_of_day": np.array([h[6:8] for h in hours]), "day": np.array([h[:6] for h in hours])}
    raw |= {name: np.array(values) for name, values in columns.items()}
    return join_columns([], list(raw.values()), labels, list(raw), min_count)


def _checked_lines(rows: Iterator[list[str]], path: str | Path, width: int, limit: int | None) -> list[list[str]]:
    lines = list(itertools.islice(rows, limit))
    for number, line in enumerate(lines, 2):
        if len(line) != width:
            raise InputError(f"{path}, line {number}: {len(line)} columns; expected {width}; repair the line")
    if not lines:
        raise InputError(f"{path} holds no samples; expected lines after the header; is the file complete?")
    return lines


def read_npy_days(folder: str | Path, days: Sequence[int], num_rows: Sequence[int] | None = None) -> ClickData:
    """Map TorchRec's preprocessed days: ``day_<i>_dense.npy``, ``_sparse.npy`` and ``_labels.npy``.

    Args:
        folder: Where they lie.
        days: Which days; one day stays on disk, several are joined in memory.
        num_rows: Rows of every field's table; the largest id plus one when None (which reads all ids).
    """
    parts = []
    for kind in ("dense", "sparse", "labels"):
        files = [Path(folder) / f"day_{day}_{kind}.npy" for day in days]
        arrays = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
        parts.append(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    dense, ids, labels = parts
    sizes = tuple(num_rows) if num_rows is not None else tuple(int(n) + 1 for n in ids.max(axis=0))
    return ClickData(dense, ids, labels.reshape(-1), tuple(f"C{i + 1}" for i in range(ids.shape[1])), sizes)


def read_parquet(
    path: str | Path, label: str, fields: Sequence[str], dense: Sequence[str] = (), min_count: int = 1
) -> ClickData:
    """Read columns of a Parquet file.

    Args:
        path: The file.
        label: Column of labels.
        fields: Columns of ids: integers or text.
        dense: Columns of numbers.
        min_count: Values rarer than this share an id.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        InputError: The file is damaged, or a column is not in it.
    """
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise MissingDependencyError("reading Parquet needs pyarrow; pip install pyarrow") from None
    try:
        names = parquet.read_schema(path).names
    except (ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise InputError(f"{path} is not readable as Parquet ({error}); expected a whole file; copy it again") from None
    missing = sorted({label, *fields, *dense} - set(names))
    if missing:
        raise input_error("columns", missing, f"columns of {path}: {names}", "correct the names")
    table: Any = parquet.read_table(path, columns=[label, *fields, *dense])
    numbers = [np.nan_to_num(np.asarray(table[name].to_numpy(), np.float32)) for name in dense]
    raw = [np.array([str(v) for v in table[name].to_pylist()]) for name in fields]
    return join_columns(numbers, raw, np.asarray(table[label].to_numpy()), list(fields), min_count)


def _open(path: str | Path) -> IO[str]:
    """Open text for reading; bytes that are none become a mark, which the check of columns and numbers refuses."""
    how: Any = {"encoding": "utf-8", "errors": "replace"}
    return gzip.open(path, "rt", **how) if str(path).endswith(".gz") else open(path, **how)
