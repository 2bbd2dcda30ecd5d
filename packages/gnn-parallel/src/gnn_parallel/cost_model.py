"""From counts to the seconds of a step.

Symbols, per step: of rank r, e_r seconds of preparing a batch (sampling, reading, aggregating raw rows) and l_r of the
rest (projecting, upper layers) when it has a core to itself, c_r = e_r + l_r; p seconds of the collectives that prepare
a batch (ids, features), a of those of activations and gradients; x_r processor time of moving messages; k >= 1 the
factor by which computing slows down when all ranks of this machine compute at once, measured. Ranks wait for each other
once a step, so it takes the *maximum over ranks of the sum*; while ranks wait for the network they leave the cores to
others; and where coming batches are prepared in the background, the two halves of a step share only link and cores::

    T = max(max_r c_r + p + a,  k mean_r (c_r + x_r))                                      one after the other
    T = max(max_r e_r + p,  max_r l_r + a,  p + a,  k mean_r (c_r + x_r))                  in the background

c_r is counted work times measured rates; p and a price every collective by the most bytes that leave or enter one rank,
divided over the collective's calls, on the measured interconnect: exchanges on the ranks of a host, the gradient
all-reduce on all ranks. A step whose rows lie on disk adds their bytes times the measured rate of the disk to c_r.

Source: APT (PPoPP 2025), section on cost models. Where we differ: compute and id shuffle are counted, every constant is
measured, maxima are taken of sums instead of sums of maxima, and shared cores are modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core_kernels.interconnect import Interconnect
from gnn_parallel.counts import StepCounts
from gnn_parallel.traffic import LayerShape, Traffic, count_traffic

__all__ = ["Price", "Prices", "Rates", "StepSeconds", "estimate_step_seconds"]


@dataclass(frozen=True)
class Rates:
    """Measured speed of this machine on this workload.

    Attributes:
        sample_seconds_per_edge: Drawing an edge and relabelling it.
        read_seconds_per_byte: Reading a feature byte of an edge and aggregating it.
        project_seconds_per_flop: A floating-point operation of the projections, forward and backward.
        row_seconds_per_byte: Copying an activation byte in or out of a message.
        split_seconds_per_edge: Regrouping an edge by the owner of its source.
        upper_seconds_per_step: Upper layers, loss, optimizer, and what else a step of one rank takes.
        disk_seconds_per_byte: Reading a feature byte from disk.
        contention: k, of the ranks that measured together.
        exchange_seconds_per_byte: Processor time per byte that leaves or enters a rank.
        call_seconds: Processor time of a collective of no size.
    """

    sample_seconds_per_edge: float
    read_seconds_per_byte: float
    project_seconds_per_flop: float
    row_seconds_per_byte: float
    split_seconds_per_edge: float
    upper_seconds_per_step: float
    disk_seconds_per_byte: float = 0.0
    contention: float = 1.0
    exchange_seconds_per_byte: float = 0.0
    call_seconds: float = 0.0

    @classmethod
    def free(cls) -> Rates:
        """Return rates under which work costs nothing."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @classmethod
    def of(cls, interconnect: Interconnect, upper_seconds_per_step: float = 0.0) -> Rates:
        """Return the rates of a machine that is not at hand, from its measured or assumed kernel rates.

        Args:
            interconnect: With rates.
            upper_seconds_per_step: What a step takes besides its input layer; the same for all strategies.
        """
        relabel = 1 / interconnect.rate("relabel_ids_per_second")
        return cls(
            sample_seconds_per_edge=1 / interconnect.rate("sample_edges_per_second") + relabel,
            read_seconds_per_byte=1 / interconnect.rate("spmm_bytes_per_second"),
            project_seconds_per_flop=1 / interconnect.rate("matmul_flops_per_second"),
            row_seconds_per_byte=1 / interconnect.rate("gather_bytes_per_second"),
            split_seconds_per_edge=relabel,
            upper_seconds_per_step=upper_seconds_per_step,
        )

    def shared_by(self, num_ranks: int, num_measured: int) -> Rates:
        """Return the rates when fewer ranks share the cores: k grows evenly with every rank after the first."""
        share = (num_ranks - 1) / (num_measured - 1) if num_measured > 1 else 0.0
        return replace(self, contention=1.0 + (self.contention - 1.0) * share)


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of a step by term, of the rank that takes longest; ``link`` of them, all collectives take."""

    sample: float
    load: float
    shuffle: float
    compute: float
    reduce: float
    link: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the terms."""
        return self.sample + self.load + self.shuffle + self.compute + self.reduce


Price = Callable[[str, float], float]
"""From a collective's name, and the most bytes that leave or enter one rank (all_reduce: of the tensor), to seconds."""


def _nothing(collective: str, num_bytes: float) -> float:
    return 0.0


@dataclass(frozen=True)
class Prices:
    """Prices of collectives by who takes part.

    Attributes:
        inside: Among the ranks of a host.
        whole: Among all ranks.
        across: Among the ranks with one number, one per host.
    """

    inside: Price = _nothing
    whole: Price = _nothing
    across: Price = _nothing


def estimate_step_seconds(
    strategy: str, counts: StepCounts, shape: LayerShape, rates: Rates, prices: Prices, is_early: bool = False
) -> StepSeconds:
    """Predict the seconds of a step.

    Args:
        strategy: One of the four.
        counts: Counts of a step, or their average.
        shape: The layer.
        rates: Measured speeds.
        prices: Prices of collectives.
        is_early: Whether coming batches are prepared in the background.
    """
    work = _work(strategy, counts, shape)
    traffic = count_traffic(strategy, counts, shape)
    sample = (counts.upper_edges + work.sampled_edges) * rates.sample_seconds_per_edge
    sample = sample + work.split_edges * rates.split_seconds_per_edge
    load = work.read_bytes * rates.read_seconds_per_byte + work.disk_bytes * rates.disk_seconds_per_byte
    moved = traffic.sent["activations"] + traffic.sent["activation_gradients"]
    compute = (
        work.flops * rates.project_seconds_per_flop + moved * rates.row_seconds_per_byte + rates.upper_seconds_per_step
    )
    fetch, ids, activations = _exchange_seconds(traffic, work.calls, prices.inside)
    reduce = _reduce_seconds(strategy, counts, shape, prices)
    messages = _message_seconds(traffic, work, strategy, shape, rates)
    link = fetch + ids + activations + reduce
    crowded = rates.contention * float((sample + load + compute + messages).mean())
    if not is_early:
        slowest = int((sample + load + compute).argmax())
        parts = (float(sample[slowest]), float(load[slowest]) + fetch, ids + activations, float(compute[slowest]))
        return StepSeconds(*parts[:3], parts[3] + max(0.0, crowded - sum(parts) - reduce), reduce, link)
    slowest, late = int((sample + load).argmax()), float(compute.max()) + activations + reduce
    early = float((sample + load)[slowest]) + fetch + ids
    waited = max(0.0, early - late, link - late)
    share = waited / early if early else 0.0
    crowding = max(0.0, crowded - late - waited)
    return StepSeconds(
        float(sample[slowest]) * share,
        (float(load[slowest]) + fetch) * share,
        ids * share + activations,
        float(compute.max()) + crowding,
        reduce,
        link,
    )


def _message_seconds(traffic: Traffic, work: _Work, strategy: str, shape: LayerShape, rates: Rates) -> Tensor:
    """Return the processor time each rank needs to move its messages."""
    exchanged = torch.stack([*traffic.sent.values(), *traffic.received.values()]).sum(0)
    num_ranks = len(exchanged)
    if num_ranks == 1:
        return exchanged
    reduced = shape.reduced_elements(strategy) * shape.element_bytes
    num_calls = 1 + sum(number for _, number in work.calls.values())
    exchanged = exchanged + 4.0 * reduced * (num_ranks - 1) / num_ranks  # a ring, in and out
    return exchanged * rates.exchange_seconds_per_byte + num_calls * rates.call_seconds


def _exchange_seconds(traffic: Traffic, calls: dict[str, tuple[str, int]], price: Price) -> tuple[float, float, float]:
    """Return the seconds of fetching features, of ids, and of activations with their gradients."""
    seconds = {"features": 0.0, "ids": 0.0, "activations": 0.0}
    kinds = {"sizes": "ids", "activation_gradients": "activations"}
    if traffic.peers:
        for tag, (collective, num_calls) in calls.items():
            busiest = max(float(traffic.sent[tag].max()), float(traffic.received[tag].max()))
            seconds[kinds.get(tag, tag)] += num_calls * price(collective, busiest / num_calls)
    return seconds["features"], seconds["ids"], seconds["activations"]


def _reduce_seconds(strategy: str, counts: StepCounts, shape: LayerShape, prices: Prices) -> float:
    num_ranks = len(counts.seeds)
    if num_ranks == 1:
        return 0.0
    seconds = prices.whole("all_reduce", shape.reduced_elements(strategy) * shape.element_bytes)
    if strategy == "nfp" and shape.num_hosts > 1:
        # The groups of all ranks of a host share its link.
        ranks_per_host = num_ranks // shape.num_hosts
        elements = shape.column_elements(0, ranks_per_host) * ranks_per_host
        seconds += prices.across("all_reduce", elements * shape.element_bytes)
    return seconds


@dataclass
class _Work:
    """What a rank computes in a step, ``[W]`` each, and which collectives a step takes how often, per tag."""

    sampled_edges: Tensor
    read_bytes: Tensor
    disk_bytes: Tensor
    flops: Tensor
    split_edges: Tensor
    calls: dict[str, tuple[str, int]]


def _work(strategy: str, counts: StepCounts, shape: LayerShape) -> _Work:
    roots = shape.projected_width if shape.reads_roots and not shape.projects_sources else 0
    # Forward and weight gradient: 4 operations per multiply-add; features take no gradient.
    flops_per_row = 4.0 * shape.input_width * (shape.projected_width + roots)
    row_bytes, none = shape.input_width * shape.element_bytes, torch.zeros(len(counts.seeds), dtype=torch.float64)
    if strategy == "gdp":
        rows = counts.sources if shape.projects_sources else counts.destinations
        calls = _calls(shape, fetches=1)
        return _Work(
            counts.edges, counts.edges * row_bytes, counts.slow_gdp * row_bytes, rows * flops_per_row, none, calls
        )
    if strategy == "nfp":
        return _nfp_work(counts, shape, flops_per_row)
    if strategy == "snp":
        return _snp_work(counts, shape, roots)
    rows = counts.owned_sources if shape.projects_sources else counts.owned_destinations
    return _Work(
        counts.owned_edges,
        counts.owned_edges * row_bytes,
        counts.slow_dnp * row_bytes,
        rows * flops_per_row,
        none,
        _calls(shape, 1, 1, 1, 1),
    )


def _nfp_work(counts: StepCounts, shape: LayerShape, flops_per_row: float) -> _Work:
    num_ranks, num_hosts = len(counts.seeds), shape.num_hosts
    none, row_bytes = torch.zeros(num_ranks, dtype=torch.float64), shape.input_width * shape.element_bytes

    def of_host(items: Tensor) -> Tensor:
        """Return each rank's share, its columns, of what all ranks of its host have."""
        by_host = items.view(num_hosts, -1)
        return by_host.mean(1, keepdim=True).expand_as(by_host).reshape(-1)

    rows = of_host(counts.sources if shape.projects_sources else counts.destinations)
    num_kinds = 2 if shape.projects_sources else 1
    calls = {
        "sizes": ("all_gather", 1),
        "ids": ("all_gather", 1),
        "activations": ("reduce_scatter", num_kinds),
        "activation_gradients": ("all_gather", num_kinds),
    }
    return _Work(counts.edges, of_host(counts.edges) * row_bytes, none, rows * flops_per_row, none, calls)


def _snp_work(counts: StepCounts, shape: LayerShape, roots: int) -> _Work:
    d, h = shape.input_width, shape.projected_width
    none = torch.zeros(len(counts.seeds), dtype=torch.float64)
    edges, rows = counts.virtual_edges.sum(0), counts.virtual_rows.sum(0)
    projected = counts.destinations if shape.state_is_raw else rows
    flops = (counts.virtual_sources if shape.projects_sources else projected) * 4.0 * d * h
    flops = flops + counts.destinations * 4.0 * d * roots
    extra = (1 if shape.query_width else 0) + (1 if shape.sends_roots else 0)
    fetches = 1 if shape.reads_roots and not shape.sends_roots else 0
    calls = _calls(shape, fetches, 1, 1 + extra, extra + (0 if shape.state_is_raw else 1))
    return _Work(counts.edges, edges * d * shape.element_bytes, none, flops, counts.edges, calls)


def _calls(
    shape: LayerShape, fetches: int, requests: int = 0, activations: int = 0, gradients: int = 0
) -> dict[str, tuple[str, int]]:
    fetches = fetches if shape.placement == "sharded" else 0
    numbers = {
        "sizes": requests + fetches,
        "ids": requests + fetches,
        "features": fetches,
        "activations": activations,
        "activation_gradients": gradients,
    }
    return {tag: ("all_to_all", number) for tag, number in numbers.items() if number}
