"""The typed program: a model's forward as a list of operators whose rows are nodes, edges or nothing.

A front end fills in operators, arguments and shapes; :mod:`gnn_eval.typing_rules` decides for every value which rows
it has and whether it depends on structure alone. All later passes read this form only, so they know no front end, no
``torch.fx`` and no PyG. A program is written to JSON without weights: parameters are found again by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from gnn_eval.sizes import Size

__all__ = ["Kind", "Program", "Ref", "Role", "Type", "Value", "map_refs", "resolve_operator"]


class Kind(Enum):
    """What the rows of a value are."""

    CONST = "const"  # parameters, numbers: no rows
    STRUCT = "struct"  # depends on edges and edge data only: computed once
    NODE = "node"  # one row per node of a space
    EDGE = "edge"  # one row per edge of an edge space
    GLOBAL = "global"  # reduced over all rows of a computed value


@dataclass(frozen=True)
class Role:
    """What an input tensor of the model means.

    Args:
        kind: ``"node"`` (rows are nodes), ``"relation"`` (``[2, edges]``), ``"edge"`` (rows are edges) or ``"const"``.
        space: Node type of a node input; relation of a relation or edge input.
        source: Node type of row 0 of a relation.
        destination: Node type of row 1 of a relation.
    """

    kind: str
    space: str = ""
    source: str = ""
    destination: str = ""


@dataclass(frozen=True)
class Ref:
    """The use of another value of the program as an argument."""

    name: str


@dataclass(frozen=True)
class Type:
    """What typing finds out about a value.

    Args:
        kind: What the rows are.
        space: Size of the row dimension of one row per member, ``None`` without rows.
        row_dim: Which dimension the rows are.
        factor: Consecutive positions of that dimension belonging to one row (1 unless a view merged dimensions).
        static: Whether the value depends on structure alone.
        uniform: Whether all rows are the same by construction, as of ``zeros`` (never stored, made where needed).
    """

    kind: Kind
    space: Size | None = None
    row_dim: int = 0
    factor: int = 1
    static: bool = False
    uniform: bool = False

    @property
    def rows(self) -> Size:
        """The space of a value that is known to have rows."""
        assert self.space is not None, "the value has no rows"
        return self.space


@dataclass
class Value:
    """One operator of the program and its result.

    Args:
        name: Unique name.
        op: ``"input"``, ``"parameter"``, ``"constant"``, ``"conv"`` or the operator's qualified name.
        args: Positional arguments; other values appear as :class:`Ref`, also inside lists and tuples.
        kwargs: Keyword arguments.
        shape: Symbolic shape of a tensor, or ``None``.
        size: Symbolic value of an integer, or ``None``.
        dtype: Dtype of a tensor, or ``None``.
        source: Module path, file, line and text it came from.
        type: Filled in by typing.
    """

    name: str
    op: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[Size, ...] | None = None
    size: Size | None = None
    dtype: torch.dtype | None = None
    source: str = ""
    type: Type = Type(Kind.CONST)

    @property
    def is_tensor(self) -> bool:
        """Whether the value is one tensor, not a number or a tuple."""
        return self.shape is not None

    @property
    def dims(self) -> tuple[Size, ...]:
        """The symbolic shape of a tensor; empty for a number or a tuple of tensors."""
        return () if self.shape is None else self.shape

    @property
    def short_op(self) -> str:
        """The operator without name space and overload: ``scatter_add`` of ``aten.scatter_add.default``."""
        parts = self.op.split(".")
        return parts[1] if len(parts) == 3 else parts[-1]

    def refs(self) -> Iterator[str]:
        """Yield the names of all values used as arguments, in order."""
        found: list[str] = []
        map_refs((self.args, self.kwargs), lambda ref: found.append(ref.name))
        return iter(found)

    def row_bytes(self) -> int:
        """Bytes of one row, for a tensor with rows."""
        width = self.type.factor
        for dim, size in enumerate(self.dims):
            if dim != self.type.row_dim:
                width *= max(size.constant, 1)
        return width * (self.dtype.itemsize if self.dtype else 8)


@dataclass
class Program:
    """A model's forward in operators.

    Args:
        values: All values by name, in an order in which arguments precede uses.
        inputs: Names of the inputs, in the order of the flattened call.
        roles: Role of each input.
        outputs: Names of the output tensors, in the order of the flattened result.
        constants: Tensors lifted from the code, by name of the value.
    """

    values: dict[str, Value]
    inputs: list[str]
    roles: dict[str, Role]
    outputs: list[str]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def consumers(self) -> dict[str, list[Value]]:
        """Return for each value the values that use it."""
        users: dict[str, list[Value]] = {name: [] for name in self.values}
        for value in self.values.values():
            for name in dict.fromkeys(value.refs()):
                users[name].append(value)
        return users

    def node_space(self, node_type: str) -> Size:
        """Return the size of the space of a node type."""
        return Size.of(f"n_{node_type}")

    def node_spaces(self) -> dict[Size, str]:
        """Return the node types by the size of their space."""
        types = {r.space for r in self.roles.values() if r.kind == "node"}
        types |= {t for r in self.roles.values() if r.kind == "relation" for t in (r.source, r.destination)}
        return {self.node_space(t): t for t in sorted(types)}


def map_refs(tree: Any, function: Callable[[Ref], Any]) -> Any:
    """Return ``tree`` with each :class:`Ref` replaced; lists, tuples, dicts and slices are walked."""
    if isinstance(tree, Ref):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_refs(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: map_refs(item, function) for key, item in tree.items()}
    return tree


def resolve_operator(name: str) -> Callable[..., Any]:
    """Return the callable of a qualified operator name.

    >>> resolve_operator("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    >>> resolve_operator("operator.getitem")((4, 5), 1)
    5
    """
    parts = name.split(".")
    if parts[0] == "operator":
        return getattr(operator, parts[1])
    if parts[0] == "math":
        return getattr(torch, parts[1])
    namespace, packet, overload = parts
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
