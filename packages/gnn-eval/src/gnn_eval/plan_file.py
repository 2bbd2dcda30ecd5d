"""Plans as JSON: operators, shapes, stages and what is stored, never weights and never code.

Operators are looked up by name when a file is read, and only in ``aten``, ``core_kernels`` and Python's ``operator``,
so a file cannot make anything else run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gnn_eval.containers import Slot
from gnn_eval.errors import EvaluationArgumentError, UnsupportedModelError
from gnn_eval.lowering import lower
from gnn_eval.program import Program, Ref, Role, Value
from gnn_eval.sizes import Size
from gnn_eval.stages import Levels
from gnn_eval.typing_rules import assign_types

if TYPE_CHECKING:
    from gnn_eval.plan import Compiled

__all__ = ["compiled_from_json", "compiled_to_json"]

_SCHEMA = "gnn-eval-plan"
_VERSION = 1
_NAMESPACES = ("aten.", "core_kernels.", "operator.")
_SPECIAL = ("input", "parameter", "constant")
_MAX_CONSTANT = 4096


def compiled_to_json(compiled: Compiled) -> dict[str, Any]:
    """Return a JSON-able dict.

    Raises:
        UnsupportedModelError: For plans with opaque convolutions, which hold Python objects.
    """
    program = compiled.program
    if compiled.frontend != "export":
        raise UnsupportedModelError(
            "conv", "opaque convolutions cannot be written to a file", "compile the model again"
        )
    for name, tensor in program.constants.items():
        if tensor.numel() > _MAX_CONSTANT:
            raise UnsupportedModelError(
                "constant", f"{name} has {tensor.numel()} numbers, more than {_MAX_CONSTANT}", "register it as a buffer"
            )
    return {
        "schema": _SCHEMA,
        "version": _VERSION,
        "torch": torch.__version__,
        "inputs": program.inputs,
        "input_roles": {n: [r.kind, r.space, r.source, r.destination] for n, r in program.roles.items()},
        "outputs": program.outputs,
        "values": [_value_to_json(value) for value in program.values.values()],
        "constants": {n: [str(t.dtype), list(t.shape), t.flatten().tolist()] for n, t in program.constants.items()},
        "stored": sorted(compiled.stored),
        "result": _encode(compiled.result_skeleton),
    }


def compiled_from_json(document: dict[str, Any], where: str) -> Compiled:
    """Read what :func:`compiled_to_json` made."""
    from gnn_eval.plan import Compiled

    found = (document.get("schema"), document.get("version"))
    if found != (_SCHEMA, _VERSION):
        raise EvaluationArgumentError(
            f"{where} has schema and version {found}; expected {(_SCHEMA, _VERSION)}; save the plan again"
        )
    values = {data["name"]: _value_from_json(data) for data in document["values"]}
    roles = {name: Role(*parts) for name, parts in document["input_roles"].items()}
    constants = {
        name: torch.tensor(numbers, dtype=_dtype(dtype)).reshape(shape)
        for name, (dtype, shape, numbers) in document["constants"].items()
    }
    program = Program(values, document["inputs"], roles, document["outputs"], constants)
    assign_types(program)
    stored = set(document["stored"])
    stages = lower(program, Levels(program), stored)
    return Compiled(program, stages, stored, _decode(document["result"]), "export")


def _value_to_json(value: Value) -> dict[str, Any]:
    return {
        "name": value.name,
        "op": value.op,
        "args": [_encode(arg) for arg in value.args],
        "kwargs": {key: _encode(arg) for key, arg in value.kwargs.items()},
        "shape": None if value.shape is None else [size.to_json() for size in value.shape],
        "size": None if value.size is None else value.size.to_json(),
        "dtype": None if value.dtype is None else str(value.dtype),
        "source": value.source,
    }


def _value_from_json(data: dict[str, Any]) -> Value:
    op = data["op"]
    if op not in _SPECIAL and not op.startswith(_NAMESPACES):
        raise EvaluationArgumentError(f"the plan names operator {op!r}; expected one of aten; use a plan you trust")
    return Value(
        data["name"],
        op,
        tuple(_decode(arg) for arg in data["args"]),
        {key: _decode(arg) for key, arg in data["kwargs"].items()},
        None if data["shape"] is None else tuple(Size.from_json(size) for size in data["shape"]),
        None if data["size"] is None else Size.from_json(data["size"]),
        None if data["dtype"] is None else _dtype(data["dtype"]),
        data["source"],
    )


def _encode(item: Any) -> Any:
    """Encode an argument; what JSON has no form for becomes a dict with one key that starts with ``$``."""
    if isinstance(item, Ref):
        return {"$ref": item.name}
    if isinstance(item, Slot):
        return {"$slot": item.index}
    if isinstance(item, Size):
        return {"$size": item.to_json()}
    if isinstance(item, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return {"$" + type(item).__name__: str(item)}
    if isinstance(item, float) and not -1e308 < item < 1e308:
        return {"$float": str(item)}
    if isinstance(item, tuple):
        return {"$tuple": [_encode(part) for part in item]}
    if isinstance(item, list):
        return [_encode(part) for part in item]
    if isinstance(item, dict):
        return {"$dict": [[_encode(key), _encode(part)] for key, part in item.items()]}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise UnsupportedModelError(type(item).__name__, "it cannot be written to a file", "compile the model again")


def _decode(item: Any) -> Any:
    if isinstance(item, list):
        return [_decode(part) for part in item]
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    if kind == "$ref":
        return Ref(content)
    if kind == "$slot":
        return Slot(content)
    if kind == "$size":
        return Size.from_json(content)
    if kind == "$float":
        return float(content)
    if kind == "$tuple":
        return tuple(_decode(part) for part in content)
    if kind == "$dict":
        return {_decode(key): _decode(part) for key, part in content}
    if kind == "$device":
        return torch.device(content)
    return getattr(torch, content.removeprefix("torch."))


def _dtype(text: str) -> torch.dtype:
    return getattr(torch, text.removeprefix("torch."))
