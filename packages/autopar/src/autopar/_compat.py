"""All imports of private torch names, so that a new torch version breaks in one place only."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

__all__ = ["dtensor_registries", "fake_mode", "quick_export"]


def fake_mode() -> Any:
    """Return a fresh fake-tensor mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def dtensor_registries() -> Any:
    """Return the object that holds DTensor's sharding rules, for cross-checks."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


@contextlib.contextmanager
def quick_export() -> Iterator[None]:
    """Export without what nobody reads: code of the graphs on the way, and garbage collections of a growing graph."""
    with contextlib.ExitStack() as stack:
        try:
            from torch.fx._lazy_graph_module import _use_lazy_graph_module
        except ImportError:  # only slower
            pass
        else:
            stack.enter_context(_use_lazy_graph_module(True))
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        yield
