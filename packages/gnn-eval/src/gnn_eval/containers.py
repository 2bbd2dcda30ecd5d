"""Taking a call's arguments apart into tensors and putting them together again.

Arguments may nest tuples, lists, dicts, PyG ``Data`` and ``HeteroData``, sparse adjacencies and :class:`Blocks`. What
remains after the tensors are taken out is a skeleton; filling it with other tensors gives the same call on another
graph. PyG and torch_sparse are recognised by what their objects can do, so neither is imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gnn_eval.adjacency import AdjacencyForm, as_edge_index, is_adjacency
from gnn_eval.errors import EvaluationArgumentError

__all__ = [
    "Bipartite",
    "Blocks",
    "GraphSlot",
    "Named",
    "Slot",
    "TracedGraph",
    "fill",
    "slots_in",
    "take_apart",
    "takes_graph",
]

Path = tuple[Any, ...]


class Named(str):
    """An attribute of a graph data object in a path, to tell it from a node type in a dictionary."""


@dataclass(frozen=True)
class Slot:
    """The place of tensor number ``index`` in a skeleton; ``form`` is what it was if it was a sparse adjacency."""

    index: int
    form: AdjacencyForm | None = None


@dataclass(frozen=True)
class _Count:
    """The place of a number of nodes in a skeleton."""

    node_type: str


@dataclass(frozen=True)
class GraphSlot:
    """The place of a graph whose edges are tensor number ``index``."""

    index: int


@dataclass
class TracedGraph:
    """Stands for a graph while a model is traced: its edges, and its number of nodes.

    Args:
        edges: ``[2, num_edges]``.
        num_nodes: Number of nodes.
    """

    edges: torch.Tensor
    num_nodes: Any


@dataclass(frozen=True)
class _Object:
    """A graph data object without its tensors."""

    template: Any
    tensors: dict[Path, Any]


@dataclass
class Blocks:
    """The full graph in every slot of training code that takes one block per layer.

    Passes ``[(edge_index, None, (n, n))] * num_layers``, the form of a neighbour sampler's ``adjs``; code that slices
    ``x[: size[1]]`` then keeps all rows, which is what full evaluation needs.

    Args:
        edge_index: Edges ``[2, num_edges]``, sources first.
        num_layers: Number of slots.
    """

    edge_index: torch.Tensor
    num_layers: int


@dataclass
class Bipartite:
    """Edges between two node types of a model called as ``conv((x_src, x_dst), edge_index)``.

    Args:
        edge_index: Edges ``[2, num_edges]``, sources first.
        source: Name of the source node type.
        destination: Name of the destination node type.
    """

    edge_index: torch.Tensor
    source: str
    destination: str


def take_apart(value: Any, path: Path = ()) -> tuple[Any, list[tuple[Path, torch.Tensor]]]:
    """Return the skeleton of ``value`` and its tensors with the path to each, in a stable order."""
    leaves: list[tuple[Path, torch.Tensor]] = []

    def walk(item: Any, path: Path) -> Any:
        if is_adjacency(item):
            leaves.append((path, as_edge_index(item)[0]))
            return Slot(len(leaves) - 1, AdjacencyForm.of(item))
        if isinstance(item, torch.Tensor):
            as_tensor = getattr(item, "as_tensor", None)  # PyG's EdgeIndex
            leaves.append((path, item if as_tensor is None else as_tensor()))
            return Slot(len(leaves) - 1)
        if isinstance(item, TracedGraph) or _is_graph(item):
            edges = item.edges if isinstance(item, TracedGraph) else item.edge_index()
            return GraphSlot(walk(edges, (*path, "edge_index")).index)
        if isinstance(item, Blocks):
            slot = walk(item.edge_index, (*path, "edge_index"))
            return [(slot, None, (_Count("node"), _Count("node")))] * item.num_layers
        if isinstance(item, Bipartite):
            return walk(item.edge_index, (*path, (item.source, "edge_index", item.destination)))
        fields = getattr(item, "_fields", None)
        if isinstance(item, tuple) and fields is not None:
            return type(item)(*(walk(part, (*path, name)) for name, part in zip(fields, item, strict=True)))
        if isinstance(item, (list, tuple)):
            return type(item)(walk(part, (*path, place)) for place, part in enumerate(item))
        if isinstance(item, dict):
            return {key: walk(part, (*path, key)) for key, part in item.items()}
        if hasattr(item, "stores"):
            found = {key: walk(part, (*path, *key)) for key, part in _entries(item)}
            return _Object(_without_tensors(item, found), found)
        return item

    return walk(value, path), leaves


def fill(
    skeleton: Any,
    tensors: list[Any],
    count: Callable[[str], Any],
    rebuild: Callable[[Slot, torch.Tensor], Any] | None = None,
) -> Any:
    """Put tensors into the slots of a skeleton.

    Args:
        skeleton: What :func:`take_apart` left.
        tensors: Tensor of each slot.
        count: Gives the number of nodes of a type.
        rebuild: Makes of an edge list the sparse adjacency it was; edge lists stay as they are when left out.
    """

    def walk(item: Any) -> Any:
        if isinstance(item, Slot):
            tensor = tensors[item.index]
            return tensor if rebuild is None or item.form is None else rebuild(item, tensor)
        if isinstance(item, GraphSlot):
            return _graph_from(tensors[item.index], count)
        if isinstance(item, _Count):
            return count(item.node_type)
        if isinstance(item, _Object):
            filled = copy.copy(item.template)
            for key, part in item.tensors.items():
                store = filled if len(key) == 1 else filled[key[1]]
                setattr(store, key[0], walk(part))
            return filled
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*(walk(part) for part in item))
        if isinstance(item, (list, tuple)):
            return type(item)(walk(part) for part in item)
        if isinstance(item, dict):
            return {key: walk(part) for key, part in item.items()}
        return item

    return walk(skeleton)


def slots_in(skeleton: Any) -> Iterator[Slot]:
    """Yield the slots of a skeleton."""
    if isinstance(skeleton, Slot):
        yield skeleton
    elif isinstance(skeleton, _Object):
        yield from slots_in(skeleton.tensors)
    elif isinstance(skeleton, (dict, list, tuple)):
        for part in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from slots_in(part)


def takes_graph(skeleton: Any) -> bool:
    """Whether a call has a graph object among its arguments."""
    if isinstance(skeleton, GraphSlot):
        return True
    parts = skeleton.values() if isinstance(skeleton, dict) else skeleton
    return isinstance(skeleton, (dict, list, tuple)) and any(takes_graph(part) for part in parts)


def _is_graph(item: Any) -> bool:
    return hasattr(item, "indptr") and hasattr(item, "num_src") and callable(getattr(item, "edge_index", None))


def _graph_from(edges: Any, count: Callable[[str], Any]) -> Any:
    """Return a graph of the edges, its stand-in while they are traced, or what was put into the slot ready-made."""
    if not isinstance(edges, torch.Tensor):
        return edges
    from torch._subclasses import FakeTensor

    if isinstance(edges, FakeTensor):
        return TracedGraph(edges, count("node"))
    from core_kernels import Graph

    return Graph.from_edge_index(edges, count("node"))


def _entries(data: Any) -> list[tuple[Path, Any]]:
    """Return the tensors of a ``Data`` or ``HeteroData`` as ((attribute,) or (attribute, type), tensor)."""
    entries: list[tuple[Path, Any]] = []
    for store in data.stores:
        key = getattr(store, "_key", None)
        for name, value in store.items():
            if isinstance(value, torch.Tensor) or is_adjacency(value):
                entries.append(((Named(name),) if key is None else (Named(name), key), value))
    return entries


def _without_tensors(data: Any, found: dict[Path, Any]) -> Any:
    template = copy.copy(data)
    for key in found:
        store = template if len(key) == 1 else template[key[1]]
        if key[0] not in ("edge_index", "adj_t", "x"):
            delattr(store, key[0])
        if "num_nodes" in store:  # counted from the rows of features instead
            del store["num_nodes"]
    if not hasattr(template, "stores"):
        raise EvaluationArgumentError("the data object cannot be copied; pass its tensors as a tuple instead")
    return template
