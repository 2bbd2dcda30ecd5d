"""What a program reduces over edges, and how partial results of the same destination merge.

Edges of one destination may lie on several ranks. Each rank reduces its own, and the states of two ranks merge into
the state of their union: sums add, extrema take the larger or smaller, a mean is a sum and a count, a softmax is its
shift and its total, rescaled to the common shift. What is summed under a softmax is rescaled with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels.vertex.ir import Program, ancestors

__all__ = ["ReduceState", "describe_states"]

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class ReduceState:
    """One reduction over in-edges.

    Attributes:
        kind: ``sum``, ``mean``, ``max``, ``min``, ``softmax`` (only its normaliser) or ``softmax_sum`` (a sum weighted
            by a softmax).
        fields: Names of the tensors of a state.
        relation: Edge type.
    """

    kind: str
    fields: tuple[str, ...]
    relation: str

    def merge(self, left: State, right: State) -> State:
        """Return the state of the union of two disjoint sets of edges.

        States of no edges are 0 for sums and counts, minus (plus) infinity for maxima and shifts (minima).
        """
        if self.kind in ("sum", "mean"):
            return tuple(a + b for a, b in zip(left, right, strict=True))
        if self.kind in ("max", "min"):
            choose = torch.maximum if self.kind == "max" else torch.minimum
            return (choose(left[0], right[0]),)
        shift = torch.maximum(left[0], right[0])
        merged = [shift]
        for a, b in zip(left[1:], right[1:], strict=True):
            merged.append(a * _rescale(left[0], shift) + b * _rescale(right[0], shift))
        return tuple(merged)

    def finish(self, state: State) -> Tensor:
        """Return the reduction's result: 0 for destinations without edges."""
        if self.kind == "sum":
            return state[0]
        if self.kind == "mean":
            return state[0] / state[1].clamp(min=1)
        if self.kind in ("max", "min"):
            return torch.where(state[0].isinf(), 0, state[0])
        if self.kind == "softmax":
            return state[1]
        return torch.where(state[1] > 0, state[2] / state[1], torch.zeros_like(state[2]))


def _rescale(old_shift: Tensor, new_shift: Tensor) -> Tensor:
    return torch.where(old_shift == float("-inf"), 0, torch.exp(old_shift - new_shift))


_FIELDS = {
    "sum": ("total",),
    "mean": ("total", "count"),
    "max": ("extremum",),
    "min": ("extremum",),
    "softmax": ("shift", "normaliser"),
    "softmax_sum": ("shift", "normaliser", "total"),
}


def describe_states(program: Program) -> tuple[ReduceState, ...]:
    """Return the reductions of a traced program in order; a softmax and a sum it weights are one state."""
    states: dict[int, str] = {}
    for number, node in enumerate(program.nodes):
        if node.op == "softmax":
            states[number] = "softmax"
        elif node.op.endswith("_dst"):
            kind = node.op.removesuffix("_dst")
            behind = [n for n in ancestors(program.nodes, node.args) if states.get(n) == "softmax"]
            if kind == "sum" and len(behind) == 1 and program.nodes[behind[0]].relation == node.relation:
                del states[behind[0]]
                kind = "softmax_sum"
            states[number] = kind
    return tuple(ReduceState(kind, _FIELDS[kind], program.nodes[n].relation) for n, kind in states.items())
