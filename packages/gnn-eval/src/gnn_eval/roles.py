"""What an input tensor means: rows of nodes, edges, values per edge, or neither.

Roles are read from argument names (``edge`` or ``adj`` in the name), from dictionary keys (node types and
``(source, relation, destination)`` triples) and from leading sizes; where these do not decide, the caller is asked.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gnn_eval.containers import Named, Path
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.program import Role

__all__ = ["infer_roles"]

_EDGE_WORDS = ("edge", "adj", "weight", "relation")
_NODE_NAMES = ("x", "x0", "x_0", "batch", "pos", "z", "h", "feat", "features", "node_attr", "node_type", "y")
_RELATION_NAMES = ("edge_index", "adj", "adj_t")
_EDGE_NAMES = ("edge_weight", "edge_attr", "edge_type")
_ROLES = ("node", "edge", "relation", "const")


def infer_roles(
    paths: list[Path], names: list[str], tensors: list[torch.Tensor], given: Mapping[str, str]
) -> list[Role]:
    """Return the role of each input.

    Args:
        paths: Where each tensor was in the arguments.
        names: The same as dotted names.
        tensors: The inputs.
        given: Roles the caller gave, by dotted name.

    Raises:
        EvaluationArgumentError: If a role cannot be told, or a tensor does not have the shape of its role.
    """
    _check_given(given, names)
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
        elif asked is None and not shaped and names[place].split(".")[-1] in _RELATION_NAMES:
            raise EvaluationArgumentError(
                f"{names[place]} has shape {list(tensor.shape)} and {tensor.dtype}; expected integers of shape "
                "[2, edges], sources first; transpose it, or call .long()"
            )
    if not any(role is not None for role in roles):  # no name tells: the only list of edges, if there is one
        lists = [place for place, name in enumerate(names) if name not in given and _may_be_edges(name, tensors[place])]
        if len(lists) == 1:
            roles[lists[0]] = Role("relation", names[lists[0]], "node", "node")
    relations = {r.space: t.size(1) for r, t in zip(roles, tensors, strict=True) if r is not None}
    for place, (path, tensor) in enumerate(zip(paths, tensors, strict=True)):
        if roles[place] is None:
            roles[place] = _role_of_rows(path, names[place], tensor, relations, tensors, names, given)
    return [role for role in roles if role is not None]


def _may_be_edges(name: str, tensor: torch.Tensor) -> bool:
    shaped = tensor.dim() == 2 and tensor.size(0) == 2 and tensor.dtype in (torch.int64, torch.int32)
    return shaped and name.split(".")[-1] not in _NODE_NAMES


def _role_of_rows(
    path: Path,
    name: str,
    tensor: torch.Tensor,
    relations: dict[str, int],
    tensors: list[torch.Tensor],
    names: list[str],
    given: Mapping[str, str],
) -> Role:
    asked = given.get(name)
    if asked == "const" or (asked is None and tensor.dim() == 0):
        return Role("const")
    triple = next((part for part in path if isinstance(part, tuple)), None)
    if triple is not None:
        return Role("edge", "__".join(triple))
    typed = next((part for part in path[1:] if isinstance(part, str) and not isinstance(part, Named)), None)
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
    if name.split(".")[-1] in _EDGE_NAMES and not matching:
        counts = ", ".join(f"{count} in {relation}" for relation, count in relations.items())
        raise EvaluationArgumentError(
            f"{name} has {tensor.size(0)} rows; expected one per edge ({counts}); pass a value for each edge"
        )
    return Role("edge", matching[0]) if matching else Role("const")


def _num_homogeneous_nodes(names: list[str], tensors: list[torch.Tensor]) -> int:
    for name, tensor in zip(names, tensors, strict=True):
        if name.split(".")[-1] in _NODE_NAMES and tensor.dim() > 0:
            return tensor.size(0)
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_floating_point() and tensor.dim() > 1 and not any(word in name for word in _EDGE_WORDS):
            return tensor.size(0)
    return -1


def _check_given(roles: Mapping[str, str], names: list[str]) -> None:
    if not isinstance(roles, Mapping):
        raise EvaluationArgumentError(
            f"roles is a {type(roles).__name__}; expected a dict from input names to roles; pass {{name: role}}"
        )
    for name, role in roles.items():
        if role not in _ROLES:
            raise EvaluationArgumentError(
                f"roles[{name!r}]={role!r} is not valid: expected one of {', '.join(_ROLES)}; pass one of them"
            )
        if name not in names:
            raise EvaluationArgumentError(
                f"roles names {name!r}, which is no input: expected one of {', '.join(names)}; use one of these names"
            )
