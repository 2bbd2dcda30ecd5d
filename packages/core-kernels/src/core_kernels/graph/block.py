"""A bipartite piece of a larger graph: what one layer reads to compute some of its rows.

Sources are numbered so that the destinations come first (``src_ids[:num_dst] == dst_ids``): a layer finds the own
row of a destination at its own number. The degrees of the full graph travel along, so that degree-normalised layers
stay exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.graph.structure import Graph

__all__ = ["Block"]


class Block(Graph):
    """In-edges of some destinations, with the ids they have in the full graph.

    Args:
        indptr: int64 [num_dst + 1].
        indices: int32 or int64 [num_edges], positions in ``src_ids``.
        src_ids: int64 [num_src], ids in the full graph, destinations first.
        dst_ids: int64 [num_dst], ids in the full graph.
        global_edge_ids: int64 [num_edges], edge ids in the full graph; ``None`` if unknown.
        global_in_degrees: int64 [num_dst], in the full graph; ``None`` if unknown.
        global_out_degrees: int64 [num_src], in the full graph; ``None`` if unknown.
        global_source_in_degrees: int64 [num_src], in the full graph; ``None`` if unknown.
        full_graph: Where degrees that are not given are looked up, when they are first asked for.
        validate: Check all of this; ``False`` trusts the caller.

    Raises:
        ArgumentError: An array has a shape or values it may not have.
        ArgumentTypeError: An array has another dtype.

    Edge ids of a block are positions. Its transpose is a plain :class:`Graph`.

    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 1]]), 4)
    >>> block = graph.in_subgraph(torch.tensor([1]))
    >>> block.src_ids.tolist(), block.indices.tolist(), block.global_edge_ids.tolist()
    ([1, 0, 3], [1, 2], [0, 3])
    """

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        *,
        src_ids: Tensor,
        dst_ids: Tensor,
        global_edge_ids: Tensor | None = None,
        global_in_degrees: Tensor | None = None,
        global_out_degrees: Tensor | None = None,
        global_source_in_degrees: Tensor | None = None,
        full_graph: Graph | None = None,
        validate: bool = True,
    ):
        self.src_ids, self.dst_ids, self.global_edge_ids = src_ids, dst_ids, global_edge_ids
        self._global_in_degrees, self._global_out_degrees = global_in_degrees, global_out_degrees
        self._global_source_in_degrees = global_source_in_degrees
        self._full_graph = full_graph
        super().__init__(indptr, indices, src_ids.shape[0], None, validate)

    @property
    def global_in_degrees(self) -> Tensor | None:
        """In-degrees of the destinations in the full graph, int64 [num_dst]; ``None`` if unknown."""
        if self._global_in_degrees is None and self._full_graph is not None:
            self._global_in_degrees = self._full_graph.in_degrees().index_select(0, self.dst_ids)
        return self._global_in_degrees

    @property
    def global_out_degrees(self) -> Tensor | None:
        """Out-degrees of the sources in the full graph, int64 [num_src]; ``None`` if unknown."""
        if self._global_out_degrees is None and self._full_graph is not None:
            self._global_out_degrees = self._full_graph.out_degrees().index_select(0, self.src_ids)
        return self._global_out_degrees

    @property
    def global_source_in_degrees(self) -> Tensor | None:
        """In-degrees of the sources in the full graph, int64 [num_src]; ``None`` if unknown."""
        if self._global_source_in_degrees is None and self._full_graph is not None:
            self._global_source_in_degrees = self._full_graph.in_degrees().index_select(0, self.src_ids)
        return self._global_source_in_degrees

    def _arrays(self) -> dict[str, Tensor | None]:
        return {
            "indptr": self.indptr,
            "indices": self.indices,
            "src_ids": self.src_ids,
            "dst_ids": self.dst_ids,
            "global_edge_ids": self.global_edge_ids,
            "global_in_degrees": self.global_in_degrees,
            "global_out_degrees": self.global_out_degrees,
            "global_source_in_degrees": self.global_source_in_degrees,
        }

    def __getstate__(self) -> dict[str, Any]:
        self._arrays()  # look the degrees up: the full graph stays behind
        return super().__getstate__() | {"_full_graph": None}

    @classmethod
    def _from_arrays(cls, arrays: dict[str, Tensor], num_src: int) -> Block:
        return cls(full_graph=None, validate=False, **arrays)

    def _validate(self) -> None:
        super()._validate()
        for name, length in (
            ("src_ids", self.num_src),
            ("dst_ids", self.num_dst),
            ("global_edge_ids", self.num_edges),
            ("global_in_degrees", self.num_dst),
            ("global_out_degrees", self.num_src),
            ("global_source_in_degrees", self.num_src),
        ):
            array = getattr(self, name)
            if array is not None and (array.shape != (length,) or array.dtype != torch.int64):
                shown = (tuple(array.shape), array.dtype)
                raise argument_error(name, shown, f"int64 [{length}]", "pass one id or degree per row of the block")
        if self.num_src < self.num_dst or not torch.equal(self.src_ids[: self.num_dst], self.dst_ids):
            raise argument_error(
                "src_ids",
                self.src_ids[: self.num_dst].tolist(),
                f"to begin with dst_ids={self.dst_ids[:8].tolist()}...",
                "number the destinations first, as core_kernels.ops.unique_relabel(dst_ids, sources) does",
            )
