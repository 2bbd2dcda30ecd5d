"""Capture of a module's training step as a graph of ATen operators, on fake tensors.

The module with its loss is exported without running it: tensors have shapes but no storage, so a model larger than this
machine's memory is captured all the same (build it inside :func:`fake_tensors`). Composite operators such as
``linear`` or ``scaled_dot_product_attention`` stay whole. Backward operators need no capture: rules and costs hold
them with their forward operator.

Operators without a rule are all listed at once, each with its source line.
"""

from __future__ import annotations

import operator as python_operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from autopar import _compat
from autopar.errors import CaptureError, ProblemError
from autopar.graph import Graph, Operator, TensorInfo
from autopar.rules import is_supported

__all__ = ["OPTIMIZER_STATES", "fake_tensors", "trace"]

# Tensors of optimiser state per parameter, each of the parameter's size and dtype.
OPTIMIZER_STATES = {"sgd": 0.0, "momentum": 1.0, "adagrad": 1.0, "adam": 2.0, "adamw": 2.0}


class _WithLoss(nn.Module):
    """A model and a function of its output and the last input."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]):
        super().__init__()
        self.model, self.loss_function = model, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss_function(self.model(*inputs[:-1]), inputs[-1])


def fake_tensors() -> Any:
    """Return a context in which tensors have shapes but no storage, for building models larger than memory."""
    return _compat.fake_mode()


def with_loss(model: nn.Module, loss: Callable[..., Tensor] | None) -> tuple[nn.Module, str]:
    """Return the module that is captured and the prefix its parameters have there."""
    return (model, "") if loss is None else (_WithLoss(model, loss), "model.")


def trace(
    model: nn.Module,
    example_inputs: Sequence[Tensor],
    loss: Callable[..., Tensor] | None = None,
    optimizer: str = "adamw",
) -> Graph:
    """Capture one training step of a module.

    Args:
        model: The module; real tensors or those of :func:`fake_tensors`.
        example_inputs: The global batch, as ``model`` takes it; with ``loss``, the targets come last.
        loss: ``loss(output, targets)``; leave it out when the module returns its loss.
        optimizer: One of :data:`OPTIMIZER_STATES`, for the memory of its state.

    Returns:
        The graph.

    Raises:
        CaptureError: The module cannot be exported, has operators without a rule, or returns no scalar.

    >>> from autopar import models
    >>> print(trace(*models.mlp()).report())
    _Classifier: 1,608 parameters in 4 tensors, 5 operators (linear x2, relu x1, dropout x1, cross_entropy_loss x1)
    """
    if optimizer not in OPTIMIZER_STATES:
        raise ProblemError(
            f"optimizer={optimizer!r} is not known: expected one of {', '.join(OPTIMIZER_STATES)}; "
            "choose the one with as many states per parameter"
        )
    begin = time.perf_counter()
    wrapped, prefix = with_loss(model, loss)
    try:
        with _compat.quick_export():
            program = torch.export.export(wrapped, tuple(example_inputs), strict=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"{type(model).__name__} cannot be exported: {reason}; expected a forward without data-dependent control "
            "flow; torch.export.export(model, inputs, strict=False) shows the place"
        ) from error
    graph = _read(program, prefix, type(model).__name__, optimizer)
    graph.capture_seconds = time.perf_counter() - begin
    return graph


def _read(program: Any, prefix: str, module_name: str, optimizer: str) -> Graph:
    leaves = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    graph = program.graph
    operators: list[Operator] = []
    position: dict[fx.Node, int] = {}
    unsupported: list[str] = []
    constants: dict[str, Tensor] = {}
    num_inputs = 0
    used = _used_nodes(graph)
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" and not node.users and leaves[node.name].kind.name != "USER_INPUT":
            continue  # another name of a tied tensor, or one that the step never reads
        if node.op == "placeholder":
            kind, target = _leaf_kind(leaves[node.name], prefix)
            num_inputs += kind == "input"
            if kind == "constant":
                constants[node.name] = program.constants[target]
        elif _is_idle_broadcast(node) or (node.args and _is_idle_broadcast(node.args[0])):
            if not _is_idle_broadcast(node):  # one of the tensors that were not changed
                position[node] = position[node.args[0].args[0][node.args[1]]]
            continue
        elif node.op == "call_function" and node in used:
            kind, target = _operator_kind(node), ""
            if not is_supported(kind):
                unsupported.append(f"  {node.target} at {_source_line(node)}")
                continue
        else:
            continue
        if any(source not in position for source in node.all_input_nodes):
            continue  # an unsupported operator feeds it; all of those are reported together below
        inputs = tuple(position[source] for source in _tensor_arguments(node))
        info = tuple(operators[source].output for source in inputs)
        has_gradient = kind == "parameter" or any(source.has_gradient for source in info)
        output = _tensor_info(node, has_gradient)
        position[node] = len(operators)
        operators.append(
            Operator(node.name, kind, inputs, info, output, node, target, _module_path(node), _source_line(node))
        )
    if unsupported:
        raise CaptureError(
            "no rule for these operators:\n" + "\n".join(dict.fromkeys(unsupported)) + "\n"
            "expected operators that autopar.rules knows; add a rule with autopar.rules.rule, or rewrite those lines"
        )
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    if len(results) != 1 or operators[position[results[0]]].output.num_elements != 1:
        shapes = [tuple(value.meta["val"].shape) for value in results]
        raise CaptureError(
            f"the captured step returns tensors of shapes {shapes}; expected one scalar, the loss; "
            "pass loss=..., or return the loss from the module"
        )
    return Graph(
        operators,
        position[results[0]],
        optimizer,
        OPTIMIZER_STATES[optimizer],
        module_name,
        graph,
        num_inputs,
        constants=constants,
    )


def _used_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return nodes the result depends on, and those that update buffers."""
    used: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        updates = node.op == "call_function" and str(node.target).split(".")[1:2] == ["add_"]
        if node.op in ("output", "placeholder") or node in used or updates:
            used.update((node, *node.all_input_nodes))
    return used


def _is_idle_broadcast(node: Any) -> bool:
    """Whether a node only lists tensors that have one shape already, as losses do."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.aten.broadcast_tensors.default:
        return False
    tensors: Any = node.args[0]
    return len({tuple(tensor.meta["val"].shape) for tensor in tensors}) == 1


def _leaf_kind(spec: Any, prefix: str) -> tuple[str, str]:
    kind = spec.kind.name
    target = (spec.target or "").removeprefix(prefix)
    if kind == "PARAMETER":
        return "parameter", target
    if kind == "BUFFER":
        return "buffer", target
    return ("input", "") if kind == "USER_INPUT" else ("constant", spec.target)


def _operator_kind(node: fx.Node) -> str:
    if node.target is python_operator.getitem:
        return "getitem"
    target = node.target
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else str(target)


def _tensor_arguments(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), lambda source: found.append(source))
    return found


def _tensor_info(node: fx.Node, has_gradient: bool) -> TensorInfo:
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        value = value[0]
    floating = value.is_floating_point()
    return TensorInfo(tuple(value.shape), value.dtype, has_gradient and floating, value.is_contiguous())


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def _source_line(node: fx.Node) -> str:
    trace_lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in trace_lines if line.startswith("File ")]
    outside = [line for line in places if "/torch/nn/" not in line] or places
    return outside[-1].removeprefix("File ").partition(", in ")[0].replace('"', "") if outside else "an unknown line"
