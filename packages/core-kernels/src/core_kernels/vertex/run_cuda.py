"""Run a plan by its CUDA C++ kernels: on a GPU through CuPy, on CPU tensors in the thread-block emulator."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from core_kernels.vertex.compiled import Edges
from core_kernels.vertex.emit_cuda import KERNEL_NAME, CudaKernel
from core_kernels.vertex.fusion import Plan
from core_kernels.vertex.passes import Widths

__all__ = ["group_lanes", "run_plan"]

_BLOCK_THREADS = 128
_ROWS_WITH_SUMS = 256
_CTYPES = {torch.float32: "float", torch.float64: "double", torch.int32: "int", torch.int64: "long long"}

_lock = threading.Lock()
_kernels: WeakKeyDictionary[Plan, list[CudaKernel]] = WeakKeyDictionary()


def group_lanes(widths: Widths) -> int:
    """Return the lanes of a group: the smallest power of two that covers the widest row of a head, at most a warp.

    >>> group_lanes(Widths(1, [7])), group_lanes(Widths(4, [128])), group_lanes(Widths())
    (8, 32, 1)
    """
    widest = max(widths.features, default=1)
    return min(32, 1 << max(widest - 1, 0).bit_length())


def run_plan(
    plan: Plan, tensors: Sequence[torch.Tensor], edges: Mapping[str, Edges], widths: Widths, backend: str
) -> list[torch.Tensor]:
    """Run all kernels of ``plan``.

    Args:
        plan: What to run.
        tensors: Inputs of its program in order, contiguous, float32 or float64.
        edges: Arrays of each edge type.
        widths: What the widths of the program stand for.
        backend: ``cuda``, or ``emulate`` for CPU tensors.

    Returns:
        The results, ``[entities, heads, features]``.
    """
    nodes, like = plan.program.nodes, tensors[0]
    arrays = {f"a{number}": tensor for number, tensor in zip(plan.program.inputs, tensors, strict=True)}
    for number, node in enumerate(nodes):
        if node.op == "degree":
            arrays[f"a{number}"] = edges[node.relation].degrees(like.dtype)
    for number in plan.arrays:
        node = nodes[number]
        rows = (edges[node.relation] if node.kind in "SE" else next(iter(edges.values()))).num_rows(node.kind)
        arrays[f"o{number}"] = like.new_empty(rows, *widths.of(node.axes))
    with _lock:
        if plan not in _kernels:
            _kernels[plan] = [CudaKernel(plan, kernel) for kernel in plan.kernels]
        kernels = _kernels[plan]
    sums: dict[int, torch.Tensor] = {}
    for kernel in kernels:
        sums |= _run_kernel(kernel, plan, arrays, edges, widths, backend)
    return [sums[number] if number in sums else arrays[f"o{number}"] for number in plan.program.outputs]


def _run_kernel(
    kernel: CudaKernel,
    plan: Plan,
    arrays: dict[str, torch.Tensor],
    edges: Mapping[str, Edges],
    widths: Widths,
    backend: str,
) -> dict[int, torch.Tensor]:
    side, nodes = kernel.kernel.side, plan.program.nodes
    home = edges[kernel.kernel.relation] if side == "S" else next(iter(edges.values()))
    num_rows, like = home.num_rows(side), next(iter(arrays.values()))
    rows_per_block = _ROWS_WITH_SUMS if kernel.has_sums else 1
    num_blocks = -(-num_rows // rows_per_block)
    graph: list[torch.Tensor] = []
    index = "int"
    for relation in kernel.relations:
        these = edges[relation]
        part = (these.indptr, these.indices) if side == "D" else (these.t_indptr, these.t_indices, these.t_positions)
        graph += part
        index = _CTYPES[part[1].dtype]
    sums: dict[int, torch.Tensor] = {}
    for name in kernel.parameters:
        shape = widths.of(nodes[int(name[1:])].axes)
        if name[0] == "s":
            sums[int(name[1:])] = arrays[name] = like.new_zeros(num_blocks, *shape)
        elif name[0] == "t":
            arrays[name] = like.new_empty(num_rows, *shape)
    group = group_lanes(widths)
    features = [widths.features[axis - 1] for axis in kernel.widths]
    arguments = [num_blocks, rows_per_block, num_rows, group, widths.num_heads, *features]
    arguments += [*graph, *(arrays[name] for name in kernel.parameters)]
    text = kernel.text(_CTYPES[like.dtype], index)
    grid = -(-num_blocks * group // _BLOCK_THREADS)
    if grid:
        (_launch_cuda if backend == "cuda" else _launch_emulated)(text, grid, arguments, like.device)
    return {number: partial.sum(0, keepdim=True) for number, partial in sums.items()}


def _launch_emulated(text: str, grid: int, arguments: list[Any], device: torch.device) -> None:
    from core_kernels.testing.emulator import run_source

    run_source(text, KERNEL_NAME, (grid,), (_BLOCK_THREADS,), arguments)


def _launch_cuda(text: str, grid: int, arguments: list[Any], device: torch.device) -> None:
    from core_kernels.kernels.cuda._device import launch_source

    launch_source(text, KERNEL_NAME, (grid,), (_BLOCK_THREADS,), arguments, device)
