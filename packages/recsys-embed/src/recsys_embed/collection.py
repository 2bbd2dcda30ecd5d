"""Sharded embedding tables whose results depend on neither tiers, pre-fetching, owners nor, if asked, world size.

A batch is looked up by its distinct rows: cold rows come from the ranks that own them, hot rows are replicated. The
backward pass sums the gradient of every row over bags, sends the sums to the owners and updates the rows there, as part
of ``loss.backward()``: no gradient tensor and no separate optimiser exist for the tables.

``deterministic=True`` makes parameters and states bitwise independent of the plan, of pre-fetching and of the number of
ranks among 1, 2, 4, ... ``num_leaves``: the global batch is cut into ``num_leaves`` equal runs of samples, and every
row's gradient is summed over the runs in one fixed binary tree.

Callers may not assume that rows are current between steps while a pipeline is open: :meth:`drain` first. Collective:
construction, forward, backward, drain, retier and everything about state, on all ranks in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from core_kernels.comm import Group
from core_kernels.launch import current_group
from core_kernels.ops import embedding_bag
from recsys_embed.agreement import check_agreement, check_plan
from recsys_embed.checkpoint import gather_tables, scatter_tables
from recsys_embed.clock import Clock
from recsys_embed.errors import PlanMismatchError, input_error
from recsys_embed.exchange import Channels, Request, RowSpace
from recsys_embed.hot_tier import build_tier, sink_rows
from recsys_embed.initial import initial_rows
from recsys_embed.kernels.rows import merge_tree, sum_occurrences
from recsys_embed.optimizers import RowOptimizer, RowWiseAdagrad
from recsys_embed.plan import Plan
from recsys_embed.pooled import PooledSpace
from recsys_embed.tables import ID_POLICIES, KeyedTensor, RowLayout, check_tables, read_batch

__all__ = ["Lookup", "TieredEmbeddingBagCollection"]


@dataclass
class Lookup:
    """One batch on its way: its bags, and a request per row space.

    Attributes:
        batch: What the user passed.
        size: Samples on this rank.
        bags: Per space ``(places, offsets, weights)``.
        requests: Per space; empty on the short way of a single rank.
        share: This rank's part of the global batch.
    """

    batch: Any
    size: int
    bags: list[tuple[Tensor, Tensor, Tensor | None]]
    requests: list[Request]
    share: float = 1.0
    step: int = -1
    counts: Any = None


class TieredEmbeddingBagCollection(nn.Module):
    """Embedding bags over sharded tables with a replicated hot tier.

    Args:
        tables: Configurations, this package's or TorchRec's ``EmbeddingBagConfig``.
        plan: What :func:`recsys_embed.plan_tiers` chose; None has no hot tier.
        optimizer: How rows are updated.
        group: All ranks; the group this process was started in when None.
        deterministic: Bitwise independent of plan, pre-fetching and world size.
        reduction: ``"mean"`` takes every rank's loss as a mean over its samples and trains on the mean over all;
            ``"sum"`` adds the gradients of the ranks.
        id_policy: ``"strict"`` raises on ids outside their table, ``"clamp"`` and ``"modulo"`` map them into it.
        seed: Key of the initial rows, which depend on seed, table, row and column alone.
        dtype: float32 or float64.
        num_leaves: Runs of samples that are summed apart in deterministic mode, a power of two.

    Raises:
        PlanMismatchError: The plan is for other tables or ranks, or ranks disagree about tables.

    >>> from recsys_embed import EmbeddingBagConfig, KeyedJaggedTensor
    >>> tables = [EmbeddingBagConfig("film", 10, 4, ["seen"])]
    >>> emb = TieredEmbeddingBagCollection(tables, optimizer=RowWiseAdagrad(lr=0.1), group=Group.single())
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([1, 2, 2]), torch.tensor([2, 0, 1]))
    >>> emb(batch)["seen"].shape
    torch.Size([3, 4])
    """

    space_type = RowSpace

    def __init__(
        self,
        tables: Sequence[Any],
        plan: Plan | None = None,
        optimizer: RowOptimizer | None = None,
        group: Group | None = None,
        deterministic: bool = False,
        reduction: str = "mean",
        id_policy: str = "strict",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        num_leaves: int = 8,
    ):
        super().__init__()
        self.tables, self.optimizer = check_tables(tables), optimizer or RowWiseAdagrad()
        self.group = group or current_group()
        if reduction not in ("mean", "sum"):
            raise input_error("reduction", reduction, "'mean' or 'sum'", "choose one of them")
        if id_policy not in ID_POLICIES:
            raise input_error("id_policy", id_policy, f"one of {', '.join(ID_POLICIES)}", "choose one of them")
        if num_leaves < 1 or num_leaves & (num_leaves - 1):
            raise input_error("num_leaves", num_leaves, "a power of two", "8 allows 1, 2, 4 or 8 ranks")
        self.deterministic, self.reduction, self.id_policy, self.seed = deterministic, reduction, id_policy, seed
        self.plan = plan or Plan.without_tier(self.tables, self.group.size)
        check_agreement(self)
        divides = deterministic and num_leaves % self.group.size == 0
        self.leaves_per_rank = num_leaves // self.group.size if divides else 1
        self.clock, self.step, self.last_share = Clock(), 0, 1.0
        self.channels = Channels.over(self.group)
        self.lookahead: Any = None  # set by PrefetchPipeline
        self._anchor = torch.zeros((), requires_grad=True)
        pooled = set() if deterministic or self.group.size == 1 else set(self.plan.pooled)
        kinds = sorted({(t.embedding_dim, t.name in pooled) for t in self.tables})
        self.spaces: list[RowSpace] = []
        for width, is_pooled in kinds:
            same = [t for t in self.tables if (t.embedding_dim, t.name in pooled) == (width, is_pooled)]
            layout = RowLayout(same, self.group.size)
            weight = initial_rows(self.tables, layout, self.group.rank, seed, dtype)
            kind = PooledSpace if is_pooled else self.space_type
            self.spaces.append(kind(layout, weight, self.optimizer, self.channels, self.clock))
        self.features = [f for t in self.tables for f in t.feature_names]
        self._mean_features = {f for t in self.tables if t.pooling == "mean" for f in t.feature_names}
        self._build_tiers(self.plan)

    # -- forward and backward ----------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> KeyedTensor:
        """Look up and pool a batch.

        Args:
            batch: A KeyedJaggedTensor, or anything with its ``keys()``, ``values()`` and ``lengths()``.

        Returns:
            Pooled rows [batch, width] per feature, in the order of the tables. Gradients flow to the tables only.

        Raises:
            InputError: A batch that does not fit the tables, or weights that are not finite.
            IdRangeError: An id outside its table, under ``id_policy="strict"``.
        """
        trains = self.training and torch.is_grad_enabled()
        if self.lookahead is not None and trains:
            lookup = self.lookahead.take(batch)
        else:
            self.finish_updates()
            lookup = self.prepare(batch)
            self.exchange_ids(lookup)
            if trains:
                lookup.step, self.step = self.step, self.step + 1
            for space, request in zip(self.spaces, lookup.requests, strict=False):
                if trains:
                    space.classify(request, None, lookup.step)
                space.post_rows(request, "all", self.channels.now)
        pooled = _Pool.apply(self._anchor, self, lookup)
        if self.lookahead is not None and trains:
            self.lookahead.after_lookup()
        return self._keyed(pooled, lookup.size)

    def prepare(self, batch: Any) -> Lookup:
        """Read a batch and find its distinct rows; no communication."""
        keys, values, lengths, weights, size = read_batch(batch, self.features)
        per_feature = lengths.view(len(keys), size)
        starts = np.concatenate([[0], per_feature.sum(1).cumsum(0).numpy()])
        bags, requests = [], []
        for space in self.spaces:
            wanted = [keys.index(f) for f in space.layout.features]
            if len(wanted) == len(keys) and wanted == sorted(wanted):
                ids, factors, runs, counts = values, weights, starts, lengths
            else:
                pieces = [slice(int(starts[i]), int(starts[i + 1])) for i in wanted]
                ids = torch.cat([values[p] for p in pieces])
                factors = None if weights is None else torch.cat([weights[p] for p in pieces])
                runs = np.concatenate([[0], np.cumsum([p.stop - p.start for p in pieces])])
                counts = per_feature[wanted].reshape(-1)
            places = space.layout.place_batch(space.layout.features, ids, runs, self.id_policy)
            offsets = torch.zeros(len(counts) + 1, dtype=torch.int64)
            torch.cumsum(counts, 0, out=offsets[1:])
            bags.append((places, offsets, None if factors is None else factors.to(space.weight.dtype)))
            if not self._is_alone:
                requests.append(space.plan(*bags[-1]))
        return Lookup(batch, size, bags, requests)

    def post_counts(self, lookup: Lookup | None) -> Any:
        """Tell every peer how many rows are asked of it, and how many samples there are (none: out of data)."""
        size = lookup.size if lookup else 0
        columns = [[size] * self.group.size] + [[0] * self.group.size] * sum(s.num_counts for s in self.spaces)
        if lookup is not None:
            pairs = zip(self.spaces, lookup.requests, strict=True)
            columns[1:] = [counts for space, request in pairs for counts in space.counts_of(request)]
        message = torch.tensor(columns, dtype=torch.int64).t().contiguous()
        ones = [1] * self.group.size
        return self.channels.control.all_to_all_v(message, ones, ones, "counts", async_op=True)

    def read_counts(self, lookup: Lookup | None, handle: Any) -> list[int]:
        """Wait for the counts of all peers, post the ids; returns everybody's batch size."""
        received = self.clock.wait("control", handle)[0]
        sizes = received[:, 0].tolist()
        if lookup is None or not all(sizes):
            return sizes
        lookup.share = lookup.size / sum(sizes)
        columns = iter(received[:, 1:].t().tolist())
        for space, request in zip(self.spaces, lookup.requests, strict=True):
            space.post_ids(request, list(itertools.islice(columns, space.num_counts)))
        return sizes

    def exchange_ids(self, lookup: Lookup) -> None:
        """Tell every owner which rows are wanted, and wait."""
        if self._is_alone:
            return
        sizes = self.read_counts(lookup, self.post_counts(lookup))
        if not all(sizes):
            found = f"batch sizes {sizes} by rank"
            raise input_error("batch", found, "at least one sample on every rank", "stop all ranks together")
        for space, request in zip(self.spaces, lookup.requests, strict=True):
            space.finish_ids(request)

    @property
    def _is_alone(self) -> bool:
        """Whether lookups need neither requests nor merging: one rank without fixed order of sums."""
        return self.group.size == 1 and not self.deterministic

    def _pool(self, lookup: Lookup) -> list[Tensor]:
        pooled = []
        for number, (space, (places, offsets, weights)) in enumerate(zip(self.spaces, lookup.bags, strict=True)):
            table, bag = space.weight, (places, offsets, weights)
            if not self._is_alone:
                space.hot.finish_update()
                table, bag = space.finish_rows(lookup.requests[number]), self._local_bags(lookup, number)
            out = embedding_bag(table, *bag, bounds="unchecked")
            pooled.append(self._divide_means(space, out, offsets, lookup.size))
        return pooled

    def _local_bags(self, lookup: Lookup, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the bags of a space over what was fetched for it: distinct rows, or partial pools."""
        request, (_, offsets, weights) = lookup.requests[number], lookup.bags[number]
        if request.offsets is not None:  # factors are in the pools
            return request.local, request.offsets, None
        return request.local, offsets, weights

    def _divide_means(self, space: RowSpace, rows: Tensor, offsets: Tensor, size: int) -> Tensor:
        """Divide the bags of mean-pooled features by their lengths, forward and backward alike."""
        if self._mean_features.isdisjoint(space.layout.features):
            return rows
        is_mean = torch.tensor([f in self._mean_features for f in space.layout.features]).repeat_interleave(size)
        divisor = torch.where(is_mean, offsets.diff().clamp(min=1), 1)
        return rows / divisor.unsqueeze(1).to(rows.dtype)

    def update(self, lookup: Lookup, grads: Sequence[Tensor]) -> None:
        """Apply one step with the gradients of the pooled rows, one tensor per space [features * batch, width]."""
        sums, self.last_share = [], lookup.share
        for number, (space, grad) in enumerate(zip(self.spaces, grads, strict=True)):
            places, offsets, weights = lookup.bags[number]
            grad = self._divide_means(space, grad, offsets, lookup.size)
            if self.reduction == "mean" and lookup.share != 1.0:
                grad = grad * lookup.share
            if self._is_alone:
                bags = (places, offsets, weights, "sum")
                lr = self.optimizer.lr
                self.optimizer.update(space.weight, space.states, bags, grad.contiguous(), lookup.step + 1, lr)
            else:
                sums.append(self._sum_rows(lookup, number, grad.contiguous()))
        if self._is_alone:
            return
        for space, request, rows in zip(self.spaces, lookup.requests, sums, strict=True):
            num_cold, request.lr = len(request.cold), self.optimizer.lr
            space.hot.start_update(request.hot, rows[num_cold:], self.optimizer, lookup.step + 1)
        cold = [rows[: len(r.cold)] for r, rows in zip(lookup.requests, sums, strict=True)]
        if self.lookahead is not None:
            self.lookahead.send(lookup, cold)
            return
        for space, request, rows in zip(self.spaces, lookup.requests, cold, strict=True):
            space.post_gradients(request, rows, "all", self.channels.now)
        for space, request in zip(self.spaces, lookup.requests, strict=True):
            space.finish_gradients(request, "all")
            space.hot.finish_update()

    def _sum_rows(self, lookup: Lookup, number: int, grad: Tensor) -> Tensor:
        """Return this rank's summed gradient of every distinct row of a batch."""
        request, (local, offsets, weights) = lookup.requests[number], self._local_bags(lookup, number)
        num_rows, leaves = len(request.cold) + len(request.hot), self.leaves_per_rank
        sums = grad.new_zeros(num_rows * leaves, grad.shape[1])
        present = np.zeros(num_rows * leaves, np.bool_)
        factors = (weights if weights is not None else grad.new_empty(0)).numpy()
        leaf_of_sample = np.arange(lookup.size) * leaves // max(lookup.size, 1)
        leaf_of_bag = np.tile(leaf_of_sample, (len(offsets) - 1) // max(lookup.size, 1))
        arrays = (grad.numpy(), offsets.numpy(), local.numpy(), factors, leaf_of_bag, leaves)
        sum_occurrences(*arrays, sums.numpy(), present)
        if leaves == 1:
            return sums
        sources = np.where(present, np.arange(num_rows * leaves), -1).reshape(num_rows, leaves)
        merged = grad.new_empty(num_rows, grad.shape[1])
        merge_tree(sums.numpy(), sources, merged.numpy())
        return merged

    def _keyed(self, pooled: Sequence[Tensor], size: int) -> KeyedTensor:
        if len(self.spaces) == 1:  # one width: a transpose instead of many pieces
            width, rows = self.spaces[0].layout.width, pooled[0]
            joined = rows.view(-1, size, width).transpose(0, 1).reshape(size, -1)
            return KeyedTensor(self.features, [width] * len(self.features), joined)
        by_feature = {}
        for space, rows in zip(self.spaces, pooled, strict=True):
            by_feature |= zip(space.layout.features, rows.split(size), strict=True)
        widths = [by_feature[f].shape[1] for f in self.features]
        return KeyedTensor(self.features, widths, torch.cat([by_feature[f] for f in self.features], dim=1))

    # -- state -------------------------------------------------------------------------------------------------------

    def finish_updates(self) -> None:
        """Apply every update that was put off."""
        if self.lookahead is not None:
            self.lookahead.finish_deferred()
        for space in self.spaces:
            space.hot.finish_update()

    def drain(self) -> None:
        """Apply every update that was put off: afterwards all tiers are current. Collective."""
        self.finish_updates()
        self.group.barrier("drain")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in gather_tables(self).items():
            destination[f"{prefix}{name}"] = tensor
        destination[f"{prefix}step"] = torch.tensor(self.step)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
        mine = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        scatter_tables(self, mine)
        self.step = int(mine["step"])
        known = {f"{t.name}.{n}" for t in self.tables for n in ("weight", *self.optimizer.state_names)} | {"step"}
        unexpected += [f"{prefix}{key}" for key in mine if key not in known]

    def retier(self, plan: Plan) -> None:
        """Move rows and their states between the tiers as a new plan says; bitwise neutral. Collective.

        Raises:
            PlanMismatchError: The plan is for other tables or ranks, or pools other tables.
            PipelineError: A pipeline is open.
        """
        if self.lookahead is not None:
            self.lookahead.refuse("retier")
        self.drain()
        check_plan(self.tables, plan, self.group.size)
        if set(plan.pooled) != set(self.plan.pooled):
            raise PlanMismatchError(
                f"the plan pools the tables {list(plan.pooled)} at their owners; expected {list(self.plan.pooled)}, as "
                "before; build a new collection and load the saved tables into it"
            )
        self._sink_hot_rows()
        self.plan = plan
        check_agreement(self)
        self._build_tiers(plan)

    def _sink_hot_rows(self) -> None:
        for space in self.spaces:
            sink_rows(space)

    def _build_tiers(self, plan: Plan) -> None:
        for space in self.spaces:
            hot_rows = {} if self._is_alone else plan.hot_rows  # replicating on one rank would only add work
            space.hot = build_tier(space, hot_rows, self.deterministic)

    def extra_repr(self) -> str:
        """Return what is shown of the collection."""
        hot = sum(len(space.hot) for space in self.spaces)
        rows = sum(space.layout.num_rows for space in self.spaces)
        return f"{len(self.tables)} tables, {rows} rows, {hot} hot, rank {self.group.rank} of {self.group.size}"


class _Pool(torch.autograd.Function):
    """Looks up and pools; its backward is the optimiser step of the tables."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, collection: TieredEmbeddingBagCollection, lookup: Lookup) -> Any:
        ctx.collection, ctx.lookup = collection, lookup
        return tuple(collection._pool(lookup))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            ctx.collection.update(ctx.lookup, grads)
        return None, None, None
