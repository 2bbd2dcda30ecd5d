"""Emit a program as torch code: the readable reference, and the implementation for what no kernel takes.

The text is plain: one line a value, every edge value is a tensor with one row per edge. ``src`` and ``dst`` are source
and destination of each position; all tensors are ``[entities, heads, features]`` with axes of length one where a value
has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from core_kernels.vertex.ir import Node, Program

__all__ = ["compile_torch", "emit_torch"]

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_WORDS = {
    "neg": "-{0}",
    "maximum": "torch.maximum({0}, {1})",
    "minimum": "torch.minimum({0}, {1})",
    "eq": "({0} == {1}).to({dtype})",
    "gt": "({0} > {1}).to({dtype})",
    "leaky_relu": "F.leaky_relu({0}, {attr})",
    "leaky_step": "torch.where({0} > 0, torch.ones_like({0}), torch.full_like({0}, {attr}))",
    "elu": "F.elu({0}, {attr})",
    "elu_step": "torch.where({0} > 0, torch.ones_like({0}), {attr} * torch.exp({0}))",
    "feature_sum": "{0}.sum(-1, keepdim=True)",
}


def emit_torch(program: Program, name: str = "layer") -> str:
    """Return the source of ``name(inputs, src, dst, sizes, widths, degree)``.

    ``src`` and ``dst`` map relation to ids per position, ``sizes`` kind and relation to entity counts, ``degree``
    relation to in-degrees; ``inputs`` follow ``program.inputs``.
    """
    lines = [f"def {name}(inputs, src, dst, sizes, widths, degree):"]
    position = {number: index for index, number in enumerate(program.inputs)}
    for number, node in enumerate(program.nodes):
        lines.append(f"    v{number} = {_expression(program, number, node, position)}")
    results = ", ".join(f"v{number}" for number in program.outputs)
    return "\n".join([*lines, f"    return [{results}]", ""])


def _expression(program: Program, number: int, node: Node, position: dict[int, int]) -> str:
    if node.op == "input":
        return f"inputs[{position[number]}]"
    if node.op == "const":
        return f"torch.tensor({node.attr!r}, dtype={_DTYPE}, device={_DEVICE})"
    if node.op == "degree":
        return f"degree[{node.relation!r}].to({_DTYPE}).view(-1, 1, 1)"
    args = [_at(program.nodes[arg], f"v{arg}", node) for arg in node.args]
    if node.op in _INFIX:
        return f" {_INFIX[node.op]} ".join(args)
    if node.op in _WORDS:
        return _WORDS[node.op].format(*args, attr=node.attr, dtype=_DTYPE)
    if node.op == "on_edge":
        return args[0]
    if node.op == "expand":
        return f"expand({args[0]}, widths.of({node.shape}))"
    if node.op == "sum_all":
        return f"{args[0]}.sum(0, keepdim=True)"
    if node.op in ("sum_dst", "sum_src", "max_dst", "min_dst", "shift_dst"):
        return _aggregation(program, node)
    return f"torch.{node.op}({args[0]})"


_DTYPE, _DEVICE = "inputs[0].dtype", "inputs[0].device"


def _at(arg: Node, text: str, user: Node) -> str:
    """Return the value of an argument at the entity of its user: gathered when the user lives on edges."""
    if user.kind == "E" and arg.kind == "S":
        return f"{text}[src[{user.relation!r}]]"
    if user.kind == "E" and arg.kind == "D":
        return f"{text}[dst[{user.relation!r}]]"
    return text


def _aggregation(program: Program, node: Node) -> str:
    arg, relation = program.nodes[node.args[0]], node.relation
    on_edge = Node("on_edge", (), "E", None, None, relation)
    value, end = _at(arg, f"v{node.args[0]}", on_edge), "src" if node.op == "sum_src" else "dst"
    size = f"sizes[{node.kind!r}, {relation if node.kind == 'S' else ''!r}]"
    reduce = {"sum_dst": "sum", "sum_src": "sum", "min_dst": "amin"}.get(node.op, "amax")
    return f"aggregate({value}, {end}[{relation!r}], {size}, {reduce!r}, {node.attr}, degree[{relation!r}])"


def aggregate(
    values: torch.Tensor, rows: torch.Tensor, size: int, reduce: str, empty: float, degree: torch.Tensor
) -> torch.Tensor:
    """Reduce edge values to the rows they belong to; ``empty`` is the result of rows without edges."""
    if values.shape[0] != rows.shape[0]:
        values = values.expand(rows.shape[0], *values.shape[1:])
    result = values.new_zeros(size, *values.shape[1:])
    if reduce == "sum":
        result = result.index_add(0, rows, values)
    else:
        index = rows.view(-1, 1, 1).expand_as(values)
        result = result.scatter_reduce(0, index, values, reduce, include_self=False)
    if empty != 0.0:
        result = torch.where(degree.view(-1, 1, 1) == 0, empty, result)
    return result


def expand(values: torch.Tensor, widths: tuple[int, int]) -> torch.Tensor:
    """Repeat values along missing axes."""
    return values.expand(values.shape[0], max(values.shape[1], widths[0]), max(values.shape[2], widths[1]))


@functools.lru_cache(maxsize=1024)
def compile_torch(program: Program) -> Callable[..., list[torch.Tensor]]:
    """Return the emitted function."""
    scope = {"torch": torch, "F": torch.nn.functional, "aggregate": aggregate, "expand": expand}
    exec(compile(emit_torch(program), "<vertex program as torch>", "exec"), scope)
    return scope["layer"]
