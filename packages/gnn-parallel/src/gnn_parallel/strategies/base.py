"""What the four strategies share: the context of a rank, and the four stages of the input layer.

A rank arrives with its destinations (rows it needs) and leaves with their result rows. In between, *permute* samples
and buckets ids by the rank that shall work on them, *shuffle* moves the ids there and reads features, *execute*
computes a part of the layer, *reshuffle* brings the rows home and completes them. The first two know no gradients and
may run ahead; the backward pass of the last two is their exact transpose, by autograd.

Every choice depends on node ids and stateless random numbers alone, never on who computes: hence the same result under
every strategy, partition and number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core_kernels import Graph, ops
from core_kernels.comm import Group
from gnn_parallel.clock import TermClock
from gnn_parallel.features import FeatureTable
from gnn_parallel.layers import SplitLayer, View

__all__ = ["Context", "Strategy", "add_self_edges", "id_dtype_for", "join_runs", "sample_in_edges", "split_runs"]


@dataclass
class Context:
    """All a rank needs to run the input layer.

    Attributes:
        graph: The full graph.
        features: The input features.
        owner: int64 ``[num_nodes]``, rank that owns each node.
        group: The ranks.
        layer: The input layer.
        fanout: Neighbours drawn per destination, -1 for all.
        seed: Seed of the sampler.
        depth: Number of the input layer's hop in the sampler, 0 at the seeds.
        placement: ``"replicated"`` or ``"sharded"`` features.
        clock: Takes the seconds per term.
        travel: Type in which activations travel, their own when ``None``.
        early: Where batches are prepared in the background, a second group of the same ranks and the clock for that.
    """

    graph: Graph
    features: FeatureTable
    owner: Tensor
    group: Group
    layer: SplitLayer
    fanout: int
    seed: int
    depth: int
    placement: str = "replicated"
    clock: TermClock = field(default_factory=TermClock)
    travel: torch.dtype | None = None
    early: tuple[Group, TermClock] | None = None

    @property
    def early_group(self) -> Group:
        """The group of what prepares batches."""
        return self.group if self.early is None else self.early[0]

    @property
    def early_clock(self) -> TermClock:
        """The clock of what prepares batches."""
        return self.clock if self.early is None else self.early[1]

    @property
    def is_early(self) -> bool:
        """Whether batches are prepared in the background."""
        return self.early is not None

    @property
    def id_dtype(self) -> torch.dtype:
        """Integer type in which node ids travel."""
        return id_dtype_for(self.graph.num_nodes)

    def sample(self, destinations: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Draw the in-edges of some destinations: ``(indptr, source ids)``."""
        with self.early_clock("sample"):
            return sample_in_edges(self.graph, destinations, self.fanout, self.seed, step, self.depth, self.layer)

    def view(self, indptr: Tensor, sources: Tensor, destinations: Tensor | None, is_partial: bool = False) -> View:
        """Find and read the features of sources and destinations given by node id.

        Args:
            indptr: int64 ``[rows + 1]``.
            sources: Node id of each edge's source.
            destinations: Node id of each row, ``None`` where nothing is known of them.
            is_partial: Whether rows have only those in-edges whose source this rank can read by itself.

        Collective: all ranks, unless partial or replicated.
        """
        layer = self.layer
        with self.early_clock("load"):
            weight = None if layer.source_scale is None else layer.source_scale[sources]
            has_scale = destinations is not None and layer.destination_scale is not None
            scale = layer.destination_scale[destinations] if has_scale else None
            find = self.features.local if is_partial else self.features.lookup
            roots = destinations if layer.reads_roots else None
            if roots is None or self.placement == "replicated":  # the table is the whole matrix
                table, rows = find(sources)
            else:
                table, rows = find(torch.cat([roots, sources.to(roots.dtype)]))
                roots, rows = rows[: len(roots)], rows[len(roots) :]
            view = View(table, indptr, rows, weight, roots, scale, is_partial)
            layer.load(view)
        return view


class Strategy(ABC):
    """One way to spread the input layer over ranks.

    Args:
        context: What this rank works with.
    """

    name: str
    summary: str

    def __init__(self, context: Context):
        self.context = context

    @abstractmethod
    def permute(self, destinations: Tensor, step: int) -> Any:
        """Bucket what is asked for by the rank that shall work on it. Local."""

    @abstractmethod
    def shuffle(self, parcel: Any) -> Any:
        """Exchange ids and read features. Collective."""

    @abstractmethod
    def execute(self, work: Any) -> Any:
        """Compute this rank's part of the layer."""

    @abstractmethod
    def reshuffle(self, work: Any, rows: Any) -> Tensor:
        """Bring result rows to the ranks that asked, in their order. Collective."""

    def reads_ahead(self, parcel: Any) -> Tensor | None:
        """Return the rows that :meth:`shuffle` will look up for a parcel, where that is known so early."""
        return None

    def prepare(self, destinations: Tensor, step: int) -> Any:
        """Run the two stages that know no gradients. Collective."""
        return self.shuffle(self.permute(destinations, step))

    def __call__(self, work: Any) -> Tensor:
        """Run the two differentiable stages: result rows ``[destinations, output_width]``. Collective."""
        return self.reshuffle(work, self.execute(work))


def id_dtype_for(num_nodes: int) -> torch.dtype:
    """Return the narrowest integer type that holds all node ids.

    >>> id_dtype_for(1000)
    torch.int32
    """
    return torch.int32 if num_nodes < 2**31 else torch.int64


def sample_in_edges(
    graph: Graph, destinations: Tensor, fanout: int, seed: int, step: int, depth: int, layer: SplitLayer
) -> tuple[Tensor, Tensor]:
    """Draw in-edges of the input layer: ``(indptr, source ids)``, with self-loops where the layer wants them."""
    indptr, sources, _ = ops.sample_neighbors(graph, destinations, fanout, seed=seed, step=step, layer=depth)
    return add_self_edges(indptr, sources, destinations) if layer.self_loops else (indptr, sources)


def add_self_edges(indptr: Tensor, sources: Tensor, destinations: Tensor) -> tuple[Tensor, Tensor]:
    """Give every destination exactly one edge from itself, in last place.

    >>> indptr, sources = torch.tensor([0, 2, 2]), torch.tensor([5, 7])
    >>> [t.tolist() for t in add_self_edges(indptr, sources, torch.tensor([5, 6]))]
    [[0, 2, 3], [7, 5, 6]]
    """
    num_rows = len(destinations)
    row = torch.repeat_interleave(torch.arange(num_rows), indptr.diff())
    kept = sources != destinations[row]
    sources, row = sources[kept], row[kept]
    kept_counts = torch.bincount(row, minlength=num_rows)
    rows = torch.arange(num_rows + 1)
    with_self = torch.zeros(num_rows + 1, dtype=torch.int64)
    torch.cumsum(kept_counts, 0, out=with_self[1:])
    with_self += rows
    merged = torch.empty(len(sources) + num_rows, dtype=sources.dtype)
    merged[torch.arange(len(sources)) + row] = sources
    merged[with_self[1:] - 1] = destinations.to(sources.dtype)
    return with_self, merged


def join_runs(parts: Sequence[tuple[Tensor, Sequence[int]]], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Interleave several arrays that are each ordered by rank into one message per rank.

    Args:
        parts: Pairs of an array and the number of its elements for each rank.
        dtype: Type of the message.

    Returns:
        The messages, rank 0's first, and their lengths.

    >>> join_runs([(torch.tensor([1, 2]), [1, 1]), (torch.tensor([7, 8, 9]), [2, 1])], torch.int64)
    (tensor([1, 7, 8, 2, 9]), [3, 2])
    """
    runs = [array.to(dtype).split(list(counts)) for array, counts in parts]
    lengths = [sum(counts[rank] for _, counts in parts) for rank in range(len(parts[0][1]))]
    return torch.cat([run[rank] for rank in range(len(lengths)) for run in runs]), lengths


def split_runs(message: Tensor, counts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Undo :func:`join_runs` on what came from all ranks.

    Args:
        message: The messages of all ranks, rank 0's first.
        counts: Per part, its elements from each rank.

    Returns:
        The arrays, each ordered by rank.

    >>> split_runs(torch.tensor([1, 7, 8, 2, 9]), [[1, 1], [2, 1]])
    [tensor([1, 2]), tensor([7, 8, 9])]
    """
    pieces = message.split([part[rank] for rank in range(len(counts[0])) for part in counts])
    return [torch.cat(pieces[index :: len(counts)]) for index in range(len(counts))]
