"""Prove on real ranks that an exchange changes nothing: rows, gradients, and one training step of a model.

Rows: every gathered row must equal the row of the whole table bit for bit. Gradients: integers in float64 add up
exactly, so the sum at the owner must be the exact count, and repeated backward passes must agree bit for bit. Model:
loss and parameter gradients are compared with one process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_kernels import launch
from core_kernels.comm import Group
from core_kernels.datasets import GraphData
from core_kernels.graph import Graph
from gnn_comm.communicator import Communicator
from gnn_comm.partitioning import Partition
from gnn_comm.plan import Plan
from gnn_comm.training import TrainSettings, global_loss, reduce_gradients, train_alone

__all__ = ["model_gradients", "relative_difference", "verify_exchange", "verify_model", "verify_plan"]

TOLERANCE = {"float32": 1e-6, "float64": 1e-10}


def verify_exchange(communicator: Communicator, width: int = 5, repeats: int = 3) -> dict[str, Any]:
    """Compare gathered rows and returned gradients with the whole table.

    Args:
        communicator: The exchange.
        width: Values per row.
        repeats: Backward passes to compare bit for bit.

    Returns:
        ``rows_equal``, ``gradients_exact``, ``backward_repeatable`` over all ranks.

    Collective: all ranks.
    """
    split, group, layout = communicator.plan._attached("verify"), communicator.group, communicator.layout
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(split.graph.num_nodes, width, dtype=torch.float64, generator=generator)
    x = communicator.dispatch(table).requires_grad_()
    rows = communicator.graph_all_gather(x)
    held = split.book.to_old(torch.from_numpy(layout.global_rows))
    rows_equal = torch.equal(rows.detach().cpu(), table[held])
    gradients = []
    for _ in range(repeats):
        weights = torch.full_like(rows, group.rank + 1.0)
        gradients.append(torch.autograd.grad(communicator.graph_all_gather(x), x, weights)[0])
    readers = np.zeros(split.graph.num_nodes)
    for device in range(split.num_parts):
        readers[split.offsets[device] : split.offsets[device + 1]] += device + 1
        if not layout.is_replicated:
            readers[communicator.plan.needed_rows(device)] += device + 1
    expected = torch.from_numpy(readers[layout.begin : layout.end])
    own = gradients[0][: layout.num_local, :1].flatten().cpu() if width else expected
    noisy = torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(rows.device)
    twice = [torch.autograd.grad(communicator.graph_all_gather(x), x, noisy)[0] for _ in range(repeats)]
    checks = {
        "rows_equal": rows_equal,
        "gradients_exact": torch.equal(own, expected),
        "backward_repeatable": all(torch.equal(twice[0], other) for other in twice[1:]),
    }
    flags = torch.tensor(list(checks.values()), dtype=torch.int32, device=group.device)
    return dict(zip(checks, (bool(v) for v in group.all_reduce(flags, op="min")), strict=True))


def model_gradients(communicator: Communicator, data: GraphData, settings: TrainSettings) -> tuple[float, list[Tensor]]:
    """Return loss and parameter gradients of the first step over all ranks.

    Collective: all ranks.
    """
    dtype = getattr(torch, settings.dtype)
    model = settings.build(data).to(communicator.group.device)
    x = communicator.dispatch(data.features).to(dtype)
    labels = communicator.dispatch(data.labels, own_only=True)
    mask = communicator.dispatch(data.train_mask, own_only=True)
    logits = model(communicator, x)[: communicator.num_local]
    loss = global_loss(logits, labels, mask, max(int(data.train_mask.sum()), 1))
    loss.backward()
    reduce_gradients(model, communicator.group)
    total = communicator.group.all_reduce(loss.detach().double(), ordered=True).item()
    return total, [p.grad.cpu() for p in model.parameters()]


def verify_model(communicator: Communicator, graph: Graph, data: GraphData, settings: TrainSettings) -> dict[str, Any]:
    """Compare the first step of a model with one process.

    Returns:
        ``loss_difference`` and ``gradient_difference``, relative to the largest value, and ``within_tolerance``.

    Collective: all ranks.
    """
    loss, gradients = model_gradients(communicator, data, settings)
    one_step = TrainSettings(**{**settings.__dict__, "num_epochs": 1})
    losses, expected = train_alone(graph, data, one_step)
    worst = max(relative_difference(a, b) for a, b in zip(gradients, expected, strict=True))
    return {
        "loss_difference": abs(loss - losses[0]) / max(abs(losses[0]), 1e-300),
        "gradient_difference": worst,
        "within_tolerance": worst <= TOLERANCE[settings.dtype],
    }


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference over the largest value of ``b``."""
    scale = b.abs().max().item() if b.numel() else 0.0
    return (a - b).abs().max().item() / scale if scale else float((a != b).any())


def verify_plan(plan: Plan, split: Partition, timeout_seconds: float = 60.0) -> dict[str, Any]:
    """Check a plan by replay, then run it on local ranks.

    Returns:
        The flags of :func:`verify_exchange`.

    Raises:
        PlanCheckError: The replay found faults.
    """
    plan.attach(split).validate()
    with tempfile.TemporaryDirectory() as folder:
        split.save(folder)
        plan.save(Path(folder) / "plan.npz")
        return launch.run_ranks(_verify_rank, plan.num_devices, folder, timeout_seconds=timeout_seconds)[0]


def _verify_rank(group: Group, folder: str) -> dict[str, Any]:
    split = Partition.load(folder)
    communicator = Communicator(Plan.load(Path(folder) / "plan.npz", split), group, validate=False)
    try:
        return verify_exchange(communicator)
    finally:
        communicator.close()
