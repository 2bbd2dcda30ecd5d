"""Evaluation of everything that depends on structure alone, once, on the full graph.

Degrees, normalisation, rewired self-loops and reversed edges are computed here with the operators of the model itself,
so they are bit for bit what the full forward computes. Only what a stage reads is evaluated and kept. Counts that are
unknown before, such as the number of edges left after self-loops are removed, are learned from the shapes seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gnn_eval.edge_structure import EdgeStructure
from gnn_eval.errors import GnnEvalError
from gnn_eval.lowering import EdgeSet, StageProgram
from gnn_eval.model_call import PARAMETER_PREFIX
from gnn_eval.patterns import reduction_of
from gnn_eval.program import Program, Ref, Value, map_refs, resolve_operator
from gnn_eval.sizes import Size

__all__ = ["StructureEvaluator", "callable_of"]


def callable_of(op: str) -> Any:
    """Return the callable of an operator; views become reshapes, since dropped copies may leave strides behind."""
    if op in ("aten.view.default", "aten._unsafe_view.default"):
        return torch.ops.aten.reshape.default
    return resolve_operator(op)


class StructureEvaluator:
    """Evaluates structural values and constants when they are asked for.

    Args:
        program: A typed program.
        model: The model, whose parameters are read now.
        inputs: Input tensors by name of the value.
        counts: Known counts of nodes and edges.
    """

    def __init__(self, program: Program, model: nn.Module, inputs: Mapping[str, Tensor], counts: dict[str, int]):
        self._program = program
        self._inputs = inputs
        self._parameters = {**dict(model.named_parameters(remove_duplicate=False))}
        self._parameters |= dict(model.named_buffers(remove_duplicate=False))
        self.counts = counts
        self.model = model
        self._known: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return the full tensor of a structural or constant value."""
        if name not in self._known:
            waiting = [name]
            while waiting:
                counted = self._counted(self._program[waiting[-1]])
                if counted is not None:
                    self._known[waiting.pop()] = counted
                    continue
                missing = [n for n in self._program[waiting[-1]].refs() if n not in self._known]
                if missing:
                    waiting.extend(missing)
                    continue
                current = waiting.pop()
                if current not in self._known:
                    self._known[current] = self._evaluate(self._program[current])
        return self._known[name]

    def edge_structures(self, stages: list[StageProgram]) -> dict[EdgeSet, EdgeStructure]:
        """Return the edge sets of all stages on this graph; edges are sorted when first needed."""
        indices: dict[EdgeSet, dict[str, Tensor]] = {}
        rows: dict[EdgeSet, int] = {}
        for stage in stages:
            for edge_set, names in stage.edge_sets.items():
                indices.setdefault(edge_set, {}).update({name: self[name] for name in names})
                rows[edge_set] = self.count_of(stage.space)
        return {
            edge_set: EdgeStructure(
                None if edge_set.grouping is None else self[edge_set.grouping], named, rows[edge_set]
            )
            for edge_set, named in indices.items()
        }

    def held_bytes(self) -> int:
        """Return the bytes of the structural values kept, inputs and parameters not counted."""
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for name, value in self._known.items()
            if isinstance(value, Tensor) and self._program[name].op not in ("input", "parameter", "constant")
        }
        for name in self._inputs:
            storages.pop(self._inputs[name].untyped_storage().data_ptr(), None)
        return sum(storages.values())

    def forget_all_but(self, names: set[str]) -> None:
        """Free what was only needed on the way."""
        self._known = {name: value for name, value in self._known.items() if name in names}

    def count_of(self, size: Size) -> int:
        """Return the number a size stands for, evaluating the value that defines it if need be."""
        for name, _ in size.terms:
            if name not in self.counts:
                self._define(name)
        return size.value(self.counts)

    def _define(self, count: str) -> None:
        for value in self._program.values.values():
            if any(count in dict(size.terms) for size in value.shape or ()) and value.type.static:
                self[value.name]
                if count in self.counts:
                    return
        raise GnnEvalError(f"no structural value tells the count {count}; report this model")

    def _input(self, name: str) -> Tensor:
        return self._inputs[name]

    def ids_of_rows(self, space: Size) -> Tensor | None:
        """Return the number each row of a space has in the full forward, where rows are kept in another order."""
        return None

    def in_degrees(self, name: str) -> Tensor | None:
        """Return how often each row occurs in an index vector, where that is known without the vector."""
        return None

    def _counted(self, value: Value) -> Tensor | None:
        """Return a sum of ones per destination from row pointers, without a one per edge."""
        reduction = reduction_of(self._program, value)
        if reduction is None or reduction.reduce != "sum" or len(value.dims) != 1:
            return None
        base, ones = self._program[reduction.base], self._program[reduction.source]
        if base.op != "aten.full.default" or ones.op != "aten.full.default" or base.args[1] != 0:
            return None
        degrees = self.in_degrees(reduction.index)
        return None if degrees is None else degrees.to(value.dtype) * ones.args[1]

    def _evaluate(self, value: Value) -> Any:
        if value.op == "input":
            result = self._input(value.name)
        elif value.op == "parameter":
            # Not detached: whether a parameter requires gradients decides which LSTM kernel torch takes.
            result = self._parameters[value.args[0].removeprefix(PARAMETER_PREFIX)]
        elif value.op == "constant":
            result = self._program.constants[value.name]
        else:
            args = self._filled(value.args)
            with torch.no_grad():
                result = callable_of(value.op)(*args, **self._filled(value.kwargs))
        if isinstance(result, Tensor) and value.shape is not None:
            self._learn(value.shape, result.shape)
        return result

    def _filled(self, tree: Any) -> Any:
        def number(item: Any) -> Any:
            if isinstance(item, Size):
                return self.count_of(item)
            if isinstance(item, (list, tuple)):
                return type(item)(number(part) for part in item)
            if isinstance(item, dict):
                return {key: number(part) for key, part in item.items()}
            return item

        return number(map_refs(tree, lambda ref: self._known[ref.name] if isinstance(ref, Ref) else ref))

    def _learn(self, shape: tuple[Size, ...], actual: torch.Size) -> None:
        for size, number in zip(shape, actual, strict=True):
            unknown = [(name, c) for name, c in size.terms if name not in self.counts]
            if len(unknown) == 1:
                name, coefficient = unknown[0]
                known = Size(tuple(t for t in size.terms if t[0] != name), size.constant).value(self.counts)
                self.counts[name] = (number - known) // coefficient
