"""From counts to bytes: what every rank sends in a step, per kind of traffic.

Symbols, per step: ranks r, q of R on one host; n_r destinations, m_r edges, s_r distinct sources of rank r; n(r,q)
destinations of r owned by q; v(r,q), e(r,q) virtual rows and edges of r that q aggregates; f(r,q) feature rows r
fetches from q; d input width, h projected width, o output width, w state width, k query width; B bytes of a feature or
a parameter, A bytes of an activation (B, or 2 under mixed precision), I bytes of an id; P parameters; H hosts.

Bytes that rank r sends (sums run over q other than r)::

    GDP  features   B d sum f(q,r)          ids  I sum f(r,q)
    NFP  ids        I (R-1)(n_r + m_r + n_r)             activations  A h sum n_q         gradients  A h (R-1) n_r
    SNP  ids        I sum (v(r,q) + e(r,q))              activations  A w sum v(q,r)      gradients  A w sum v(r,q)
    DNP  ids        I sum n(r,q)                         activations  A o sum n(q,r)      gradients  A o sum n(r,q)
    all  parameters a ring all-reduce of P elements over all ranks (under NFP less the input weights, whose columns are
                    summed over the H ranks that hold the same ones)

Raw states (``LinearSplit.state_is_raw``) have no gradient to return. Sizes of messages are 8 bytes each. Attention
under NFP moves projected sources (s_r rows of h and n_r of k) and under SNP adds queries (k per virtual row, the
other way). DNP fetches features as GDP does, and SNP own rows of destinations where they do not travel projected.

Source: APT (PPoPP 2025), section on cost models. Where we differ: ids and parameters are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core_kernels.comm.counters import ring_all_reduce_bytes
from gnn_parallel.counts import StepCounts
from gnn_parallel.exchange import TAGS
from gnn_parallel.features import column_slices
from gnn_parallel.layers import ProjectedSplit, SplitLayer
from gnn_parallel.linear_split import LinearSplit
from gnn_parallel.strategies.base import id_dtype_for
from gnn_parallel.strategies.nfp import sends_destinations
from gnn_parallel.strategies.snp import roots_travel_projected

__all__ = ["LayerShape", "Traffic", "count_traffic", "sent_bytes"]

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
        activation_bytes: A.
        id_bytes: I.
        num_parameters: P, trainable elements.
        num_column_parameters: Those that NFP spreads over ranks.
        placement: Where features are.
        num_hosts: H.
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
    activation_bytes: int
    id_bytes: int
    num_parameters: int
    num_column_parameters: int
    placement: str
    num_hosts: int = 1

    def reduced_elements(self, strategy: str) -> int:
        """Return the elements of the gradient all-reduce over all ranks."""
        return self.num_parameters - (self.num_column_parameters if strategy == "nfp" else 0)

    def column_elements(self, number: int, ranks_per_host: int) -> int:
        """Return the elements of the spread weights that a rank of a host holds."""
        columns = column_slices(self.input_width, ranks_per_host)[number]
        return self.num_column_parameters // self.input_width * (columns.stop - columns.start)

    @classmethod
    def of(
        cls,
        layer: SplitLayer,
        num_parameters: int,
        num_nodes: int,
        element_bytes: int,
        placement: str,
        is_mixed: bool = False,
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
            activation_bytes=2 if is_mixed else element_bytes,
            id_bytes=id_dtype_for(num_nodes).itemsize,
            num_parameters=num_parameters,
            num_column_parameters=sum(p.numel() for p in layer.column_parameters()),
            placement=placement,
        )


def sent_bytes(strategy: str, counts: StepCounts, shape: LayerShape) -> dict[str, Tensor]:
    """Return the bytes every rank sends in a step, float64 ``[W]``, per tag of :data:`gnn_parallel.exchange.TAGS`.

    Exact for the counts of a step; the average for average counts.
    """
    num_ranks, num_hosts = len(counts.seeds), shape.num_hosts
    sent = count_traffic(strategy, counts, shape).sent
    gradients = sent["parameter_gradients"]
    for rank in range(num_ranks):
        gradients[rank] += ring_all_reduce_bytes(
            shape.reduced_elements(strategy), shape.element_bytes, rank, num_ranks
        )[0]
        if strategy == "nfp" and num_hosts > 1:
            host, number = divmod(rank, num_ranks // num_hosts)
            elements = shape.column_elements(number, num_ranks // num_hosts)
            gradients[rank] += ring_all_reduce_bytes(elements, shape.element_bytes, host, num_hosts)[0]
    return sent


def count_traffic(strategy: str, counts: StepCounts, shape: LayerShape) -> Traffic:
    """Return what a step moves between the ranks of a host."""
    traffic = Traffic(len(counts.seeds), shape.num_hosts)
    if traffic.peers:
        {"gdp": _gdp_bytes, "nfp": _nfp_bytes, "snp": _snp_bytes, "dnp": _dnp_bytes}[strategy](traffic, counts, shape)
    return traffic


class Traffic:
    """Bytes sent and received per tag and rank, filled in by the formulas of a strategy.

    Attributes:
        peers: Ranks that each rank exchanges with.
        sent: float64 ``[W]`` per tag.
        received: The same.
    """

    def __init__(self, num_ranks: int, num_hosts: int = 1):
        self.num_hosts, self.peers = num_hosts, num_ranks // num_hosts - 1
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
        self.received[tag] += self._of_others(items) * bytes_per_item

    def from_all(self, items: Tensor, bytes_per_item: int, tag: str) -> None:
        """Count shares of rank r's items that every other rank sends to it."""
        self.sent[tag] += self._of_others(items) * bytes_per_item
        self.received[tag] += items * self.peers * bytes_per_item

    def _of_others(self, items: Tensor) -> Tensor:
        """Return what the other ranks of the host have."""
        by_host = items.view(self.num_hosts, -1)
        return (by_host.sum(1, keepdim=True) - by_host).view(-1)

    def sizes(self, num: int) -> None:
        """Count ``num`` sizes told to every other rank."""
        self.sent["sizes"] += num * self.peers * _SIZE_BYTES
        self.received["sizes"] += num * self.peers * _SIZE_BYTES

    def fetch(self, pairs: Tensor, shape: LayerShape) -> None:
        """Count asking for feature rows and sending them."""
        self.sizes(1)
        self.ask(pairs, shape.id_bytes, "ids")
        self.answer(pairs, shape.input_width * shape.element_bytes, "features")


def _gdp_bytes(tags: Traffic, counts: StepCounts, shape: LayerShape) -> None:
    if shape.placement == "sharded":
        tags.fetch(counts.fetch_gdp, shape)


def _nfp_bytes(tags: Traffic, counts: StepCounts, shape: LayerShape) -> None:
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
        tags.from_all(items, width * shape.activation_bytes, "activations")
        tags.to_all(items, width * shape.activation_bytes, "activation_gradients")


def _snp_bytes(tags: Traffic, counts: StepCounts, shape: LayerShape) -> None:
    element = shape.activation_bytes
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
        tags.fetch(counts.fetch_roots, shape)


def _dnp_bytes(tags: Traffic, counts: StepCounts, shape: LayerShape) -> None:
    width = shape.output_width * shape.activation_bytes
    tags.sizes(1)
    tags.ask(counts.destinations_by_owner, shape.id_bytes, "ids")
    tags.answer(counts.destinations_by_owner, width, "activations")
    tags.ask(counts.destinations_by_owner, width, "activation_gradients")
    if shape.placement == "sharded":
        tags.fetch(counts.fetch_dnp, shape)
