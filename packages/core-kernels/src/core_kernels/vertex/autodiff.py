"""Reverse-mode differentiation on the program.

The gradient of a typed program is another typed program. It reads the same inputs, the forward's aggregations (named
``saved:i``: these are kept in memory, everything else is recomputed) and the gradients of the results (``grad:i``).
A gradient that arrives at a value shared by many edges is summed over them: ``sum_dst`` for destination-wise values,
``sum_src``, over the out-edges, for source-wise ones, ``sum_all`` for parameters.

A gradient may have fewer axes than its value (it is the same along them) or an unsummed head axis (sums over heads
are left to the very end, being linear). :func:`differentiate` returns both as they are; the caller fits them.
Maximum and minimum share their gradient evenly among equal winners, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core_kernels.vertex.builder import Builder
from core_kernels.vertex.ir import AGGREGATIONS, Node, Program, ancestors, number_reachable

__all__ = ["Gradient", "differentiate"]


@dataclass(frozen=True)
class Gradient:
    """The backward program.

    Attributes:
        program: Its outputs are contributions to gradients of inputs.
        targets: For each output the forward number of the input it belongs to; contributions of one input add up.
        saved: Forward numbers of the aggregations it reads, in the order of the names ``saved:0``, ``saved:1``, ...
    """

    program: Program
    targets: tuple[int, ...]
    saved: tuple[int, ...]


def differentiate(forward: Program, wanted: Iterable[int]) -> Gradient:
    """Return the program that computes gradients of the ``wanted`` inputs (forward numbers)."""
    wanted = tuple(wanted)
    aggregations = [number for number, node in enumerate(forward.nodes) if node.op in AGGREGATIONS]
    tape = _Tape(forward, wanted, aggregations)
    for position, number in enumerate(forward.outputs):
        node = forward.nodes[number]
        grad = tape.builder.input(node.kind, f"grad:{position}", node.shape, node.relation if node.kind == "E" else "")
        tape.add_grad(number, grad)
    for number in reversed(range(len(forward.nodes))):
        for grad in list(tape.grads[number].values()):
            tape.propagate(number, grad)
    outputs, targets = [], []
    for number in wanted:
        for grad in tape.grads[number].values():
            node, found = forward.nodes[number], tape.builder.nodes[grad]
            if node.kind == "E" and found.kind != "E":
                grad = tape.builder.alias("on_edge", grad, "E", found.axes, node.relation)
            outputs.append(grad)
            targets.append(number)
    program = number_reachable(tape.builder.nodes, outputs)
    used = {program.nodes[number].attr for number in program.inputs}
    saved = [number for position, number in enumerate(aggregations) if f"saved:{position}" in used]
    return Gradient(_renumber_saved(program, aggregations, saved), tuple(targets), tuple(saved))


def _renumber_saved(program: Program, aggregations: list[int], saved: list[int]) -> Program:
    new_name = {f"saved:{aggregations.index(number)}": f"saved:{position}" for position, number in enumerate(saved)}
    nodes = tuple(
        Node("input", (), node.kind, node.shape, new_name[node.attr], node.relation)
        if node.op == "input" and node.attr in new_name
        else node
        for node in program.nodes
    )
    return Program(nodes, program.outputs)


class _Tape:
    """The backward program under construction, with the gradients collected for each forward value."""

    def __init__(self, forward: Program, wanted: tuple[int, ...], aggregations: list[int]):
        self.forward, self.builder = forward, Builder()
        self.grads: list[dict[bool, int]] = [{} for _ in forward.nodes]
        self.differentiable = [
            number in wanted or any(map(ancestors(forward.nodes, [number]).__contains__, wanted))
            for number in range(len(forward.nodes))
        ]
        self.value = self._copy_forward(aggregations)

    def _copy_forward(self, aggregations: list[int]) -> list[int]:
        builder, value = self.builder, []
        for number, node in enumerate(self.forward.nodes):
            args = [value[arg] for arg in node.args]
            if node.op in AGGREGATIONS:
                value.append(builder.input("D", f"saved:{aggregations.index(number)}", node.shape))
            elif node.op in ("input", "const", "degree"):
                value.append(builder.add(node))
            elif node.op == "feature_sum":
                value.append(builder.feature_sum(*args))
            else:
                value.append(builder.emit(node.op, *args, attr=node.slope))
        return value

    def add_grad(self, number: int, grad: int) -> None:
        """Add a contribution; those with an unsummed head axis are kept apart."""
        unsummed = self.builder.nodes[grad].shape[0] > self.forward.nodes[number].shape[0]
        grads = self.grads[number]
        grads[unsummed] = self.builder.emit("add", grads[unsummed], grad) if unsummed in grads else grad

    def propagate(self, number: int, grad: int) -> None:
        """Pass the gradient of a value on to its arguments."""
        node = self.forward.nodes[number]
        if not self.differentiable[number] or not node.args:
            return
        if node.op in AGGREGATIONS:
            self._propagate_aggregation(number, node, grad)
            return
        if node.op == "feature_sum":
            self._pass_on(node, node.args[0], grad, shape=self.forward.nodes[node.args[0]].shape)
            return
        args = [self.value[arg] for arg in node.args]
        for position, arg in enumerate(node.args):
            if self.differentiable[arg]:
                factor = _DERIVATIVES[node.op](self.builder.emit, position, args, self.value[number], node.attr)
                if factor is not None:
                    passed = grad if factor == "same" else self.builder.emit("mul", grad, factor)
                    self._pass_on(node, arg, passed)

    def _propagate_aggregation(self, number: int, node: Node, grad: int) -> None:
        arg, builder = node.args[0], self.builder
        if node.op in ("max_dst", "min_dst"):
            winners = builder.emit("eq", self.value[arg], self.value[number])
            # One where there is no edge: the quotient may be moved in front of a sum, and zero times it must be zero.
            count = builder.aggregate("sum_dst", winners, node.relation, empty=1.0)
            grad = builder.emit("mul", winners, builder.emit("div", grad, count))
        elif node.op == "shift_dst":
            return
        on_edges = Node("contribution", (), "E", node.shape, None, node.relation)
        self._pass_on(on_edges, arg, grad)

    def _pass_on(self, user: Node, arg: int, grad: int, shape: tuple[int, int] | None = None) -> None:
        """Reduce a gradient that lives where ``user`` lives to where its argument lives."""
        builder, target = self.builder, self.forward.nodes[arg]
        shape = shape or user.axes
        have = builder.nodes[grad].axes
        lost = tuple(
            int(user_axis and not target_axis) for user_axis, target_axis in zip(shape, target.axes, strict=True)
        )
        heads, features = (have[axis] or (shape[axis] if lost[axis] else 0) for axis in (0, 1))
        if (heads, features) != have:
            found = builder.nodes[grad]
            grad = builder.alias("expand", grad, found.kind, (heads, features), found.relation)
        if lost[1]:
            grad = builder.feature_sum(grad)
        if user.kind == "E" and target.kind in "SD":
            op = "sum_src" if target.kind == "S" else "sum_dst"
            grad = builder.aggregate(op, grad, user.relation)
        elif target.kind == "P" and user.kind != "P":
            if user.kind == "E" and builder.nodes[grad].kind != "E":
                grad = builder.alias("on_edge", grad, "E", builder.nodes[grad].axes, user.relation)
            grad = builder.aggregate("sum_all", grad, "")
        self.add_grad(arg, grad)


def _const(emit: Callable, number: float) -> int:
    return emit.__self__.const(number)


def _div(emit: Callable, position: int, args: list[int], value: int, attr: float | None) -> int:
    inverse = emit("div", _const(emit, 1.0), args[1])
    return inverse if position == 0 else emit("neg", emit("mul", value, inverse))


def _extremum(comparison: str) -> Callable:
    def rule(emit: Callable, position: int, args: list[int], value: int, attr: float | None) -> int:
        mine, other = args[position], args[1 - position]
        strict = emit("gt", mine, other) if comparison == "max" else emit("gt", other, mine)
        half = emit("mul", emit("eq", mine, other), emit.__self__.const(0.5))
        return emit("add", strict, half)

    return rule


def _unary(rule: Callable[[Callable, int, int, float | None], int]) -> Callable:
    return lambda emit, position, args, value, attr: rule(emit, args[0], value, attr)


#: For each operation the factor its gradient is multiplied by on the way to argument ``position``; "same" is one, None
#: is zero.
_DERIVATIVES: dict[str, Callable] = {
    "add": lambda *_: "same",
    "sub": lambda emit, position, *_: "same" if position == 0 else _const(emit, -1.0),
    "mul": lambda emit, position, args, value, attr: args[1 - position],
    "div": _div,
    "maximum": _extremum("max"),
    "minimum": _extremum("min"),
    "eq": lambda *_: None,
    "gt": lambda *_: None,
    "sign": lambda *_: None,
    "leaky_step": lambda *_: None,
    "neg": _unary(lambda emit, x, y, attr: _const(emit, -1.0)),
    "exp": _unary(lambda emit, x, y, attr: y),
    "log": _unary(lambda emit, x, y, attr: emit("div", _const(emit, 1.0), x)),
    "sqrt": _unary(lambda emit, x, y, attr: emit("div", _const(emit, 0.5), y)),
    "tanh": _unary(lambda emit, x, y, attr: emit("sub", _const(emit, 1.0), emit("mul", y, y))),
    "sigmoid": _unary(lambda emit, x, y, attr: emit("mul", y, emit("sub", _const(emit, 1.0), y))),
    "relu": _unary(lambda emit, x, y, attr: emit("gt", x, _const(emit, 0.0))),
    "abs": _unary(lambda emit, x, y, attr: emit("sign", x)),
    "leaky_relu": _unary(lambda emit, x, y, attr: emit("leaky_step", x, attr=attr)),
    "elu": _unary(lambda emit, x, y, attr: emit("elu_step", x, attr=attr)),
}
