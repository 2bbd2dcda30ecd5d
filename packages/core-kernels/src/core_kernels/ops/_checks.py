"""Checks and reshapes that the public wrappers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError, argument_error

if TYPE_CHECKING:
    from core_kernels.graph import Graph

__all__ = [
    "check_apart",
    "check_bounds_mode",
    "check_floating",
    "check_ids_tensor",
    "check_indptr",
    "check_rows",
    "edge_weight_matrix",
    "feature_matrix",
    "transpose_tensors",
]


def check_floating(name: str, x: Tensor) -> None:
    """Raise unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentTypeError(f"{name} is {found}; expected a floating-point tensor; convert it with {name}.float()")


def check_rows(name: str, x: Tensor, num_rows: int, count_name: str) -> None:
    """Raise unless ``x`` has ``num_rows`` rows."""
    if x.dim() == 0 or x.shape[0] != num_rows:
        raise argument_error(
            f"{name}.shape",
            tuple(x.shape),
            f"({num_rows}, ...) because {count_name}={num_rows}",
            "pass one row for each",
        )


def check_apart(out: Tensor, x: Tensor) -> None:
    """Raise if ``out`` shares memory with ``x``, whose rows are still read while it is written."""
    if torch.compiler.is_compiling() or type(out) is not Tensor or out.device != x.device or out.is_meta:
        return  # only real memory has addresses
    begin, other = out.data_ptr(), x.data_ptr()
    if begin < other:
        shared = begin + out.nbytes > other
    elif x.is_contiguous():
        shared = other + x.nbytes > begin
    else:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        shared = x.numel() > 0 and other + (last + 1) * x.itemsize > begin
    if shared and out.numel():
        raise argument_error("out", "memory of x", "memory of its own, since x is read all along", "leave out= away")


def check_ids_tensor(name: str, ids: Tensor) -> Tensor:
    """Return ``ids`` as a contiguous 1-D integer tensor, or raise.

    Raises:
        ArgumentError: Not 1-D.
        ArgumentTypeError: Not int32 or int64.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        found = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentTypeError(f"{name} is {found}; expected an int32 or int64 tensor; convert it with {name}.long()")
    if ids.dim() != 1:
        raise argument_error(f"{name}.shape", tuple(ids.shape), "one dimension", f"pass {name}.flatten()")
    return ids.contiguous()


def check_indptr(name: str, indptr: Tensor, num_rows: int) -> None:
    """Raise unless ``indptr`` is a valid row pointer over ``num_rows`` rows."""
    if not isinstance(indptr, Tensor) or indptr.dtype != torch.int64 or indptr.dim() != 1 or indptr.shape[0] == 0:
        found = f"{indptr.dtype} {tuple(indptr.shape)}" if isinstance(indptr, Tensor) else type(indptr).__name__
        raise ArgumentTypeError(f"{name} is {found}; expected int64 [num_segments + 1]; convert it with {name}.long()")
    if int(indptr[0]) != 0 or int(indptr[-1]) != num_rows or bool((indptr[1:] < indptr[:-1]).any()):
        shown = f"{int(indptr[0])}..{int(indptr[-1])}"
        raise argument_error(
            name, shown, f"never decreasing from 0 to {num_rows}, the number of rows", "build it with lengths.cumsum(0)"
        )


def check_bounds_mode(bounds: str) -> bool:
    """Return whether ids are to be checked.

    Raises:
        ArgumentError: ``bounds`` is neither ``"error"`` nor ``"unchecked"``.
    """
    if bounds not in ("error", "unchecked"):
        raise argument_error("bounds", bounds, '"error" or "unchecked"', 'keep "error" unless ids were checked before')
    return bounds == "error"


def feature_matrix(x: Tensor) -> Tensor:
    """Return ``x`` [rows, ...] as a matrix [rows, width]; a vector becomes one column."""
    if x.dim() == 2:
        return x
    width = 1
    for size in x.shape[1:]:
        width *= size
    return x.reshape(x.shape[0], width)


def edge_weight_matrix(graph: Graph, x: Tensor, weight: Tensor) -> Tensor:
    """Return ``weight`` as [num_edges, heads], checked against the features.

    Raises:
        ArgumentError: Wrong number of edges, or heads that ``x`` does not have.
        ArgumentTypeError: Another dtype than ``x``.
    """
    if weight.dtype != x.dtype:
        raise ArgumentTypeError(
            f"weight is {weight.dtype}; expected {x.dtype} like x; convert it with weight.to(x.dtype)"
        )
    check_rows("weight", weight, graph.num_edges, "num_edges")
    if weight.dim() == 1:
        return weight.unsqueeze(1)
    heads = weight.shape[1]
    if weight.dim() != 2 or not (heads == 1 or (x.dim() >= 3 and x.shape[1] == heads)):
        raise argument_error(
            "weight.shape",
            tuple(weight.shape),
            f"[{graph.num_edges}], or [{graph.num_edges}, heads] with x [num_src, heads, ...]; x is {tuple(x.shape)}",
            "shape x with one row per head",
        )
    return weight


def transpose_tensors(graph: Graph, needed: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the arrays of the transposed graph where a gradient needs them, else three times None."""
    if not needed:
        return None, None, None
    from core_kernels.graph import Graph
    from core_kernels.graph.tracing import kept

    transposed = kept(Graph.transpose, graph)
    return transposed.indptr, transposed.indices, transposed.edge_ids
