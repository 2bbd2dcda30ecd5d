"""The registered operators that run vertex programs: ``vertex_forward`` and ``vertex_backward``.

Both take tensors and the text of the program, so that ``torch.compile`` and ``torch.export`` see one node a layer.
Inputs and results are ``[entities, heads, features]``; edge-wise ones are by position. ``graphs`` holds five tensors a
relation: ``indptr, indices`` and, of the transposed graph, ``indptr, indices, positions``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from core_kernels._backend import resolve_backend
from core_kernels._gradients import first_derivative
from core_kernels.errors import ArgumentTypeError
from core_kernels.vertex.compiled import CompiledProgram, Edges, compiled, edges_by_relation, measure_widths
from core_kernels.vertex.emit_torch import compile_torch
from core_kernels.vertex.fusion import Plan
from core_kernels.vertex.ir import Program
from core_kernels.vertex.passes import Widths

__all__ = ["forward_operator"]

_library = torch.library.Library("core_kernels", "FRAGMENT")
_library.define("vertex_forward(Tensor[] inputs, Tensor[] graphs, SymInt[] num_src, str program) -> Tensor[]")
_library.define(
    "vertex_backward(Tensor[] inputs, Tensor[] saved, Tensor[] grads, Tensor[] graphs, SymInt[] num_src, str program) "
    "-> Tensor[]"
)

_RUNNERS = {"numba": "run_numba", "cuda": "run_cuda", "emulate": "run_cuda"}


def _run(
    plan_of: Any, program: Program, tensors: Sequence[torch.Tensor], edges: Mapping[str, Edges]
) -> list[torch.Tensor]:
    """Run one program on the implementation that fits its tensors."""
    like = next(iter(edges.values())).indptr if not tensors else tensors[0]
    chosen = resolve_backend(like)
    widths = measure_widths(program, tensors)
    if chosen == "torch":
        return _run_torch(program, tensors, edges, widths)
    if like.dtype not in (torch.float32, torch.float64):
        raise ArgumentTypeError(
            f"vertex program on backend {chosen} got {like.dtype}; expected float32 or float64; convert the inputs, or "
            "use backend('torch')"
        )
    runner = importlib.import_module(f"core_kernels.vertex.{_RUNNERS[chosen]}")
    plan: Plan = plan_of()
    return runner.run_plan(plan, tensors, edges, widths, chosen)


def _run_torch(
    program: Program, tensors: Sequence[torch.Tensor], edges: Mapping[str, Edges], widths: Widths
) -> list[torch.Tensor]:
    src, dst, degree, sizes = {}, {}, {}, {}
    for relation, these in edges.items():
        degree[relation] = these.degrees()
        src[relation] = these.indices.long()
        dst[relation] = torch.repeat_interleave(degree[relation], output_size=these.indices.shape[0])
        sizes["S", relation], sizes["D", ""] = these.num_src, these.num_dst
    results = compile_torch(program)(tensors, src, dst, sizes, widths, degree)
    rows = {kind: size for (kind, _), size in sizes.items()}
    return [
        result.expand(rows.get(node.kind, result.shape[0]) if node.kind == "D" else result.shape[0], -1, -1)
        .contiguous()
        .clone()
        if result.shape[0] == 1
        else result.contiguous()
        for result, node in zip(results, (program.nodes[number] for number in program.outputs), strict=True)
    ]


def _forward(
    inputs: list[torch.Tensor], graphs: list[torch.Tensor], num_src: list[int], program: str
) -> list[torch.Tensor]:
    code = compiled(program)
    edges = edges_by_relation(code.program, graphs, num_src)
    contiguous = [tensor.contiguous() for tensor in inputs]
    return _run(lambda: code.forward_plan, code.forward, contiguous, edges)


def _forward_fake(
    inputs: list[torch.Tensor], graphs: list[torch.Tensor], num_src: list[int], program: str
) -> list[torch.Tensor]:
    code = compiled(program)
    edges = edges_by_relation(code.program, graphs, num_src)
    widths = measure_widths(code.program, inputs)
    results = []
    for number in code.forward.outputs:
        node = code.forward.nodes[number]
        rows = (edges[node.relation] if node.kind in "SE" else next(iter(edges.values()))).num_rows(node.kind)
        results.append(inputs[0].new_empty(rows, *widths.of(node.axes)))
    return results


def _backward(
    inputs: list[torch.Tensor],
    saved: list[torch.Tensor],
    grads: list[torch.Tensor],
    graphs: list[torch.Tensor],
    num_src: list[int],
    program: str,
) -> list[torch.Tensor]:
    code = compiled(program)
    edges = edges_by_relation(code.program, graphs, num_src)
    tensors = [tensor.contiguous() for tensor in code.backward_inputs(inputs, saved, grads)]
    parts = _run(lambda: code.backward_plan, code.gradient.program, tensors, edges)
    return code.collect_gradients(parts, inputs)


def _backward_fake(
    inputs: list[torch.Tensor],
    saved: list[torch.Tensor],
    grads: list[torch.Tensor],
    graphs: list[torch.Tensor],
    num_src: list[int],
    program: str,
) -> list[torch.Tensor]:
    return [torch.empty_like(inputs[position]) for position in compiled(program).wanted]


def _setup_context(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
    tensors, graphs, num_src, text = inputs
    code = compiled(text)
    saved = [output[position] for position in code.saved_results] if code.wanted else []
    ctx.save_for_backward(*tensors, *graphs, *saved)
    ctx.num_inputs, ctx.num_graphs, ctx.num_src, ctx.text = len(tensors), len(graphs), num_src, text
    ctx.set_materialize_grads(False)
    ctx.output_shapes = [result.shape for result in output]


def _autograd(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple:
    code: CompiledProgram = compiled(ctx.text)
    tensors = ctx.saved_tensors
    inputs = list(tensors[: ctx.num_inputs])
    graphs = list(tensors[ctx.num_inputs : ctx.num_inputs + ctx.num_graphs])
    saved = list(tensors[ctx.num_inputs + ctx.num_graphs :])
    given = [
        inputs[0].new_zeros(ctx.output_shapes[position]) if grads[position] is None else grads[position]
        for position in (code.forward.outputs.index(number) for number in code.program.outputs)
    ]
    with torch.no_grad():
        results = torch.ops.core_kernels.vertex_backward(inputs, saved, given, graphs, ctx.num_src, ctx.text)
    by_input: list[torch.Tensor | None] = [None] * ctx.num_inputs
    for position, result in zip(code.wanted, results, strict=True):
        by_input[position] = first_derivative("a vertex program", result, *inputs, *given)
    return by_input, [None] * ctx.num_graphs, None, None


for _name, _implementation, _fake in (
    ("vertex_forward", _forward, _forward_fake),
    ("vertex_backward", _backward, _backward_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"core_kernels::{_name}", _fake, lib=_library)
torch.library.register_autograd("core_kernels::vertex_forward", _autograd, setup_context=_setup_context, lib=_library)

forward_operator = torch.ops.core_kernels.vertex_forward.default
