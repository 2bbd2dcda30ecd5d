"""Measured operators: what one operator of given local shapes really takes on this device.

A roofline says little about a small convolution on a CPU. Here every operator that a search may meet is run once per
distinct local shape, forward and backward, on tensors of that shape; the medians go into a cluster's
``operator_seconds`` and take the place of the estimate. Operators of repeated layers share one entry.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autopar.graph import Graph, Operator
from autopar.placement import local_shape

if TYPE_CHECKING:
    from autopar.cluster import Cluster
    from autopar.rules import Configuration

__all__ = ["measure_operators", "operator_key"]


def operator_key(operator: Operator, config: Configuration, mesh: Sequence[int]) -> str:
    """Return the name under which a measurement is kept: kind, local shapes, dtypes, gradients and arguments."""
    shapes = [local_shape(info.shape, layout, mesh) for info, layout in _pairs(operator, config)]
    shapes.append(local_shape(operator.output.shape, config.output, mesh))
    grads = "".join("g" if info.has_gradient else "-" for info in operator.input_info)
    plain = [argument for argument in operator.node.args if not isinstance(argument, fx.Node | list | tuple)]
    plain += [argument for argument in operator.node.args if operator.kind.startswith(("conv", "max_pool"))][2:]
    text = repr((shapes, grads, str(operator.output.dtype), [str(a) for a in plain], sorted(operator.node.kwargs)))
    return f"{operator.kind}:{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _pairs(operator: Operator, config: Configuration) -> Iterable:
    return zip(operator.input_info, config.inputs, strict=True)


def measure_operators(
    graph: Graph, cluster: Cluster, meshes: Sequence[tuple[int, ...]] | None = None, repeats: int = 5
) -> Cluster:
    """Run every operator of a graph at every local shape it may have, and return the cluster with the medians.

    Args:
        graph: Captured step.
        cluster: Where it will run; entries it already has are kept.
        meshes: Meshes to consider; all of the cluster when left out.
        repeats: Runs of each, the median counts.

    Returns:
        A cluster with more entries in ``operator_seconds``.

    Cost: operators that exist in many shapes take a second each on a CPU; repeated layers cost nothing.
    """
    from autopar.rules import configurations, rule_of

    found = dict(cluster.operator_seconds)
    for mesh in meshes or cluster.meshes():
        for operator in graph.operators:
            if operator.is_leaf or rule_of(operator.kind).is_view or operator.kind in ("add_", "getitem"):
                continue
            for config in configurations(operator, mesh):
                key = operator_key(operator, config, mesh)
                if key not in found:
                    found[key] = _measure(operator, config, mesh, repeats)
    return replace(cluster, operator_seconds=found)


def _measure(operator: Operator, config: Configuration, mesh: Sequence[int], repeats: int) -> float:
    from autopar.local_operators import LocalContext, run_operator

    context = LocalContext.alone(mesh)
    inputs = [_sample(operator, slot, config, mesh) for slot in range(len(operator.inputs))]
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        output = run_operator(operator, config, inputs, context)
        first: Any = output[0] if isinstance(output, list | tuple) else output
        if first.requires_grad:
            torch.autograd.grad(first, [x for x in inputs if x.requires_grad], torch.ones_like(first))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _sample(operator: Operator, slot: int, config: Configuration, mesh: Sequence[int]) -> Tensor:
    info = operator.input_info[slot]
    shape = local_shape(info.shape, config.inputs[slot], mesh)
    if not info.dtype.is_floating_point:
        return torch.zeros(shape, dtype=info.dtype)
    positive = operator.kind == "batch_norm" and slot == 4
    return (torch.rand(shape, dtype=info.dtype) + positive).requires_grad_(info.has_gradient)
