"""From a layer module to its cut: how SAGEConv, GCNConv, GINConv, GATConv and GATv2Conv aggregate and merge.

The engine never asks what a layer is called; it works with the :class:`~gnn_parallel.layers.SplitLayer` that an adapter
returns. A module may bring its own by a method ``split_layer(graph)``; :func:`register_adapter` adds one for a class
that cannot be changed. The layers of ``core_kernels.nn`` and of PyG share parameter names, so one adapter serves both,
and PyG is never imported here.

Degrees are those of the full graph, not of the sample: only then does a layer mean the same for every rank that
computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import Graph, ops
from gnn_parallel.errors import UnsupportedLayerError
from gnn_parallel.layers import SplitLayer, WholeLayer
from gnn_parallel.linear_split import LinearSplit
from gnn_parallel.softmax_split import SoftmaxSplit

__all__ = ["find_input_layer", "register_adapter", "split_layer"]

Adapter = Callable[[Any, Graph], SplitLayer]

_ADAPTERS: dict[tuple[str, str], Adapter] = {}
_SHIPPED_PACKAGES = ("core_kernels", "torch_geometric")


def register_adapter(layer_class: type[nn.Module], adapter: Adapter) -> None:
    """Tell how layers of a class are cut.

    Args:
        layer_class: The class; its sub-classes are included unless they have an adapter of their own.
        adapter: From (layer, graph) to the cut.
    """
    _ADAPTERS[layer_class.__module__, layer_class.__qualname__] = adapter


def split_layer(layer: nn.Module, graph: Graph) -> SplitLayer:
    """Return how ``layer`` is cut.

    Args:
        layer: A graph layer: one with a method ``split_layer(graph)``, a SAGEConv, GCNConv, GINConv, GATConv or
            GATv2Conv of core_kernels.nn or PyG, or of a registered class.
        graph: The full graph, for degrees.

    Raises:
        UnsupportedLayerError: No adapter is known for the layer, or it drops activations by itself.
    """
    own: Any = getattr(layer, "split_layer", None)
    if own is not None:
        return own(graph)
    adapter = _find_adapter(type(layer))
    if adapter is None:
        raise UnsupportedLayerError(
            f"no adapter for input layer {type(layer).__module__}.{type(layer).__qualname__}; expected a layer of "
            "core_kernels.nn or PyG (SAGEConv, GCNConv, GINConv, GATConv, GATv2Conv) or one with a method "
            "split_layer(graph); call gnn_parallel.register_adapter for its class"
        )
    _check_inner_dropout(layer)
    return adapter(layer, graph)


def _check_inner_dropout(layer: nn.Module) -> None:
    """Refuse a dropout inside the layer, such as in the MLP of a GINConv."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UnsupportedLayerError(
                f"{type(layer).__name__}.{name} is {type(module).__name__}(p={module.p}), which draws other masks on "
                "every rank; expected none inside the input layer; use gnn_parallel.keyed_dropout between layers"
            )


def find_input_layer(model: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """Return name and module of a model's input layer.

    Args:
        model: The model.
        name: Dotted name of the layer; left out, the first sub-module (or the model itself) that has an adapter.

    Raises:
        UnsupportedLayerError: There is none.
    """
    modules: Iterator[tuple[str, nn.Module]] = model.named_modules()
    if name is not None:
        found = dict(modules).get(name)
        if found is None:
            raise UnsupportedLayerError(
                f"input_layer={name!r} is no module of {type(model).__name__}; expected a dotted name from "
                "model.named_modules(); pass one of them"
            )
        return name, found
    for candidate, module in modules:
        if hasattr(module, "split_layer") or _find_adapter(type(module)) is not None:
            return candidate, module
    raise UnsupportedLayerError(
        f"no layer of {type(model).__name__} has an adapter; expected one of SAGEConv, GCNConv, GINConv, GATConv, "
        "GATv2Conv or a module with split_layer(graph); call gnn_parallel.register_adapter for its class"
    )


def _find_adapter(layer_class: type) -> Adapter | None:
    for base in layer_class.__mro__:
        adapter = _ADAPTERS.get((base.__module__, base.__qualname__))
        if adapter is None and base.__module__.split(".")[0] in _SHIPPED_PACKAGES:
            adapter = _SHIPPED.get(base.__qualname__)
        if adapter is not None:
            return adapter
    return None


def _whole(layer: Any, input_width: int, output_width: int, reason: str) -> WholeLayer:
    """Return the cut of a layer that can only be called."""
    if not type(layer).__module__.startswith("torch_geometric"):
        return WholeLayer(lambda graph, x, num_rows: layer.forward(graph, x), input_width, output_width, reason)
    return WholeLayer(
        lambda graph, x, num_rows: type(layer).forward(layer, (x, x[:num_rows]), graph.edge_index()),
        input_width,
        output_width,
        reason,
    )


def _in_width(layer: Any) -> int:
    width = layer.in_channels
    return width if isinstance(width, int) else width[0]


def _split_sage(layer: Any, graph: Graph) -> SplitLayer:
    algebra: Any = {"mean": "mean", "sum": "sum", "add": "sum", "max": "max"}.get(layer.aggr)
    out_width = layer.out_channels
    if algebra is None or getattr(layer, "project", False):
        reason = "it projects neighbours through a nonlinearity" if algebra else f"aggr={layer.aggr!r} has no merge"
        return _whole(layer, _in_width(layer), out_width, reason)

    def finish(rows: Tensor) -> Tensor:
        rows = rows if layer.lin_l.bias is None else rows + layer.lin_l.bias
        return F.normalize(rows, p=2.0, dim=-1) if getattr(layer, "normalize", False) else rows

    root = getattr(layer, "lin_r", None)
    return LinearSplit(algebra, layer.lin_l.weight, None if root is None else root.weight, finish)


def _split_gcn(layer: Any, graph: Graph) -> SplitLayer:
    if getattr(layer, "improved", False):
        return _whole(layer, _in_width(layer), layer.out_channels, "improved=True weighs self-loops by 2")
    bias = layer.bias
    split = LinearSplit("sum", layer.lin.weight, None, lambda rows: rows if bias is None else rows + bias)
    split.self_loops = getattr(layer, "add_self_loops", True)
    if getattr(layer, "normalize", True):
        _require_two_way(graph)
        degrees = graph.in_degrees()
        if split.self_loops:  # one loop per node replaces those of the graph
            sources, destinations = graph.coo()
            loops = torch.bincount(destinations[sources == destinations], minlength=graph.num_nodes)
            degrees = degrees - loops + 1
        factor = degrees.to(layer.lin.weight.dtype).pow(-0.5)
        factor[degrees == 0] = 0
        split.source_scale = split.destination_scale = factor
    return split


def _require_two_way(graph: Graph) -> None:
    """Raise unless in- and out-degrees agree: a block takes the degree of a source from either, as it comes."""
    if not torch.equal(graph.in_degrees(), graph.out_degrees()):
        node = int(torch.nonzero(graph.in_degrees() != graph.out_degrees())[0])
        raise UnsupportedLayerError(
            f"GCNConv on a graph whose node {node} has {int(graph.in_degrees()[node])} in-edges and "
            f"{int(graph.out_degrees()[node])} out-edges; expected every edge in both directions, or its normalisation "
            "depends on the sample; pass graph.symmetrized(), or use SAGEConv"
        )


def _split_gin(layer: Any, graph: Graph) -> SplitLayer:
    inner: list[Any] = list(layer.nn) if isinstance(layer.nn, nn.Sequential) else [layer.nn]
    first, rest = inner[0], inner[1:]
    if not isinstance(first, nn.Linear):
        reason = "its nn does not begin with a torch.nn.Linear"
        raise UnsupportedLayerError(f"GINConv cannot be cut: {reason}; begin nn with a Linear")

    def finish(rows: Tensor) -> Tensor:
        rows = rows if first.bias is None else rows + first.bias
        for module in rest:
            rows = module(rows)
        return rows

    widths = [module.out_features for module in inner if isinstance(module, nn.Linear)]
    weight: Any = first.weight
    return LinearSplit("sum", weight, weight, finish, lambda: 1 + layer.eps, widths[-1])


def _split_gat(layer: Any, graph: Graph) -> SplitLayer:
    _refuse_attention_options(layer)
    heads, channels = layer.heads, layer.out_channels
    linear = layer.lin if getattr(layer, "lin", None) is not None else layer.lin_src

    def query_weight() -> Tensor:
        per_head = linear.weight.view(heads, channels, -1) * layer.att_dst.view(heads, channels, 1)
        return per_head.sum(1)

    def score(graph: Graph, projected: Tensor, query: Tensor) -> Tensor:
        source = (projected.view(-1, heads, channels) * layer.att_src.view(1, heads, channels)).sum(-1)
        return F.leaky_relu(ops.sddmm(graph, source, query, op="add"), layer.negative_slope)

    split = SoftmaxSplit(
        weight=linear.weight,
        bias=None,
        query_weight=query_weight,
        query_bias=lambda: None,
        score=score,
        finish=_finish_heads(layer),
        heads=heads,
        query_width=heads,
        output_width=heads * channels if layer.concat else channels,
        query_parameters=[],
    )
    split.self_loops = layer.add_self_loops
    return split


def _split_gatv2(layer: Any, graph: Graph) -> SplitLayer:
    _refuse_attention_options(layer)
    heads, channels = layer.heads, layer.out_channels

    def score(graph: Graph, projected: Tensor, query: Tensor) -> Tensor:
        pairs = F.leaky_relu(ops.sddmm(graph, projected, query, op="add"), layer.negative_slope)
        return (pairs.view(-1, heads, channels) * layer.att.view(1, heads, channels)).sum(-1)

    split = SoftmaxSplit(
        weight=layer.lin_l.weight,
        bias=layer.lin_l.bias,
        query_weight=lambda: layer.lin_r.weight,
        query_bias=lambda: layer.lin_r.bias,
        score=score,
        finish=_finish_heads(layer),
        heads=heads,
        query_width=heads * channels,
        output_width=heads * channels if layer.concat else channels,
        query_parameters=[] if layer.lin_r is layer.lin_l else [layer.lin_r.weight],
    )
    split.self_loops = layer.add_self_loops
    return split


def _finish_heads(layer: Any) -> Callable[[Tensor], Tensor]:
    def finish(values: Tensor) -> Tensor:
        rows = values.flatten(1) if layer.concat else values.mean(1)
        return rows if layer.bias is None else rows + layer.bias

    return finish


def _refuse_attention_options(layer: Any) -> None:
    """Raise for options of attention layers that would make ranks disagree."""
    name = type(layer).__name__
    if layer.dropout:
        raise UnsupportedLayerError(
            f"{name}(dropout={layer.dropout}) as input layer draws other masks on every rank; expected dropout=0 "
            "there; use gnn_parallel.keyed_dropout between layers"
        )
    for option in ("edge_dim", "residual"):
        if getattr(layer, option, None):
            raise UnsupportedLayerError(
                f"{name}({option}={getattr(layer, option)}) cannot be the input layer: expected no {option}; "
                "leave it out, or use the layer higher up"
            )


_SHIPPED: dict[str, Adapter] = {
    "SAGEConv": _split_sage,
    "GCNConv": _split_gcn,
    "GINConv": _split_gin,
    "GATConv": _split_gat,
    "GATv2Conv": _split_gatv2,
}
