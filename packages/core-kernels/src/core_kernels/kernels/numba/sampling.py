"""Neighbour sampling on the CPU: Floyd's draws without replacement, from the stateless generator.

Every destination's draws depend on its key alone, so rows are split over threads freely.

Source: R. W. Floyd in J. Bentley, "Programming Pearls: A Sample of Brilliance", CACM 30(9), 1987.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from core_kernels._huge_pages import advise
from core_kernels.kernels.numba._arrays import array
from core_kernels.kernels.numba._copy_loop import LINE_BYTES, prefetch_row
from core_kernels.kernels.numba._threads import run_ranges
from core_kernels.kernels.numba.random import absorb, bounded, row_key, stream_key
from core_kernels.kernels.numba.relabel import direct_table, relabel_direct, reset_table, unique_relabel

__all__ = ["sample_block", "sample_neighbors"]

#: Up to this fanout a repeated draw is found by looking through the earlier ones, above by marks over the whole row.
_LINEAR_FANOUT = 32
#: Draws that are made before their sources are read; seeds between the request for a row pointer and its use.
_GATHER_DRAWS, _PREFETCH_SEEDS = 1024, 16
#: Edges per draw up to which all lines of a row are asked for once, rather than the line of every draw.
_EDGES_PER_DRAW = 8


def sample_neighbors(indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer):
    """Return row pointers, sources and edge ids of the sampled in-edges."""
    rows, pointers = torch.empty(seeds.shape[0] + 1, dtype=torch.int64), array(indptr)
    num_draws = _count(pointers, array(seeds), fanout, replace, array(rows))
    sources, edges = _empty_draws(num_draws, indices.dtype)
    _draw(pointers, indices, edge_ids, seeds, keys, (fanout, replace, seed, step, layer), rows, sources, edges)
    return rows, sources, edges


def sample_block(indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer, num_src):
    """Return row pointers, local sources, source ids and edge ids of the sampled block."""
    num_seeds, pointers = seeds.shape[0], array(indptr)
    rows = torch.empty(num_seeds + 1, dtype=torch.int64)
    num_draws = _count(pointers, array(seeds), fanout, replace, array(rows))
    sources, edges = _empty_draws(num_draws, indices.dtype)
    draw = (fanout, replace, seed, step, layer)
    _draw(pointers, indices, edge_ids, seeds, keys, draw, rows, sources, edges)
    table = direct_table(num_src, num_seeds + num_draws)
    if table is None:
        unique, local = unique_relabel(torch.cat([seeds, sources.long()]))
        return rows, local[num_seeds:].int(), unique, edges
    unique, local = torch.empty(num_seeds + num_draws, dtype=torch.int64), torch.empty(num_draws, dtype=torch.int32)
    count = _number_block(array(seeds), array(sources), table, array(unique), array(local))
    return rows, local, unique[:count], edges


def _empty_draws(num_draws, dtype):
    """Return uninitialised sources and edge ids."""
    sources, edges = torch.empty(num_draws, dtype=dtype), torch.empty(num_draws, dtype=torch.int64)
    for tensor in (sources, edges):
        advise(tensor)
    return sources, edges


@njit(cache=True, nogil=True)
def _number_block(seeds, sources, table, unique, local):
    count = relabel_direct(seeds, table, unique, np.empty(len(seeds), np.int32), 0)
    count = relabel_direct(sources, table, unique, local, count)
    reset_table(table, unique, count)
    return count


def _draw(pointers, indices, edge_ids, seeds, keys, draw, rows, sources, edges):
    run_ranges(
        _draw_rows, seeds.shape[0], array(rows), pointers, array(indices), array(edge_ids), array(seeds),
        array(seeds if keys is None else keys), *draw, array(rows), array(sources), array(edges), unit=4,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _count(indptr, seeds, fanout, replace, rows):
    """Write the row pointers of the sample; return the number of draws."""
    total = np.int64(0)
    rows[0] = 0
    for place in range(len(seeds)):
        _prefetch_pointers(indptr, seeds, place, len(seeds))
        degree = indptr[seeds[place] + 1] - indptr[seeds[place]]
        take = fanout if replace and degree > 0 else min(degree, fanout)
        total += degree if fanout < 0 else take
        rows[place + 1] = total
    return total


@njit(cache=True, nogil=True, inline="always")
def _prefetch_pointers(indptr, seeds, place, stop):
    """Ask for the row pointer of a seed that comes soon: seeds are read in any order."""
    if place + _PREFETCH_SEEDS < stop:
        prefetch_row(indptr.ctypes.data + seeds[place + _PREFETCH_SEEDS] * indptr.itemsize, 1, False)


@njit(cache=True, nogil=True, inline="always")
def _prefetch_edges(array, begin, count):
    """Ask for every line of ``array[begin : begin + count]``."""
    address = array.ctypes.data + begin * array.itemsize
    skew = address % LINE_BYTES
    prefetch_row(address - skew, skew + count * array.itemsize, False)


@njit(cache=True, nogil=True)
def _longest_row(indptr, seeds, start, stop):
    longest = np.int64(0)
    for place in range(start, stop):
        longest = max(longest, indptr[seeds[place] + 1] - indptr[seeds[place]])
    return longest


@njit(cache=True, nogil=True)
def _draw_rows(
    start,
    stop,
    indptr,
    indices,
    edge_ids,
    seeds,
    keys,
    fanout,
    replace,
    seed,
    step,
    layer,
    rows,
    sources,
    edges,
):
    stream = stream_key(seed, step, layer)
    marked = fanout > _LINEAR_FANOUT and not replace
    marks = np.zeros(_longest_row(indptr, seeds, start, stop) if marked else 0, np.bool_)
    gathered = rows[start]
    for place in range(start, stop):
        _prefetch_pointers(indptr, seeds, place, stop)
        begin, first, last = indptr[seeds[place]], rows[place], rows[place + 1]
        degree = indptr[seeds[place] + 1] - begin
        is_dense = degree <= _EDGES_PER_DRAW * (last - first)
        if is_dense:
            near = min(degree, _GATHER_DRAWS)  # what is farther along, the processor asks for by itself
            _prefetch_edges(indices, begin, near)
            if edge_ids is not None:
                _prefetch_edges(edge_ids, begin, near)
        if fanout < 0 or degree == 0 or (degree <= fanout and not replace):
            for draw in range(last - first):
                edges[first + draw] = begin + draw
        else:
            key = row_key(stream, keys[place])
            if replace:
                for draw in range(fanout):
                    edges[first + draw] = begin + bounded(absorb(key, draw), degree)
            elif marked:
                _floyd_marked(key, degree, fanout, begin, marks, edges, first)
            else:
                _floyd_linear(key, degree, fanout, begin, edges, first)
        if not is_dense:
            for out in range(first, last):
                _prefetch_edges(indices, edges[out], 1)
                if edge_ids is not None:
                    _prefetch_edges(edge_ids, edges[out], 1)
        # A loop of its own: its loads do not wait for one another, nor for the branches above. It follows while what
        # was asked for is still in the cache.
        if last - gathered >= _GATHER_DRAWS or place == stop - 1:
            _gather_drawn(gathered, last, indices, edge_ids, sources, edges)
            gathered = last


@njit(cache=True, nogil=True)
def _gather_drawn(begin, end, indices, edge_ids, sources, edges):
    for out in range(begin, end):
        position = edges[out]
        sources[out] = indices[position]
        if edge_ids is not None:
            edges[out] = edge_ids[position]


@njit(cache=True, nogil=True, inline="always")
def _floyd_linear(key, degree, fanout, begin, edges, first):
    for draw in range(fanout):
        newest = degree - fanout + draw
        position = begin + bounded(absorb(key, draw), newest + 1)
        # No early exit: repeats are rare, and the comparisons run side by side.
        taken = False
        for earlier in range(first, first + draw):
            taken |= edges[earlier] == position
        edges[first + draw] = begin + newest if taken else position


@njit(cache=True, nogil=True)
def _floyd_marked(key, degree, fanout, begin, marks, edges, first):
    for draw in range(fanout):
        newest = degree - fanout + draw
        slot = bounded(absorb(key, draw), newest + 1)
        if marks[slot]:
            slot = newest
        marks[slot] = True
        edges[first + draw] = begin + slot
    for draw in range(first, first + fanout):
        marks[edges[draw] - begin] = False
