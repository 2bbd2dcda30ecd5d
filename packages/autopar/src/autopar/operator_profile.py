"""Measured operators: what one operator of given local shapes really takes on this device.

A roofline says little about a small convolution on a CPU. Here every operator that a search may meet is run once per
distinct local shape, forward and backward, on tensors of that shape; the medians go into a cluster's
``operator_seconds`` and take the place of the estimate. Operators of repeated layers share one entry.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autopar.graph import Graph, Operator
from autopar.placement import local_shape

if TYPE_CHECKING:
    from autopar.cluster import Cluster
    from autopar.rules import Configuration
    from core_kernels.comm import Group

__all__ = ["measure_operators", "operator_key", "update_key"]


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


def update_key(optimizer: str, stored_bytes: int) -> str:
    """Return the name under which the update of a parameter of this size is kept."""
    return f"update:{optimizer}:{stored_bytes}"


def measure_operators(
    graph: Graph,
    cluster: Cluster,
    meshes: Sequence[tuple[int, ...]] | None = None,
    repeats: int = 5,
    group: Group | None = None,
) -> Cluster:
    """Run every operator of a graph, and every update of a parameter, at every local shape it may have.

    Args:
        graph: Captured step.
        cluster: Where it will run; entries it already has are kept.
        meshes: Meshes to consider; all of the cluster when left out.
        repeats: Runs of each, the median counts.
        group: Ranks that measure at the same time, because ranks of one machine share its cores and its memory; the
            slowest rank's median counts. Alone when left out.

    Returns:
        The cluster with the medians in ``operator_seconds``.

    Cost: operators that exist in many shapes take a second each on a CPU; repeated layers cost nothing.

    Collective: all ranks of ``group``, with the same graph and cluster.
    """
    from autopar.rules import configurations, rule_of

    found = dict(cluster.operator_seconds)
    new: dict[str, float] = {}

    def measure(key: str, run: Callable[[], float]) -> None:
        if key not in found and key not in new:
            if group is not None:
                group.barrier("calibrate")
            new[key] = run()

    for mesh in meshes or cluster.meshes():
        for operator in graph.operators:
            if operator.kind == "parameter":
                whole, dtype = operator.output.num_bytes, operator.output.dtype
                for count in {math.prod(axes) for n in range(len(mesh) + 1) for axes in combinations(mesh, n)}:
                    size = whole // count
                    key = update_key(graph.optimizer, size)
                    measure(key, lambda size=size, dtype=dtype: _measure_update(graph.optimizer, size, dtype, repeats))
            if operator.is_leaf or rule_of(operator.kind).is_view or operator.kind in ("add_", "getitem"):
                continue
            for config in configurations(operator, mesh):
                key = operator_key(operator, config, mesh)
                measure(key, lambda o=operator, c=config, m=mesh: _measure(o, c, m, repeats))
    if group is not None and new:
        medians = torch.tensor(list(new.values()), dtype=torch.float64)
        new = dict(zip(new, group.all_reduce(medians, "max", tag="calibrate").tolist(), strict=True))
    return replace(cluster, operator_seconds=found | new)


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


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def _measure_update(optimizer: str, stored_bytes: int, dtype: torch.dtype, repeats: int) -> float:
    parameter = torch.nn.Parameter(torch.rand(max(1, stored_bytes // dtype.itemsize), dtype=dtype))
    parameter.grad = torch.rand_like(parameter)
    update = _OPTIMIZERS[optimizer]([parameter], lr=1e-3)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        update.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _sample(operator: Operator, slot: int, config: Configuration, mesh: Sequence[int]) -> Tensor:
    info = operator.input_info[slot]
    shape = local_shape(info.shape, config.inputs[slot], mesh)
    if not info.dtype.is_floating_point:
        return torch.zeros(shape, dtype=info.dtype)
    positive = operator.kind == "batch_norm" and slot == 4
    return (torch.rand(shape, dtype=info.dtype) + positive).requires_grad_(info.has_gradient)
