"""The raw operators: their schemas, their registration with torch, and where their implementations are found.

A raw operator ``torch.ops.core_kernels.<op>`` takes plain tensors. It checks ids, allocates its outputs with torch and
hands over to one implementation, chosen by :func:`core_kernels._backend.resolve_backend`:

===========  ==============================================  ==========================================
backend      module                                          role
===========  ==============================================  ==========================================
``torch``    ``core_kernels.ops.reference.<family>``         readable oracle, any floating dtype
``numba``    ``core_kernels.kernels.numba.<family>``         CPU kernels
``cuda``     ``core_kernels.kernels.cuda.<family>``          CUDA C++ kernels on the current stream
``emulate``  ``core_kernels.kernels.cuda.<family>``          the same sources, CPU tensors
===========  ==============================================  ==========================================

What implementations receive and must compute stands in :mod:`core_kernels.ops._schemas`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from core_kernels._backend import resolve_backend
from core_kernels.errors import ArgumentError, argument_error, index_bounds_error
from core_kernels.ops._schemas import OPERATORS

__all__ = ["NAMESPACE", "OPERATORS", "check_ids", "contiguous_rows", "implementation", "library", "register", "run"]

NAMESPACE = "core_kernels"

library = torch.library.Library(NAMESPACE, "DEF")

#: Sets of dispatch keys that name a device and nothing else.
_DEVICE_ONLY = frozenset(
    torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr() for key in ("CPU", "CUDA")
)

_PACKAGE_OF_BACKEND = {
    "torch": "core_kernels.ops.reference",
    "numba": "core_kernels.kernels.numba",
    "cuda": "core_kernels.kernels.cuda",
    "emulate": "core_kernels.kernels.cuda",
}


@functools.cache
def implementation(op: str, backend: str) -> Callable[..., Any]:
    """Return the function that computes ``op`` on ``backend``, importing its module on first use.

    Raises:
        ArgumentError: That backend has no such operator.
    """
    family = OPERATORS[op].family
    module_name = f"{_PACKAGE_OF_BACKEND[backend]}.{family}"
    try:
        return getattr(importlib.import_module(module_name), op)
    except (AttributeError, ModuleNotFoundError) as missing:
        if isinstance(missing, ModuleNotFoundError) and not module_name.startswith(str(missing.name)):
            raise
        raise ArgumentError(
            f"operator {op} has no {backend} implementation: expected {module_name}.{op}; "
            f'choose another implementation with core_kernels.backend("auto")'
        ) from None


def run(op: str, tensor: torch.Tensor, *args: Any) -> Any:
    """Call the implementation of ``op`` that fits ``tensor`` and the pinned backend."""
    return implementation(op, resolve_backend(tensor))(*args)


def register(
    op: str,
    dispatcher: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Define ``op`` in torch's registry and return the callable operator.

    Args:
        op: A key of ``OPERATORS``.
        dispatcher: Takes the schema's arguments; checks, allocates, runs.
        fake: The same for shapes alone.
        backward: Gradient formula, for differentiable operators only: registering one costs microseconds per call.
        setup_context: What ``backward`` needs from the forward call.
    """
    library.define(op + OPERATORS[op].signature)
    for key in ("CPU", "CUDA"):
        library.impl(op, dispatcher, key)
    qualified = f"{NAMESPACE}::{op}"
    torch.library.register_fake(qualified, fake, lib=library)
    if backward is not None:
        _register_autograd(op, dispatcher, backward, setup_context)
    return getattr(getattr(torch.ops, NAMESPACE), op).default


def _register_autograd(
    op: str,
    dispatcher: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None,
) -> None:
    """Register a gradient formula as ``torch.library.register_autograd`` does, at a third of its cost per call.

    Our schemas have neither defaults nor keyword-only arguments nor lists of tensors, so none of them need be handled.
    Where nothing but the device is left to dispatch on (no tracing, no fake tensors), the dispatcher is called at once.
    """
    overload = getattr(getattr(torch.ops, NAMESPACE), op).default
    below, after_autograd = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    below_views = torch._C._after_ADInplaceOrView_keyset.raw_repr()
    is_grad_enabled, any_requires_grad = torch._C.is_grad_enabled, torch._C._any_requires_grad

    def run_below(keyset: Any, args: Sequence[Any]) -> Any:
        if keyset.raw_repr() & below_views in _DEVICE_ONLY:
            return dispatcher(*args)
        with below():
            return overload.redispatch(keyset & after_autograd, *args)

    def forward(ctx: Any, *args: Any) -> Any:
        # The key set comes last, so that positions of inputs agree with the schema.
        inputs = args[:-1]
        output = run_below(args[-1], inputs)
        if setup_context is not None:
            setup_context(ctx, inputs, output)
        return output

    def gradients(ctx: Any, *grads: Any) -> Any:
        return (*backward(ctx, *grads), None)

    function = type(
        f"Backward_{op}",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(gradients)},
    )

    # Function.apply only adds what functorch's transforms need; torch's stubs do not show the one below it.
    apply_plainly = super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]
    has_transforms = torch._C._are_functorch_transforms_active

    def autograd(keyset: Any, *args: Any) -> Any:
        if is_grad_enabled() and any_requires_grad(*args):
            return function.apply(*args, keyset) if has_transforms() else apply_plainly(*args, keyset)
        return run_below(keyset, args)

    library.impl(op, autograd, "Autograd", with_keyset=True)


def check_ids(op: str, name: str, ids: torch.Tensor, bound: int, skippable: bool = True) -> None:
    """Raise when an id lies outside ``[0, bound)``, naming its value.

    Args:
        op: The operator, for the message.
        name: The argument.
        ids: Integer tensor.
        bound: Number of rows they index.
        skippable: Whether the operator has ``bounds="unchecked"``.

    Raises:
        ArgumentError: Such an id exists.
    """
    if ids.numel() == 0:
        return
    lowest, highest = (int(value) for value in torch.aminmax(ids))
    if lowest >= 0 and highest < bound:
        return
    culprit = lowest if lowest < 0 else highest
    if skippable:
        raise index_bounds_error(op, name, culprit, bound)
    raise argument_error(f"{name} of {op}", culprit, f"ids in [0, {bound})", "pass ids of this graph")


def contiguous_rows(op: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as a contiguous matrix, copying only when its layout asks for it.

    Raises:
        ArgumentError: ``x`` is not 2-D.
    """
    if x.dim() != 2:
        raise argument_error(name, tuple(x.shape), f"a matrix for raw operator {op}", "reshape it to [rows, columns]")
    return x.contiguous()
