"""One call of a model on a graph: its tensors and what each of them means.

Roles are read from argument names (``edge`` or ``adj`` in the name), from dictionary keys (node types and
``(source, relation, destination)`` triples) and from leading sizes; where these do not decide, the caller is asked.
A parameter that holds one row per node, as an embedding table, is lifted to an input so that it is split like features.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnn_eval.containers import Path, as_edge_index, fill, is_adjacency, take_apart
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.program import Role

__all__ = ["ModelCall", "bind_call", "num_rows_of"]

_EDGE_WORDS = ("edge", "adj", "weight", "relation")
_NODE_NAMES = ("x", "x0", "x_0", "batch", "pos", "z", "h", "feat", "features", "node_attr", "node_type", "y")
PARAMETER_PREFIX = "parameter:"


@dataclass
class ModelCall:
    """A model's arguments in flat form.

    Args:
        skeleton: ``(args, kwargs)`` without tensors.
        names: Dotted path of each tensor.
        tensors: The tensors; the last ``len(lifted)`` are parameters with one row per node.
        roles: Role of each tensor.
        lifted: Qualified names of those parameters.
    """

    skeleton: Any
    names: list[str]
    tensors: list[torch.Tensor]
    roles: list[Role]
    lifted: list[str]

    def arguments(self, tensors: list[torch.Tensor]) -> tuple[tuple, dict[str, Any]]:
        """Return ``(args, kwargs)`` with other tensors in the slots."""
        return fill(self.skeleton, tensors, lambda node_type: self._count(node_type, tensors))

    def _count(self, node_type: str, tensors: list[torch.Tensor]) -> Any:
        for role, tensor in zip(self.roles, tensors, strict=False):
            if role.kind == "node" and role.space == node_type:
                return tensor.size(0)
        raise EvaluationArgumentError(f"no input has one row per node of type {node_type!r}; pass node features")

    def counts(self) -> dict[str, int]:
        """Return the counts ``n_<type>`` and ``e_<relation>`` of this call."""
        counts: dict[str, int] = {}
        for role, tensor in zip(self.roles, self.tensors, strict=True):
            if role.kind != "const":
                prefix = "n" if role.kind == "node" else "e"
                counts[f"{prefix}_{role.space}"] = num_rows_of(role, tensor)
        return counts

    def signature(self) -> tuple:
        """Return what a compiled plan depends on besides the model: names, roles, dtypes and trailing shapes."""
        parts = []
        for name, role, tensor in zip(self.names, self.roles, self.tensors, strict=True):
            trailing = tuple(tensor.shape) if role.kind == "const" else tuple(tensor.shape[1:])
            parts.append((name, role, tensor.dtype, () if role.kind == "relation" else trailing))
        return tuple(parts)

    def check_ids(self) -> None:
        """Raise when an edge names a node that does not exist."""
        counts = self.counts()
        for name, role, tensor in zip(self.names, self.roles, self.tensors, strict=True):
            if role.kind != "relation" or tensor.numel() == 0:
                continue
            for row, node_type in enumerate((role.source, role.destination)):
                bound = counts.get(f"n_{node_type}")
                if bound is None:
                    raise EvaluationArgumentError(
                        f"{name} has nodes of type {node_type!r}, but no input has their rows; pass their features"
                    )
                low, high = int(tensor[row].min()), int(tensor[row].max())
                if low < 0 or high >= bound:
                    bad = low if low < 0 else high
                    raise EvaluationArgumentError(
                        f"{name}[{row}] holds {bad}, outside [0, {bound}); the graph has {bound} nodes of type "
                        f"{node_type!r}: pass ids below {bound}, or add the missing rows of features"
                    )


def num_rows_of(role: Role, tensor: torch.Tensor) -> int:
    """Return the number of nodes or edges a tensor has under its role."""
    return tensor.size(1 if role.kind == "relation" else 0)


def bind_call(model: nn.Module, data: Any, roles: Mapping[str, str] | None = None) -> ModelCall:
    """Bind ``data`` to the arguments of ``model.forward``.

    Args:
        model: The model.
        data: A tuple of positional arguments, a dict of keyword arguments, a ``Data`` or ``HeteroData``.
        roles: Overrides by dotted name: ``"node"``, ``"edge"``, ``"relation"`` or ``"const"``.

    Returns:
        The flat call.

    Raises:
        EvaluationArgumentError: If a role cannot be told, or an argument is missing.
    """
    args, kwargs = _bind_arguments(model, data)
    named = _names_of_positions(model, args)
    skeleton, leaves = take_apart((tuple(args), kwargs))
    paths = [named[path[1]] + path[2:] if path[0] == 0 else path[1:] for path, _ in leaves]
    tensors = [tensor for _, tensor in leaves]
    names = [_dotted(path) for path in paths]
    found = _infer_roles(paths, names, tensors, dict(roles or {}))
    num_nodes = _num_nodes(data, model, found, tensors)
    lifted = _parameters_with_node_rows(model, found, tensors, num_nodes)
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return ModelCall(
        skeleton,
        names + [PARAMETER_PREFIX + name for name in lifted],
        tensors + [parameters[name].detach() for name in lifted],
        found + [Role("node", "node")] * len(lifted),
        lifted,
    )


def _bind_arguments(model: nn.Module, data: Any) -> tuple[tuple, dict[str, Any]]:
    if isinstance(data, tuple):
        return data, {}
    if isinstance(data, Mapping):
        return (), dict(data)
    if isinstance(data, torch.Tensor) or is_adjacency(data):
        return (data,), {}
    parameters = inspect.signature(model.forward).parameters
    chosen: dict[str, Any] = {}
    for name, parameter in parameters.items():
        value = _attribute(data, name)
        if value is None and name in ("edge_index", "adj_t", "adj"):
            value = next((v for v in (_attribute(data, n) for n in ("edge_index", "adj_t")) if v is not None), None)
        if value is not None and not (name == "batch" and parameter.default is None):
            chosen[name] = value
        elif parameter.default is parameter.empty and parameter.kind == parameter.POSITIONAL_OR_KEYWORD:
            if len([p for p in parameters.values() if p.default is p.empty]) == 1:
                return (data,), {}
            raise EvaluationArgumentError(
                f"forward needs {name!r}, which the data object does not have; pass the arguments as a tuple or a dict"
            )
    adjacency = _attribute(data, "adj_t")
    if adjacency is not None and "edge_weight" in parameters and "edge_weight" not in chosen:
        weight = as_edge_index(adjacency)[1]
        if weight is not None:
            chosen["edge_weight"] = weight
    return (), chosen


def _attribute(data: Any, name: str) -> Any:
    try:
        return getattr(data, name, None)
    except (KeyError, ValueError):
        return None


def _names_of_positions(model: nn.Module, args: tuple) -> list[Path]:
    names = list(inspect.signature(model.forward).parameters)
    return [(names[place] if place < len(names) else f"arg{place}",) for place in range(len(args))]


def _dotted(path: Path) -> str:
    return ".".join("__".join(part) if isinstance(part, tuple) else str(part) for part in path)


def _infer_roles(paths: list[Path], names: list[str], tensors: list[torch.Tensor], given: dict[str, str]) -> list[Role]:
    roles: list[Role | None] = [None] * len(paths)
    for place, (path, tensor) in enumerate(zip(paths, tensors, strict=True)):
        asked = given.get(names[place])
        shaped = tensor.dim() == 2 and tensor.size(0) == 2 and tensor.dtype in (torch.int64, torch.int32)
        triple = next((part for part in path if isinstance(part, tuple)), None)
        called = any(word in names[place].lower() for word in ("edge", "adj"))
        if asked == "relation" or (asked is None and shaped and (called or triple is not None)):
            source, destination = (triple[0], triple[-1]) if triple else ("node", "node")
            relation = "__".join(triple) if triple else names[place]
            roles[place] = Role("relation", relation, source, destination)
    relations = {r.space: t.size(1) for r, t in zip(roles, tensors, strict=True) if r is not None}
    for place, (path, tensor) in enumerate(zip(paths, tensors, strict=True)):
        if roles[place] is None:
            roles[place] = _role_of_rows(path, names[place], tensor, relations, tensors, names, given)
    return [role for role in roles if role is not None]


def _role_of_rows(
    path: Path,
    name: str,
    tensor: torch.Tensor,
    relations: dict[str, int],
    tensors: list[torch.Tensor],
    names: list[str],
    given: dict[str, str],
) -> Role:
    asked = given.get(name)
    if asked == "const" or (asked is None and tensor.dim() == 0):
        return Role("const")
    triple = next((part for part in path if isinstance(part, tuple)), None)
    if triple is not None:
        return Role("edge", "__".join(triple))
    typed = next((part for part in path[1:] if isinstance(part, str)), None)
    if typed is not None and not any(word in name for word in _EDGE_WORDS):
        return Role("node", typed)
    num_nodes = _num_homogeneous_nodes(names, tensors)
    matching = [relation for relation, count in relations.items() if count == tensor.size(0)]
    edge_named = any(word in name.lower() for word in _EDGE_WORDS)
    if asked == "edge" or (asked is None and matching and edge_named):
        return Role("edge", matching[0])
    if asked == "node" or name.split(".")[-1] in _NODE_NAMES:
        return Role("node", "node")
    if tensor.size(0) == num_nodes:
        if matching:
            raise EvaluationArgumentError(
                f"{name} has {num_nodes} rows, and there are {num_nodes} nodes and as many edges; "
                f'say which it is with roles={{"{name}": "node"}} or roles={{"{name}": "edge"}}'
            )
        return Role("node", "node")
    return Role("edge", matching[0]) if matching else Role("const")


def _num_homogeneous_nodes(names: list[str], tensors: list[torch.Tensor]) -> int:
    for name, tensor in zip(names, tensors, strict=True):
        if name.split(".")[-1] in _NODE_NAMES and tensor.dim() > 0:
            return tensor.size(0)
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_floating_point() and tensor.dim() > 1 and not any(word in name for word in _EDGE_WORDS):
            return tensor.size(0)
    return -1


def _num_nodes(data: Any, model: nn.Module, roles: list[Role], tensors: list[torch.Tensor]) -> int | None:
    for role, tensor in zip(roles, tensors, strict=True):
        if role == Role("node", "node"):
            return tensor.size(0)
    given = getattr(data, "num_nodes", None) or getattr(model, "num_nodes", None)
    return int(given) if given else None


def _parameters_with_node_rows(
    model: nn.Module, roles: list[Role], tensors: list[torch.Tensor], num_nodes: int | None
) -> list[str]:
    """Return parameters that hold one row per node: embedding tables read by edges, not by ids given as input."""
    homogeneous = any(role.kind == "relation" and role.source == "node" for role in roles)
    ids_given = any(r.kind == "node" and not t.is_floating_point() for r, t in zip(roles, tensors, strict=True))
    if num_nodes is None or ids_given or not homogeneous:
        return []
    found = []
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding) or "SparseLinear" in type(module).__name__:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.dim() == 2 and parameter.size(0) == num_nodes:
                    found.append(name)
    return found
