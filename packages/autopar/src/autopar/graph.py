"""The captured computation: operators on tensors, with the names of parameters and where each line came from.

A :class:`Graph` wraps the forward graph of ATen operators. Each :class:`Operator` knows its tensor inputs by position
of the value list, their shapes and its arguments; rules and costs read nothing else. Shapes are global, those of one
device.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

__all__ = ["Graph", "Operator", "TensorInfo"]


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype and whether a gradient flows to it. For several outputs of an operator, those of the first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    is_contiguous: bool = True

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * self.dtype.itemsize


@dataclass(eq=False)
class Operator:
    """One node of the graph.

    Attributes:
        name: Unique name, that of the graph node.
        kind: ``"parameter"``, ``"buffer"``, ``"input"``, ``"constant"``, or an operator such as ``"linear"``.
        inputs: Positions of the operators whose results are the tensor inputs, in argument order.
        input_info: Shapes and dtypes of those tensors.
        output: The result.
        node: The graph node, with all arguments.
        target: Name of the parameter or buffer.
        module: Path of the module it belongs to.
        line: Source line, when known.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    input_info: tuple[TensorInfo, ...]
    output: TensorInfo
    node: Any  # fx.Node, whose arguments may be of any type
    target: str = ""
    module: str = ""
    line: str = ""

    @property
    def is_leaf(self) -> bool:
        """Whether it only brings a tensor in."""
        return self.kind in ("parameter", "buffer", "input", "constant")

    @functools.cached_property
    def signature(self) -> tuple[str, tuple[TensorInfo, ...], TensorInfo, tuple[str, ...]]:
        """What decides an operator's rule and costs; equal for operators of repeated layers."""
        if self.kind in ("cat", "stack"):
            plain: tuple[str, ...] = (str(self.argument(1, "dim", 0)), str(len(self.inputs)))
        else:
            arguments = (*self.node.args, *self.node.kwargs.items())
            plain = tuple("tensor" if isinstance(argument, fx.Node) else str(argument) for argument in arguments)
        return self.kind, self.input_info, self.output, plain

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return a non-tensor argument given by position or by name."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def input_at(self, position: int) -> int | None:
        """Return which tensor input stands at an argument position, ``None`` when that argument is no tensor."""
        args = self.node.args
        if position >= len(args) or not isinstance(args[position], fx.Node):
            return None
        return sum(isinstance(argument, fx.Node) for argument in args[:position])


@dataclass(eq=False)
class Graph:
    """A captured training step.

    Attributes:
        operators: In topological order, leaves first.
        result: Position of the loss.
        optimizer: Name of the optimiser whose state is planned for.
        state_factor: Bytes of its state per byte of parameters.
        module_name: Class of the module.
        fx_graph: The captured graph itself.
        num_inputs: Number of tensors the step takes.
        constants: Tensors that the module made itself, by name of their operator.
        capture_seconds: How long the capture took.
    """

    operators: list[Operator]
    result: int
    optimizer: str
    state_factor: float
    module_name: str
    fx_graph: fx.Graph
    num_inputs: int
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    capture_seconds: float = 0.0

    @property
    def parameters(self) -> list[Operator]:
        """The parameters, in order of capture."""
        return [operator for operator in self.operators if operator.kind == "parameter"]

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements, tied ones once."""
        return sum(operator.output.num_elements for operator in self.parameters)

    def consumers(self) -> list[list[tuple[int, int]]]:
        """Return per operator the (operator, input position) pairs that read its result."""
        readers: list[list[tuple[int, int]]] = [[] for _ in self.operators]
        for position, operator in enumerate(self.operators):
            for slot, source in enumerate(operator.inputs):
                readers[source].append((position, slot))
        return readers

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of operators, shapes, dtypes, names and arguments."""
        digest = hashlib.blake2b(digest_size=8)
        for operator in self.operators:
            parts = (operator.kind, operator.target, operator.inputs, operator.output.shape, str(operator.output.dtype))
            digest.update(repr((*parts, _plain(operator.node.args), _plain(operator.node.kwargs))).encode())
        return digest.hexdigest()

    def report(self) -> str:
        """Return a short description: sizes, operators and how often each occurs."""
        counts: dict[str, int] = {}
        for operator in self.operators:
            if not operator.is_leaf:
                counts[operator.kind] = counts.get(operator.kind, 0) + 1
        listed = ", ".join(f"{kind} x{count}" for kind, count in sorted(counts.items(), key=lambda item: -item[1]))
        return (
            f"{self.module_name}: {self.num_parameters:,} parameters in {len(self.parameters)} tensors, "
            f"{sum(counts.values())} operators ({listed})"
        )


def _plain(value: Any) -> Any:
    """Return arguments without graph nodes, whose names are accidental."""
    if isinstance(value, fx.Node):
        return "tensor"
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value)
