"""The part of the graph that one run of a stage works on.

A block has a set of destinations (a contiguous range, or a list of ids), the edges that end in them for each edge set
of the stage, and the source rows those edges read. Where a value is read as it is stored and storage is memory, edges
index the store itself: then there is no list of source rows, and nothing is copied before the gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from gnn_eval.edge_structure import EdgeBlock, EdgeStructure, RowNumbers
from gnn_eval.lowering import EdgeSet, Rows, StageProgram
from gnn_eval.sizes import Size

__all__ = ["Block", "BlockBuilder", "Destinations"]


@dataclass(frozen=True)
class Destinations:
    """The destinations of a block: ``start`` to ``stop``, or the rows ``ids``.

    >>> import torch
    >>> Destinations(2, 5).num_rows, Destinations(ids=torch.tensor([4, 9])).num_rows
    (3, 2)
    """

    start: int = 0
    stop: int = 0
    ids: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of destinations."""
        return self.stop - self.start if self.ids is None else self.ids.numel()


@dataclass
class Block:
    """Everything the steps of a stage need to know of one block.

    Args:
        destinations: The destinations.
        edges: The edges of each edge set.
        local: Index vectors as positions among the source rows (or, read directly, in the whole space).
        sources: Ids of the source rows of each space read indirectly.
        spaces: Space each index vector points into.
        counts: Number of rows of each row set, by key.
        loaded: Rows read from disk before the block runs, by slot.
    """

    destinations: Destinations
    edges: dict[EdgeSet, EdgeBlock] = field(default_factory=dict)
    local: dict[tuple[EdgeSet, str], Tensor] = field(default_factory=dict)
    sources: dict[Size, Tensor] = field(default_factory=dict)
    spaces: dict[tuple[EdgeSet, str], Size] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, Tensor] = field(default_factory=dict)

    def edges_at(self, rows: Rows) -> EdgeBlock:
        """Return the edges a row set of kind ``"edge"`` stands for."""
        return next(e for s, e in self.edges.items() if s.space == rows.space and s.grouping == rows.grouping)

    @property
    def num_edges(self) -> int:
        """Edges of all edge sets with a grouping."""
        return sum(edges.num_edges for edge_set, edges in self.edges.items() if edge_set.grouping is not None)


class BlockBuilder:
    """Builds blocks of one stage.

    Args:
        stage: The stage.
        structures: The edge sets on the actual graph.
        counts: Number of rows of each space read at source rows.
        direct: Spaces whose values are all read as they are stored.
        numbers: Gives the shared renumbering workspace of a space.
        ordered_sources: Whether source rows come in increasing order.
    """

    def __init__(
        self,
        stage: StageProgram,
        structures: dict[EdgeSet, EdgeStructure],
        counts: dict[Size, int],
        direct: set[Size],
        numbers: Callable[[Size], RowNumbers],
        ordered_sources: bool = False,
    ):
        self._stage, self._structures, self._counts = stage, structures, counts
        self._direct, self._numbers, self._ordered = direct, numbers, ordered_sources

    def build(self, destinations: Destinations, in_list_order: bool = False) -> Block:
        """Return the block of the destinations given.

        Args:
            destinations: A range or a list of rows of the stage's space.
            in_list_order: Leave edges in the order of the edge list; only for all destinations at once.
        """
        block = Block(destinations)
        block.counts[Rows("range", self._stage.space).key] = destinations.num_rows
        for edge_set in self._stage.edge_sets:
            structure = self._structures[edge_set]
            if destinations.ids is not None:
                edges = structure.rows(destinations.ids)
            elif in_list_order:
                edges = structure.whole()
            else:
                edges = structure.range(destinations.start, destinations.stop)
            self._add_edges(block, edge_set, edges)
        self._number_sources(block)
        return block

    def part(self, block: Block, edge_set: EdgeSet, start: int, stop: int) -> Block:
        """Return a block with only edges ``start`` to ``stop`` of one edge set, and all destinations."""
        small = Block(block.destinations)
        small.counts[Rows("range", self._stage.space).key] = block.destinations.num_rows
        self._add_edges(small, edge_set, self._structures[edge_set].part(block.edges[edge_set], start, stop))
        self._number_sources(small)
        return small

    def edges_of(self, destinations: Destinations) -> Block:
        """Return a block whose edges are known but whose source rows are not numbered."""
        block = Block(destinations)
        block.counts[Rows("range", self._stage.space).key] = destinations.num_rows
        for edge_set in self._stage.edge_sets:
            structure = self._structures[edge_set]
            ids = destinations.ids
            edges = structure.rows(ids) if ids is not None else structure.range(destinations.start, destinations.stop)
            block.edges[edge_set] = edges
        return block

    def _add_edges(self, block: Block, edge_set: EdgeSet, edges: EdgeBlock) -> None:
        block.edges[edge_set] = edges
        if edge_set.grouping is not None:
            block.counts[Rows("edge", edge_set.space, edge_set.grouping).key] = edges.num_edges
        for index in self._stage.edge_sets[edge_set]:
            block.spaces[(edge_set, index)] = self._stage.edge_sets[edge_set][index]
            block.local[(edge_set, index)] = self._structures[edge_set].index(index, edges)

    def _number_sources(self, block: Block) -> None:
        by_space: dict[Size, list[tuple[EdgeSet, str]]] = {}
        for key in block.local:
            by_space.setdefault(self._stage.edge_sets[key[0]][key[1]], []).append(key)
        for space, keys in by_space.items():
            if space in self._direct:
                block.counts[Rows("source", space).key] = self._counts[space]
                continue
            ids, local = self._numbers(space).distinct([block.local[key] for key in keys], self._ordered)
            block.sources[space] = ids
            block.counts[Rows("source", space).key] = ids.numel()
            block.local.update(zip(keys, local, strict=True))
