"""From counts to bytes, and from bytes, rows and edges to seconds.

Symbols, per step: ranks r, q of W; n_r destinations, m_r edges, s_r distinct sources of rank r; n(r,q) destinations
of r owned by q; v(r,q), e(r,q) virtual rows and edges of r that q aggregates; u_q, m'_q distinct destinations and
edges that q computes under DNP; f(r,q) feature rows r fetches from q; d input width, h projected width, o output
width, w state width, k query width; B bytes of an element, I bytes of an id; P parameters.

Bytes that rank r sends (sums run over q other than r)::

    GDP  features   B d sum f(q,r)          ids  I sum f(r,q)
    NFP  ids        I (W-1)(n_r + m_r + n_r)             activations  B h sum n_q         gradients  B h (W-1) n_r
    SNP  ids        I sum (v(r,q) + e(r,q))              activations  B w sum v(q,r)      gradients  B w sum v(r,q)
    DNP  ids        I sum n(r,q)                         activations  B o sum n(q,r)      gradients  B o sum n(r,q)
    all  parameters a ring all-reduce of P elements (under NFP less the input weights)

Raw states (``LinearSplit.state_is_raw``) have no gradient to return. Sizes of messages are 8 bytes each. Attention
under NFP moves projected sources (s_r rows of h and n_r of k) and under SNP adds queries (k per virtual row, the
other way).

Seconds of a rank are the sum of sampling, feature reading and aggregation, projection, id and activation shuffle, upper
layers and gradient all-reduce; a step takes the *maximum over ranks of the sum*, since ranks wait for each other once.

Source: APT (PPoPP 2025), section on cost models. Where we differ: compute and id shuffle are counted, every constant is
measured, and maxima are taken of sums instead of sums of maxima.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels.comm.counters import ring_all_reduce_bytes
from gnn_parallel.counts import StepCounts
from gnn_parallel.exchange import TAGS
from gnn_parallel.layers import ProjectedSplit, SplitLayer
from gnn_parallel.linear_split import LinearSplit
from gnn_parallel.strategies.base import id_dtype_for
from gnn_parallel.strategies.nfp import sends_destinations
from gnn_parallel.strategies.snp import roots_travel_projected

__all__ = ["LayerShape", "Price", "Rates", "StepSeconds", "estimate_step_seconds", "sent_bytes"]

_SIZE_BYTES = 8


@dataclass(frozen=True)
class LayerShape:
    """The numbers of a layer and its model that bytes and seconds depend on.

    Attributes:
        algebra: How states merge.
        input_width: d.
        projected_width: h.
        output_width: o.
        state_width: w.
        query_width: k.
        state_is_raw: Whether states travel before the projection.
        projects_sources: Whether sources are projected before they are aggregated.
        reads_roots: Whether own rows of destinations are read.
        sends_roots: Whether owners send projected own rows under SNP.
        sends_destinations: Whether NFP sends destination ids.
        element_bytes: B.
        id_bytes: I.
        num_parameters: P, trainable elements.
        num_column_parameters: Those that NFP spreads over ranks.
        placement: ``"replicated"`` or ``"sharded"`` features.
    """

    algebra: str
    input_width: int
    projected_width: int
    output_width: int
    state_width: int
    query_width: int
    state_is_raw: bool
    projects_sources: bool
    reads_roots: bool
    sends_roots: bool
    sends_destinations: bool
    element_bytes: int
    id_bytes: int
    num_parameters: int
    num_column_parameters: int
    placement: str

    def reduced_elements(self, strategy: str) -> int:
        """Return the elements of the gradient all-reduce."""
        return self.num_parameters - (self.num_column_parameters if strategy == "nfp" else 0)

    @classmethod
    def of(
        cls, layer: SplitLayer, num_parameters: int, num_nodes: int, element_bytes: int, placement: str
    ) -> LayerShape:
        """Read the shape of a layer."""
        can_split = isinstance(layer, LinearSplit | ProjectedSplit)
        return cls(
            algebra=layer.algebra,
            input_width=layer.input_width,
            projected_width=layer.projected_width if can_split else layer.output_width,
            output_width=layer.output_width,
            state_width=layer.state_width if can_split else 0,
            query_width=layer.query_width,
            state_is_raw=isinstance(layer, LinearSplit) and layer.state_is_raw,
            projects_sources=isinstance(layer, ProjectedSplit),
            reads_roots=layer.reads_roots,
            sends_roots=can_split and roots_travel_projected(layer, placement),
            sends_destinations=can_split and sends_destinations(layer),
            element_bytes=element_bytes,
            id_bytes=id_dtype_for(num_nodes).itemsize,
            num_parameters=num_parameters,
            num_column_parameters=sum(p.numel() for p in layer.column_parameters()),
            placement=placement,
        )


def sent_bytes(strategy: str, counts: StepCounts, shape: LayerShape) -> dict[str, Tensor]:
    """Return the bytes every rank sends in a step, float64 ``[W]``, per tag of :data:`gnn_parallel.exchange.TAGS`.

    Exact for the counts of a step; the average for average counts.
    """
    num_ranks = len(counts.seeds)
    sent = _fill_tags(strategy, counts, shape).sent
    for rank in range(num_ranks):
        ring_bytes, _ = ring_all_reduce_bytes(shape.reduced_elements(strategy), shape.element_bytes, rank, num_ranks)
        sent["parameter_gradients"][rank] += ring_bytes
    return sent


def _fill_tags(strategy: str, counts: StepCounts, shape: LayerShape) -> _Tags:
    tags = _Tags(len(counts.seeds))
    if tags.peers:
        {"gdp": _gdp_bytes, "nfp": _nfp_bytes, "snp": _snp_bytes, "dnp": _dnp_bytes}[strategy](tags, counts, shape)
    return tags


class _Tags:
    """Bytes sent and received per tag and rank, filled in by the formulas of a strategy."""

    def __init__(self, num_ranks: int):
        self.peers = num_ranks - 1
        self.sent = {tag: torch.zeros(num_ranks, dtype=torch.float64) for tag in TAGS}
        self.received = {tag: torch.zeros(num_ranks, dtype=torch.float64) for tag in TAGS}

    def ask(self, pairs: Tensor, bytes_per_item: int, tag: str) -> None:
        """Count what rank r sends to others about rows ``pairs[r, q]``."""
        self.sent[tag] += (pairs.sum(1) - pairs.diagonal()) * bytes_per_item
        self.received[tag] += (pairs.sum(0) - pairs.diagonal()) * bytes_per_item

    def answer(self, pairs: Tensor, bytes_per_item: int, tag: str) -> None:
        """Count what rank q sends back about rows ``pairs[r, q]``."""
        self.ask(pairs.T, bytes_per_item, tag)

    def to_all(self, items: Tensor, bytes_per_item: int, tag: str) -> None:
        """Count items that every rank sends to every other."""
        self.sent[tag] += items * self.peers * bytes_per_item
        self.received[tag] += (items.sum() - items) * bytes_per_item

    def from_all(self, items: Tensor, bytes_per_item: int, tag: str) -> None:
        """Count shares of rank r's items that every other rank sends to it."""
        self.sent[tag] += (items.sum() - items) * bytes_per_item
        self.received[tag] += items * self.peers * bytes_per_item

    def sizes(self, num: int) -> None:
        """Count ``num`` sizes told to every other rank."""
        self.sent["sizes"] += num * self.peers * _SIZE_BYTES
        self.received["sizes"] += num * self.peers * _SIZE_BYTES

    def fetch(self, pairs: Tensor, shape: LayerShape) -> None:
        """Count asking for feature rows and sending them."""
        self.sizes(1)
        self.ask(pairs, shape.id_bytes, "ids")
        self.answer(pairs, shape.input_width * shape.element_bytes, "features")


def _gdp_bytes(tags: _Tags, counts: StepCounts, shape: LayerShape) -> None:
    if shape.placement == "sharded":
        tags.fetch(counts.fetch_gdp, shape)


def _nfp_bytes(tags: _Tags, counts: StepCounts, shape: LayerShape) -> None:
    if shape.projects_sources:
        tags.sizes(2)
        tags.to_all(counts.sources + counts.destinations, shape.id_bytes, "ids")
        rows = ((counts.sources, shape.projected_width), (counts.destinations, shape.query_width))
    else:
        tags.sizes(3 if shape.sends_destinations else 2)
        sent = counts.destinations + counts.edges
        tags.to_all(sent + counts.destinations if shape.sends_destinations else sent, shape.id_bytes, "ids")
        rows = ((counts.destinations, shape.projected_width),)
    for items, width in rows:
        tags.from_all(items, width * shape.element_bytes, "activations")
        tags.to_all(items, width * shape.element_bytes, "activation_gradients")


def _snp_bytes(tags: _Tags, counts: StepCounts, shape: LayerShape) -> None:
    element = shape.element_bytes
    tags.sizes(3)
    tags.ask(counts.virtual_rows + counts.virtual_edges, shape.id_bytes, "ids")
    tags.answer(counts.virtual_rows, shape.state_width * element, "activations")
    if not shape.state_is_raw:
        tags.ask(counts.virtual_rows, shape.state_width * element, "activation_gradients")
    if shape.query_width:
        tags.ask(counts.virtual_rows, shape.query_width * element, "activations")
        tags.answer(counts.virtual_rows, shape.query_width * element, "activation_gradients")
    if shape.sends_roots:
        width = shape.query_width or shape.projected_width
        tags.ask(counts.remote_roots, shape.id_bytes, "ids")
        tags.answer(counts.remote_roots, width * element, "activations")
        tags.ask(counts.remote_roots, width * element, "activation_gradients")
    elif shape.placement == "sharded" and shape.reads_roots:
        tags.fetch(counts.remote_roots, shape)


def _dnp_bytes(tags: _Tags, counts: StepCounts, shape: LayerShape) -> None:
    width = shape.output_width * shape.element_bytes
    tags.sizes(1)
    tags.ask(counts.destinations_by_owner, shape.id_bytes, "ids")
    tags.answer(counts.destinations_by_owner, width, "activations")
    tags.ask(counts.destinations_by_owner, width, "activation_gradients")
    if shape.placement == "sharded":
        tags.fetch(counts.fetch_dnp, shape)


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
    """

    sample_seconds_per_edge: float
    read_seconds_per_byte: float
    project_seconds_per_flop: float
    row_seconds_per_byte: float
    split_seconds_per_edge: float
    upper_seconds_per_step: float

    @classmethod
    def free(cls) -> Rates:
        """Return rates under which work costs nothing."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of a step by term, of the rank that takes longest."""

    sample: float
    load: float
    shuffle: float
    compute: float
    reduce: float

    @property
    def total(self) -> float:
        """Sum of the terms."""
        return self.sample + self.load + self.shuffle + self.compute + self.reduce


Price = Callable[[str, float], float]
"""From a collective's name, and the most bytes that leave or enter one rank (all_reduce: of the tensor), to seconds."""


def estimate_step_seconds(
    strategy: str, counts: StepCounts, shape: LayerShape, rates: Rates, price: Price
) -> StepSeconds:
    """Predict the seconds of a step.

    Args:
        strategy: One of the four.
        counts: Average counts of a step.
        shape: The layer.
        rates: Measured speeds.
        price: Prices of collectives.
    """
    work = _work(strategy, counts, shape)
    tags = _fill_tags(strategy, counts, shape)
    sample = (counts.upper_edges + work.sampled_edges) * rates.sample_seconds_per_edge
    sample = sample + work.split_edges * rates.split_seconds_per_edge
    load = work.read_bytes * rates.read_seconds_per_byte
    moved = tags.sent["activations"] + tags.sent["activation_gradients"]
    compute = (
        work.flops * rates.project_seconds_per_flop + moved * rates.row_seconds_per_byte + rates.upper_seconds_per_step
    )
    per_rank = sample + load + compute
    slowest = int(per_rank.argmax())
    shuffle = fetch = reduce = 0.0
    if len(counts.seeds) > 1:
        for tag, (collective, num_calls) in work.calls.items():
            busiest = max(float(tags.sent[tag].max()), float(tags.received[tag].max()))
            seconds = num_calls * price(collective, busiest / num_calls)
            fetch, shuffle = (fetch + seconds, shuffle) if tag == "features" else (fetch, shuffle + seconds)
        reduce = price("all_reduce", shape.reduced_elements(strategy) * shape.element_bytes)
    return StepSeconds(float(sample[slowest]), float(load[slowest]) + fetch, shuffle, float(compute[slowest]), reduce)


@dataclass
class _Work:
    """What a rank computes in a step, ``[W]`` each, and which collectives a step takes how often, per tag."""

    sampled_edges: Tensor
    read_bytes: Tensor
    flops: Tensor
    split_edges: Tensor
    calls: dict[str, tuple[str, int]]


def _work(strategy: str, counts: StepCounts, shape: LayerShape) -> _Work:
    d, h, element = shape.input_width, shape.projected_width, shape.element_bytes
    num_ranks, none = len(counts.seeds), torch.zeros(len(counts.seeds), dtype=torch.float64)
    projects = shape.projects_sources
    roots = h if shape.reads_roots and not projects else 0
    # Forward and weight gradient: 4 operations per multiply-add; features take no gradient.
    per_row = 4.0 * d * (h + roots)
    if strategy == "gdp":
        rows = counts.sources if projects else counts.destinations
        return _Work(counts.edges, counts.edges * d * element, rows * per_row, none, _calls(shape, fetches=1))
    if strategy == "nfp":
        rows = (counts.sources if projects else counts.destinations).sum()
        all_edges = counts.edges.sum().expand(num_ranks)
        share, num_kinds = 1.0 / num_ranks, 2 if projects else 1
        calls = {
            "sizes": ("all_gather", 1),
            "ids": ("all_gather", 1),
            "activations": ("reduce_scatter", num_kinds),
            "activation_gradients": ("all_gather", num_kinds),
        }
        flops = (rows * per_row * share).expand(num_ranks)
        return _Work(counts.edges, all_edges * d * element * share, flops, none, calls)
    if strategy == "snp":
        edges, rows = counts.virtual_edges.sum(0), counts.virtual_rows.sum(0)
        projected = counts.destinations if shape.state_is_raw else rows
        flops = (
            counts.virtual_sources if projects else projected
        ) * 4.0 * d * h + counts.destinations * 4.0 * d * roots
        extra = (1 if shape.query_width else 0) + (1 if shape.sends_roots else 0)
        fetches = 1 if shape.reads_roots and not shape.sends_roots else 0
        calls = _calls(shape, fetches, 1, 1 + extra, extra + (0 if shape.state_is_raw else 1))
        return _Work(counts.edges, edges * d * element, flops, counts.edges, calls)
    rows = counts.owned_sources if projects else counts.owned_destinations
    read_bytes = counts.owned_edges * d * element
    return _Work(counts.owned_edges, read_bytes, rows * per_row, none, _calls(shape, 1, 1, 1, 1))


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
