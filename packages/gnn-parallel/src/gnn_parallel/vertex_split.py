"""Cuts a vertex program: any layer written as a formula over in-edges, with linear maps before it.

The traced program says what to do. Everything on edges is computed where the sources are; each aggregation leaves a
mergeable state there (``VertexProgram.states`` names its kind); whatever the program computes of the destination
afterwards runs where the destination is. Whole destinations run the compiled program itself.

Callers may not assume that every program can be cut: an aggregation that reads another one's result, or a sum that is
not linear in the softmax it is weighted by, has no mergeable state. Such programs run under GDP, DNP and NFP, and
:meth:`VertexSplit.obstacles` says why not under SNP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels import Graph, ops, vertex
from gnn_parallel.errors import UnsupportedLayerError
from gnn_parallel.layers import Columns, ProjectedSplit, View, VirtualRows

__all__ = ["VertexSplit"]


class VertexSplit(ProjectedSplit):
    """A layer ``finish(program(src={name: map(x)}, dst={name: map(x_root)}))``.

    Args:
        program: Over one edge type, without edge inputs, with one destination-wise result.
        sources: The linear map behind each name the program reads from sources.
        destinations: The same for destinations.
        params: Returns the parameters the program reads.
        finish: From the program's result ``[rows, heads, channels]`` to result rows; flattens when left out.
        heads: Heads of every value; a map's output is ``heads`` times its channels.
        output_width: Columns after ``finish``.

    Raises:
        UnsupportedLayerError: The program reads edges, several edge types, or names without a map.
    """

    def __init__(
        self,
        program: vertex.VertexProgram,
        sources: Mapping[str, nn.Linear],
        destinations: Mapping[str, nn.Linear] | None = None,
        *,
        params: Callable[[], Mapping[str, Tensor]] | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
        heads: int = 1,
        output_width: int,
    ):
        self.program, self.heads, self.output_width = program, heads, output_width
        self.sources, self.destinations = dict(sources), dict(destinations or {})
        self._params, self._finish = params or dict, finish or (lambda rows: rows.flatten(1))
        self._check()
        self.input_width = next(iter(self.sources.values())).in_features
        self.projected_width = sum(linear.out_features for linear in self.sources.values())
        self._query_width = sum(linear.out_features for linear in self.destinations.values())
        nodes = program.traced.nodes
        self._reductions = [n for n, node in enumerate(nodes) if node.op in _REDUCTIONS]
        self._softmax_of = {n: self._softmax_behind(n) for n in self._reductions}
        kinds = {"softmax" if self._softmax_of[n] is not None else _REDUCTIONS[nodes[n].op] for n in self._reductions}
        self.algebra = kinds.pop() if len(kinds) == 1 else "several"
        self.state_width = 0 if self.obstacles() else self._empty_state().shape[1]

    def _check(self) -> None:
        reads, nodes = self.program.reads, self.program.traced.nodes
        missing = {*reads.source} - {*self.sources} | {*reads.destination} - {*self.destinations}
        result = [nodes[number].kind for number in self.program.traced.outputs]
        if reads.edge or self.program.relations != ("",) or missing or result != ["D"]:
            found = (
                f"reads edges {reads.edge}, edge types {self.program.relations}, names without map {sorted(missing)}"
            )
            raise UnsupportedLayerError(
                f"vertex program {self.program.name} cannot be the input layer: it {found}; expected one edge type, no "
                "edge inputs, a linear map per name and one result per destination; give the maps, or use it higher up"
            )

    @property
    def query_width(self) -> int:
        """Columns that executors of partial rows need from each destination."""
        return self._query_width

    def obstacles(self) -> dict[str, str]:
        """Return why this layer cannot run under SNP."""
        for number in self._reductions:
            softmax = self._softmax_of[number]
            behind = self._behind(number) - ({softmax} if softmax is not None else set())
            if any(self.program.traced.nodes[n].op in (*_REDUCTIONS, "softmax") for n in behind):
                return {"snp": f"vertex program {self.program.name} aggregates what depends on another aggregation"}
            if softmax is not None and self._degree_in(self.program.traced.nodes[number].args[0], softmax) != 1:
                return {"snp": f"vertex program {self.program.name} has a sum that is not linear in its softmax"}
        return {}

    def column_parameters(self) -> list[nn.Parameter]:
        """Return the weights whose columns NFP spreads over ranks."""
        maps: list[Any] = [*self.sources.values(), *self.destinations.values()]
        return [linear.weight for linear in maps]

    def project(self, x: Tensor, columns: Columns = None) -> Tensor:
        """Map source rows, or a slice of their columns, without bias."""
        return _project(self.sources, x, columns)

    def project_root(self, x: Tensor, columns: Columns = None) -> Tensor:
        """Map destination rows, or a slice of their columns, without bias."""
        return _project(self.destinations, x, columns)

    def complete_sources(self, projected: Tensor) -> Tensor:
        """Add the biases of sources."""
        return _add_biases(self.sources, projected)

    def complete_query(self, query: Tensor) -> Tensor:
        """Add the biases of destinations."""
        return _add_biases(self.destinations, query)

    def attend(self, graph: Graph, projected: Tensor, query: Tensor | None) -> Tensor:
        """Run the compiled program."""
        source, own = self._named(self.sources, projected), self._named(self.destinations, query)
        return self._finish(self.program(graph, src=source, dst=own, params=self._params()))

    def partial(self, view: View, query: Tensor | None) -> Tensor:
        """Compute edge values and reduce each aggregation to its state."""
        graph = view.local
        values = self._inputs(self.complete_sources(self.project(view.rows)), query)
        run = _Evaluation(self.program.traced.nodes, values, graph)
        fields = []
        for number in self._reductions:
            node, softmax = run.nodes[number], self._softmax_of[number]
            if softmax is None:
                kind = _REDUCTIONS[node.op]
                edge_values = run.on_edges(node.args[0])
                fields.append(ops.segment_reduce(edge_values, graph.indptr, "sum" if kind == "mean" else kind))
                continue
            logits = run.on_edges(run.nodes[softmax].args[0])
            # The shift m cancels in the result, so it needs no gradient.
            m = ops.segment_reduce(logits.detach(), graph.indptr, "max")
            run.values[softmax] = torch.exp(logits - torch.repeat_interleave(m, graph.in_degrees(), dim=0))
            z = ops.segment_reduce(run.values[softmax], graph.indptr, "sum")
            fields += [m, z, ops.segment_reduce(run.on_edges(node.args[0]), graph.indptr, "sum")]
            del run.values[softmax]
            run.forget(softmax)
        self._shapes = [tuple(field.shape[1:]) for field in fields]
        return torch.cat([field.flatten(1) for field in fields], dim=1)

    def merge(self, states: Tensor, virtual: VirtualRows, scale: Tensor | None = None) -> Tensor:
        """Combine the states of each destination, and turn them into the aggregations' results, side by side."""
        fields = iter(states.split([a * b for a, b in self._shapes], dim=1))
        results = []
        for number in self._reductions:
            kind = _REDUCTIONS[self.program.traced.nodes[number].op]
            if self._softmax_of[number] is not None:
                m, z, total = next(fields), next(fields), next(fields)
                shift = torch.exp(m - virtual.max(m.detach()).index_select(0, virtual.destination))
                z, per_head = virtual.sum(z * shift), total.shape[1] // m.shape[1]
                total = virtual.sum(total * shift.repeat_interleave(per_head, dim=1))
                results.append(total / torch.where(z == 0, 1.0, z).repeat_interleave(per_head, dim=1))
            elif kind == "mean":
                counts = virtual.total_counts().clamp_(min=1).to(states.dtype)
                results.append(virtual.sum(next(fields)) / counts[:, None])
            elif kind == "sum":
                results.append(virtual.sum(next(fields)))
            else:
                results.append(virtual.max(next(fields)) if kind == "max" else -virtual.max(-next(fields)))
        return torch.cat(results, dim=1)

    def conclude(self, merged: Tensor, query: Tensor | None) -> Tensor:
        """Run the rest of the program on the destinations."""
        values = self._inputs(None, query)
        shapes = self._result_shapes()
        pieces = merged.split([heads * channels for heads, channels in shapes], dim=1)
        for number, piece, shape in zip(self._reductions, pieces, shapes, strict=True):
            values[number] = piece.view(-1, *shape)
        run = _Evaluation(self.program.traced.nodes, values, None)
        return self._finish(run.value(self.program.traced.outputs[0]))

    def _result_shapes(self) -> list[tuple[int, int]]:
        shapes = iter(self._shapes)
        results = []
        for number in self._reductions:
            if self._softmax_of[number] is not None:
                next(shapes)  # of m
                next(shapes)  # of z
            results.append(next(shapes))
        return results

    def _empty_state(self) -> Tensor:
        weight = next(iter(self.sources.values())).weight
        view = View(weight[:0], torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        view.rows, view.local = weight.new_zeros(0, self.input_width), Graph(view.indptr, view.sources, 0)
        with torch.no_grad():
            return self.partial(view, weight.new_zeros(0, self._query_width))

    def _named(self, maps: Mapping[str, nn.Linear], rows: Tensor | None) -> dict[str, Tensor]:
        if rows is None:
            return {}
        rows = rows.float() if rows.dtype == torch.bfloat16 else rows  # compiled programs know no 16-bit numbers
        widths = [linear.out_features for linear in maps.values()]
        pieces = rows.split(widths, dim=1)
        return {
            name: piece.reshape(-1, self.heads, width // self.heads)
            for name, piece, width in zip(maps, pieces, widths, strict=True)
        }

    def _inputs(self, projected: Tensor | None, query: Tensor | None) -> dict[int, Tensor]:
        """Return the values of the program's inputs by node number."""
        params = {name: _three_axes(value) for name, value in self._params().items()}
        by_kind = {"S": self._named(self.sources, projected), "D": self._named(self.destinations, query), "P": params}
        nodes = self.program.traced.nodes
        return {
            number: by_kind[nodes[number].kind][nodes[number].attr]
            for number in self.program.traced.inputs
            if nodes[number].attr in by_kind[nodes[number].kind]
        }

    def _behind(self, number: int) -> set[int]:
        """Return the numbers of all values that ``number`` is computed from."""
        found: set[int] = set()
        waiting = list(self.program.traced.nodes[number].args)
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting += self.program.traced.nodes[current].args
        return found

    def _softmax_behind(self, number: int) -> int | None:
        nodes = self.program.traced.nodes
        found = [n for n in self._behind(number) if nodes[n].op == "softmax"]
        return found[0] if len(found) == 1 and nodes[number].op == "sum_dst" else None

    def _degree_in(self, number: int, softmax: int) -> int | None:
        """Return the degree of a value as a polynomial of the softmax; ``None`` when it is none."""
        node = self.program.traced.nodes[number]
        if number == softmax:
            return 1
        if softmax not in self._behind(number):
            return 0
        found = [self._degree_in(arg, softmax) for arg in node.args]
        degrees = [degree for degree in found if degree is not None]
        if len(degrees) < len(found):
            return None
        if node.op == "mul":
            return sum(degrees)
        if node.op in ("add", "sub"):
            return degrees[0] if degrees[0] == degrees[1] else None
        if node.op in ("neg", "feature_sum", "on_edge", "expand") or (node.op == "div" and degrees[1] == 0):
            return degrees[0]
        return None


_REDUCTIONS = {"sum_dst": "sum", "mean_dst": "mean", "max_dst": "max", "min_dst": "min"}


class _Evaluation:
    """Evaluates a traced program with torch, value by value, as values are asked for."""

    def __init__(self, nodes: tuple[Any, ...], values: dict[int, Tensor], graph: Graph | None):
        self.nodes, self.values, self.graph = nodes, values, graph

    def value(self, number: int) -> Tensor:
        """Return a value at the entities it lives on, ``[entities, heads, channels]``."""
        if number not in self.values:
            node = self.nodes[number]
            at = self.on_edges if node.kind == "E" else self.value
            self.values[number] = _apply(node, [at(arg) for arg in node.args], self.values)
        return self.values[number]

    def on_edges(self, number: int) -> Tensor:
        """Return a value at every edge."""
        value, kind, graph = self.value(number), self.nodes[number].kind, self.graph
        if kind == "S":
            return ops.gather(value, graph.indices)
        if kind == "D":
            return torch.repeat_interleave(value, graph.in_degrees(), dim=0)
        return value.expand(graph.num_edges, *value.shape[1:]) if kind == "P" else value

    def forget(self, number: int) -> None:
        """Drop all values computed from ``number``."""
        stale = {number}
        for later, node in enumerate(self.nodes):
            if later in self.values and stale.intersection(node.args):
                stale.add(later)
                del self.values[later]


def _apply(node: Any, args: list[Tensor], values: dict[int, Tensor]) -> Tensor:
    if node.op == "const":
        return next(iter(values.values())).new_full((1, 1, 1), node.attr)
    if node.op in ("on_edge", "expand"):
        return args[0]
    if node.op == "feature_sum":
        return args[0].sum(-1, keepdim=True)
    if node.op in ("leaky_relu", "elu"):
        return getattr(F, node.op)(args[0], node.attr)
    return getattr(torch, node.op)(*args)


def _project(maps: Mapping[str, nn.Linear], x: Tensor, columns: Columns) -> Tensor:
    weights = [linear.weight if columns is None else linear.weight[:, columns] for linear in maps.values()]
    return F.linear(x, torch.cat(weights)) if weights else x.new_zeros(len(x), 0)


def _add_biases(maps: Mapping[str, nn.Linear], rows: Tensor) -> Tensor:
    biases = [rows.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in maps.values()]
    return rows + torch.cat(biases) if biases else rows


def _three_axes(value: Tensor) -> Tensor:
    """Return a parameter as ``[1, heads, channels]``."""
    return value.reshape(1, *(1,) * (2 - min(value.dim(), 2)), *value.shape[-2:])
