"""From an edge list to rows of in-edges, in time and memory proportional to the edges.

CPU tensors are sorted by the two-pass counting sort of :mod:`core_kernels.kernels.numba.graph`; others, and those under
``backend("torch")``, by torch's stable sort. Both give the same arrays. Indices are int32 whenever the ids fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core_kernels._backend import current_backend
from core_kernels.errors import ArgumentTypeError, argument_error

__all__ = [
    "bucket_starts",
    "choose_row_bits",
    "count_ids",
    "empty",
    "expand_rows",
    "index_dtype",
    "read_edge_index",
    "read_num_nodes",
    "runs_numba",
    "sort_by_key",
]

_INT32_LIMIT = 1 << 31
_INTEGER_DTYPES = (torch.int32, torch.int64)
_NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64}
_MIN_ROW_BITS = 10
_MAX_ROW_BITS = 15  # the low bits of a key travel above a 48-bit id


def runs_numba(tensor: Tensor) -> bool:
    """Return whether the Numba kernels take ``tensor``; torch does otherwise."""
    return tensor.device.type == "cpu" and current_backend() != "torch"


def index_dtype(bound: int) -> torch.dtype:
    """Return the dtype for ids below ``bound``: int32 while they fit, else int64."""
    return torch.int32 if bound <= _INT32_LIMIT else torch.int64


def read_edge_index(edge_index: Tensor | np.ndarray | Sequence[Tensor | np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return the source and the destination column of an edge list, checked for type and shape, not copied."""
    if isinstance(edge_index, np.ndarray):
        edge_index = torch.from_numpy(edge_index)
    if isinstance(edge_index, Tensor):
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise argument_error(
                "edge_index.shape",
                tuple(edge_index.shape),
                "(2, num_edges), row 0 sources and row 1 destinations",
                "transpose an (num_edges, 2) list with edge_index.t()",
            )
        columns = [edge_index[0], edge_index[1]]
    else:
        columns = [torch.from_numpy(column) if isinstance(column, np.ndarray) else column for column in edge_index]
        if len(columns) != 2 or not all(isinstance(column, Tensor) for column in columns):
            raise ArgumentTypeError(
                f"edge_index is a {type(edge_index).__name__} of {len(columns)}; expected a tensor [2, num_edges] "
                "or a pair (sources, destinations) of tensors; build one with torch.tensor([sources, destinations])"
            )
        if columns[0].shape != columns[1].shape or columns[0].dim() != 1:
            raise argument_error(
                "edge_index",
                [tuple(column.shape) for column in columns],
                "two 1-D columns of one length",
                "pass as many destinations as sources",
            )
    for column in columns:
        if column.numel() == 0 and column.dtype == torch.float32:
            continue  # torch.tensor([[], []]) is float; there is nothing to lose
        if column.dtype not in _INTEGER_DTYPES:
            raise ArgumentTypeError(
                f"edge_index has dtype {column.dtype}; expected torch.int32 or torch.int64; "
                "convert with edge_index.long()"
            )
    sources, destinations = (column if column.dtype in _INTEGER_DTYPES else column.long() for column in columns)
    return sources, destinations


def read_num_nodes(num_nodes: int | tuple[int, int] | None, sources: Tensor, destinations: Tensor) -> tuple[int, int]:
    """Return ``(num_src, num_dst)`` after checking that every id lies below them."""
    spans = [
        tuple(int(bound) for bound in torch.aminmax(column)) if column.numel() else (0, -1)
        for column in (sources, destinations)
    ]
    if num_nodes is None:
        num_nodes = max(spans[0][1], spans[1][1]) + 1
    counts = tuple(num_nodes) if isinstance(num_nodes, tuple | list) else (num_nodes, num_nodes)
    if len(counts) != 2 or not all(isinstance(count, int | np.integer) and count >= 0 for count in counts):
        raise argument_error(
            "num_nodes", num_nodes, "a count of at least 0, or a pair (num_src, num_dst)", "pass the number of nodes"
        )
    for side, (low, high), count in zip(("source", "destination"), spans, counts, strict=True):
        if low < 0 or high >= count:
            bad = low if low < 0 else high
            raise argument_error(
                "edge_index",
                bad,
                f"{side} ids in [0, {count})",
                "remove negative ids" if low < 0 else f"pass num_nodes of at least {high + 1}",
            )
    return int(counts[0]), int(counts[1])


def sort_by_key(
    keys: Tensor, values: Tensor, num_keys: int, value_bound: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Group ``values`` by ``keys``, keeping the order within a key.

    Args:
        keys: int32 or int64 [num_edges], each in [0, num_keys).
        values: int32 or int64 [num_edges], each in [0, value_bound).
        num_keys: Number of rows.
        value_bound: Decides the dtype of the grouped values.
        dtype: Overrides that dtype.

    Returns:
        Row pointers int64 [num_keys + 1]; the grouped values; the position in the input of each, or ``None`` when
        the input was grouped already.
    """
    dtype = dtype or index_dtype(value_bound)
    if not runs_numba(keys):
        counts = torch.bincount(keys, minlength=num_keys)
        indptr = torch.zeros(num_keys + 1, dtype=torch.int64, device=keys.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        if bool((keys[1:] >= keys[:-1]).all()):
            return indptr, values.to(dtype, copy=True), None
        order = torch.sort(keys, stable=True).indices
        return indptr, values[order].to(dtype), order

    from core_kernels.kernels.numba import graph as kernels

    num_edges = keys.shape[0]
    keys_, values_ = keys.contiguous().numpy(), values.contiguous().numpy()
    indptr = empty(num_keys + 1, torch.int64)
    if kernels.is_non_decreasing(keys_):
        kernels.count_keys(keys_, indptr.numpy())
        return indptr, values.to(dtype, copy=True), None
    row_bits = choose_row_bits(num_keys)
    starts = bucket_starts(keys_, num_keys, row_bits)
    out, ids = empty(num_edges, dtype), empty(num_edges, torch.int64)
    kernels.scatter_edges(keys_, values_, row_bits, starts, out.numpy(), ids.numpy())
    kernels.sort_buckets(row_bits, starts, indptr.numpy(), out.numpy(), ids.numpy())
    return indptr, out, ids


def empty(length: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor. Numpy asks the system for huge pages, which torch does not."""
    return torch.from_numpy(np.empty(length, _NUMPY_DTYPES[dtype]))


def choose_row_bits(num_rows: int) -> int:
    """Return the size of a coarse bucket: about a thousand of them, not tiny, none outgrowing the cache."""
    return min(max(num_rows.bit_length() - 11, _MIN_ROW_BITS), _MAX_ROW_BITS)


def bucket_starts(keys: np.ndarray, num_rows: int, row_bits: int) -> np.ndarray:
    """Return the first position of each coarse bucket of ``2**row_bits`` rows, and the number of keys."""
    from core_kernels.kernels.numba.graph import count_buckets

    starts = np.empty(((num_rows - 1) >> row_bits) + 2, np.int64)
    count_buckets(keys, row_bits, starts)
    return starts


def expand_rows(indptr: Tensor, num_edges: int) -> Tensor:
    """Return the row of each position, int32 while row ids fit."""
    num_rows = indptr.shape[0] - 1
    dtype = index_dtype(num_rows)
    if not runs_numba(indptr):
        rows = torch.arange(num_rows, dtype=dtype, device=indptr.device)
        return torch.repeat_interleave(rows, indptr.diff(), output_size=num_edges)

    from core_kernels.kernels.numba import graph as kernels

    out = empty(num_edges, dtype)
    kernels.expand_rows(indptr.numpy(), out.numpy())
    return out


def count_ids(ids: Tensor, num_ids: int) -> Tensor:
    """Return how often each id in [0, num_ids) occurs, int64 [num_ids]."""
    if not runs_numba(ids):
        return torch.bincount(ids, minlength=num_ids)

    from core_kernels.kernels.numba import graph as kernels

    indptr = empty(num_ids + 1, torch.int64)
    kernels.count_keys(ids.contiguous().numpy(), indptr.numpy())
    return indptr.diff()
