"""Neighbour sampling and blocks.

A draw depends on (seed, step, layer, id of the destination, number of the draw) and on nothing else: the same
neighbours come out on any device, with any number of threads or ranks, and whatever other seeds are in the batch.
Without replacement a destination gets min(degree, fanout) distinct edges, every subset equally likely up to the
2**-32 granularity of the generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.ops import _library
from core_kernels.ops._checks import check_ids_tensor

if TYPE_CHECKING:
    from core_kernels.graph import Block, Graph

__all__ = ["sample_block", "sample_blocks", "sample_neighbors"]


def sample_neighbors(
    graph: Graph,
    seeds: Tensor,
    fanout: int,
    seed: int = 0,
    replace: bool = False,
    step: int = 0,
    layer: int = 0,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample in-edges of each seed.

    Args:
        graph: Where to sample.
        seeds: Destination ids, int32 or int64 [num_seeds]; may repeat (and then draw the same).
        fanout: Edges per seed, at least 1; -1 takes all.
        seed: Key of the random numbers.
        replace: Draw with replacement: exactly ``fanout`` edges of every seed that has any.
        step: Key, for example the number of the batch.
        layer: Key, for example the number of the hop.
        keys: int64 [num_seeds], what identifies each seed to the generator instead of its id: a renumbered graph that
            passes the original ids draws as the original does.

    Returns:
        ``(indptr, indices, edge_ids)``: row pointers int64 [num_seeds + 1], source ids, edge ids int64.

    Raises:
        ArgumentError: A seed is outside the graph, or ``fanout`` is not an integer of at least 1 or -1.
        ArgumentTypeError: Seeds are not integers.

    >>> from core_kernels import Graph
    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [3, 3, 3]]), 4)
    >>> indptr, indices, edge_ids = sample_neighbors(graph, torch.tensor([3, 0]), 2)
    >>> indptr.tolist(), torch.equal(indices.long(), edge_ids)
    ([0, 2, 2], True)
    """
    arguments = _arguments(graph, seeds, fanout, replace, seed, step, layer, keys)
    return _sample_neighbors(*arguments)


def sample_block(
    graph: Graph,
    seeds: Tensor,
    fanout: int,
    seed: int = 0,
    replace: bool = False,
    step: int = 0,
    layer: int = 0,
    keys: Tensor | None = None,
) -> Block:
    """Sample in-edges of distinct seeds as a block: what one layer reads to compute their rows.

    Args:
        graph: A square graph.
        seeds: Distinct destination ids.
        fanout: As for :func:`sample_neighbors`, and so are the others.
        seed: Key of the random numbers.
        replace: Draw with replacement.
        step: Key.
        layer: Key.
        keys: What identifies each seed to the generator.

    Returns:
        The block; ``src_ids`` are the seeds and then other sources in first-seen order. It carries the degrees of the
        full graph.

    Raises:
        ArgumentError: As :func:`sample_neighbors`; or a seed occurs twice; or sources and destinations differ.

    >>> from core_kernels import Graph
    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [3, 3, 3]]), 4)
    >>> sample_block(graph, torch.tensor([3]), -1).src_ids.tolist()
    [3, 0, 1, 2]
    """
    from core_kernels.graph import Block

    num_nodes = graph.num_nodes
    arguments = _arguments(graph, seeds, fanout, replace, seed, step, layer, keys)
    indptr, indices, src_ids, edge_ids = _sample_block(*arguments, num_nodes)
    dst_ids = arguments[3]
    if not torch.equal(src_ids[: dst_ids.shape[0]], dst_ids):
        repeated = int(dst_ids[torch.bincount(dst_ids)[dst_ids] > 1][0])
        raise argument_error("seeds", repeated, "distinct ids, but this one repeats", "pass unique_relabel(seeds)[0]")
    return Block(
        indptr,
        indices,
        src_ids=src_ids,
        dst_ids=dst_ids,
        global_edge_ids=edge_ids,
        full_graph=graph,
        validate=False,
    )


def sample_blocks(
    graph: Graph, seeds: Tensor, fanouts: Sequence[int], seed: int = 0, replace: bool = False, step: int = 0
) -> list[Block]:
    """Sample the blocks of a model with one layer per fanout.

    Args:
        graph: A square graph.
        seeds: Distinct ids of the nodes whose outputs are wanted.
        fanouts: Edges per destination and hop; the first is the hop at the seeds. -1 takes all.
        seed: Key of the random numbers.
        replace: Draw with replacement.
        step: Key, for example the number of the batch.

    Returns:
        Blocks in the order a model runs them: ``blocks[0]`` reads the input features of its ``src_ids``, the last one's
        destinations are the seeds. Hop ``k`` draws with ``layer=k``.

    Raises:
        ArgumentError: As :func:`sample_block`; or no fanout is given.

    >>> from core_kernels import Graph
    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4)
    >>> [block.src_ids.tolist() for block in sample_blocks(graph, torch.tensor([3]), [2, 2])]
    [[3, 2, 1], [3, 2]]
    """
    if len(fanouts) == 0:
        raise argument_error("fanouts", list(fanouts), "one fanout per layer", "pass for example [10, 10]")
    blocks: list[Block] = []
    for hop, fanout in enumerate(fanouts):
        blocks.append(sample_block(graph, seeds, fanout, seed=seed, replace=replace, step=step, layer=hop))
        seeds = blocks[-1].src_ids
    return blocks[::-1]


def _arguments(graph, seeds, fanout, replace, seed, step, layer, keys):
    seeds = check_ids_tensor("seeds", seeds).long()
    if isinstance(fanout, bool) or not isinstance(fanout, int) or not (fanout == -1 or fanout >= 1):
        raise argument_error("fanout", fanout, "an integer of at least 1, or -1 for all", "pass for example 10")
    if replace and fanout == -1:
        raise argument_error("fanout", fanout, "at least 1 with replace=True", "say how many edges to draw")
    if keys is not None:
        keys = check_ids_tensor("keys", keys).long()
        if keys.shape != seeds.shape:
            raise argument_error(
                "keys.shape", tuple(keys.shape), f"{tuple(seeds.shape)} like seeds", "pass one per seed"
            )
    draw = (
        fanout,
        bool(replace),
        *(_signed(name, key) for name, key in (("seed", seed), ("step", step), ("layer", layer))),
    )
    return graph.indptr, graph.indices, graph.edge_ids, seeds, keys, *draw


def _signed(name: str, key: int) -> int:
    """Return ``key`` as the int64 with the same 64 bits."""
    if isinstance(key, bool) or not isinstance(key, int) or not -(1 << 63) <= key < 1 << 64:
        raise argument_error(name, key, "an integer of at most 64 bits", f"reduce {name} modulo 2**64")
    return key - (1 << 64) if key >= 1 << 63 else key


def _dispatch_neighbors(indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer):
    _library.check_ids("sample_neighbors", "seeds", seeds, indptr.shape[0] - 1, skippable=False)
    draw = (fanout, replace, seed, step, layer)
    return _library.run("sample_neighbors", indptr, indptr, indices, edge_ids, seeds, keys, *draw)


def _fake_neighbors(indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer):
    num_draws = torch.library.get_ctx().new_dynamic_size()
    rows = indptr.new_empty(seeds.shape[0] + 1)
    return rows, indices.new_empty(num_draws), indptr.new_empty(num_draws)


def _dispatch_block(indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer, num_src):
    _library.check_ids("sample_block", "seeds", seeds, min(num_src, indptr.shape[0] - 1), skippable=False)
    draw = (fanout, replace, seed, step, layer)
    return _library.run("sample_block", indptr, indptr, indices, edge_ids, seeds, keys, *draw, num_src)


def _fake_block(indptr, indices, edge_ids, seeds, keys, fanout, replace, seed, step, layer, num_src):
    context = torch.library.get_ctx()
    num_draws, num_sources = context.new_dynamic_size(), context.new_dynamic_size()
    rows = indptr.new_empty(seeds.shape[0] + 1)
    local = indices.new_empty(num_draws, dtype=torch.int32)
    return rows, local, indptr.new_empty(num_sources), indptr.new_empty(num_draws)


_sample_neighbors = _library.register("sample_neighbors", _dispatch_neighbors, _fake_neighbors)
_sample_block = _library.register("sample_block", _dispatch_block, _fake_block)
