"""Pre-fetching: rows of the next batch travel behind the compute of the current one, and nothing else changes.

What happens around batch k, with everything in order on every rank::

    lookup k           wait for the rows of k; learn what peers want in k+1; classify, send one bit per row
    after forward k    apply deferred gradients of k-1; send free rows of k+1; read batch k+2 and announce its counts
    backward k         urgent gradients of k travel, are applied; late rows of k+1 leave
    dense step k       dense gradients are averaged; deferred gradients of k leave; ids of k+2 leave

A free row of k+1 is read when all updates up to k-1 are applied and k does not touch it; a late row after the update of
k; a deferred gradient is applied before rows of k+2 are read. So every forward pass reads each row after all earlier
updates, exactly as without pre-fetching.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from recsys_embed.collection import Lookup, TieredEmbeddingBagCollection
from recsys_embed.errors import PipelineError, input_error

__all__ = ["PrefetchPipeline"]

_logger = logging.getLogger(__name__)


class PrefetchPipeline:
    """Wraps an ordinary training loop so that embedding rows are fetched one batch ahead.

    Args:
        model: The module whose forward calls the embeddings; rows travel after its forward pass.
        dense_optimizer: Optimiser of the other parameters. Their gradients are averaged over ranks before its step,
            weighted by samples; None leaves them alone (pass it when the model is DistributedDataParallel).
        embeddings: The collection.
        features: Takes what the loader yields, returns the KeyedJaggedTensor in it; by default the batch itself, its
            ``features`` attribute, or the first item of a tuple.
        enabled: False runs the same loop without pre-fetching.
        uneven: Ranks that run out of data early: ``"stop"`` ends all together, ``"error"`` raises on all.

    Use it as a context; leaving it applies everything that was put off::

        with PrefetchPipeline(model, dense_optimizer, embeddings) as pipe:
            for batch in pipe(loader):
                loss = criterion(model(batch), batch.labels)
                dense_optimizer.zero_grad()
                loss.backward()
                dense_optimizer.step()

    Collective: all ranks, batch by batch.
    """

    def __init__(
        self,
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer | None,
        embeddings: TieredEmbeddingBagCollection,
        features: Any = None,
        enabled: bool = True,
        uneven: str = "stop",
    ):
        if uneven not in ("stop", "error"):
            raise input_error("uneven", uneven, "'stop' or 'error'", "choose one of them")
        self.model, self.dense_optimizer, self.embeddings, self.enabled = model, dense_optimizer, embeddings, enabled
        self.uneven, self._features = uneven, features or _find_features
        self._hooks: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self._current: Lookup | None = None
        self._next: Lookup | None = None
        self._after: tuple[Any, Lookup | None, Any] | None = None
        self._deferred: tuple[Lookup, list[Tensor]] | None = None
        self._unsent: tuple[Lookup, list[Tensor]] | None = None
        self._stage = "idle"
        self._items: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self.embeddings.lookahead is not None:
            raise PipelineError("the collection already is in a pipeline; expected none; leave the other one first")
        if self.enabled and not self.embeddings._is_alone:
            self.embeddings.lookahead = self
            self._hooks.append(self.model.register_forward_hook(lambda *_: self._after_forward()))
        if self.dense_optimizer is not None and self.embeddings.group.size > 1:
            self._hooks.append(self.dense_optimizer.register_step_pre_hook(lambda *_: self._before_dense_step()))
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        is_open = self.embeddings.lookahead is self
        if is_open and kind is None:
            self._settle()
        self.embeddings.lookahead = None
        if kind is None:
            self.embeddings.finish_updates()
        self._reset()

    def __call__(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of ``loader``, each exactly once, until the first rank has no more.

        Raises:
            PipelineError: A batch was not trained on before the next was asked for, or ranks have different numbers of
                batches and ``uneven="error"``.
        """
        if self.embeddings.lookahead is not self:
            yield from self._plain(loader)
            return
        self._source = iter(loader)
        self._announce()
        self._flush()
        self._current = self._admit()
        if self._current is not None:
            self._start(self._current)
            self._announce()
            self._flush()
            self._next = self._admit()
        while self._current is not None:
            self._stage = "given"
            yield self._items.pop(id(self._current))
            if self._stage != "updated":
                raise PipelineError(
                    f"batch {self._current.step} ended in the stage {self._stage!r}; expected a forward and a backward "
                    "pass before the next batch; use embeddings.eval() for batches that are not trained on"
                )
            self._flush()
            self._current, self._next = self._next, self._admit()
        self._settle()

    # -- events, in the order of the table above ---------------------------------------------------------------------

    def take(self, batch: Any) -> Lookup:
        """Return the lookup of the batch at hand, its rows on their way."""
        if self._current is None or self._current.batch is not batch or self._stage != "given":
            raise PipelineError(
                "the collection was given a batch that the pipeline did not announce; expected the one just yielded, "
                "once; iterate over pipe(loader), or use embeddings.eval()"
            )
        self._flush()
        self._stage = "looked up"
        return self._current

    def after_lookup(self) -> None:
        """Learn what peers want next, classify it, tell them."""
        emb, current, following = self.embeddings, self._current, self._next
        if following is None or current is None or following.step >= 0:
            return
        following.step, emb.step = emb.step, emb.step + 1
        for space, request, previous in zip(emb.spaces, following.requests, current.requests, strict=True):
            space.finish_ids(request)
            space.classify(request, previous, following.step)

    def _after_forward(self) -> None:
        if self._stage != "looked up" or not self.embeddings.training:
            return
        emb, current, following = self.embeddings, self._current, self._next
        self._stage = "forward done"
        self.finish_deferred()
        if current is not None and following is not None:
            for space, request, previous in zip(emb.spaces, following.requests, current.requests, strict=True):
                space.finish_bits(request, previous)
                space.post_rows(request, "free", emb.channels.ahead)
            self._announce()

    def send(self, lookup: Lookup, sums: list[Tensor]) -> None:
        """Send the gradients of the batch at hand: urgent ones now, the others later."""
        if self._stage == "looked up":  # the collection is used outside the model's forward
            self._after_forward()
        if self._stage != "forward done" or lookup is not self._current:
            raise PipelineError("a batch was differentiated twice, or out of order; expected one backward per batch")
        emb, following = self.embeddings, self._next
        part = "all" if following is None else "urgent"
        for space, request, rows in zip(emb.spaces, lookup.requests, sums, strict=True):
            space.post_gradients(request, rows, part, emb.channels.now)
        for number, (space, request) in enumerate(zip(emb.spaces, lookup.requests, strict=True)):
            space.finish_gradients(request, part)
            if following is not None:
                space.post_rows(following.requests[number], "late", emb.channels.now)
        if following is not None:
            self._unsent = (lookup, sums)
        self._stage = "updated"

    def _before_dense_step(self) -> None:
        self._average_dense()
        if self._stage == "updated":
            self._flush()

    def _flush(self) -> None:
        """Let the ids of the batch after next leave, and behind them, as they are many, the deferred gradients."""
        if self._after is not None and self._after[2] is not None:
            item, lookup, handle = self._after
            sizes = self.embeddings.read_counts(lookup, handle)
            self._after = (item, lookup if self._all_go_on(sizes) else None, None)
        if self._unsent is not None:
            lookup, sums = self._unsent
            self._unsent = None
            for space, request, rows in zip(self.embeddings.spaces, lookup.requests, sums, strict=True):
                space.post_gradients(request, rows, "deferred", self.embeddings.channels.ahead)
            self._deferred = (lookup, sums)

    def finish_deferred(self) -> None:
        """Apply deferred gradients; a no-op when there are none."""
        if self._unsent is not None:
            self._flush()
        if self._deferred is None:
            return
        lookup, _ = self._deferred
        self._deferred = None
        for space, request in zip(self.embeddings.spaces, lookup.requests, strict=True):
            space.finish_gradients(request, "deferred")

    def refuse(self, action: str) -> None:
        """Raise because an action needs the pipeline to be left."""
        raise PipelineError(f"{action} was called inside a pipeline; expected none open; leave the context first")

    # -- batches -----------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Read one batch and tell peers how many rows it wants."""
        item = next(self._source, None)
        lookup = None if item is None else self.embeddings.prepare(self._features(item))
        self._after = (item, lookup, self.embeddings.post_counts(lookup))

    def _admit(self) -> Lookup | None:
        """Return the announced batch, None when a rank has no more."""
        if self._after is None:
            return None
        item, lookup, _ = self._after
        self._after = None
        if lookup is not None:
            self._items[id(lookup)] = item
        return lookup

    def _start(self, lookup: Lookup) -> None:
        """Fetch the very first batch at once."""
        emb = self.embeddings
        lookup.step, emb.step = emb.step, emb.step + 1
        for space, request in zip(emb.spaces, lookup.requests, strict=True):
            space.finish_ids(request)
            space.classify(request, None, lookup.step)
            space.post_rows(request, "all", emb.channels.now)

    def _all_go_on(self, sizes: Sequence[int]) -> bool:
        if all(sizes):
            return True
        if any(sizes):
            empty = [rank for rank, size in enumerate(sizes) if not size]
            if self.uneven == "error":
                raise PipelineError(
                    f"ranks {empty} have no more batches while others do; expected equally many on every rank; drop "
                    "the tail of the loader, or pass uneven='stop'"
                )
            _logger.warning("ranks %s have no more batches; all ranks stop here", empty)
        return False

    def _settle(self) -> None:
        """Leave nothing in flight: apply what was put off, forget what was fetched for a batch that never came."""
        self._flush()
        self.finish_deferred()
        for lookup in (self._next, self._after[1] if self._after else None):
            for space, request in zip(self.embeddings.spaces, lookup.requests if lookup else [], strict=False):
                space.forget(request)
            if lookup is not None and lookup.step >= 0:
                self.embeddings.step = min(self.embeddings.step, lookup.step)
        self._next = self._after = self._current = None
        self._stage = "idle"

    def _plain(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield batches without pre-fetching, until the first rank has no more."""
        group = self.embeddings.group
        for item in _then_none(loader):
            sizes = [int(item is not None)]
            if group.size > 1:
                sizes = group.all_gather_v(torch.tensor(sizes), tag="go on", counts=[1] * group.size)[0].tolist()
            if not self._all_go_on(sizes):
                return
            yield item

    def _average_dense(self) -> None:
        """Average the gradients of dense parameters over ranks, weighted by samples, in one all-reduce."""
        emb, optimizer = self.embeddings, self.dense_optimizer
        if optimizer is None:
            return
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        if not parameters:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in grads]).mul_(emb.last_share if emb.reduction == "mean" else 1.0)
        handle = emb.group.all_reduce(flat, tag="dense", async_op=True, out=flat, ordered=emb.deterministic)
        emb.clock.wait("dense", handle)
        for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)


def _find_features(item: Any) -> Any:
    if hasattr(item, "lengths"):
        return item
    return getattr(item, "features", None) or item[0]


def _then_none(loader: Iterable[Any]) -> Iterator[Any]:
    yield from loader
    yield None
