"""The order in which destinations are put into blocks.

A block reads each source row once, so blocks of nodes that share neighbours read fewer rows. Orders: ``cluster``
(label propagation with capped clusters), ``rcm`` (reverse Cuthill-McKee), ``metis``, and ``auto``, which grows a few
sample clusters and keeps the natural order where clustering would gain less than 5 %. Stored rows stay where they are;
only the sequence of computation changes, so the order never shows in a result.

Source: Raghavan, Albert, Kumara, "Near linear time algorithm to detect community structures in large-scale networks",
Phys. Rev. E 76, 2007. Clusters here are capped, laid out next to their neighbours, and packed into
blocks.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gnn_eval.edge_structure import EdgeStructure
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.lowering import EdgeSet, StageProgram

__all__ = ["ORDERS", "choose_order", "cluster_order", "gain_is_likely", "num_source_rows"]

ORDERS = ("auto", "natural", "cluster", "rcm", "metis")
_DEFAULT_CLUSTER = 2048
_MIN_GAIN = 0.05
_SAMPLED_BLOCKS = 16
_PASSES = 6
_PACKED_TOGETHER = 64
_GROWN_CLUSTERS = 12


def choose_order(
    order: str,
    rows: Tensor | None,
    num_rows: int,
    stage: StageProgram,
    structures: dict[EdgeSet, EdgeStructure],
    batch_rows: int | None,
    copies_sources: bool = True,
) -> Tensor | None:
    """Return the rows in the order of computation, or ``rows`` itself for the natural order.

    Args:
        order: One of :data:`ORDERS`.
        rows: Rows to compute in increasing order, ``None`` for all.
        num_rows: Number of rows of the space.
        stage: The stage.
        structures: Its edge sets.
        batch_rows: Expected number of rows of a block.
        copies_sources: Whether blocks copy their source rows; ``auto`` keeps the natural order where they do not.
    """
    if order not in ORDERS:
        raise EvaluationArgumentError(f"order={order!r} is not valid: expected one of {', '.join(ORDERS)}; pass 'auto'")
    structure, sources = _square_structure(stage, structures)
    size = batch_rows or _DEFAULT_CLUSTER
    if order == "natural" or structure is None or num_rows <= size or (order == "auto" and not copies_sources):
        return rows
    if order == "auto" and not _is_promising(structure, sources, size):
        return rows
    kind = "cluster" if order == "auto" else order
    if (kind, size) not in structure.orders:
        structure.orders[(kind, size)] = _make_order(kind, structure, sources, size)
    found = structure.orders[(kind, size)]
    if order == "auto":
        natural = _sample(structure, sources, torch.arange(num_rows), size)
        if _sample(structure, sources, found, size) > (1 - _MIN_GAIN) * natural:
            return rows
    if rows is None:
        return found
    wanted = torch.zeros(num_rows, dtype=torch.bool)
    wanted[rows] = True
    return found[wanted[found]]


def cluster_order(
    indptr: Tensor, sources: Tensor, max_rows: int, block_rows: int | None = None, seed: int = 0
) -> Tensor:
    """Return nodes grouped by label propagation, each cluster of at most ``max_rows`` nodes.

    Clusters follow one another as a walk over the graph meets them, but for short-range swaps that let blocks end where
    clusters end: a cluster cut in two has most of its sources read twice.

    Args:
        indptr: int64 [num_nodes + 1] row pointers.
        sources: int32 or int64 [num_edges] source of each edge.
        max_rows: Cap on the size of a cluster.
        block_rows: Expected rows of a block; half of ``max_rows`` if left out.
        seed: Seed of the order in which nodes are visited.

    >>> indptr, sources = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([2, 3, 0, 1])
    >>> sorted(cluster_order(indptr, sources, 2).tolist())
    [0, 1, 2, 3]
    """
    num_nodes = indptr.numel() - 1
    visits = np.random.default_rng(seed).permutation(num_nodes)
    labels = np.arange(num_nodes, dtype=np.int64)
    pointers, columns = indptr.numpy(), sources.numpy()
    _propagate(pointers, columns, visits, labels, max_rows, _PASSES)
    rank = _rank_clusters(pointers, columns, labels)[labels]
    place = _pack_clusters(np.bincount(rank), block_rows or max(max_rows // 2, 1))
    return torch.from_numpy(np.argsort(place[rank], kind="stable"))


def num_source_rows(indptr: Tensor, sources: Tensor, order: Tensor, batch_rows: int) -> int:
    """Return the distinct source rows read over all blocks of ``batch_rows`` destinations taken in ``order``."""
    num_rows = int(sources.max()) + 1 if sources.numel() else 0
    stamp = np.zeros(max(num_rows, 1), np.int64)
    return int(_count_sources(indptr.numpy(), sources.numpy(), order.numpy(), batch_rows, stamp))


def gain_is_likely(indptr: Tensor, sources: Tensor, batch_rows: int, seed: int = 0) -> bool:
    """Tell from a sample whether an order by clusters would read at least 5 % fewer source rows.

    Some clusters of the size of a block are grown, each from a random node by always adding the node most edges of the
    cluster come from. Their source rows per edge are compared with those of blocks of the natural order.

    Args:
        indptr: int64 [num_nodes + 1] row pointers.
        sources: int32 or int64 [num_edges] source of each edge.
        batch_rows: Rows of a block.
        seed: Seed of the choice of nodes.

    Cost: a fraction of a second, whatever the size of the graph, beside two integers per node.
    """
    num_nodes = indptr.numel() - 1
    pointers, columns = indptr.numpy(), sources.numpy()
    starts = np.linspace(0, max(num_nodes - batch_rows, 0), _SAMPLED_BLOCKS).astype(np.int64)
    blocks = [np.arange(start, min(start + batch_rows, num_nodes)) for start in starts]
    linked, stamp = np.zeros(num_nodes, np.int32), np.zeros(num_nodes, np.int32)
    seeds = np.random.default_rng(seed).integers(num_nodes, size=_GROWN_CLUSTERS)
    clusters = [_grow_cluster(pointers, columns, node, batch_rows, linked) for node in seeds]
    counted = [_count_distinct(pointers, columns, nodes, stamp, n + 1) for n, nodes in enumerate([*blocks, *clusters])]
    totals = np.array(counted, dtype=np.float64)
    natural, grown = totals[: len(blocks)].sum(0), totals[len(blocks) :].sum(0)
    if natural[1] == 0 or grown[1] == 0:
        return False
    return bool(grown[0] / grown[1] < (1 - _MIN_GAIN) * natural[0] / natural[1])


def _is_promising(structure: EdgeStructure, sources: Tensor, size: int) -> bool:
    if ("promising", size) not in structure.orders:
        likely = gain_is_likely(structure.indptr, sources, size)
        structure.orders[("promising", size)] = torch.tensor(likely)
    return bool(structure.orders[("promising", size)])


def _square_structure(
    stage: StageProgram, structures: dict[EdgeSet, EdgeStructure]
) -> tuple[EdgeStructure | None, Tensor]:
    """Return the largest edge set that reads the space it writes, which is the one worth ordering for."""
    best, sources = None, torch.empty(0, dtype=torch.int64)
    for edge_set, indices in stage.edge_sets.items():
        for name, space in indices.items():
            structure = structures[edge_set]
            bigger = best is None or structure.num_edges > best.num_edges
            if space == stage.space and edge_set.grouping is not None and bigger:
                best, sources = structure, structure.sorted_index(name)
    return best, sources


def _make_order(kind: str, structure: EdgeStructure, sources: Tensor, size: int) -> Tensor:
    if kind == "cluster":
        return cluster_order(structure.indptr, sources, 2 * size)
    if kind == "rcm":
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import reverse_cuthill_mckee

        ones = np.ones(sources.numel(), np.int8)
        shape = (structure.num_rows, structure.num_rows)
        matrix = csr_matrix((ones, sources.numpy(), structure.indptr.numpy()), shape=shape)
        matrix = (matrix + matrix.T).tocsr()
        return torch.from_numpy(reverse_cuthill_mckee(matrix, symmetric_mode=True).astype(np.int64))
    from core_kernels import Graph, partition_graph

    graph = Graph(structure.indptr, sources, structure.num_rows, validate=False)
    book = partition_graph(graph, max(2, structure.num_rows // size), method="metis")
    return book.perm


def _sample(structure: EdgeStructure, sources: Tensor, order: Tensor, size: int) -> int:
    """Return the source rows of some blocks taken evenly from an order."""
    starts = np.linspace(0, max(order.numel() - size, 0), _SAMPLED_BLOCKS).astype(np.int64)
    return sum(num_source_rows(structure.indptr, sources, order[s : s + size].contiguous(), size) for s in starts)


@njit(cache=True, nogil=True)
def _propagate(pointers, sources, visits, labels, max_rows, passes):
    num_nodes = labels.size
    sizes = np.ones(num_nodes, np.int64)
    votes = np.zeros(num_nodes, np.int32)
    for _ in range(passes):
        moved = 0
        for node in visits:
            first, last = pointers[node], pointers[node + 1]
            own = labels[node]
            best, most = own, 0
            for position in range(first, last):
                votes[labels[sources[position]]] += 1
            for position in range(first, last):
                label = labels[sources[position]]
                if votes[label] > most and (label == own or sizes[label] < max_rows):
                    best, most = label, votes[label]
            if votes[own] == most:
                best = own
            for position in range(first, last):
                votes[labels[sources[position]]] = 0
            if best != own:
                sizes[own] -= 1
                sizes[best] += 1
                labels[node] = best
                moved += 1
        if moved * 100 < num_nodes:
            break


@njit(cache=True, nogil=True)
def _rank_clusters(pointers, sources, labels):
    """Number clusters in the order in which a breadth-first walk over nodes meets them."""
    num_nodes = labels.size
    rank = np.full(num_nodes, -1, np.int64)
    seen = np.zeros(num_nodes, np.bool_)
    queue = np.empty(num_nodes, np.int64)
    found = 0
    for root in range(num_nodes):
        if seen[root]:
            continue
        head, tail = 0, 1
        queue[0], seen[root] = root, True
        while head < tail:
            node = queue[head]
            head += 1
            if rank[labels[node]] < 0:
                rank[labels[node]] = found
                found += 1
            for position in range(pointers[node], pointers[node + 1]):
                source = sources[position]
                if not seen[source]:
                    seen[source] = True
                    queue[tail] = source
                    tail += 1
    return rank


@njit(cache=True, nogil=True)
def _pack_clusters(sizes, block_rows):
    """Return the place of each cluster: the largest of the next few that still fits the block, else the smallest."""
    place = np.full(sizes.size, -1, np.int64)
    head, left = 0, block_rows
    for turn in range(sizes.size):
        while place[head] >= 0:
            head += 1
        fitting, smallest, looked = -1, -1, 0
        for candidate in range(head, sizes.size):
            if place[candidate] >= 0:
                continue
            looked += 1
            if looked > _PACKED_TOGETHER:
                break
            if sizes[candidate] <= left and (fitting < 0 or sizes[candidate] > sizes[fitting]):
                fitting = candidate
            if smallest < 0 or sizes[candidate] < sizes[smallest]:
                smallest = candidate
        chosen = fitting if fitting >= 0 else smallest
        place[chosen] = turn
        left = block_rows - (block_rows - left + sizes[chosen]) % block_rows
    return place


@njit(cache=True, nogil=True)
def _grow_cluster(pointers, sources, start, num_rows, linked):
    """Return up to ``num_rows`` nodes around ``start``; ``linked`` is all zeros before and after."""
    nodes = np.empty(num_rows, np.int64)
    found = 0
    heap = [(np.int64(0), np.int64(start))]
    touched = [np.int64(start)]
    while found < num_rows and heap:
        links, node = heapq.heappop(heap)
        if linked[node] != -links:
            continue  # taken already, or in the heap again with more links
        linked[node] = -1
        nodes[found] = node
        found += 1
        for position in range(pointers[node], pointers[node + 1]):
            source = np.int64(sources[position])
            if linked[source] < 0:
                continue
            if linked[source] == 0:
                touched.append(source)
            linked[source] += 1
            heapq.heappush(heap, (np.int64(-linked[source]), source))
    for node in touched:
        linked[node] = 0
    return nodes[:found]


@njit(cache=True, nogil=True)
def _count_distinct(pointers, sources, nodes, stamp, block):
    """Return the distinct sources of some nodes, and their edges."""
    distinct = edges = 0
    for node in nodes:
        for position in range(pointers[node], pointers[node + 1]):
            edges += 1
            source = sources[position]
            if stamp[source] != block:
                stamp[source] = block
                distinct += 1
    return distinct, edges


@njit(cache=True, nogil=True)
def _count_sources(pointers, sources, order, batch_rows, stamp):
    total = 0
    for start in range(0, order.size, batch_rows):
        block = start + 1
        for place in range(start, min(start + batch_rows, order.size)):
            row = order[place]
            for position in range(pointers[row], pointers[row + 1]):
                source = sources[position]
                if stamp[source] != block:
                    stamp[source] = block
                    total += 1
    return total
