"""Full-graph training: every rank owns a part, every epoch is one step over all vertices.

The loss is the mean over all training vertices of the whole graph: each rank sums over its own and divides by the
global number, and gradients of parameters are summed over ranks in rank order. Loss and gradients are therefore
those of one process up to the order of additions.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels.comm import Group
from core_kernels.datasets import GraphData
from core_kernels.graph import Graph
from gnn_comm.communicator import Communicator
from gnn_comm.layers import FullGraphModel, build_model
from gnn_comm.partitioning import Partition
from gnn_comm.plan import Plan

__all__ = ["TrainResult", "TrainSettings", "global_loss", "reduce_gradients", "train", "train_alone", "train_rank"]


@dataclass(frozen=True)
class TrainSettings:
    """What to train.

    Args:
        model: One of :data:`gnn_comm.layers.MODELS`.
        hidden: Width between layers.
        num_layers: Number of layers.
        num_epochs: Steps over the whole graph.
        learning_rate: Of Adam.
        seed: Of the parameters.
        dtype: ``"float32"`` or ``"float64"``.
    """

    model: str = "gcn"
    hidden: int = 64
    num_layers: int = 2
    num_epochs: int = 10
    learning_rate: float = 0.01
    seed: int = 0
    dtype: str = "float32"

    def build(self, data: GraphData) -> FullGraphModel:
        """Build the model with the parameters this seed gives on every rank."""
        torch.manual_seed(self.seed)
        model = build_model(self.model, data.features.shape[1], self.hidden, data.num_classes, self.num_layers)
        return model.to(getattr(torch, self.dtype))


@dataclass(frozen=True)
class TrainResult:
    """What training did.

    Attributes:
        losses: Loss of every epoch.
        epoch_seconds: Seconds of every epoch, slowest rank.
        exchange_seconds: Seconds inside exchanges of every epoch, slowest rank; overlapped work included.
        sent_bytes: Bytes of rows and gradients all ranks sent in all epochs.
        accuracy: Share of test vertices classified right at the end.
        planner: The plan's planner.
    """

    losses: list[float]
    epoch_seconds: list[float]
    exchange_seconds: list[float]
    sent_bytes: int
    accuracy: float
    planner: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return asdict(self)


def global_loss(logits: Tensor, labels: Tensor, mask: Tensor, num_train: int) -> Tensor:
    """Return this rank's share of the mean loss over all training vertices."""
    return F.cross_entropy(logits[mask], labels[mask], reduction="sum") / num_train


def reduce_gradients(model: nn.Module, group: Group) -> None:
    """Sum the gradients of all parameters over ranks, in rank order.

    Collective: all ranks.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    flat = group.all_reduce(flat, tag="gnn_comm.parameters", ordered=True)
    for parameter, block in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = block.view_as(parameter).clone()


def train(communicator: Communicator, data: GraphData, settings: TrainSettings) -> TrainResult:
    """Train on this rank's part.

    Args:
        communicator: The exchange.
        data: The whole data, in the user's numbering; each rank reads its rows.
        settings: What to train.

    Returns:
        The same result on every rank.

    Collective: all ranks.
    """
    group, dtype = communicator.group, getattr(torch, settings.dtype)
    model = settings.build(data).to(group.device)
    x = communicator.dispatch(data.features).to(dtype)
    labels = communicator.dispatch(data.labels, own_only=True)
    masks = {name: communicator.dispatch(getattr(data, name), own_only=True) for name in ("train_mask", "test_mask")}
    num_train = max(int(data.train_mask.sum()), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    before = communicator.sent_bytes()
    losses, seconds, exchanged = [], [], []
    for _ in range(settings.num_epochs):
        group.barrier()
        start, spent = time.perf_counter(), communicator.exchange_seconds
        optimizer.zero_grad()
        logits = model(communicator, x)[: communicator.num_local]
        loss = global_loss(logits, labels, masks["train_mask"], num_train)
        loss.backward()
        reduce_gradients(model, group)
        optimizer.step()
        took = torch.tensor([time.perf_counter() - start, communicator.exchange_seconds - spent], dtype=torch.float64)
        losses.append(group.all_reduce(loss.detach().double(), ordered=True).item())
        slowest = group.all_reduce(took.to(group.device), op="max")
        seconds.append(slowest[0].item())
        exchanged.append(slowest[1].item())
    with torch.no_grad():
        right = model(communicator, x)[: communicator.num_local].argmax(dim=1) == labels
    counts = torch.stack([(right & masks["test_mask"]).sum(), masks["test_mask"].sum()])
    sent = torch.tensor(communicator.sent_bytes() - before, device=group.device)
    totals = group.all_reduce(torch.cat([counts, sent[None]]))
    accuracy = totals[0].item() / max(totals[1].item(), 1)
    return TrainResult(losses, seconds, exchanged, int(totals[2]), accuracy, communicator.plan.planner)


def train_alone(graph: Graph, data: GraphData, settings: TrainSettings) -> tuple[list[float], list[Tensor]]:
    """Train in one process without any exchange; return losses and the gradients of the last epoch."""
    model, dtype = settings.build(data), getattr(torch, settings.dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    num_train, losses = max(int(data.train_mask.sum()), 1), []
    for _ in range(settings.num_epochs):
        optimizer.zero_grad()
        logits = model(graph, data.features.to(dtype))
        loss = global_loss(logits, data.labels, data.train_mask, num_train)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in model.parameters()]


def train_rank(group: Group, folder: str, plan_path: str, data: GraphData, settings: TrainSettings) -> TrainResult:
    """Load partition and plan from files and train: the function ranks start with."""
    split = Partition.load(Path(folder))
    communicator = Communicator(Plan.load(plan_path, split), group, validate=group.rank == 0)
    try:
        return train(communicator, data, settings)
    finally:
        communicator.close()
