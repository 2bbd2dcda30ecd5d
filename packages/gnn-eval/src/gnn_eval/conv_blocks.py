"""Calling an opaque convolution on the one-hop block of a range of destinations.

A block has the destinations, whose rows of the result are those wanted, then the source rows. One extra node before and
one after, each with an edge to itself, are there for layers that fail where the first or last node has no edges. Node
types and relations that do not lead to the destinations are passed with no rows.

Destinations keep their position modulo 4 of the full graph, with rows of zeros between where they must: matrix products
inside a layer add up narrow rows according to their address (see :mod:`gnn_eval.row_exact`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core_kernels import Block as CoreBlock
from gnn_eval.block import Block
from gnn_eval.containers import fill, take_apart
from gnn_eval.frontends.opaque import conv_call
from gnn_eval.hoisting import StructureEvaluator
from gnn_eval.lowering import EdgeSet, Step
from gnn_eval.program import Program, Value
from gnn_eval.row_exact import FEW_ROWS, congruent_places

__all__ = ["make_conv"]

_ROWS_BEFORE = 4
"""Room for the extra row; a multiple of 4, so that places stay congruent."""


def make_conv(program: Program, step: Step, structure: StructureEvaluator) -> Callable[[dict[str, Any], Block], Tensor]:
    """Return the action of a conv step."""
    value = program[step.name]
    call = conv_call(value.kwargs["call"])
    function = call.function or structure.model.get_submodule(call.path)
    tensors, output, destination = value.args[0], value.kwargs["output"], value.kwargs["destination"]
    constants = {
        place: structure[ref.name] for place, ref in enumerate(tensors) if program[ref.name].type.space is None
    }
    empty = {place: _empty_rows(program, ref.name) for place, ref in enumerate(tensors) if place not in constants}
    edges = {
        place: (EdgeSet(program[rows.name].type.rows, rows.name), value.kwargs["rows"][f"{place}.0"].name)
        for place, role in enumerate(call.roles)
        if role[0] == "relation" and role[2] == destination
        for rows in [value.kwargs["rows"][f"{place}.1"]]
    }

    join = torch.cat if call.takes_graph else _with_extra_rows
    degrees = {place: _degrees(structure, value, place) for place in edges} if call.takes_graph else {}
    in_order = sorted(enumerate(call.roles), key=lambda item: item[1][0] == "relation")
    empty_edges = [torch.empty(2, 0, dtype=torch.int64)] * len(call.roles)

    def run(slots: dict[str, Any], block: Block) -> Tensor:
        places = _places(block)
        filled: list[Any] = list(empty_edges)
        for place, role in in_order:
            if place in constants:
                filled[place] = constants[place]
            elif role[0] == "node":
                parts = [slots[step.inputs[k]] for k in (f"{place} range", f"{place} sources") if k in step.inputs]
                if f"{place} range" in step.inputs and not call.takes_graph:
                    filled[place] = _with_last_row([_spread(parts[0], places), *parts[1:]])
                else:
                    filled[place] = join(parts) if parts else empty[place]
            elif role[0] == "edge":
                slot = step.inputs.get(f"{place} edges")
                filled[place] = empty[place] if slot is None else join([slots[slot]])
            elif call.takes_graph:
                filled[place] = _graph_block(block, *edges[place], degrees[place])
            elif place in edges:
                last = [filled[role[1]].size(0) - 1, filled[role[2]].size(0) - 1]
                filled[place] = _local_edges(block, places, *edges[place], role[1] == destination, last)
        args, kwargs = fill(call.skeleton, filled, lambda _: None)
        _, leaves = take_apart(function(*args, **kwargs))
        result = leaves[output][1]
        return result[: block.destinations.num_rows] if call.takes_graph else result[places]

    return run


def _places(block: Block) -> Tensor:
    """Return where each destination goes: congruent modulo 4 to its id, behind the extra row and distinct."""
    chosen = block.destinations
    ids = torch.arange(chosen.start, chosen.stop) if chosen.ids is None else chosen.ids
    return congruent_places(ids) + _ROWS_BEFORE


def _num_places(places: Tensor) -> int:
    return max(int(places.max()) + 1 if places.numel() else 1, FEW_ROWS)


def _spread(rows: Tensor, places: Tensor) -> Tensor:
    spread = rows.new_zeros((_num_places(places), *rows.shape[1:]))
    return spread.index_copy_(0, places, rows)


def _local_edges(
    block: Block, places: Tensor, edge_set: EdgeSet, source: str, is_square: bool, last: list[int]
) -> Tensor:
    local = block.local[(edge_set, source)].long()
    if is_square:  # destinations are sources too: a self-loop must lead from a row to itself
        among = _place_of_sources(block, edge_set, source)[local]
        others = among - places.numel() + _num_places(places)
        sources = torch.where(among < places.numel(), places[among.clamp(max=places.numel() - 1)], others)
    else:
        sources = local + 1
    inner = torch.stack([sources, places[block.edges[edge_set].rows_of_edges()]])
    return torch.cat([torch.zeros(2, 1, dtype=torch.int64), inner, torch.tensor(last).view(2, 1)], 1)


def _degrees(structure: StructureEvaluator, value: Value, place: int) -> tuple[Tensor, Tensor]:
    """Return in-degrees and out-degrees of the full graph."""
    rows = value.kwargs["rows"]
    num_nodes = structure.count_of(value.type.rows)
    into, out_of = (structure[rows[f"{place}.{side}"].name] for side in (1, 0))
    return torch.bincount(into, minlength=num_nodes), torch.bincount(out_of, minlength=num_nodes)


def _graph_block(block: Block, edge_set: EdgeSet, source: str, degrees: tuple[Tensor, Tensor]) -> CoreBlock:
    chosen, edges = block.destinations, block.edges[edge_set]
    own = torch.arange(chosen.start, chosen.stop) if chosen.ids is None else chosen.ids
    ids = torch.cat([own, block.sources[block.spaces[(edge_set, source)]]])
    return CoreBlock(
        edges.pointers,
        _place_of_sources(block, edge_set, source)[block.local[(edge_set, source)].long()],
        src_ids=ids,
        dst_ids=own,
        global_in_degrees=degrees[0][own],
        global_out_degrees=degrees[1][ids],
        global_source_in_degrees=degrees[0][ids],
        validate=False,
    )


def _place_of_sources(block: Block, edge_set: EdgeSet, source: str) -> Tensor:
    """Return where each source row is found: among the destinations if it is one, else after them."""
    chosen = block.destinations
    ids = block.sources[block.spaces[(edge_set, source)]]
    after = torch.arange(ids.numel()) + chosen.num_rows
    if chosen.ids is None:
        return torch.where((ids >= chosen.start) & (ids < chosen.stop), ids - chosen.start, after)
    order = chosen.ids.argsort()
    place = torch.searchsorted(chosen.ids, ids, sorter=order).clamp(max=chosen.num_rows - 1)
    return torch.where(chosen.ids[order[place]] == ids, order[place], after)


def _with_extra_rows(parts: list[Tensor]) -> Tensor:
    return _with_last_row([parts[0].new_zeros((1, *parts[0].shape[1:])), *parts])


def _with_last_row(parts: list[Tensor]) -> Tensor:
    return torch.cat([*parts, parts[0].new_zeros((1, *parts[0].shape[1:]))])


def _empty_rows(program: Program, name: str) -> Tensor:
    value = program[name]
    shape = [0 if dim == value.type.row_dim else size.constant for dim, size in enumerate(value.dims)]
    return torch.empty(shape, dtype=value.dtype)
