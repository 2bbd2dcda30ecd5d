"""The part of the graph that one rank computes on, over the rows it has after a gather.

Edges keep the order they have in the full graph, and degrees are those of the full graph, so a layer adds up the same
numbers in the same order as on one machine.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from core_kernels.graph import Block, Graph
from gnn_comm.layout import DeviceLayout

__all__ = ["boundary_split", "local_block", "take_destinations"]


def local_block(graph: Graph, layout: DeviceLayout) -> Block:
    """Build the block of in-edges of a rank's vertices.

    Args:
        graph: The whole graph in the partition's numbering.
        layout: Rows of the rank. With replication the copies are destinations too; edges from rows that are not held
            are left out there, since nobody reads what those copies compute.
    """
    rows = layout.global_rows
    destinations = rows if layout.is_replicated else rows[: layout.num_local]
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    lengths = indptr[destinations + 1] - indptr[destinations]
    starts = np.cumsum(lengths) - lengths
    positions = np.repeat(indptr[destinations] - starts, lengths) + np.arange(int(lengths.sum()))
    place = np.full(graph.num_nodes, -1, np.int64)
    place[rows] = np.arange(len(rows))
    local = place[indices[positions]]
    held = local >= 0
    ends = np.concatenate([[0], np.cumsum(held)])
    counts = ends[starts + lengths] - ends[starts]
    edge_ids = torch.from_numpy(positions[held])
    return Block(
        torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)),
        torch.from_numpy(local[held].astype(np.int32)),
        src_ids=torch.from_numpy(rows),
        dst_ids=torch.from_numpy(destinations),
        global_edge_ids=edge_ids if graph.edge_ids is None else graph.edge_ids[edge_ids],
        global_in_degrees=graph.in_degrees()[torch.from_numpy(destinations)],
        global_out_degrees=graph.out_degrees()[torch.from_numpy(rows)],
        validate=False,
    )


def boundary_split(block: Block, num_local: int) -> tuple[tuple[Block, Tensor], tuple[Block, Tensor]]:
    """Split a rank's vertices into those that read own rows only and those that read remote ones.

    Returns:
        ``(interior, rows), (boundary, rows)``: blocks, with the positions of their sources in the rows of a gather. The
        sources of the interior are own rows.
    """
    remote = (block.indices >= num_local).to(torch.int64)
    ends = torch.cat([remote.new_zeros(1), remote.cumsum(0)])
    reads_remote = ends[block.indptr[1:]] - ends[block.indptr[:-1]] > 0
    interior, boundary = (~reads_remote).nonzero().squeeze(1), reads_remote.nonzero().squeeze(1)
    return take_destinations(block, interior), take_destinations(block, boundary)


def take_destinations(block: Block, destinations: Tensor) -> tuple[Block, Tensor]:
    """Return the block of some destinations, and the positions of its sources in the sources of ``block``."""
    lengths = (block.indptr[1:] - block.indptr[:-1])[destinations]
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    starts = block.indptr[:-1][destinations] - indptr[:-1]
    positions = torch.repeat_interleave(starts, lengths) + torch.arange(int(indptr[-1]), device=lengths.device)
    sources = block.indices[positions].long()
    place = torch.full((block.num_src,), -1, dtype=torch.int64, device=lengths.device)
    place[destinations] = torch.arange(len(destinations), device=lengths.device)
    others = torch.unique(sources[place[sources] < 0])
    rows = torch.cat([destinations, others])
    place[others] = torch.arange(len(destinations), len(rows), device=lengths.device)
    return Block(
        indptr,
        place[sources].to(block.indices.dtype),
        src_ids=block.src_ids[rows],
        dst_ids=block.dst_ids[destinations],
        global_edge_ids=None if block.global_edge_ids is None else block.global_edge_ids[positions],
        global_in_degrees=block.global_in_degrees[destinations],
        global_out_degrees=block.global_out_degrees[rows],
        validate=False,
    ), rows
