"""Which operators are planned alike: the repetitions of a recurrence.

A recurrent layer written out in time reads one weight at every step. Planning each step on its own multiplies the
choices without use, and entangles the graph: every step meets the shared weight. So the steps are tied. Readers of one
parameter that do the same with it form a class; classes spread backward to what feeds them at the same place, and
forward to what reads only tied values. Feed-forward models have no such readers and keep every choice.

Callers may not assume that the members of a class have as many readers, or the same kinds of inputs: the first step of
a recurrence has no state to read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopar.graph import Graph, Operator

__all__ = ["tied_operators"]


def tied_operators(graph: Graph) -> list[int]:
    """Return for every operator the first operator of its class, itself where nothing is tied.

    >>> from autopar import models, trace
    >>> mlp, lstm = trace(*models.mlp()), trace(*models.lstm(length=6))
    >>> tied_operators(mlp) == list(range(len(mlp.operators)))
    True
    >>> len(set(tied_operators(lstm))) < len(lstm.operators) / 2
    True
    """
    classes = _Classes(graph)
    readers = graph.consumers()
    for position, operator in enumerate(graph.operators):
        if operator.kind == "parameter":
            alike: dict[tuple, int] = {}
            for reader, slot in readers[position]:
                classes.tie(alike.setdefault((slot, classes.signatures[reader]), reader), reader)
    while classes.changed:
        classes.changed = False
        classes.spread_forward()
        classes.spread_to_joined()
    return [classes.first(position) for position in range(len(graph.operators))]


def _shape_signature(operator: Operator) -> tuple:
    """Return an operator's signature without strides, which no rule reads."""
    kind, inputs, output, plain = operator.signature
    return kind, tuple(replace(info, is_contiguous=True) for info in inputs), replace(output, is_contiguous=True), plain


class _Classes:
    """Classes of tied operators; tying two ties what feeds them at the same place."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.signatures = [_shape_signature(operator) for operator in graph.operators]
        # Which of several outputs is read does not matter to the plan.
        self.loose = [signature[:3] if signature[0] == "getitem" else signature for signature in self.signatures]
        self.changed = False
        self._parent = list(range(len(graph.operators)))

    def first(self, position: int) -> int:
        while self._parent[position] != position:
            position = self._parent[position]
        return position

    def tie(self, a: int, b: int) -> None:
        waiting = [(a, b)]
        while waiting:
            a, b = waiting.pop()
            first, second = sorted((self.first(a), self.first(b)))
            if first == second or self.graph.operators[b].is_leaf or self.loose[a] != self.loose[b]:
                continue
            self._parent[second] = first
            self.changed = True
            waiting += zip(self.graph.operators[a].inputs, self.graph.operators[b].inputs, strict=True)

    def spread_forward(self) -> None:
        """Tie operators that do the same with tied values."""
        known: dict[tuple, int] = {}
        sizes = Counter(self.first(position) for position in range(len(self._parent)))
        for position, operator in enumerate(self.graph.operators):
            sources = tuple(self.first(source) for source in operator.inputs)
            if any(sizes[source] > 1 for source in sources):
                self.tie(known.setdefault((self.signatures[position], sources), position), position)

    def spread_to_joined(self) -> None:
        """Tie all that a join puts together once some of it is tied, so that the last step is planned as the others."""
        for operator in self.graph.operators:
            if operator.kind in ("stack", "cat"):
                sources = [self.first(source) for source in operator.inputs]
                if len(set(sources)) < len(set(operator.inputs)):
                    for source in operator.inputs:
                        self.tie(max(sources, key=sources.count), source)
