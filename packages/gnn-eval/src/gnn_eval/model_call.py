"""One call of a model on a graph: its tensors and what each of them means.

Arguments are bound to the model's forward, taken apart into tensors, and each tensor gets a role. A parameter
that holds one row per node, as an embedding table, is lifted to an input so that it is split like features.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gnn_eval.adjacency import AdjacencyForm, adjacencies_in, is_adjacency, weights_of
from gnn_eval.containers import Path, Slot, fill, slots_in, take_apart
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.program import Role
from gnn_eval.roles import infer_roles

__all__ = ["ModelCall", "bind_call", "count_of", "num_rows_of", "unwrapped"]

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

    def forms(self) -> list[AdjacencyForm]:
        """Return what each sparse adjacency of the caller was."""
        return [slot.form for slot in slots_in(self.skeleton) if slot.form is not None]

    def as_given(self) -> tuple[tuple, dict[str, Any]]:
        """Return ``(args, kwargs)`` with sparse adjacencies in the form in which the caller passed them."""
        weights = [t for n, t in zip(self.names, self.tensors, strict=True) if n == "edge_weight"]
        taken = False

        def rebuild(slot: Slot, edges: torch.Tensor) -> Any:
            nonlocal taken
            role = self.roles[slot.index]
            sizes = (self._count(role.destination, self.tensors), self._count(role.source, self.tensors))
            taken |= slot.form.weighted
            return slot.form.build(edges, weights[0] if slot.form.weighted else None, sizes)

        args, kwargs = fill(self.skeleton, self.tensors, lambda t: self._count(t, self.tensors), rebuild)
        return args, {name: value for name, value in kwargs.items() if not (taken and name == "edge_weight")}

    def counts(self) -> dict[str, int]:
        """Return the counts ``n_<type>`` and ``e_<relation>`` of this call."""
        counts: dict[str, int] = {}
        for role, tensor in zip(self.roles, self.tensors, strict=True):
            if role.kind != "const":
                counts[count_of(role)] = num_rows_of(role, tensor)
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
        counts, sizes = self.counts(), dict[str, int]()
        for name, role, tensor in zip(self.names, self.roles, self.tensors, strict=True):
            rows = 0 if role.kind == "const" else num_rows_of(role, tensor)
            if role.kind != "const" and rows != sizes.setdefault(count_of(role), rows):
                what = f"{role.kind}s of {'type' if role.kind == 'node' else 'relation'} {role.space!r}"
                raise EvaluationArgumentError(
                    f"{name} has {rows} rows, but there are {sizes[count_of(role)]} {what}; expected one row each; "
                    f"pass tensors of one graph, or say what {name} is with roles="
                )
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


def count_of(role: Role) -> str:
    """Return the name of the count of rows a role has: ``n_<type>`` or ``e_<relation>``."""
    return f"{'n' if role.kind == 'node' else 'e'}_{role.space}"


def num_rows_of(role: Role, tensor: torch.Tensor) -> int:
    """Return the number of nodes or edges a tensor has under its role."""
    return tensor.size(1 if role.kind == "relation" else 0)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile(model)``, whose signature is lost; any other model as it is.

    Raises:
        EvaluationArgumentError: If a layer still waits for its first call to learn its width.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise EvaluationArgumentError(
                    f"{name} of {type(model).__name__} has no shape yet; expected a model whose lazy layers know their "
                    "widths; call the model once on a small graph first"
                )
    return model


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
    if not isinstance(model, nn.Module):
        raise EvaluationArgumentError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module; wrap the function in a module's forward"
        )
    args, kwargs = _bind_arguments(model, data)
    kwargs = kwargs | _weights_of_adjacencies(model, args, kwargs)
    _check_signature(model, args, kwargs)
    named = _names_of_positions(model, args)
    skeleton, leaves = take_apart((tuple(args), kwargs))
    paths = [named[path[1]] + path[2:] if path[0] == 0 else path[1:] for path, _ in leaves]
    tensors = [tensor for _, tensor in leaves]
    names = [_dotted(path) for path in paths]
    found = infer_roles(paths, names, tensors, roles or {})
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
    if isinstance(data, (tuple, list)):
        return tuple(data), {}
    if isinstance(data, Mapping):
        return (), dict(data)
    if isinstance(data, torch.Tensor) or is_adjacency(data):
        return (data,), {}
    parameters = inspect.signature(model.forward).parameters
    chosen: dict[str, Any] = {}
    for name, parameter in parameters.items():
        value = _attribute(data, name)
        if value is None and hasattr(data, "node_types"):
            value = _attribute(data, f"{name}_dict")
        if value is None and name in ("edge_index", "adj_t", "adj"):
            value = next((v for v in (_attribute(data, n) for n in ("edge_index", "adj_t")) if v is not None), None)
        if value is not None and not (name == "batch" and parameter.default is None):
            chosen[name] = value
        elif parameter.default is parameter.empty and parameter.kind == parameter.POSITIONAL_OR_KEYWORD:
            if len([p for p in parameters.values() if p.default is p.empty]) == 1:
                return (data,), {}
            raise EvaluationArgumentError(
                f"forward needs {name!r}, which the {type(data).__name__} object does not have; "
                "pass the arguments as a tuple or a dict"
            )
    return (), chosen


def _weights_of_adjacencies(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a weighted adjacency as ``edge_weight``, since a plan works on edge lists."""
    weighted = [a for a in adjacencies_in([args, kwargs]) if weights_of(a) is not None]
    if not weighted:
        return {}
    names = list(inspect.signature(model.forward).parameters)
    free = "edge_weight" in names[len(args) :] and kwargs.get("edge_weight") is None
    if len(weighted) > 1 or not free:
        raise EvaluationArgumentError(
            f"{len(weighted)} sparse adjacencies have weights other than one, and forward of {type(model).__name__} "
            f"has {'one' if free else 'no free'} argument edge_weight; expected one adjacency and that argument; "
            "pass edge_index and the weights as the model's own arguments"
        )
    return {"edge_weight": weights_of(weighted[0])}


def _check_signature(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise EvaluationArgumentError(
            f"the inputs do not fit {type(model).__name__}.forward({names}): {error}; got {len(args)} positional and "
            f"{sorted(kwargs)} by name; pass a tuple in the order of forward, or a dict by name"
        ) from None


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
