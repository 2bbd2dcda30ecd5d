"""Layers of third parties that are to be kept whole.

Most layers need no registration: they are traced down to operators. A layer that cannot be traced, or that calls a
kernel of its own, is registered with what it looks at; it is then called on blocks, and verification proves the claim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gnn_eval.errors import EvaluationArgumentError

__all__ = ["LayerSpec", "register", "spec_of"]


@dataclass(frozen=True)
class LayerSpec:
    """What a layer kept whole looks at: its destinations, their in-edges, and the sources of these.

    Args:
        graph: How it is called: ``"edge_index"`` with local ids, or ``"block"`` with a :class:`core_kernels.Block`
            that knows the degrees of the full graph.
    """

    graph: str = "edge_index"


_specs: dict[type[nn.Module], LayerSpec] = {}


def register(layer: type[nn.Module], spec: LayerSpec) -> None:
    """Keep all layers of a class whole when a model is compiled.

    Args:
        layer: The class.
        spec: What it looks at.

    >>> class Mine(nn.Module): ...
    >>> register(Mine, LayerSpec())
    >>> spec_of(Mine())
    LayerSpec(graph='edge_index')
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise EvaluationArgumentError(
            f"layer={layer!r} is not valid: expected a class of modules; pass the class itself"
        )
    if not isinstance(spec, LayerSpec):
        raise EvaluationArgumentError(f"spec={spec!r} is not valid: expected a LayerSpec; pass gnn_eval.LayerSpec()")
    if spec.graph not in ("edge_index", "block"):
        raise EvaluationArgumentError(
            f"graph={spec.graph!r} is not valid: expected 'edge_index' or 'block'; pass one of them"
        )
    _specs[layer] = spec


def spec_of(module: nn.Module) -> LayerSpec | None:
    """Return the specification of a layer's class, or of the nearest class it derives from."""
    return next((_specs[kind] for kind in type(module).__mro__ if kind in _specs), None)
