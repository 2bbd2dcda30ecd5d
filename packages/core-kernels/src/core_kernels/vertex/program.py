"""Vertex programs: a GNN layer written as a function of one vertex.

The function is traced once, when it is decorated. A call picks the typed program for the shapes of its inputs (width
one, heads, and which widths are equal matter; the widths themselves do not) and runs one registered operator.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_kernels.errors import ArgumentError, ArgumentTypeError, argument_error
from core_kernels.graph import Graph
from core_kernels.graph.tracing import kept
from core_kernels.vertex import ir
from core_kernels.vertex.compiled import CompiledProgram
from core_kernels.vertex.operator import forward_operator
from core_kernels.vertex.passes import name_widths, rank_of, specialise
from core_kernels.vertex.states import ReduceState, describe_states
from core_kernels.vertex.trace import trace

__all__ = ["Reads", "VertexProgram", "program"]

_ARGUMENT = {"S": "src", "D": "dst", "E": "edge", "P": "params"}


@dataclass(frozen=True)
class Reads:
    """Names a program reads; a name of an edge type other than ``""`` is written ``type/name``.

    Attributes:
        source: Read from the sources of in-edges: these rows must travel to where the destination is computed.
        destination: Read from the destination itself.
        edge: Read from edges.
        params: Parameters.
    """

    source: tuple[str, ...]
    destination: tuple[str, ...]
    edge: tuple[str, ...]
    params: tuple[str, ...]


class VertexProgram:
    """A traced function of one vertex; call it on a graph. Made by :func:`program`.

    Attributes:
        traced: What was written down, before widths are known.
        name: Name of the function.
    """

    def __init__(self, function: Callable[..., Any], constants: dict[str, Any]):
        self._function, self._constants = function, constants
        self.name, self.__doc__ = function.__name__, function.__doc__
        self._params = _parameter_names(function)
        self.traced = trace(function, self._params, constants)
        inputs = [self.traced.nodes[number] for number in self.traced.inputs]
        self._inputs = tuple(node.key for node in inputs)
        self._specialised: dict[tuple, tuple[str, tuple[tuple[str, str, int], ...]]] = {}
        self._lock = threading.Lock()

    @property
    def reads(self) -> Reads:
        """What the program reads, by where it is read."""
        names = {kind: [] for kind in _ARGUMENT}
        for kind, relation, name in self._inputs:
            names[kind].append(f"{relation}/{name}" if relation else name)
        return Reads(tuple(names["S"]), tuple(names["D"]), tuple(names["E"]), tuple(names["P"]))

    @property
    def states(self) -> tuple[ReduceState, ...]:
        """The reductions over in-edges and how two partial results of each merge."""
        return describe_states(self.traced)

    @property
    def relations(self) -> tuple[str, ...]:
        """Edge types the program runs over; ``("",)`` for a program that names none."""
        return self.traced.relations

    def bind(self, **constants: Any) -> VertexProgram:
        """Return the program with other values of its keyword-only arguments.

        Raises:
            ArgumentError: The function has no such argument.
        """
        unknown = sorted(constants.keys() - self._constants.keys())
        if unknown:
            raise argument_error("constants", unknown, f"names among {sorted(self._constants)}", "check the spelling")
        return VertexProgram(self._function, self._constants | constants)

    def __call__(
        self,
        graph: Graph | Mapping[str, Graph],
        *,
        src: Mapping[str, Any] | None = None,
        dst: Mapping[str, Tensor] | None = None,
        edge: Mapping[str, Any] | None = None,
        params: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Run the program.

        Args:
            graph: A graph or block; for programs over several edge types one of each by name, with equal destinations.
            src: Tensors by the names read as ``e.src.name``, [num_src], [num_src, features] or
                [num_src, heads, features]; with several edge types ``{type: {name: tensor}}``.
            dst: The same for ``v.name``, [num_dst, ...].
            edge: The same for ``e.name``, [num_edges, ...] in the order of edge ids.
            params: Parameters by name, [features] or [heads, features], no entity axis.

        Returns:
            What the function returns: a tensor, or a tuple of them; destination-wise [num_dst, ...], edge-wise
            [num_edges, ...] in the order of edge ids.

        Raises:
            ArgumentError: An input is missing, has another number of rows or shapes that do not fit.
        """
        graphs = self._graphs(graph)
        given = {"S": src or {}, "D": dst or {}, "E": edge or {}, "P": params or {}}
        tensors = [self._input(key, given, graphs) for key in self._inputs]
        dtype = self._common_dtype(tensors)
        if dtype in (torch.float16, torch.bfloat16):
            tensors = [tensor.float() for tensor in tensors]
        elif any(tensor.dtype != dtype for tensor in tensors):
            tensors = [tensor.to(dtype) for tensor in tensors]
        shapes = tuple(tuple(tensor.shape[key[0] != "P" :]) for tensor, key in zip(tensors, self._inputs, strict=True))
        grad = torch.is_grad_enabled()
        wanted = tuple(position for position, tensor in enumerate(tensors) if grad and tensor.requires_grad)
        text, outputs = _specialised(self, shapes, wanted)
        flat = [
            tensor.reshape(1 if key[0] == "P" else tensor.shape[0], *(1, 1, *shape)[-2:])
            for tensor, key, shape in zip(tensors, self._inputs, shapes, strict=True)
        ]
        arrays, num_src = _graph_arrays([graphs[relation] for relation in self.relations], bool(wanted))
        results = forward_operator(flat, arrays, num_src, text)
        shaped = []
        for (kind, relation, rank), result in zip(outputs, results, strict=False):
            value = result.reshape(result.shape[0], *result.shape[3 - rank :])
            value = graphs[relation].from_positions(value) if kind == "E" else value
            shaped.append(value.to(dtype) if value.dtype != dtype else value)
        return shaped[0] if len(outputs) == 1 else tuple(shaped)

    def _common_dtype(self, tensors: list[Tensor]) -> torch.dtype:
        """Return the dtype of the computation: that of all inputs, the wider one where autocast made some narrow."""
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) == 1:
            return tensors[0].dtype
        if torch.float64 in dtypes or not all(dtype.is_floating_point for dtype in dtypes):
            found = {name: tensor.dtype for (_, _, name), tensor in zip(self._inputs, tensors, strict=True)}
            shown = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
            raise ArgumentTypeError(
                f"vertex program {self.name} got {shown}; expected one floating-point dtype; convert with .to(dtype)"
            )
        return torch.float32

    def _graphs(self, graph: Graph | Mapping[str, Graph]) -> dict[str, Graph]:
        graphs = {"": graph} if isinstance(graph, Graph) else dict(graph)
        missing = [relation for relation in self.relations if relation not in graphs]
        if missing:
            raise argument_error(
                "graph", sorted(graphs), f"edge types {list(self.relations)}", "pass one graph of each"
            )
        counts = {relation: graphs[relation].num_dst for relation in self.relations}
        if len(set(counts.values())) > 1:
            raise argument_error("graph", counts, "equal num_dst for all edge types", "number destinations alike")
        return graphs

    def _input(self, key: tuple[str, str, str], given: Mapping[str, Any], graphs: Mapping[str, Graph]) -> Tensor:
        kind, relation, name = key
        group = given[kind]
        if relation and kind in "SE":
            group = group.get(relation, {})
        if name not in group:
            where = f"{_ARGUMENT[kind]}[{relation!r}]" if relation else _ARGUMENT[kind]
            raise ArgumentError(
                f"vertex program {self.name} reads {name!r}, which is not in {where}={sorted(group)}; expected a "
                f"tensor of that name; pass {_ARGUMENT[kind]}={{{name!r}: tensor}}"
            )
        tensor = group[name]
        if kind == "P":
            while tensor.dim() > 2 and tensor.shape[0] == 1:
                tensor = tensor[0]
            return tensor
        graph = graphs[relation] if kind in "SE" else graphs[self.relations[0]]
        rows = {"S": graph.num_src, "D": graph.num_dst, "E": graph.num_edges}[kind]
        if tensor.shape[0] != rows:
            entity = {"S": "source", "D": "destination", "E": "edge"}[kind]
            raise argument_error(
                f"{name}.shape", tuple(tensor.shape), f"({rows}, ...): one row per {entity}", "check the graph"
            )
        return graph.to_positions(tensor) if kind == "E" else tensor

    def specialise(self, shapes: tuple[tuple[int, ...], ...], wanted: tuple[int, ...]) -> tuple[str, tuple]:
        """Return the text of the compiled program, and (kind, relation, rank) of each result.

        Args:
            shapes: Per-entity shape of each input, in the order of the traced program.
            wanted: Positions of the inputs that want gradients.
        """
        key = shapes, wanted
        with self._lock:
            if key not in self._specialised:
                names = [name for _, _, name in self._inputs]
                symbolic, _ = name_widths(shapes, names)
                typed = specialise(self.traced, dict(zip(self._inputs, symbolic, strict=True)))
                ranks = {key: len(shape) for key, shape in zip(self._inputs, shapes, strict=True)}
                outputs = tuple(self._describe(number, ranks) for number in self.traced.outputs)
                self._specialised[key] = _with_all_inputs(typed, self._inputs, symbolic, wanted), outputs
            return self._specialised[key]

    def _describe(self, number: int, ranks: Mapping[tuple[str, str, str], int]) -> tuple[str, str, int]:
        node = self.traced.nodes[number]
        return node.kind, node.relation if node.kind == "E" else "", rank_of(self.traced, number, ranks)

    def __copy__(self) -> VertexProgram:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> VertexProgram:
        # A program never changes once traced, so copies of a model share it, as they share functions.
        return self

    def __reduce__(self) -> tuple[Callable[..., VertexProgram], tuple]:
        module, name = self._function.__module__, self._function.__qualname__
        if _undecorated(module, name) is not self._function:
            raise pickle.PicklingError(
                f"vertex program {name!r} is not found as {module}.{name}; expected a function at the top of a module, "
                "which another process can import; move it there"
            )
        return _rebuild, (module, name, self._constants)

    def __repr__(self) -> str:
        return f"<vertex program {self.name}>\n{self.traced}"


def _undecorated(module: str, name: str) -> Callable[..., Any] | None:
    """Return the function behind ``module.name``, which may be bound to the program made of it."""
    found = getattr(importlib.import_module(module), name, None)
    return found._function if isinstance(found, VertexProgram) else found


def _rebuild(module: str, name: str, constants: dict[str, Any]) -> VertexProgram:
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, VertexProgram):
        return found if found._constants == constants else found.bind(**constants)
    return VertexProgram(found, constants)


def _with_all_inputs(typed: ir.Program, keys: tuple, shapes: list[ir.Shape], wanted: tuple[int, ...]) -> str:
    """Return the text of a typed program whose inputs are all of the traced ones, in that order."""
    kept = {node.key: number for number, node in enumerate(typed.nodes) if node.op == "input"}
    nodes: list[ir.Node] = []
    moved: dict[int, int] = {}
    for key, shape in zip(keys, shapes, strict=True):
        if key in kept:
            moved[kept[key]] = len(nodes)
        kind, relation, name = key
        nodes.append(ir.Node("input", (), kind, shape, name, relation))
    for number, node in enumerate(typed.nodes):
        if number not in moved:
            moved[number] = len(nodes)
            args = tuple(moved[arg] for arg in node.args)
            nodes.append(ir.Node(node.op, args, node.kind, node.shape, node.attr, node.relation))
    outputs = tuple(moved[number] for number in typed.outputs)
    return CompiledProgram(ir.Program(tuple(nodes), outputs), wanted).to_text()


@torch._dynamo.assume_constant_result
def _specialised(owner: VertexProgram, shapes: tuple, wanted: tuple) -> tuple[str, tuple]:
    return owner.specialise(shapes, wanted)


def _graph_arrays(graphs: list[Graph], with_transpose: bool) -> tuple[list[Tensor], list[int]]:
    arrays: list[Tensor] = []
    for graph in graphs:
        arrays += [graph.indptr, graph.indices]
        if with_transpose:
            transposed = kept(Graph.transpose, graph)
            arrays += [transposed.indptr, transposed.indices, graph.transpose_positions()]
        else:
            arrays += [graph.indptr[:0], graph.indices[:0], graph.indptr[:0]]
    return arrays, [graph.num_src for graph in graphs]


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, entry in inspect.signature(function).parameters.items() if entry.kind in positional]
    if not names:
        raise argument_error("function", function.__name__, "a first argument, the vertex", "write def layer(v): ...")
    return tuple(names[1:])


def program(function: Callable[..., Any]) -> VertexProgram:
    """Turn a function of one vertex into a layer that runs on graphs.

    Args:
        function: Takes the vertex ``v``, then parameters by position (tensors without entity axis, passed as
            ``params``), then keyword-only constants with defaults (see :meth:`VertexProgram.bind`). It reads
            ``v.name``, ``e.name`` and ``e.src.name`` for ``e in v.in_edges`` and aggregates with ``vertex.sum``,
            ``mean``, ``max``, ``min``, ``softmax``.

    Returns:
        The program.

    >>> from core_kernels import Graph, vertex
    >>> @vertex.program
    ... def attend(v):
    ...     alpha = vertex.softmax(e.src.score + v.score for e in v.in_edges)
    ...     return vertex.sum(a * e.src.h for a, e in zip(alpha, v.in_edges))
    >>> graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 2)
    >>> h, score = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
    >>> attend(graph, src={"h": h, "score": score}, dst={"score": score})
    tensor([[0.],
            [2.]])
    """
    entries = inspect.signature(function).parameters.items()
    constants = {name: entry.default for name, entry in entries if entry.kind is inspect.Parameter.KEYWORD_ONLY}
    return VertexProgram(function, constants)
