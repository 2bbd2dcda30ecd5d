"""Full-graph training: every rank owns a part, every epoch is one step over all vertices.

The loss is the mean over all training vertices of the whole graph: each rank sums over its own and divides by the
global number, and gradients of parameters are summed over ranks in rank order. Loss and gradients are therefore
those of one process up to the order of additions.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_kernels.comm import Group
from core_kernels.datasets import GraphData
from core_kernels.graph import Graph
from gnn_comm.communicator import Communicator
from gnn_comm.errors import GnnCommArgumentError
from gnn_comm.gradients import GradientReducer
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
        quantize_rows: Bits of exchanged rows, 8 or 4; ``None`` sends them exactly.
        compress_gradients: ``"s2"`` or ``"casq"`` for the gradients of parameters; ``None`` sums them exactly.
    """

    model: str = "gcn"
    hidden: int = 64
    num_layers: int = 2
    num_epochs: int = 10
    learning_rate: float = 0.01
    seed: int = 0
    dtype: str = "float32"
    quantize_rows: int | None = None
    compress_gradients: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "num_layers", "num_epochs"):
            if getattr(self, name) < 1:
                raise GnnCommArgumentError(f"{name}={getattr(self, name)} is not valid; expected at least 1; raise it")
        if self.dtype not in ("float32", "float64"):
            raise GnnCommArgumentError(f"dtype={self.dtype!r}: expected 'float32' or 'float64'; choose one of them")
        if not 0 < self.learning_rate < inf:
            raise GnnCommArgumentError(f"learning_rate={self.learning_rate}: expected above 0; pass such as 0.01")

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
        sent_bytes: Bytes of rows and their gradients all ranks sent in all epochs.
        parameter_bytes: Bytes all ranks sent to sum the gradients of parameters.
        accuracy: Share of test vertices classified right at the end.
        planner: The plan's planner.
    """

    losses: list[float]
    epoch_seconds: list[float]
    exchange_seconds: list[float]
    sent_bytes: int
    accuracy: float
    planner: str
    parameter_bytes: int = 0

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
    GradientReducer(group).reduce(model)


def train(communicator: Communicator, data: GraphData, settings: TrainSettings) -> TrainResult:
    """Train on this rank's part.

    Args:
        communicator: The exchange.
        data: The whole data, in the user's numbering; each rank reads its rows.
        settings: What to train.

    Returns:
        The same result on every rank.

    Raises:
        GnnCommArgumentError: The data lack features, labels or a mask.

    Collective: all ranks.
    """
    _check_complete(data, ("features", "labels", "train_mask", "test_mask"))
    group, dtype = communicator.group, getattr(torch, settings.dtype)
    model = settings.build(data).to(group.device)
    x = communicator.dispatch(data.features).to(dtype)
    labels = communicator.dispatch(data.labels, own_only=True)
    masks = {name: communicator.dispatch(getattr(data, name), own_only=True) for name in ("train_mask", "test_mask")}
    num_train = max(int(data.train_mask.sum()), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    reducer = GradientReducer(group, settings.compress_gradients, settings.seed)
    before, before_parameters = communicator.sent_bytes(), reducer.sent_bytes()
    losses, seconds, exchanged = [], [], []
    for _ in range(settings.num_epochs):
        group.barrier()
        start, spent = time.perf_counter(), communicator.exchange_seconds
        optimizer.zero_grad()
        logits = model(communicator, x)[: communicator.num_local]
        loss = global_loss(logits, labels, masks["train_mask"], num_train)
        loss.backward()
        reducer.reduce(model)
        optimizer.step()
        took = torch.tensor([time.perf_counter() - start, communicator.exchange_seconds - spent], dtype=torch.float64)
        losses.append(group.all_reduce(loss.detach().double(), ordered=True).item())
        slowest = group.all_reduce(took.to(group.device), op="max")
        seconds.append(slowest[0].item())
        exchanged.append(slowest[1].item())
    with torch.no_grad():
        right = model(communicator, x)[: communicator.num_local].argmax(dim=1) == labels
    counts = torch.stack([(right & masks["test_mask"]).sum(), masks["test_mask"].sum()])
    sent = torch.tensor([communicator.sent_bytes() - before, reducer.sent_bytes() - before_parameters])
    totals = group.all_reduce(torch.cat([counts, sent.to(group.device)]))
    accuracy = totals[0].item() / max(totals[1].item(), 1)
    planner = communicator.plan.planner
    return TrainResult(losses, seconds, exchanged, int(totals[2]), accuracy, planner, int(totals[3]))


def train_alone(graph: Graph, data: GraphData, settings: TrainSettings) -> tuple[list[float], list[Tensor]]:
    """Train in one process without any exchange; return losses and the gradients of the last epoch."""
    _check_complete(data, ("features", "labels", "train_mask"))
    model, dtype = settings.build(data), getattr(torch, settings.dtype)
    features, labels, mask = data.features, data.labels, data.train_mask
    assert labels is not None  # both were checked above
    assert mask is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    num_train, losses = max(int(mask.sum()), 1), []
    for _ in range(settings.num_epochs):
        optimizer.zero_grad()
        logits = model(graph, features.to(dtype))
        loss = global_loss(logits, labels, mask, num_train)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in model.parameters()]


def _check_complete(data: GraphData, needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if getattr(data, name) is None]
    if missing:
        raise GnnCommArgumentError(
            f"data set {data.name!r} has no {', no '.join(missing)}; expected {', '.join(needed)} to train on; "
            "complete it"
        )


def train_rank(group: Group, folder: str, plan_path: str, data: GraphData, settings: TrainSettings) -> TrainResult:
    """Load partition and plan from files and train: the function ranks start with."""
    split = Partition.load(Path(folder))
    made = Plan.load(plan_path, split)
    communicator = Communicator(made, group, validate=group.rank == 0, quantize_bits=settings.quantize_rows)
    try:
        return train(communicator, data, settings)
    finally:
        communicator.close()
