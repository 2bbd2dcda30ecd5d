"""The fallback front end: convolutions stay whole, everything around them is traced.

Some convolutions cannot be traced with open sizes (they sort, or branch on counts). Such a module becomes one node of
the program, a *conv*: given the rows of its node inputs, it is called on the one-hop block of a range of destinations,
destinations first, with all their in-edges. That is exact for layers that look one hop along in-edges and use no degree
of their sources; whether a layer does is proved by verification, not assumed.

Source: Yin et al., "DGI", KDD 2023, traces with ``torch.fx`` and keeps every convolution whole; here only those that
need it are, and the rest goes through ``torch.export``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnn_eval.containers import GraphSlot, fill, take_apart
from gnn_eval.errors import UnsupportedModelError
from gnn_eval.frontends import export
from gnn_eval.model_call import ModelCall
from gnn_eval.program import Program, Ref, Value
from gnn_eval.registry import spec_of

__all__ = ["ConvCall", "call_whole", "capture", "conv_call", "hide", "with_conv_values"]

_NEED_OPAQUE = ("RGCNConv", "HGTConv", "ClusterGCNConv", "RGATConv", "FastHGTConv", "HEATConv", "SuperGATConv")
_NEED_OPAQUE_AGGREGATIONS = ("LSTMAggregation", "MedianAggregation", "QuantileAggregation", "SortAggregation")
_PADDED_AGGREGATIONS = ("LSTMAggregation", "GRUAggregation")
_calls: list[ConvCall] = []


@dataclass
class ConvCall:
    """A call of an opaque convolution, its tensors taken out.

    Args:
        path: Where the module is in the model.
        kind: Class of the module.
        skeleton: ``(args, kwargs)`` without tensors.
        roles: Of each tensor ``("node", key)``, ``("relation", source key, destination key)``, ``("edge", relation)``
            or ``("const",)``; keys and relations are positions in the list of tensors.
        result: Skeleton of what the module returns.
        outputs: Of each tensor returned, the position of the node tensor whose rows it has, and its trailing shape.
        takes_graph: Whether it is called with a block in place of an edge list.
        function: What is called, if it is not a module of the model.
    """

    path: str
    kind: str
    skeleton: Any
    roles: list[tuple]
    result: Any
    outputs: list[tuple[int, tuple[int, ...]]]
    takes_graph: bool = False
    function: Callable[..., Any] | None = None

    def at_destinations_only(self, place: int) -> bool:
        """Whether a node tensor of a vertex program is read at destinations only."""
        return self.roles[place][0] == "node" and len(self.roles[place]) > 2


@torch.library.custom_op("gnn_eval::opaque_conv", mutates_args=())
def _opaque_conv(tensors: list[Tensor], call: int) -> list[Tensor]:
    raise UnsupportedModelError(
        _calls[call].kind, "it is called outside of a block", "evaluate the model through its plan", _calls[call].path
    )


@_opaque_conv.register_fake
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    return [tensors[place].new_empty((tensors[place].size(0), *trailing)) for place, trailing in _calls[call].outputs]


def conv_call(number: int) -> ConvCall:
    """Return a registered call."""
    return _calls[number]


def capture(model: nn.Module, call: ModelCall, only_needed: bool) -> tuple[Program, Any]:
    """Trace ``model`` with opaque convolutions.

    Args:
        model: The model.
        call: Its call.
        only_needed: Keep only convolutions known to need it whole; else all.

    Returns:
        The program and the skeleton of the model's result.
    """
    hidden: list[str] = []

    def prepare(copied: nn.Module) -> None:
        for path, module in copied.named_modules():
            if type(module).__name__ in _PADDED_AGGREGATIONS:
                raise UnsupportedModelError(
                    type(module).__name__,
                    "it runs over neighbours padded to the largest degree in the graph, so a row depends on others",
                    "use an aggregation without padding, or evaluate the model with a full forward",
                    _place_of(module, path),
                )
            if _is_conv(module) and (not only_needed or _needs_opaque(module)):
                hidden.append(path)
                hide(module, path)
        if not hidden:
            raise UnsupportedModelError("torch.export", "there is no convolution to keep whole", "report this model")

    program, skeleton = export.capture(model, call, prepare)
    return with_conv_values(program), skeleton


def _place_of(module: nn.Module, path: str) -> str:
    file, line = inspect.getsourcefile(type(module)), inspect.getsourcelines(type(module).forward)[1]
    return f"{path} {'/'.join(str(file).split('/')[-2:])}:{line}"


def _is_conv(module: nn.Module) -> bool:
    known = callable(getattr(module, "propagate", None)) and callable(getattr(module, "message", None))
    return known or spec_of(module) is not None


def _needs_opaque(module: nn.Module) -> bool:
    inner = {type(part).__name__ for part in module.modules()}
    return (
        spec_of(module) is not None
        or type(module).__name__ in _NEED_OPAQUE
        or bool(inner & set(_NEED_OPAQUE_AGGREGATIONS))
    )


def hide(module: nn.Module, path: str) -> None:
    """Replace the module's forward by one opaque operator."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call_whole(original, type(module).__name__, path, args, kwargs)

    module.forward = forward


def call_whole(function: Callable[..., Any], kind: str, path: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Record a call as one opaque operator, learning its result's shape from a tiny call."""
    skeleton, leaves = take_apart((args, kwargs))
    tensors = [tensor for _, tensor in leaves]
    takes_graph = any(isinstance(part, GraphSlot) for part in (*skeleton[0], *skeleton[1].values()))
    roles = _roles([path for path, _ in leaves], tensors)
    result, outputs = _try_small(function, skeleton, roles, tensors, path, takes_graph)
    _calls.append(ConvCall(path, kind, skeleton, roles, result, outputs, takes_graph, None if path else function))
    made = torch.ops.gnn_eval.opaque_conv(tensors, len(_calls) - 1)
    return fill(result, list(made), lambda _: None)


def _roles(paths: list[tuple], tensors: list[Tensor]) -> list[tuple]:
    """Tell node tensors, relations and edge data of a convolution's arguments apart."""
    relations = [
        place for place, t in enumerate(tensors) if t.dim() == 2 and t.dtype == torch.int64 and _same(t.size(0), 2)
    ]
    edges: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        for relation in relations:
            if place not in relations and tensor.dim() and _same(tensor.size(0), tensors[relation].size(1)):
                edges.setdefault(place, relation)
    nodes = [p for p, t in enumerate(tensors) if p not in relations and p not in edges and _has_open_rows(t)]
    by_type = {paths[place][-1]: place for place in reversed(nodes) if isinstance(paths[place][-1], str)}
    roles: list[tuple] = []
    for place, path in enumerate(paths):
        if place in relations:
            triple = next((part for part in path if isinstance(part, tuple)), None)
            if triple is not None:
                roles.append(("relation", by_type[triple[0]], by_type[triple[-1]]))
            else:
                pair = [p for p in nodes if paths[p][:2] == paths[nodes[0]][:2]]
                roles.append(("relation", nodes[0], pair[1] if len(pair) > 1 else nodes[0]))
        elif place in edges:
            roles.append(("edge", edges[place]))
        elif not _has_open_rows(tensors[place]):
            roles.append(("const",))
        else:
            roles.append(("node", place, "dst") if path[:2] == (1, "dst") else ("node", place))
    return roles


def _has_open_rows(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and isinstance(tensor.size(0), torch.SymInt)


def _same(left: Any, right: Any) -> bool:
    """Whether two sizes are the same; tracing uses distinct numbers for distinct counts, and no guard is added."""
    left, right = (size.node.hint if isinstance(size, torch.SymInt) else size for size in (left, right))
    return left is not None and bool(left == right)


def _try_small(
    function: Callable[..., Any],
    skeleton: Any,
    roles: list[tuple],
    tensors: list[Tensor],
    path: str,
    takes_graph: bool,
) -> tuple[Any, list[tuple[int, tuple[int, ...]]]]:
    """Call the convolution on a few real rows to learn the form of its result."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    nodes = [place for place, role in enumerate(roles) if role[0] == "node"]
    sizes = {place: 5 if takes_graph else 5 + 2 * number for number, place in enumerate(nodes)}
    shapes = [tuple(int(size) if not isinstance(size, torch.SymInt) else -1 for size in t.shape) for t in tensors]
    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.no_grad():
        small: list[Tensor] = []
        for role, shape, tensor in zip(roles, shapes, tensors, strict=True):
            if role[0] == "relation":
                count = min(sizes[role[1]], sizes[role[2]])
                small.append(torch.arange(count).repeat(2, 1))
            elif role[0] == "const":
                small.append(torch.zeros(shape, dtype=tensor.dtype))
            else:
                rows = sizes[len(small)] if role[0] == "node" else 5
                small.append(torch.zeros((rows, *shape[1:]), dtype=tensor.dtype))
        for place, role in enumerate(roles):
            if role[0] == "edge":
                count = small[role[1]].size(1)
                small[place] = torch.zeros((count, *shapes[place][1:]), dtype=small[place].dtype)
        args, kwargs = fill(skeleton, small, lambda _: 5)
        result = function(*args, **kwargs)
    form, leaves = take_apart(result)
    by_rows = {rows: place for place, rows in sizes.items()}
    by_type = {key: place for key, place in _typed_places(skeleton).items() if place in sizes}
    outputs: list[tuple[int, tuple[int, ...]]] = []
    for leaf_path, tensor in leaves:
        place = by_type.get(leaf_path[-1]) if leaf_path else None
        place = by_rows.get(tensor.size(0)) if place is None else place
        destination = next((r[2] for r in roles if r[0] == "relation"), None)
        place = destination if place is None or takes_graph else place
        if place is None:
            raise UnsupportedModelError("conv", "its result belongs to no node rows", "pass it an edge_index", path)
        outputs.append((place, tuple(tensor.shape[1:])))
    if not outputs:
        raise UnsupportedModelError("conv", "it returns no tensor", "return node rows", path)
    return form, outputs


def _typed_places(skeleton: Any) -> dict[str, int]:
    found: dict[str, int] = {}

    def walk(item: Any) -> None:
        if isinstance(item, dict):
            for key, part in item.items():
                if hasattr(part, "index") and isinstance(key, str):
                    found.setdefault(key, part.index)
                walk(part)
        elif isinstance(item, (list, tuple)):
            for part in item:
                walk(part)

    walk(skeleton)
    return found


def with_conv_values(program: Program) -> Program:
    """Turn each result of an opaque operator into a value of kind ``conv``, with the index rows of its edges."""
    values: dict[str, Value] = {}
    for name, value in program.values.items():
        if value.op != "operator.getitem" or not isinstance(value.args[0], Ref):
            if value.op != "gnn_eval.opaque_conv.default":
                values[name] = value
            continue
        owner = program.values[value.args[0].name]
        if owner.op != "gnn_eval.opaque_conv.default":
            values[name] = value
            continue
        tensors, number = owner.args
        call = conv_call(number)
        rows: dict[str, Ref] = {}
        for place, role in enumerate(call.roles):
            if role[0] == "relation":
                for side in (0, 1):
                    row = Value(f"{tensors[place].name}_row{side}", "aten.select.int", (tensors[place], 0, side))
                    row.shape, row.dtype = program[tensors[place].name].shape[1:], torch.int64
                    values.setdefault(row.name, row)
                    rows[f"{place}.{side}"] = Ref(row.name)
        kwargs = {"rows": rows, "call": number, "output": value.args[1], "destination": call.outputs[value.args[1]][0]}
        values[name] = Value(
            name, "conv", (list(tensors),), kwargs, value.shape, None, value.dtype, f"{call.path} ({call.kind})"
        )
    return Program(values, program.inputs, program.roles, program.outputs, program.constants)
