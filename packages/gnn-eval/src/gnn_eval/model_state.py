"""What a trace of a model depends on besides its inputs.

Parameters and registered buffers are read each time a plan runs, so training on does not make a plan stale. Everything
else a forward may read is fixed by tracing: numbers and flags kept as attributes, tensors that are not registered,
hooks, replaced methods, the modules themselves, and autocast. :func:`state_of` describes all of it; a plan is used
again only while the description stays the same. Callers may not assume that a changed global variable is noticed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["state_of"]

_READ_AT_EACH_RUN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_CACHED = "_cached"  # what PyG's layers remember of a graph; tracing forgets it


def state_of(model: nn.Module) -> tuple:
    """Return a hashable description of all that a trace of ``model`` depends on.

    >>> model = nn.Dropout(0.5)
    >>> before = state_of(model)
    >>> model.p = 0.1
    >>> state_of(model) == before
    False
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    registered = {id(tensor) for _, tensor in tensors}
    attributes = tuple((name, type(module), _attributes(module, registered)) for name, module in model.named_modules())
    return attributes, _autocast(), tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


def _autocast() -> tuple:
    """Return what autocast would make of the model's operators: a trace holds its casts."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


class _Same:
    """A tensor that equals itself alone, kept alive so that no other gets its identity."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._tensor is other._tensor

    def __hash__(self) -> int:
        return id(self._tensor)


def _attributes(module: nn.Module, registered: set[int]) -> tuple:
    named = [(n, v) for n, v in vars(module).items() if n not in _READ_AT_EACH_RUN and not n.startswith(_CACHED)]
    return tuple((name, _described(value, registered)) for name, value in named)


def _described(value: Any, registered: set[int], depth: int = 3) -> Any:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return type(value), value
    if isinstance(value, torch.Tensor):
        if id(value) in registered or value.is_inference():
            return "tensor", _Same(value)
        return "tensor", _Same(value), value._version
    if depth and isinstance(value, dict):
        return tuple((str(key), _described(part, registered, depth - 1)) for key, part in value.items())
    if depth and isinstance(value, (list, tuple, set)):
        return (type(value), *(_described(part, registered, depth - 1) for part in value))
    return type(value), id(value)
