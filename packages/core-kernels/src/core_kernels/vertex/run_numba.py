"""Run a plan on the CPU: allocate what it stores, compile or load its kernels, call them over ranges of rows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from core_kernels._huge_pages import advise, collapse
from core_kernels.kernels.numba._threads import run_ranges
from core_kernels.kernels.numba.spmm import spmm_sum
from core_kernels.vertex.cache import compile_lock, load_function
from core_kernels.vertex.compiled import Edges
from core_kernels.vertex.emit_numba import NumbaKernel
from core_kernels.vertex.emit_torch import compile_torch
from core_kernels.vertex.fusion import Kernel, Plan
from core_kernels.vertex.ir import Program
from core_kernels.vertex.passes import Widths
from core_kernels.vertex.spmm_form import SpmmForm, match_spmm

__all__ = ["run_plan"]

_logger = logging.getLogger(__name__)

#: Rows of a block: of kernels with partial sums, and of the others (where it only bounds how finely work is split).
_ROWS_WITH_SUMS, _ROWS = 1024, 64

_lock = threading.Lock()
_kernels: WeakKeyDictionary[Plan, list[NumbaKernel | tuple[SpmmForm, Kernel]]] = WeakKeyDictionary()
_ready: set[str] = set()


def run_plan(
    plan: Plan, tensors: Sequence[torch.Tensor], edges: Mapping[str, Edges], widths: Widths, backend: str = "numba"
) -> list[torch.Tensor]:
    """Run all kernels of ``plan``.

    Args:
        plan: What to run.
        tensors: Inputs of its program in order, contiguous, float32 or float64.
        edges: Arrays of each edge type.
        widths: What the widths of the program stand for.
        backend: Not used; the CUDA runner has two.

    Returns:
        The results, ``[entities, heads, features]``.
    """
    nodes = plan.program.nodes
    arrays: dict[str, np.ndarray] = {}
    num_edges = sum(these.indices.shape[0] for these in edges.values())
    for number, tensor in zip(plan.program.inputs, tensors, strict=True):
        collapse(tensor, num_edges if nodes[number].kind in "SD" else 0)
        arrays[f"a{number}"] = _flat(tensor)
    dtype = tensors[0].dtype
    for number, node in enumerate(nodes):
        if node.op == "degree":
            arrays[f"a{number}"] = _flat(edges[node.relation].degrees(dtype))
    stored: dict[int, torch.Tensor] = {}
    for number in plan.arrays:
        node = nodes[number]
        rows = (edges[node.relation] if node.kind in "SE" else next(iter(edges.values()))).num_rows(node.kind)
        stored[number] = torch.empty(rows, *widths.of(node.axes), dtype=dtype)
        advise(stored[number])
        arrays[f"o{number}"] = _flat(stored[number])
    with _lock:
        if plan not in _kernels:
            _kernels[plan] = [_prepare(plan, kernel) for kernel in plan.kernels]
        kernels = _kernels[plan]
    memory = dict(zip(plan.program.inputs, tensors, strict=True)) | stored
    for kernel in kernels:
        if isinstance(kernel, NumbaKernel):
            stored.update(_run_kernel(kernel, nodes, arrays, edges, widths, dtype))
        else:
            _run_spmm(*kernel, plan, memory, edges)
    return [stored[number] for number in plan.program.outputs]


def _run_spmm(
    form: SpmmForm, kernel: Kernel, plan: Plan, memory: Mapping[int, torch.Tensor], edges: Mapping[str, Edges]
) -> None:
    """Run a kernel that is a sparse-times-dense product by the hand-tuned one."""
    these = edges[next(step.relation for step in kernel.steps if step.relation is not None)]
    x, out = memory[form.x], memory[form.output]
    weight = None if form.weight is None else memory[form.weight]

    def scale(program: Program | None, num_rows: int) -> torch.Tensor | None:
        return None if program is None else _evaluate(program, num_rows, plan, memory, edges, x.dtype)

    if kernel.side == "D":
        indptr, indices, edge_ids = these.indptr, these.indices, None
    else:
        indptr, indices, edge_ids = these.t_indptr, these.t_indices, these.t_positions
    spmm_sum(
        indptr,
        indices,
        x.flatten(1),
        None if weight is None else weight.flatten(1),
        edge_ids,
        scale(form.far_scale, x.shape[0]),
        scale(form.row_scale, out.shape[0]),
        out.view(out.shape[0], out.shape[1:].numel()),
    )


def _evaluate(
    program: Program,
    num_rows: int,
    plan: Plan,
    memory: Mapping[int, torch.Tensor],
    edges: Mapping[str, Edges],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute a narrow value of one side, one number per row, from what is in memory."""
    by_name = {
        (node.kind, node.relation, node.attr): memory[number]
        for number, node in enumerate(plan.program.nodes)
        if node.op == "input"
    }
    inputs = [by_name[program.nodes[n].kind, program.nodes[n].relation, program.nodes[n].attr] for n in program.inputs]
    degree = {relation: these.degrees() for relation, these in edges.items()}
    like = inputs or [torch.empty(0, dtype=dtype)]
    (result,) = compile_torch(program)(like, {}, {}, {}, Widths(), degree)
    return result.reshape(-1).expand(num_rows).contiguous()


def _prepare(plan: Plan, kernel: Kernel) -> NumbaKernel | tuple[SpmmForm, Kernel]:
    form = match_spmm(plan, kernel)
    return NumbaKernel(plan, kernel) if form is None else (form, kernel)


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).numpy()


def _run_kernel(
    kernel: NumbaKernel,
    nodes: Sequence[Any],
    arrays: dict[str, np.ndarray],
    edges: Mapping[str, Edges],
    widths: Widths,
    dtype: torch.dtype,
) -> dict[int, torch.Tensor]:
    side = kernel.kernel.side
    home = edges[kernel.kernel.relation] if side == "S" else next(iter(edges.values()))
    num_rows = home.num_rows(side)
    rows_per_block = _ROWS_WITH_SUMS if kernel.has_sums else _ROWS
    num_blocks = -(-num_rows // rows_per_block)
    graph_arrays: list[np.ndarray] = []
    index_dtypes = []
    for relation in kernel.relations:
        these = edges[relation]
        wanted = (these.indptr, these.indices) if side == "D" else (these.t_indptr, these.t_indices, these.t_positions)
        graph_arrays += [tensor.numpy() for tensor in wanted]
        index_dtypes.append(str(graph_arrays[-1 if side == "D" else -2].dtype))
    sums: dict[int, np.ndarray] = {}
    for name in kernel.parameters:
        if name.startswith("s"):
            number = int(name[1:])
            sums[number] = np.zeros((num_blocks, widths.size(nodes[number].shape)), _numpy_name(dtype))
            arrays[name] = sums[number].reshape(-1)
    arguments = [rows_per_block, num_rows, widths.num_heads, *widths.features]
    arguments += [*graph_arrays, *(arrays[name] for name in kernel.parameters)]
    text = kernel.module_text(_numpy_name(dtype), " ".join(index_dtypes))
    function = _compiled_function(text, arguments)
    weights = None
    if kernel.relations and num_blocks:
        pointers = graph_arrays[0]
        weights = pointers[np.minimum(np.arange(num_blocks + 1) * rows_per_block, num_rows)]
    run_ranges(function, num_blocks, weights, *arguments, unit=widths.num_heads * max(widths.features, default=1))
    return {
        number: torch.from_numpy(partial.sum(0)).view(1, *widths.of(nodes[number].shape))
        for number, partial in sums.items()
    }


def _numpy_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compiled_function(text: str, arguments: list[Any]) -> Any:
    """Return the kernel of a module, compiled: by this process, or by another one whose machine code is on disk."""
    function, path = load_function(text, "kernel")
    if text not in _ready:
        with compile_lock(path):
            try:
                function(0, 0, *arguments)
            except OSError as error:  # compiled, but not kept for the next process
                _logger.warning("machine code of %s is not kept on disk: %s", path, error)
                function(0, 0, *arguments)
        _ready.add(text)
    return function
