"""Training a click model over ranks: what ``recsys-embed train`` runs on each of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core_kernels.comm import Group
from core_kernels.console import progress, say
from core_kernels.interconnect import Interconnect
from recsys_embed.collection import TieredEmbeddingBagCollection
from recsys_embed.data import ClickData, FieldSpec, make_clicks, read_criteo_tsv, read_movielens
from recsys_embed.data.clicks import join_columns
from recsys_embed.errors import input_error
from recsys_embed.models import make_model
from recsys_embed.optimizers import make_optimizer
from recsys_embed.plan import Plan
from recsys_embed.planner import plan_tiers
from recsys_embed.prefetch import PrefetchPipeline
from recsys_embed.profile import AccessStats
from recsys_embed.work import WorkCosts

__all__ = ["TrainJob", "area_under_curve", "load_clicks", "make_plan", "train_on_rank"]


@dataclass(frozen=True)
class TrainJob:
    """What to train and how.

    Attributes:
        dataset: ``movielens``, ``synthetic``, ``criteo:PATH`` (text or ``.npz``) or a folder of ``convert``.
        model: Name of a model.
        width: Width of the rows.
        batch_size: Samples per rank.
        epochs: Passes over the data.
        optimizer: Name of the row optimiser.
        learning_rate: Of rows and dense parameters.
        hot: Size of the hot tier, or ``"auto"``.
        prefetch: Whether rows are fetched ahead.
        deterministic: Bitwise independent of everything above.
        interconnect: Path of a measured one, or name of a preset.
        seed: Of initial values and shuffling.
        work: Path of measured :class:`recsys_embed.WorkCosts`; guessed from the interconnect when empty.
    """

    dataset: str = "movielens"
    model: str = "dlrm"
    width: int = 16
    batch_size: int = 512
    epochs: int = 2
    optimizer: str = "rowwise_adagrad"
    learning_rate: float = 0.05
    hot: str | int = "auto"
    prefetch: bool = True
    deterministic: bool = False
    interconnect: str = "loopback-cpu"
    seed: int = 0
    work: str = ""


def load_clicks(dataset: str) -> ClickData:
    """Return a data set by its name; see :class:`TrainJob`.

    Raises:
        InputError: An unknown name.
    """
    if dataset == "movielens":
        return read_movielens().as_clicks()
    if dataset == "synthetic":
        return make_clicks(20_000, [FieldSpec(f"f{i}", 1000 * (i + 1)) for i in range(8)])
    kind, _, path = dataset.partition(":")
    if kind == "criteo" and path.endswith(".npz"):
        return read_criteo_npz(path)
    if kind == "criteo" and path:
        return read_criteo_tsv(path)
    if kind == "folder" and path:
        return ClickData.load(path)
    expected = "movielens, synthetic, criteo:PATH or folder:PATH"
    raise input_error("dataset", dataset, expected, "correct the name")


def read_criteo_npz(path: str) -> ClickData:
    """Read arrays ``dense``, ``sparse`` (ids of any numbering) and ``labels``; ids are numbered per field."""
    with np.load(path, allow_pickle=False) as file:
        dense, ids, labels = (file[name] for name in ("dense", "sparse", "labels"))
    fields = [f"C{i + 1}" for i in range(ids.shape[1])]
    return join_columns(list(dense.T), list(ids.T), labels.reshape(-1), fields, min_count=1)


def find_interconnect(name: str) -> Interconnect:
    """Return a saved interconnect, or a preset."""
    return Interconnect.load(name) if name.endswith(".json") else Interconnect.preset(name)


def make_plan(job: TrainJob, data: ClickData, world_size: int) -> Plan:
    """Count the accesses of some batches and plan."""
    tables = data.tables(job.width)
    batches = (b.features for b in data.batches(job.batch_size, seed=job.seed))
    stats = AccessStats.from_batches(batches, tables)
    hot: Any = job.hot if job.hot == "auto" else float(job.hot) if "." in str(job.hot) else int(job.hot)
    optimizer = make_optimizer(job.optimizer, job.learning_rate)
    net = find_interconnect(job.interconnect)
    work = WorkCosts.load(job.work) if job.work else None
    return plan_tiers(
        stats, net, tables, world_size, job.batch_size, optimizer, hot=hot, prefetch=job.prefetch, work=work
    )


def train_on_rank(group: Group, job: TrainJob) -> dict[str, Any]:
    """Train on one rank; every rank returns the same result. Collective."""
    torch.manual_seed(job.seed)
    training, test = load_clicks(job.dataset).split(seed=job.seed)
    plan = make_plan(job, training, group.size)
    optimizer = make_optimizer(job.optimizer, job.learning_rate)
    tables = training.tables(job.width)
    emb = TieredEmbeddingBagCollection(tables, plan, optimizer, group, deterministic=job.deterministic, seed=job.seed)
    model = make_model(job.model, emb, training.dense.shape[1])
    dense_optimizer = torch.optim.Adagrad(model.parameters(), lr=job.learning_rate)
    criterion, epochs = nn.BCEWithLogitsLoss(), []
    if group.rank == 0:
        say(plan.explain())
    for epoch in range(job.epochs):
        begin, losses = time.perf_counter(), []
        loader = training.batches(job.batch_size, group.rank, group.size, job.seed, epoch)
        num_steps = len(training) // (job.batch_size * group.size) + 1
        with (
            PrefetchPipeline(model, dense_optimizer, emb, enabled=job.prefetch) as pipe,
            progress(f"epoch {epoch + 1}", num_steps if group.rank == 0 else None) as advance,
        ):
            for batch in pipe(loader):
                dense_optimizer.zero_grad()
                loss = criterion(model(batch), batch.labels)
                loss.backward()
                dense_optimizer.step()
                losses.append(loss.detach())
                advance()
        seconds = time.perf_counter() - begin
        mean_loss = group.all_reduce(torch.stack(losses).mean(), "mean", tag="loss").item()
        auc = evaluate(group, model, test, job.batch_size)
        epochs.append({"loss": mean_loss, "auc": auc, "seconds": seconds})
        if group.rank == 0:
            say(f"epoch {epoch + 1}: loss {mean_loss:.4f}, AUC {auc:.4f}, {seconds:.1f} s")
    waited = emb.clock.snapshot()
    return {"epochs": epochs, "auc": epochs[-1]["auc"], "hot_rows": plan.num_hot_rows, "waited_seconds": waited}


@torch.no_grad()
def evaluate(group: Group, model: nn.Module, data: ClickData, batch_size: int) -> float:
    """Return the area under the curve over all ranks. Collective."""
    model.eval()
    scores, labels = [], []
    for batch in data.batches(batch_size, group.rank, group.size):
        scores.append(model(batch))
        labels.append(batch.labels)
    model.train()
    everything = group.all_gather_v(torch.stack([torch.cat(scores), torch.cat(labels)], 1), tag="evaluate")[0]
    return area_under_curve(everything[:, 0], everything[:, 1])


def area_under_curve(scores: Tensor, labels: Tensor | Sequence[float]) -> float:
    """Return the area under the ROC curve: the share of (click, no click) pairs in order, ties count half.

    >>> area_under_curve(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    0.75
    """
    labels = torch.as_tensor(labels, dtype=torch.float64)
    _, inverse, counts = scores.double().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    positives = labels.sum()
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    return float((ranks[labels > 0].sum() - positives * (positives + 1) / 2) / (positives * negatives))
