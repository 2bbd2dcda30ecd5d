"""Launchers of ``sampling.cuh``: neighbour sampling, bit-equal to the CPU, and sampling with relabelling."""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.kernels.cuda._instances import INDICES, Kernel
from core_kernels.kernels.cuda._launch import launch_threads
from core_kernels.kernels.cuda.relabel import unique_relabel

__all__ = ["KERNELS", "sample_block", "sample_neighbors"]

_SAMPLE = Kernel("sample_neighbors", "sampling.cuh", indices=INDICES)
KERNELS = (_SAMPLE,)


def sample_neighbors(
    indptr: Tensor,
    indices: Tensor,
    edge_ids: Tensor | None,
    seeds: Tensor,
    keys: Tensor | None,
    fanout: int,
    replace: bool,
    seed: int,
    step: int,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw in-neighbours of each seed; returns row pointers, sources and edge ids (one device synchronisation)."""
    seeds = seeds.to(torch.int64)
    degree = indptr[seeds + 1] - indptr[seeds]
    replace = replace and fanout >= 0
    count = degree
    if replace:
        count = torch.where(degree > 0, fanout, 0)
    elif fanout >= 0:
        count = degree.clamp_max(fanout)
    out_indptr = torch.zeros(seeds.numel() + 1, dtype=torch.int64, device=seeds.device)
    torch.cumsum(count, 0, out=out_indptr[1:])
    num_drawn = int(out_indptr[-1])
    sources = torch.empty(num_drawn, dtype=indices.dtype, device=indices.device)
    drawn_ids = torch.empty(num_drawn, dtype=torch.int64, device=indices.device)
    per_seed = fanout if fanout >= 0 else num_drawn // max(1, seeds.numel())
    group_lanes = min(32, 1 << max(0, per_seed - 1).bit_length())
    launch_threads(
        _SAMPLE.instance(index=indices.dtype),
        seeds.numel() * group_lanes if num_drawn else 0,
        (
            indptr,
            indices,
            edge_ids,
            seeds,
            None if keys is None else keys.to(torch.int64),
            out_indptr,
            sources,
            drawn_ids,
        )
        + (seeds.numel(), replace, seed, step, layer, group_lanes),
        indices.device,
    )
    return out_indptr, sources, drawn_ids


def sample_block(
    indptr: Tensor,
    indices: Tensor,
    edge_ids: Tensor | None,
    seeds: Tensor,
    keys: Tensor | None,
    fanout: int,
    replace: bool,
    seed: int,
    step: int,
    layer: int,
    num_src: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample, then number the seeds and the sources in first-seen order."""
    out_indptr, sources, drawn_ids = sample_neighbors(
        indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer
    )
    source_ids, local = unique_relabel(torch.cat((seeds.to(torch.int64), sources.to(torch.int64))))
    return out_indptr, local[seeds.numel() :].to(torch.int32), source_ids, drawn_ids
