"""Which implementation of an operator runs: chosen by the tensors' device, or pinned by a context.

``auto`` takes the CUDA kernel for CUDA tensors and the Numba kernel for CPU tensors. ``torch`` is the readable
reference, ``emulate`` runs the CUDA C++ sources on the CPU. A pinned choice never falls back: where it cannot run, the
operator raises and says why.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core_kernels.errors import argument_error

__all__ = ["BACKENDS", "backend", "current_backend", "resolve_backend"]

BACKENDS = ("auto", "torch", "numba", "emulate", "cuda")

_current: contextvars.ContextVar[str] = contextvars.ContextVar("core_kernels_backend", default="auto")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Pin the implementation of every operator inside the ``with`` block.

    Args:
        name: One of ``auto``, ``torch``, ``numba``, ``emulate``, ``cuda``.

    Raises:
        ArgumentError: ``name`` is none of these.

    >>> with backend("torch"):
    ...     current_backend()
    'torch'
    """
    if name not in BACKENDS:
        raise argument_error("backend", name, f"one of {', '.join(BACKENDS)}", 'use "auto" unless you compare them')
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)


def current_backend() -> str:
    """Return the name pinned by the innermost :func:`backend` context, ``"auto"`` outside of one."""
    return _current.get()


def resolve_backend(tensor: torch.Tensor) -> str:
    """Return the implementation that runs for ``tensor``: ``torch``, ``numba``, ``emulate`` or ``cuda``.

    Args:
        tensor: Any tensor argument of the operator; its device decides under ``auto``.

    Raises:
        ArgumentError: The pinned implementation cannot take tensors of this device.
    """
    chosen = _current.get()
    on_cuda = tensor.is_cuda
    if chosen == "auto":
        return "cuda" if on_cuda else "numba"
    if chosen in ("numba", "emulate") and on_cuda:
        raise argument_error("backend", chosen, "CPU tensors", "move the tensors to the CPU or use backend('cuda')")
    if chosen == "cuda" and not on_cuda:
        raise argument_error("backend", chosen, "CUDA tensors", "move the tensors to a GPU or use backend('auto')")
    return chosen
