"""Sparse adjacencies as edge lists, and back to what the caller passed.

A plan works on edge lists. PyG's layers do not treat the forms of a graph alike: ``gcn_norm`` keeps the weight of a
self-loop in an edge list, overwrites it in a ``torch_sparse.SparseTensor`` and adds to it in a torch sparse matrix, and
some layers read the weights of a matrix that others ignore. So the form is remembered: verification also runs the full
forward on an adjacency of the caller's form, and a model for which the forms differ is refused, not guessed.

torch_sparse is recognised by what its objects can do and never imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdjacencyForm", "adjacencies_in", "as_edge_index", "is_adjacency", "weights_of"]

_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


@dataclass(frozen=True)
class AdjacencyForm:
    """What a sparse adjacency was before it became an edge list.

    Args:
        layout: A torch layout, or the class of another library's sparse matrix.
        weighted: Whether it has values other than one.
        has_loops: Whether a node has an edge to itself.
    """

    layout: Any
    weighted: bool
    has_loops: bool

    @classmethod
    def of(cls, adjacency: Any) -> AdjacencyForm:
        """Return the form of an adjacency."""
        edge_index, _ = as_edge_index(adjacency)
        layout = adjacency.layout if isinstance(adjacency, Tensor) else type(adjacency)
        return cls(layout, weights_of(adjacency) is not None, bool((edge_index[0] == edge_index[1]).any()))

    @property
    def name(self) -> str:
        """A short name for messages."""
        return self.layout.__name__ if isinstance(self.layout, type) else str(self.layout)

    def covers(self, other: AdjacencyForm) -> bool:
        """Whether what was verified for this form holds for the other."""
        same = (self.layout, self.weighted) == (other.layout, other.weighted)
        return same and (self.has_loops or not other.has_loops)

    def build(self, edge_index: Tensor, weight: Tensor | None, sizes: tuple[int, int]) -> Any:
        """Return an adjacency of this form; ``sizes`` are (destinations, sources), edges must not repeat."""
        source, destination = edge_index
        if isinstance(self.layout, type):
            return self.layout(row=destination, col=source, value=weight, sparse_sizes=sizes)
        values = torch.ones(source.numel()) if weight is None else weight
        matrix = torch.sparse_coo_tensor(torch.stack([destination, source]), values, sizes).coalesce()
        if self.layout == torch.sparse_csr:
            return matrix.to_sparse_csr()
        return matrix.to_sparse_csc() if self.layout == torch.sparse_csc else matrix


def is_adjacency(value: Any) -> bool:
    """Tell whether ``value`` is a sparse adjacency: a torch sparse matrix or an object like torch_sparse's."""
    if isinstance(value, Tensor):
        return value.layout in _LAYOUTS
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("coo", "csr", "sparse_sizes"))


def as_edge_index(adjacency: Any) -> tuple[Tensor, Tensor | None]:
    """Return ``(edge_index, weight)`` of a transposed adjacency, whose rows are destinations.

    >>> matrix = torch.tensor([[0., 2.], [0., 0.]]).to_sparse_coo()
    >>> as_edge_index(matrix)
    (tensor([[1],
            [0]]), tensor([2.]))
    """
    if isinstance(adjacency, Tensor):
        coo = adjacency.to_sparse_coo().coalesce() if adjacency.layout != torch.sparse_coo else adjacency.coalesce()
        row, col = coo.indices()
        return torch.stack([col, row]), coo.values()
    row, col, value = adjacency.coo()
    return torch.stack([col, row]), value


def weights_of(adjacency: Any) -> Tensor | None:
    """Return the values of an adjacency in the order of its edge list, ``None`` if there are none or all are one."""
    weight = as_edge_index(adjacency)[1]
    return None if weight is None or bool((weight == 1).all()) else weight


def adjacencies_in(tree: Any) -> Iterator[Any]:
    """Yield the adjacencies among arguments, also inside lists, tuples, dicts and graph data objects."""
    if is_adjacency(tree):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from adjacencies_in(part)
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from adjacencies_in(part)
    elif hasattr(tree, "stores"):
        for store in tree.stores:
            yield from adjacencies_in(dict(store.items()))
