"""Clean-up of a captured program before typing: one value for each distinct computation.

Layers recompute the same structure (self-loops, degrees, index rows) once each; merging equal operators makes equal
index vectors one value, which is how edge sets are told apart later. Merging also unifies the unknown counts that
tracing gave each copy. Copies are dropped, fills lose their dependence on the tensor whose dtype they took, and sizes
become expressions instead of operators. Results are bit for bit those of the captured program.
"""

from __future__ import annotations

from typing import Any

import torch

from gnn_eval.program import Program, Ref, Value, map_refs
from gnn_eval.sizes import Size

__all__ = ["index_base", "simplify"]

_COPIES = {"clone", "detach", "alias", "contiguous", "lift_fresh_copy", "detach_"}
_RANDOM = {"rand", "randn", "bernoulli", "multinomial", "randint", "randperm", "rand_like", "randn_like", "dropout"}
_INDEX_VIEWS = {"view", "reshape", "expand", "unsqueeze", "_unsafe_view", "expand_as", "squeeze"}


def simplify(program: Program) -> Program:
    """Return ``program`` with copies, duplicates, size operators and dead values removed."""
    alias: dict[str, str] = {}
    counts: dict[str, str] = {}
    seen: dict[Any, str] = {}
    kept: dict[str, Value] = {}

    def current(ref: Ref) -> Any:
        name = alias.get(ref.name, ref.name)
        value = kept.get(name)
        return value.size if value is not None and value.size is not None else Ref(name)

    for value in program.values.values():
        value.args, value.kwargs = map_refs(value.args, current), map_refs(value.kwargs, current)
        value.shape = tuple(s.rename(counts) for s in value.shape) if value.shape is not None else None
        value.size = value.size.rename(counts) if value.size is not None else None
        if _is_copy(value):
            alias[value.name] = value.args[0].name
            continue
        _make_fill(value, kept)
        key = _key(value)
        twin = kept[seen[key]] if key in seen else None
        if twin is not None and _unify(value, twin, counts):
            alias[value.name] = twin.name
            continue
        seen.setdefault(key, value.name)
        kept[value.name] = value
    outputs = [alias.get(name, name) for name in program.outputs]
    live = _live(kept, outputs)
    values = {n: v for n, v in kept.items() if n in live or v.op == "input"}
    return Program(values, program.inputs, program.roles, outputs, program.constants)


def index_base(program: Program, name: str) -> str:
    """Follow an index tensor that was viewed or expanded to fit its source back to the index vector itself."""
    value = program[name]
    while value.short_op in _INDEX_VIEWS and value.args and isinstance(value.args[0], Ref):
        if value.is_tensor and len(value.dims) == 1 and program[value.args[0].name].op == "input":
            break
        value = program[value.args[0].name]
    return value.name


def _is_copy(value: Value) -> bool:
    if not value.op.startswith("aten.") or not value.args or not isinstance(value.args[0], Ref):
        return False
    if value.short_op == "dropout" or value.short_op == "feature_dropout":
        return value.args[2] is False
    return value.short_op in _COPIES


def _make_fill(value: Value, kept: dict[str, Value]) -> None:
    """Rewrite ``new_zeros(x, size)`` and ``zeros_like(x)`` as fills that do not use ``x``."""
    if not value.op.startswith("aten.") or not value.is_tensor:
        return
    fills = {"new_zeros": 0, "new_ones": 1, "zeros_like": 0, "ones_like": 1, "zeros": 0, "ones": 1, "new_empty": 0}
    name = value.short_op
    if name in fills:
        fill = fills[name]
    elif name in ("new_full", "full_like", "full", "scalar_tensor"):
        fill = value.args[0] if name == "scalar_tensor" else value.args[2 if name == "new_full" else 1]
    else:
        return
    if isinstance(fill, (Ref, Size)):
        return
    value.op, value.args, value.kwargs = "aten.full.default", (list(value.dims), fill), {"dtype": value.dtype}


def _key(value: Value) -> Any:
    if value.op in ("input", "parameter", "constant") or value.short_op in _RANDOM:
        return (value.op, value.name)
    return (value.op, _frozen(value.args), _frozen(value.kwargs))


def _frozen(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(item) for item in tree)
    if isinstance(tree, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(tree.items()))
    if isinstance(tree, torch.Tensor):
        return id(tree)
    return (type(tree).__name__, tree) if isinstance(tree, (bool, int, float)) else tree


def _unify(value: Value, twin: Value, counts: dict[str, str]) -> bool:
    """Identify the counts of two equal computations; ``False`` if their shapes cannot be the same."""
    if (value.shape is None) != (twin.shape is None) or (value.size is None) != (twin.size is None):
        return False
    pairs = list(zip(value.shape or (), twin.shape or (), strict=True))
    if value.size is not None and twin.size is not None:
        pairs.append((value.size, twin.size))
    for mine, other in pairs:
        if mine == other:
            continue
        if len(mine.terms) != len(other.terms) or mine.constant != other.constant:
            return False
        unknown = [n for n, _ in mine.terms if n not in dict(other.terms)]
        known = [n for n, _ in other.terms if n not in dict(mine.terms)]
        if len(unknown) != 1 or len(known) != 1:
            return False
        counts[unknown[0]] = known[0]
    return True


def _live(values: dict[str, Value], outputs: list[str]) -> set[str]:
    live: set[str] = set()
    waiting = [name for name in outputs if name in values]
    while waiting:
        name = waiting.pop()
        if name not in live:
            live.add(name)
            waiting.extend(values[name].refs())
    return live
