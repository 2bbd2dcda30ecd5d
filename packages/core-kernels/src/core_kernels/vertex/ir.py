"""The typed program of one graph layer: a list of values, each computed from earlier ones.

A value lives on one of four kinds of entity: sources (``S``), destinations (``D``), edges (``E``), or once for all
(``P``, parameters and constants). Per entity it is a matrix ``[head, feature]``; a shape says for either axis whether
it is one long (0), all heads (1), or which of the program's feature widths it has (1, 2, ...). Shapes hold names of
widths, never numbers, so one compiled kernel serves every width. A freshly traced program has no shapes yet.

Aggregations: ``sum_dst``, ``max_dst``, ``min_dst`` go from the in-edges of a destination to it, ``sum_src`` from the
out-edges of a source to it (gradients), ``sum_all`` to a parameter (gradients). ``mean_dst`` and ``softmax`` exist in
traced programs only and are lowered (:mod:`core_kernels.vertex.passes`); ``shift_dst`` is the maximum that a softmax
subtracts, which has no gradient. ``degree`` counts in-edges. ``on_edge`` and ``expand`` change kind and shape alone.

Programs serialise to text, which is what the registered operators carry.
Source: Wu et al., Seastar: Vertex-Centric Programming for Graph Neural Networks, EuroSys 2021, sections 4 and 5
(https://doi.org/10.1145/3447786.3456247). We differ: relations (edge types) are part of the type, widths are symbolic.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from core_kernels.errors import ArgumentError

__all__ = ["AGGREGATIONS", "Node", "Program", "Shape", "ancestors", "join_kinds", "join_shapes", "number_reachable"]

#: (1 if one row per head, number of the feature width), 0 standing for "one long".
Shape = tuple[int, int]

AGGREGATIONS = frozenset({"sum_dst", "max_dst", "min_dst", "mean_dst", "shift_dst", "sum_src", "sum_all"})


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a program.

    Attributes:
        op: Name of the operation; ``input`` and ``const`` have no arguments.
        args: Numbers of earlier values.
        kind: ``S``, ``D``, ``E`` or ``P``.
        shape: Per-entity shape, or None before widths are known.
        attr: Name of an input, value of a constant, slope, or what an aggregation gives where there is no edge.
        relation: Edge type of source-wise and edge-wise values, ``""`` in programs of one edge type; the relation that
            is summed over for aggregations.
    """

    op: str
    args: tuple[int, ...]
    kind: str
    shape: Shape | None
    attr: str | float | None = None
    relation: str = ""

    @property
    def is_wide(self) -> bool:
        """Whether it has one number per feature."""
        return self.shape is not None and self.shape[1] > 0

    @property
    def axes(self) -> Shape:
        """Its shape in a typed program, where every value has one."""
        assert self.shape is not None, f"{self.op} has no shape before widths are known"
        return self.shape

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, relation and name of an input, by which it is looked up."""
        return self.kind, self.relation, str(self.attr)

    @property
    def number(self) -> float:
        """The value of a constant, or of an aggregation where there is no edge."""
        assert isinstance(self.attr, int | float), f"{self.op} holds {self.attr!r}, no number"
        return self.attr

    @property
    def slope(self) -> float | None:
        """The slope of an element-wise operation that has one."""
        assert not isinstance(self.attr, str), f"{self.op} holds the name {self.attr!r}, no slope"
        return self.attr


@dataclass(frozen=True)
class Program:
    """Values in order of computation, and the numbers of those that are results.

    Attributes:
        nodes: All values; arguments precede users.
        outputs: Numbers of the results.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of the input values, in order."""
        return tuple(number for number, node in enumerate(self.nodes) if node.op == "input")

    @property
    def relations(self) -> tuple[str, ...]:
        """Edge types the program aggregates over, in order of appearance."""
        return tuple(dict.fromkeys(node.relation for node in self.nodes if node.op in AGGREGATIONS | {"softmax"}))

    def to_text(self) -> str:
        """Return the program as one line of JSON."""
        rows = [[n.op, list(n.args), n.kind, n.shape and list(n.shape), n.attr, n.relation] for n in self.nodes]
        return json.dumps([rows, list(self.outputs)], separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Program:
        """Rebuild a program from :meth:`to_text`."""
        rows, outputs = json.loads(text)
        nodes = tuple(
            Node(op, tuple(args), kind, shape and tuple(shape), attr, relation)
            for op, args, kind, shape, attr, relation in rows
        )
        return Program(nodes, tuple(outputs))

    def __str__(self) -> str:
        lines = []
        for number, node in enumerate(self.nodes):
            words = [f"%{arg}" for arg in node.args] + ([] if node.attr is None else [str(node.attr)])
            axes = "" if node.shape is None else f"[{'H' if node.shape[0] else 1}, {_width_name(node.shape[1])}]"
            over = f" over {node.relation}" if node.relation else ""
            lines.append(f"%{number}: {node.kind}{axes} = {node.op}({', '.join(words)}){over}")
        return "\n".join([*lines, f"return {', '.join(f'%{number}' for number in self.outputs)}"])


def _width_name(axis: int) -> str:
    return f"F{axis}" if axis else "1"


def join_kinds(nodes: Iterable[Node]) -> tuple[str, str]:
    """Return kind and relation of a value computed from ``nodes`` entity by entity.

    Raises:
        ArgumentError: The values live on edges or sources of different relations.
    """
    kinds, relations = set(), {}
    for node in nodes:
        kinds.add(node.kind)
        if node.kind in "SE":
            relations[node.relation] = node
    if len(relations) > 1:
        raise ArgumentError(
            f"values of the edge types {sorted(relations)} meet in one operation; expected one edge type on an edge; "
            "aggregate each edge type to the vertex first, then combine"
        )
    relation = next(iter(relations), "")
    if "E" in kinds or {"S", "D"} <= kinds:
        return "E", relation
    return ("S", relation) if "S" in kinds else ("D", "") if "D" in kinds else ("P", "")


def join_shapes(nodes: Iterable[Node]) -> Shape | None:
    """Return the broadcast of per-entity shapes, None if any is unknown.

    Raises:
        ArgumentError: Two different feature widths meet.
    """
    head = feature = 0
    for node in nodes:
        if node.shape is None:
            return None
        head = max(head, node.shape[0])
        if feature and node.shape[1] and feature != node.shape[1]:
            raise ArgumentError(
                "values of two different feature widths meet in one operation; expected equal widths or width 1; "
                "check the last dimension of the tensors passed to the program"
            )
        feature = max(feature, node.shape[1])
    return head, feature


def ancestors(nodes: tuple[Node, ...] | list[Node], roots: Iterable[int], stops: Iterable[int] = ()) -> set[int]:
    """Return the numbers of all values that ``roots`` are computed from, roots included, not going behind ``stops``."""
    found: set[int] = set()
    stops = frozenset(stops)
    stack = list(roots)
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            if number not in stops:
                stack.extend(nodes[number].args)
    return found


def number_reachable(nodes: list[Node] | tuple[Node, ...], outputs: Iterable[int]) -> Program:
    """Return the program without values that no output needs, numbered anew (dead code elimination)."""
    outputs = tuple(outputs)
    kept = sorted(ancestors(nodes, outputs))
    new_number = {number: position for position, number in enumerate(kept)}
    renumbered = tuple(
        replace(nodes[number], args=tuple(new_number[arg] for arg in nodes[number].args)) for number in kept
    )
    return Program(renumbered, tuple(new_number[number] for number in outputs))
