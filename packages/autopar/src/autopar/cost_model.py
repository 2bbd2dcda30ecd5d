"""Seconds and bytes of one operator under one configuration, and of one re-scheduling.

Symbols: F multiply-adds times two of the whole operator, a the number of ranks its work is split over, n its local
bytes (inputs and output), f and b the device's rates of arithmetic and of memory, l the least time of a launch::

    operator    max(F_forward / (a f), n / b, l) + max(F_backward / (a f), 2 n / b, l)      F_backward = 2 F_forward
    view        0
    collective  Interconnect.seconds, plus bytes copied before and after at rate b
    optimiser   (3 + 2 k) s / b for s bytes of parameters and k states each

A measured operator or update (:mod:`autopar.operator_profile`) replaces its line. Memory is what one device holds at
the start of the backward pass: parameters, their gradient buffers and optimiser state, everything saved for the
backward pass, and on top the largest working set that any single operator needs; or, where that is more, what the
optimiser needs besides to update the largest parameter, when nothing is saved any more. That is what the search adds
up; a plan's own prediction follows the backward pass and lets go of what it has used (:mod:`autopar.schedule`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.graph import Graph, Operator, TensorInfo
from autopar.operator_profile import operator_key, update_key
from autopar.placement import Layout, local_shape
from autopar.resharding import Message, Step, message_of, step_messages
from autopar.rules import Configuration, rule_of

__all__ = [
    "ConversionCost",
    "conversion_cost",
    "copied_bytes",
    "internal_messages",
    "local_bytes",
    "operator_seconds",
    "saved_bytes",
    "update_bytes",
    "update_seconds",
    "working_bytes",
]

# Views of a part, whose backward pass makes a whole gradient of the parts'.
_CUTS = ("unbind", "split", "split_with_sizes", "chunk", "select", "slice")


# Temporaries of a parameter's size while it is updated, one parameter after another (``foreach=False``).
_UPDATE_TEMPORARIES = {"adagrad": 1, "adam": 2, "adamw": 2}


def update_bytes(optimizer: str, stored_bytes: int) -> int:
    """Return the bytes an optimiser needs besides its state while it updates a parameter of this size.

    >>> update_bytes("adamw", 100), update_bytes("sgd", 100)
    (200, 0)
    """
    return _UPDATE_TEMPORARIES.get(optimizer, 0) * stored_bytes


def update_seconds(graph: Graph, stored_bytes: int, cluster: Cluster) -> float:
    """Return the seconds in which the optimiser updates one parameter of this size."""
    measured = cluster.operator_seconds.get(update_key(graph.optimizer, stored_bytes))
    if measured is not None:
        return measured
    return (3 + 2 * graph.state_factor) * stored_bytes / cluster.bytes_per_second + cluster.launch_seconds


def local_bytes(info: TensorInfo, layout: Layout, mesh: Sequence[int]) -> int:
    """Return the bytes of one rank's part of a tensor."""
    return math.prod(local_shape(info.shape, layout, mesh)) * info.dtype.itemsize


def internal_messages(
    operator: Operator, config: Configuration, mesh: Sequence[int], coordinate: Sequence[int] | None = None
) -> list[Message]:
    """Return collectives an operator runs inside: batch normalisation adds its statistics over the ranks.

    Forward it adds sums, squared deviations come in a second round; backward two sums per channel.
    """
    if operator.kind != "batch_norm" or not operator.argument(5, "training", False):
        return []
    channels = local_shape(operator.output.shape, config.output, mesh)[1]
    size = operator.output.dtype.itemsize
    messages = []
    for axis in range(len(mesh)):
        if config.output[axis] == 0 and mesh[axis] > 1:
            place = coordinate[axis] if coordinate else 0
            messages += [message_of("all_reduce", axis, mesh[axis], channels, size, False, place)] * 2
            if operator.output.has_gradient:
                messages.append(message_of("all_reduce", axis, mesh[axis], 2 * channels, size, True, place))
    return messages


def operator_seconds(operator: Operator, config: Configuration, mesh: tuple[int, ...], cluster: Cluster) -> float:
    """Return the seconds of an operator, forward and backward, without re-scheduling of its inputs."""
    rule = rule_of(operator.kind)
    inside = sum(cluster.message_seconds(message, mesh) for message in internal_messages(operator, config, mesh))
    if (rule.is_view and operator.kind not in ("reshape", "flatten")) or operator.kind == "getitem":
        return inside
    if cluster.operator_seconds:
        measured = cluster.operator_seconds.get(operator_key(operator, config, mesh))
        if measured is not None:
            return measured + inside
    split = math.prod(mesh[axis] for axis in config.active)
    flops = rule.flops(operator) / split if rule.flops else 0.0
    moved = local_bytes(operator.output, config.output, mesh)
    moved += sum(
        local_bytes(info, layout, mesh) for info, layout in zip(operator.input_info, config.inputs, strict=True)
    )
    if operator.kind == "embedding":
        moved = 2 * local_bytes(operator.output, config.output, mesh)
    memory_seconds, compute_seconds = moved / cluster.bytes_per_second, flops / cluster.flops_per_second
    seconds = max(compute_seconds, memory_seconds, cluster.launch_seconds)
    if operator.output.has_gradient:
        # The gradient of an input that needs none is not computed.
        products = sum(info.has_gradient for info in operator.input_info[:2]) if rule.flops else 2
        seconds += max(products * compute_seconds, 2 * memory_seconds, cluster.launch_seconds)
    return seconds + inside


def saved_bytes(operator: Operator, config: Configuration, mesh: Sequence[int]) -> int:
    """Return the bytes an operator keeps for its backward pass besides its inputs."""
    if not operator.output.has_gradient:
        return 0
    rule = rule_of(operator.kind)
    elements = math.prod(local_shape(operator.output.shape, config.output, mesh))
    kept = int(elements * rule.saves_bytes_per_output)
    if rule.saves_output:
        kept += elements * operator.output.dtype.itemsize
    if operator.kind == "dropout" and not operator.argument(1, "p", 0.5):
        kept = 0
    if operator.kind in ("cross_entropy_loss", "log_softmax"):
        kept = local_bytes(operator.input_info[0], config.inputs[0], mesh)
    if operator.kind == "layer_norm":
        rows = elements // math.prod(operator.node.args[1])
        kept += 2 * rows * operator.output.dtype.itemsize
    if operator.kind == "scaled_dot_product_attention":
        rows = elements // operator.output.shape[-1]
        kept += rows * 4
        if operator.argument(4, "dropout_p", 0.0):
            # Computed in the open: probabilities before and after dropout, and the mask.
            kept += rows * operator.input_info[1].shape[-2] * (2 * operator.output.dtype.itemsize + 1)
    return kept


def working_bytes(operator: Operator, config: Configuration, mesh: Sequence[int]) -> int:
    """Return the bytes that live only while an operator runs backward.

    These are gradients of its output and inputs, and what kernels make besides, as seen on a CPU: convolutions copy
    input and gradient into a layout of their own, the gradient of a loss over classes passes through one of the
    logarithms, and the backward of a cut makes a whole gradient of the parts'.
    """
    if not operator.output.has_gradient:
        return 0
    first = local_bytes(operator.input_info[0], config.inputs[0], mesh) if operator.inputs else 0
    if rule_of(operator.kind).is_view:
        return first if operator.kind in _CUTS else 0
    total = output = local_bytes(operator.output, config.output, mesh)
    for info, layout in zip(operator.input_info, config.inputs, strict=True):
        if info.has_gradient:
            total += local_bytes(info, layout, mesh)
    if operator.kind.startswith("conv"):
        return total + first + output
    return total + first if operator.kind == "cross_entropy_loss" else total


@dataclass(frozen=True)
class ConversionCost:
    """What re-scheduling one tensor costs.

    Attributes:
        seconds: Forward and backward.
        moves_data: Whether the result is another tensor than the source.
        gathers: Whether the result is larger than the source.
        forward_seconds: The forward part.
    """

    seconds: float
    forward_seconds: float
    moves_data: bool
    gathers: bool


def copied_bytes(step: Step, info: TensorInfo, mesh: Sequence[int]) -> int:
    """Return the most that one step of re-scheduling holds of a gradient on its way back, besides the gradient.

    Collectives move rows: along another dim than the first, what is sent and what arrives are copies.
    """
    if mesh[step.axis] == 1:
        return 0
    have, made = local_bytes(info, step.after, mesh), local_bytes(info, step.before, mesh)
    along = max(step.after[step.axis], step.before[step.axis])
    if step.backward == "all_gather":
        return 2 * made if along else made
    if step.backward == "reduce_scatter":
        return (2 if along else 1) * have + made
    return {"all_to_all": 2 * made, "all_reduce": made, "pad": made, "mask": made}.get(step.backward, 0)


def conversion_cost(
    steps: Sequence[Step], info: TensorInfo, mesh: tuple[int, ...], cluster: Cluster, is_parameter: bool
) -> ConversionCost:
    """Price the steps of one re-scheduling."""
    forward = backward = 0.0
    for step in steps:
        if mesh[step.axis] == 1:
            continue
        copied = local_bytes(info, step.before, mesh) + local_bytes(info, step.after, mesh)
        copy_seconds = copied / cluster.bytes_per_second
        for message in step_messages(step, info.shape, info.dtype.itemsize, mesh, info.has_gradient):
            seconds = cluster.message_seconds(message, mesh) + copy_seconds
            if message.backward:
                backward += seconds
            else:
                forward += seconds
        if step.forward == "slice" and not is_parameter:
            forward += copy_seconds
        if step.backward in ("slice", "pad", "mask") and info.has_gradient:
            backward += copy_seconds
    if is_parameter:
        backward *= 1 - cluster.overlap
    moves = any(step.forward != "nothing" and mesh[step.axis] > 1 for step in steps)
    gathers = any(step.forward == "all_gather" and mesh[step.axis] > 1 for step in steps)
    return ConversionCost(forward + backward, forward, moves, gathers)
