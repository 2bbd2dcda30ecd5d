"""Recognise kernels that are a plain sparse-times-dense product, so that the hand-tuned one runs instead.

The form is ``out[row] = row_scale * sum_edges weight[edge] * far_scale[far] * x[far]`` with ``x`` and ``weight`` in
memory and each scale a product of quotients of narrow values of one side. GCN, GraphSAGE-mean and GIN have it, forward
and, as long as neither scales nor weights want gradients, backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from core_kernels.vertex.builder import Builder
from core_kernels.vertex.fusion import Kernel, Plan
from core_kernels.vertex.ir import Program, number_reachable

__all__ = ["SpmmForm", "match_spmm"]


@dataclass(frozen=True)
class SpmmForm:
    """A kernel in the form above.

    Attributes:
        x: Number of the wide value, in memory.
        weight: Number of the edge value, in memory, or None.
        far_scale: Program of one narrow value of the far side, or None for one.
        row_scale: The same for the rows.
        output: Number of the stored value.
    """

    x: int
    weight: int | None
    far_scale: Program | None
    row_scale: Program | None
    output: int


def match_spmm(plan: Plan, kernel: Kernel) -> SpmmForm | None:
    """Return the form of ``kernel``, or None if it has another one."""
    return _Matcher(plan, kernel).match()


class _Matcher:
    def __init__(self, plan: Plan, kernel: Kernel):
        self.plan, self.kernel, self.nodes = plan, kernel, plan.program.nodes
        self.builder = Builder()
        self.builder.nodes = list(self.nodes)

    def match(self) -> SpmmForm | None:
        loops = [step for step in self.kernel.steps if step.relation is not None]
        stored = [root for step in self.kernel.steps if step.relation is None for root in step.roots]
        if len(loops) != 1 or len(loops[0].roots) != 1 or loops[0].roots[0].action != "sum":
            return None
        total = loops[0].roots[0].target
        if len(stored) != 1 or stored[0].action != "store" or self.nodes[total].attr != 0.0:
            return None
        far = "S" if self.kernel.side == "D" else "D"
        inner = self._split(loops[0].roots[0].value, far)
        outer = self._scale_of(stored[0].value, total)
        if inner is None or outer is None:
            return None
        x, weight, (above, below) = inner
        if self.nodes[x].shape != self.nodes[total].shape:
            return None
        return SpmmForm(x, weight, self._program(above, below), self._program(*outer), stored[0].value)

    def _in_memory(self, number: int) -> bool:
        return self.nodes[number].op in ("input", "degree") or (
            number in self.plan.arrays and number not in self.kernel.writes()
        )

    def _split(self, value: int, far: str) -> tuple[int, int | None, tuple[list[int], list[int]]] | None:
        """Split an edge value into x, weight and the factors of the far scale."""
        above, below = self.builder.factors(value)
        wide = [n for n in above if self.nodes_of(n).is_wide]
        weights = [n for n in above if self.nodes_of(n).kind == "E" and n not in wide]
        rest = [n for n in above if n not in wide and n not in weights]
        if len(wide) != 1 or len(weights) > 1 or self.nodes[wide[0]].kind != far or not self._in_memory(wide[0]):
            return None
        if weights and not (self.nodes[weights[0]].op == "input" or self._in_memory(weights[0])):
            return None
        if any(self.nodes_of(n).kind not in (far, "P") or self.nodes_of(n).shape != (0, 0) for n in rest + below):
            return None
        return wide[0], weights[0] if weights else None, (rest, below)

    def nodes_of(self, number: int):
        """Return a value; constants made while matching lie behind the program's own."""
        return self.builder.nodes[number]

    def _scale_of(self, value: int, total: int) -> tuple[list[int], list[int]] | None:
        """Return the factors of a row value beside the aggregation, None if it is no such product."""
        above, below = self.builder.factors(value)
        if above.count(total) != 1:
            return None
        above = [n for n in above if n != total]
        if any(self.nodes_of(n).kind not in (self.kernel.side, "P") for n in above + below):
            return None
        if any(self.nodes_of(n).shape != (0, 0) or total in self._behind(n) for n in above + below):
            return None
        return above, below

    def _behind(self, number: int) -> set[int]:
        found, stack = set(), [number]
        while stack:
            n = stack.pop()
            found.add(n)
            stack.extend(self.nodes_of(n).args)
        return found

    def _program(self, above: list[int], below: list[int]) -> Program | None:
        if not above and not below:
            return None
        return number_reachable(self.builder.nodes, [self.builder.product(above, below)])
