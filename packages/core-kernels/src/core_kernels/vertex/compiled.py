"""A typed program made ready to run: forward with what it saves, backward, and the text that names both.

The text is the whole program, so an operator call that carries it needs no registry: it works in exported models, in
other processes and on other ranks. Texts are looked up in a cache, which is what the usual call does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from core_kernels.vertex.autodiff import Gradient, differentiate
from core_kernels.vertex.fusion import Plan, make_plan
from core_kernels.vertex.ir import Program
from core_kernels.vertex.passes import Widths

__all__ = ["CompiledProgram", "Edges", "compiled", "measure_widths"]


@dataclass(frozen=True)
class Edges:
    """The arrays of one edge type.

    Attributes:
        indptr: int64 [num_dst + 1].
        indices: Source of each position.
        t_indptr: int64 [num_src + 1] of the transposed graph; empty when no gradient will be asked for.
        t_indices: Destination of each position of the transposed graph.
        t_positions: int64, position in the graph of each position of the transposed graph.
        num_src: Number of sources.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    t_indptr: torch.Tensor
    t_indices: torch.Tensor
    t_positions: torch.Tensor
    num_src: int

    @property
    def num_dst(self) -> int:
        """Number of destinations."""
        return self.indptr.shape[0] - 1

    def degrees(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the in-degrees."""
        degrees = self.indptr.diff()
        return degrees if dtype is None else degrees.to(dtype)

    def num_rows(self, kind: str) -> int:
        """Return how many entities of a kind there are."""
        return {"S": self.num_src, "D": self.num_dst, "E": self.indices.shape[0], "P": 1}[kind]


def measure_widths(program: Program, tensors: Sequence[torch.Tensor]) -> Widths:
    """Return the widths behind the symbols, read from the inputs ``[entities, heads, features]`` in program order."""
    num_heads, features = 1, {}
    for number, tensor in zip(program.inputs, tensors, strict=True):
        head, feature = program.nodes[number].axes
        if head:
            num_heads = tensor.shape[1]
        if feature:
            features[feature] = tensor.shape[2]
    highest = max(features, default=0)
    return Widths(num_heads, [features.get(axis, 1) for axis in range(1, highest + 1)])


class CompiledProgram:
    """Forward and backward of one typed program for one choice of inputs that want gradients.

    Attributes:
        program: The forward, as the user returned it.
        wanted: Positions among its inputs that want gradients.
        forward: The same with saved aggregations as further results.
    """

    def __init__(self, program: Program, wanted: tuple[int, ...]):
        self.program, self.wanted = program, wanted
        outputs = list(program.outputs)
        if wanted:
            outputs += [number for number in self.gradient.saved if number not in outputs]
        self.forward = Program(program.nodes, tuple(dict.fromkeys(outputs)))

    @cached_property
    def gradient(self) -> Gradient:
        """The backward program."""
        return differentiate(self.program, [self.program.inputs[position] for position in self.wanted])

    @cached_property
    def forward_plan(self) -> Plan:
        """Kernels of the forward."""
        return make_plan(self.forward)

    @cached_property
    def backward_plan(self) -> Plan:
        """Kernels of the backward."""
        return make_plan(self.gradient.program)

    @cached_property
    def saved_results(self) -> tuple[int, ...]:
        """For each saved aggregation its position among the results of ``forward``."""
        return tuple(self.forward.outputs.index(number) for number in self.gradient.saved)

    def backward_inputs(
        self, inputs: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the inputs of the backward program in its order."""
        by_name: dict[tuple[str, str, str], torch.Tensor] = {}
        for number, tensor in zip(self.program.inputs, inputs, strict=True):
            by_name[self.program.nodes[number].key] = tensor
        ordered = []
        for number in self.gradient.program.inputs:
            node = self.gradient.program.nodes[number]
            role, _, position = str(node.attr).partition(":")
            if role == "saved" and position:
                ordered.append(saved[int(position)])
            elif role == "grad" and position:
                ordered.append(grads[int(position)])
            else:
                ordered.append(by_name[node.key])
        return ordered

    def collect_gradients(
        self, contributions: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Add up what the backward program returned, fitted to the shapes of the wanted inputs."""
        total: dict[int, torch.Tensor] = {}
        for target, part in zip(self.gradient.targets, contributions, strict=True):
            like = inputs[self.program.inputs.index(target)]
            if part.shape[1] > like.shape[1]:
                part = part.sum(1, keepdim=True)
            part = part.expand(like.shape) if part.shape != like.shape else part
            total[target] = total[target] + part if target in total else part
        wanted = [(position, self.program.inputs[position]) for position in self.wanted]
        return [
            (total[number] if number in total else torch.zeros_like(inputs[position])).contiguous()
            for position, number in wanted
        ]

    def to_text(self) -> str:
        """Return the text from which :func:`compiled` rebuilds this object."""
        return ",".join(map(str, self.wanted)) + "|" + self.program.to_text()


@functools.lru_cache(maxsize=1024)
def compiled(text: str) -> CompiledProgram:
    """Return the compiled program that a text names."""
    wanted, _, program = text.partition("|")
    return CompiledProgram(Program.from_text(program), tuple(int(number) for number in wanted.split(",") if number))


def edges_by_relation(program: Program, graphs: Sequence[torch.Tensor], num_src: Sequence[int]) -> Mapping[str, Edges]:
    """Return the arrays of each edge type from the flat list an operator takes, five tensors a relation."""
    relations = program.relations
    return {
        relation: Edges(*graphs[5 * index : 5 * index + 5], num_src=num_src[index])
        for index, relation in enumerate(relations)
    }
