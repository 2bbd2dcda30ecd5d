"""Graphs made from graphs: reversed, with self-loops, symmetric, renumbered, cut out.

Every function takes the parts of a graph as tensors and returns parts, so that :class:`~core_kernels.graph.Graph` stays
a thin face. Work is proportional to nodes plus edges.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.graph.build import (
    bucket_starts,
    choose_row_bits,
    empty,
    expand_rows,
    index_dtype,
    runs_numba,
    sort_by_key,
)

__all__ = ["check_ids", "check_permutation", "first_seen_order", "permute_rows", "symmetrize", "take_rows", "transpose"]


def transpose(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row pointers, indices and, for each position of the reversed graph, its position in the given one."""
    num_edges = indices.shape[0]
    dtype = torch.int64 if indices.dtype == torch.int64 else index_dtype(indptr.shape[0] - 1)
    if not runs_numba(indptr):
        rows = expand_rows(indptr, num_edges)
        out_indptr, out_indices, positions = sort_by_key(indices, rows, num_src, indptr.shape[0] - 1, dtype)
        if positions is None:
            positions = torch.arange(num_edges, device=indices.device)
        return out_indptr, out_indices, positions

    from core_kernels.kernels.numba import graph as kernels

    row_bits = choose_row_bits(num_src)
    starts = bucket_starts(indices.numpy(), num_src, row_bits)
    out_indptr, out_indices = empty(num_src + 1, torch.int64), empty(num_edges, dtype)
    positions = empty(num_edges, torch.int64)
    columns = (out_indices.numpy(), positions.numpy())
    kernels.scatter_reversed(indptr.numpy(), indices.numpy(), row_bits, starts, *columns)
    kernels.sort_buckets(row_bits, starts, out_indptr.numpy(), *columns)
    return out_indptr, out_indices, positions


def symmetrize(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the union of a square graph and its reverse: sorted rows, each edge once."""
    num_nodes = indptr.shape[0] - 1
    back_indptr, back_indices, _ = transpose(indptr, indices, num_nodes)
    # Transposing sorts every row, so twice gives the graph itself with sorted rows.
    indptr, indices, _ = transpose(back_indptr, back_indices, num_nodes)
    if not runs_numba(indptr):
        keys = torch.cat(
            [
                expand_rows(rows, columns.shape[0]).long() * num_nodes + columns
                for rows, columns in ((indptr, indices), (back_indptr, back_indices))
            ]
        ).unique()
        rows, columns = keys // max(num_nodes, 1), keys % max(num_nodes, 1)
        out_indptr, out_indices, _ = sort_by_key(rows, columns, num_nodes, num_nodes, indices.dtype)
        return out_indptr, out_indices

    from core_kernels.kernels.numba.graph import merge_sorted_rows

    rows = (indptr.numpy(), indices.numpy(), back_indptr.numpy(), back_indices.numpy())
    out_indptr = np.empty(num_nodes + 1, np.int64)
    merge_sorted_rows(*rows, out_indptr, indices.numpy(), True)
    out_indices = empty(int(out_indptr[-1]), indices.dtype)
    merge_sorted_rows(*rows, out_indptr, out_indices.numpy(), False)
    return torch.from_numpy(out_indptr), out_indices


def take_rows(indptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return row pointers of the chosen rows, and the position in the graph of each of their entries."""
    starts = indptr[rows]
    counts = indptr[rows + 1] - starts
    out_indptr = torch.zeros(rows.shape[0] + 1, dtype=torch.int64, device=indptr.device)
    torch.cumsum(counts, 0, out=out_indptr[1:])
    total = int(out_indptr[-1])
    shift = torch.repeat_interleave(starts - out_indptr[:-1], counts, output_size=total)
    return out_indptr, shift + torch.arange(total, device=indptr.device)


def permute_rows(
    indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, row_of_new: Tensor, new_of_source: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row pointers, indices and edge ids of a graph whose rows and sources are renumbered."""
    if not runs_numba(indptr):
        out_indptr, positions = take_rows(indptr, row_of_new)
        out_ids = positions if edge_ids is None else edge_ids[positions]
        return out_indptr, new_of_source[indices[positions]].to(indices.dtype), out_ids

    from core_kernels.kernels.numba.graph import move_rows

    out_indptr = torch.zeros(row_of_new.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(indptr.diff()[row_of_new], 0, out=out_indptr[1:])
    out_indices = empty(indices.shape[0], indices.dtype)
    out_ids = empty(indices.shape[0], torch.int64)
    # A narrow table of names stays longer in the caches: it is read at random, once per edge.
    names = new_of_source.to(indices.dtype)
    move_rows(
        indptr.numpy(),
        indices.numpy(),
        None if edge_ids is None else edge_ids.numpy(),
        row_of_new.contiguous().numpy(),
        names.numpy(),
        out_indptr.numpy(),
        out_indices.numpy(),
        out_ids.numpy(),
    )
    return out_indptr, out_indices, out_ids


def first_seen_order(seeds: Tensor, ids: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Number ``seeds`` (distinct) first, then the other ``ids`` in the order they are first seen.

    Returns:
        The distinct ids in that order, and for each of ``ids`` its number.
    """
    first_seen = torch.full((num_ids,), ids.shape[0], dtype=torch.int64, device=ids.device)
    first_seen.scatter_reduce_(0, ids.long(), torch.arange(ids.shape[0], device=ids.device), "amin")
    first_seen[seeds] = ids.shape[0]
    others = first_seen[first_seen < ids.shape[0]].sort().values
    unique = torch.cat([seeds, ids[others].to(seeds.dtype)])
    number = first_seen  # its values are used up; reuse the memory
    number[unique] = torch.arange(unique.shape[0], device=ids.device)
    return unique, number[ids.long()]


def check_ids(name: str, ids: Tensor, bound: int, distinct: bool = False) -> Tensor:
    """Return ``ids`` as int64 after checking that they are a 1-D list in [0, bound), distinct when asked."""
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        shown = (tuple(ids.shape), ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise argument_error(name, shown, "a 1-D int32 or int64 tensor of ids", "convert with torch.tensor(ids)")
    if ids.numel():
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= bound:
            raise argument_error(name, low if low < 0 else high, f"ids in [0, {bound})", "remove the ids outside")
    ids = ids.long()
    if distinct and ids.numel():
        seen = torch.zeros(bound, dtype=torch.bool, device=ids.device)
        seen[ids] = True
        num_distinct = int(seen.sum())
        if num_distinct != ids.shape[0]:
            raise argument_error(
                name, ids.shape[0], f"distinct ids, only {num_distinct} are", f"pass {name}.unique() instead"
            )
    return ids


def check_permutation(name: str, perm: Tensor, length: int) -> Tensor:
    """Return ``perm`` as int64 after checking that it orders ``range(length)``."""
    perm = check_ids(name, perm, length, distinct=True)
    if perm.shape[0] != length:
        raise argument_error(name, perm.shape[0], f"a permutation of {length} ids", "list every id once")
    return perm
