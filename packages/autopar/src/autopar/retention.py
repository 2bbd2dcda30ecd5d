"""Which inputs must stay in memory until an operator's backward pass has run."""

from __future__ import annotations

from autopar.graph import Graph, Operator
from autopar.rules import rule_of

__all__ = ["shares_memory", "storage_needs"]

# Of two operands each is kept for the other's gradient.
_PAIRS = ("mul", "div", "linear", "mm", "bmm", "matmul")


def storage_needs(graph: Graph) -> list[list[bool]]:
    """Return per operator and input whether the input's memory must stay for the backward pass.

    What shares an input's memory and is needed itself keeps that input too.
    """
    readers = graph.consumers()
    needs: list[list[bool]] = [[] for _ in graph.operators]
    for position in reversed(range(len(graph.operators))):
        operator = graph.operators[position]
        if operator.is_leaf:
            continue
        rule = rule_of(operator.kind)
        through = shares_memory(operator) and any(needs[reader][slot] for reader, slot in readers[position])
        for slot in range(len(operator.inputs)):
            saved = slot in rule.saves and operator.output.has_gradient
            if operator.kind in _PAIRS:
                saved = len(operator.inputs) > 1 and slot < 2 and operator.input_info[1 - slot].has_gradient
            needs[position].append(saved or (through and slot == 0))
    return needs


def shares_memory(operator: Operator) -> bool:
    """Whether an operator's result lies in its input's memory."""
    if operator.is_leaf or not rule_of(operator.kind).is_view:
        return False
    copies_if_strided = operator.kind in ("reshape", "flatten", "contiguous")
    return not copies_if_strided or operator.input_info[0].is_contiguous
