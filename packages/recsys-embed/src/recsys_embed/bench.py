"""Measures ways to train the same model on the same batches over the same links.

Systems: ``ours`` (duplicates removed, pre-fetched), ``no_prefetch`` (duplicates removed, exchanged when needed),
``all_to_all`` (every id fetched, every gradient row sent, no hot tier), ``torchrec`` (its ``table_wise`` sharding, when
installed). One job runs on every rank; the caller counts bytes on the links around it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from core_kernels.comm import Group
from core_kernels.interconnect import Interconnect
from core_kernels.ops import unique_relabel
from recsys_embed.collection import TieredEmbeddingBagCollection
from recsys_embed.data import ClickData, FieldSpec, make_clicks
from recsys_embed.data.clicks import ClickBatch
from recsys_embed.exchange import Request, RowSpace
from recsys_embed.kernels.rows import split_by_owner
from recsys_embed.models import make_model
from recsys_embed.optimizers import SGD
from recsys_embed.plan import Plan
from recsys_embed.planner import plan_tiers
from recsys_embed.prefetch import PrefetchPipeline
from recsys_embed.profile import AccessStats
from recsys_embed.training import load_clicks
from recsys_embed.work import WorkCosts

__all__ = [
    "CRITEO_CARDINALITIES",
    "SYSTEMS",
    "BenchJob",
    "bench_data",
    "bench_on_rank",
    "bench_plan",
    "compare_systems",
    "endless",
    "measure_dense",
    "own_steps",
]

SYSTEMS = ("ours", "no_prefetch", "all_to_all", "torchrec")

#: Distinct ids of the 26 fields of Criteo's display advertising challenge.
CRITEO_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True)
class BenchJob:
    """What to measure.

    Attributes:
        system: One of ``SYSTEMS``.
        dataset: ``"zipf"`` (26 fields with the cardinalities of Criteo's, at most ``zipf_rows``), ``"zipf-even"`` (26
            fields of ``zipf_rows`` rows: few ids repeat), ``"uniform"`` (those, all ids alike), or what ``train``
            takes.
        batch_size: Samples per rank.
        width: Width of rows.
        hidden: Widths of the model's hidden layers.
        steps: Steps measured, after ``warmup``.
        plan: Hot tier.
        zipf_rows: Most rows of a field of the synthetic data.
    """

    system: str
    dataset: str = "zipf"
    batch_size: int = 512
    width: int = 64
    hidden: tuple[int, ...] = (128, 64)
    steps: int = 12
    warmup: int = 3
    plan: Plan | None = None
    zipf_rows: int = 200_000


class _PlainSpace(RowSpace):
    """Asks for every id and returns a gradient row for every id."""

    def plan(self, places: Tensor, offsets: Tensor, weights: Tensor | None) -> Request:
        local = torch.arange(len(places))
        cold, none = torch.empty_like(places), torch.empty_like(places)
        counts = torch.empty(self.channels.now.size + 1, dtype=torch.int64)
        is_cold = torch.full((len(places),), -1, dtype=torch.int32)
        arrays = (local.numpy(), cold.numpy(), none.numpy(), counts.numpy())
        split_by_owner(places.numpy(), is_cold.numpy(), self.layout.bounds, *arrays)
        return Request(local, cold, none[:0], counts[:-1].tolist())

    def finish_gradients(self, request: Request, part: str) -> None:
        handle, slots, _ = request.pending.pop(part)
        rows = self.clock.wait("gradients", handle)[0]
        unique, local = unique_relabel(slots[:0], slots)
        bags = (unique[local], None, None, "sum")
        self.optimizer.update(self.weight, self.states, bags, rows, request.step + 1, request.lr)


class _PlainCollection(TieredEmbeddingBagCollection):
    """The baseline without removal of duplicates."""

    space_type = _PlainSpace


def bench_data(job: BenchJob) -> ClickData:
    """Return the samples; synthetic ones are 16 global batches of four ranks."""
    if job.dataset not in ("zipf", "zipf-even", "uniform"):
        return load_clicks(job.dataset)
    rows = [min(job.zipf_rows, n) if job.dataset == "zipf" else job.zipf_rows for n in CRITEO_CARDINALITIES]
    exponent = 0.0 if job.dataset == "uniform" else 1.05
    return make_clicks(job.batch_size * 64, [FieldSpec(f"C{i + 1}", n, exponent) for i, n in enumerate(rows)])


class _GivenRows(nn.Module):
    """Stands for a collection whose pooled rows are there already."""

    def __init__(self, data: ClickData, width: int):
        super().__init__()
        self.tables, self.features = data.tables(width), list(data.fields)

    def forward(self, values: Tensor) -> Any:
        return SimpleNamespace(values=lambda: values)


def measure_dense(group: Group, job: BenchJob, repeats: int = 6) -> tuple[float, int]:
    """Measure the model without its rows, on all ranks at once. Collective.

    Returns:
        Seconds of forward and backward, and bytes of its gradients.
    """
    data = bench_data(job)
    model = make_model("dlrm", _GivenRows(data, job.width), data.dense.shape[1], job.hidden)
    batch = next(iter(data.batches(job.batch_size, seed=3)))
    pooled = torch.randn(job.batch_size, len(data.fields) * job.width, requires_grad=True)
    seconds = []
    for _ in range(repeats):
        group.barrier("dense")
        begin = time.perf_counter()
        model(SimpleNamespace(dense=batch.dense, features=pooled)).sum().backward()
        seconds.append(time.perf_counter() - begin)
    own = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return group.all_reduce(own, "mean", tag="dense").item(), num_bytes


def compare_systems(rows: Sequence[dict[str, Any]], predicted_bytes: float | None) -> dict[str, float]:
    """Return what ours gains over the other systems that ran, medians over repeats.

    Returns:
        ``exposed_over_<system>`` and ``speed_over_<system>``: times as long, times as many samples per second;
        ``bytes_over_predicted``: interface bytes of ours over the prediction.
    """

    def middle(system: str, what: str) -> float:
        return statistics.median(r[what] for r in rows if r["system"] == system)

    systems = {r["system"] for r in rows}
    if "ours" not in systems:
        return {}
    found = {}
    for other in sorted(systems - {"ours"}):
        found[f"speed_over_{other}"] = middle(other, "step_seconds") / middle("ours", "step_seconds")
        if other != "torchrec":
            found[f"exposed_over_{other}"] = middle(other, "exposed_seconds") / middle("ours", "exposed_seconds")
    if predicted_bytes:
        found["bytes_over_predicted"] = middle("ours", "interface_bytes") / predicted_bytes
    return found


def endless(data: ClickData, job: BenchJob, rank: int, world_size: int) -> Iterator[ClickBatch]:
    """Yield full batches, shuffled anew in every epoch."""
    for epoch in itertools.count():
        for batch in data.batches(job.batch_size, rank, world_size, seed=1, epoch=epoch):
            if len(batch.labels) == job.batch_size:
                yield batch


def bench_plan(
    job: BenchJob,
    net: Interconnect,
    world_size: int,
    dense: tuple[float, int],
    hot: Any = "auto",
    prefetch: bool = True,
    work: WorkCosts | None = None,
) -> Plan:
    """Count accesses of other shuffles than those measured, and plan."""
    data = bench_data(job)
    batches = (b.features for b in data.batches(job.batch_size, seed=99))
    stats = AccessStats.from_batches(batches, data.tables(job.width))
    tables = data.tables(job.width)
    return plan_tiers(
        stats, net, tables, world_size, job.batch_size, SGD(0.05), hot=hot, dense_seconds=dense[0],
        dense_bytes=dense[1], prefetch=prefetch, work=work,
    )  # fmt: skip


def bench_on_rank(group: Group, job: BenchJob) -> dict[str, Any]:
    """Train some steps; return seconds, waiting and payload bytes per step of this rank. Collective."""
    torch.manual_seed(0)
    data = bench_data(job)
    batches = list(itertools.islice(endless(data, job, group.rank, group.size), job.warmup + job.steps))
    embeddings: TieredEmbeddingBagCollection | None = None
    model, before = nn.Module(), 0
    if job.system == "torchrec":
        from recsys_embed.torchrec_peer import torchrec_steps

        marks = torchrec_steps(group, job, data, batches)
    else:
        kind = _PlainCollection if job.system == "all_to_all" else TieredEmbeddingBagCollection
        plan = job.plan if job.system != "all_to_all" else None
        embeddings = kind(data.tables(job.width), plan, SGD(0.05), group)
        model = make_model("dlrm", embeddings, data.dense.shape[1], job.hidden)
        before = _sent(embeddings)
        marks = own_steps(embeddings, model, job, batches)
    seconds = [stop[0] - start[0] for start, stop in itertools.pairwise(marks[job.warmup :])]
    measured = (marks[-1][0] - marks[job.warmup][0]) / job.steps
    result = {"system": job.system, "step_seconds": measured, "median_step_seconds": statistics.median(seconds)}
    if embeddings is not None:
        first, last = marks[job.warmup][1], marks[-1][1]
        waited = {kind: (last[kind] - first.get(kind, 0.0)) / job.steps for kind in last}
        result["waited_seconds"] = waited
        result["exposed_seconds"] = sum(v for kind, v in waited.items() if kind != "dense")
        result["payload_bytes"] = (_sent(embeddings) - before) / (job.steps + job.warmup)
        elsewhere = (group.size - 1) / group.size
        result["dense_bytes"] = 2 * elsewhere * 4 * sum(p.numel() for p in model.parameters())
    return result


def _sent(embeddings: TieredEmbeddingBagCollection) -> int:
    channels = embeddings.channels
    return sum(channel.counters.sent() for channel in {channels.now, channels.ahead, channels.control})


def own_steps(
    embeddings: TieredEmbeddingBagCollection, model: nn.Module, job: BenchJob, batches: list[ClickBatch]
) -> list[tuple[float, dict[str, float]]]:
    """Train on batches with SGD; return the time, and the seconds waited so far, after every step. Collective."""
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.05), nn.BCEWithLogitsLoss()
    with PrefetchPipeline(model, optimizer, embeddings, enabled=job.system == "ours") as pipe:
        marks = [(time.perf_counter(), embeddings.clock.snapshot())]
        for batch in pipe(batches):
            optimizer.zero_grad()
            criterion(model(batch), batch.labels).backward()
            optimizer.step()
            marks.append((time.perf_counter(), embeddings.clock.snapshot()))
    return marks
