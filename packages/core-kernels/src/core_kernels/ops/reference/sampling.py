"""Neighbour sampling spelled out: one destination, one draw at a time."""

from __future__ import annotations

import torch

from core_kernels.ops.reference.relabel import unique_relabel
from core_kernels.random import bounded, random_bits

__all__ = ["sample_block", "sample_neighbors"]


def _slots(degree, key, fanout, replace, seed, step, layer):
    if fanout < 0 or degree == 0 or (degree <= fanout and not replace):
        return list(range(degree))
    bits = random_bits(seed, step, layer, key, torch.arange(fanout))
    if replace:
        return bounded(bits, degree).tolist()
    chosen: list[int] = []
    for draw in range(fanout):
        newest = degree - fanout + draw
        slot = int(bounded(bits[draw], newest + 1))
        chosen.append(newest if slot in chosen else slot)
    return chosen


def sample_neighbors(indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer):
    """Return (row pointers, sources, edge ids): see the operator's meaning."""
    positions, lengths = [], []
    for destination, key in zip(seeds.tolist(), (seeds if keys is None else keys).tolist(), strict=True):
        begin, end = indptr[destination : destination + 2].tolist()
        slots = _slots(end - begin, key, fanout, replace, seed, step, layer)
        positions += [begin + slot for slot in slots]
        lengths.append(len(slots))
    at = torch.tensor(positions, dtype=torch.int64, device=indices.device)
    rows = torch.tensor([0, *lengths], dtype=torch.int64, device=indices.device).cumsum(0)
    return rows, indices[at], at if edge_ids is None else edge_ids[at]


def sample_block(indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer, num_src):
    """Return (row pointers, local sources, source ids, edge ids): see the operator's meaning."""
    draw = (fanout, replace, seed, step, layer)
    rows, sources, edges = sample_neighbors(indptr, indices, edge_ids, seeds, keys, *draw)
    unique, local = unique_relabel(torch.cat([seeds, sources.long()]))
    return rows, local[seeds.shape[0] :].int(), unique, edges
