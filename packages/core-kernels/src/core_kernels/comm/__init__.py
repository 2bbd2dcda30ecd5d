"""Collectives on ``torch.distributed``: uneven splits, gradients, byte counters, errors that name who and where.

``Group`` is the entry; ``autograd`` has the forms that record gradients. ``nccl`` (raw communicators) and ``compress``
(lossy reductions) are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from core_kernels.comm import autograd
from core_kernels.comm.counters import ByteCounters, broadcast_bytes, ring_all_reduce_bytes
from core_kernels.comm.group import Group
from core_kernels.comm.handle import Handle, Recv, Send
from core_kernels.errors import CollectiveError

if TYPE_CHECKING:
    from core_kernels.comm import compress, nccl

__all__ = [
    "ByteCounters",
    "CollectiveError",
    "Group",
    "Handle",
    "Recv",
    "Send",
    "autograd",
    "broadcast_bytes",
    "compress",
    "nccl",
    "ring_all_reduce_bytes",
]


def __getattr__(name: str) -> Any:
    if name in ("compress", "nccl"):
        return importlib.import_module(f"core_kernels.comm.{name}")
    raise AttributeError(f"module 'core_kernels.comm' has no attribute {name!r}")
