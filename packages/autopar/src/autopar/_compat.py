"""All imports of private torch names, so that a new torch version breaks in one place only."""

from __future__ import annotations

from typing import Any

__all__ = ["dtensor_registries", "fake_mode"]


def fake_mode() -> Any:
    """Return a fresh fake-tensor mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def dtensor_registries() -> Any:
    """Return the object that holds DTensor's sharding rules, for cross-checks."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator
