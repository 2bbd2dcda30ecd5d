"""Gradients of logical workers: the same bits for any number of physical ones.

The global batch is split into a fixed number of logical shares. A physical worker computes several, one forward and
backward pass each, and keeps their gradients apart. At the end of the step every worker gets the gradients of all
shares and adds them in the order of their numbers. Neither the split nor the order depends on how many workers there
are, so neither does any bit of the weights.

Each pass draws random numbers from a seed of step and share, and sees module buffers (batch-norm statistics) as they
were at the start of the step; their mean over shares, weighted by samples, is kept.

Callers may not assume speed: memory is the gradients times the number of shares, and so is what travels. Workers must
run the same build on the same kind of device with the same number of threads.

Source: "EasyScale: Elastic Training with Consistent Accuracy and Improved Resource Utilization on GPUs" (SC 2023), the
idea of training threads that do not depend on devices.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from elastic_train.gradients import make_buckets
from elastic_train.group import Links

__all__ = ["LogicalGradients", "shares_of"]


def shares_of(rank: int, size: int, num_shares: int) -> range:
    """Return the logical shares that a worker computes.

    >>> [list(shares_of(rank, 3, 8)) for rank in range(3)]
    [[0, 1], [2, 3, 4], [5, 6, 7]]
    """
    return range(num_shares * rank // size, num_shares * (rank + 1) // size)


class _Rows:
    """Some tensors of each share, one row a share."""

    def __init__(self, tensors: list[Tensor], num_shares: int):
        self.tensors = tensors
        self.rows = torch.zeros(num_shares, sum(t.numel() for t in tensors), dtype=tensors[0].dtype)
        self.total = torch.zeros(self.rows.shape[1], dtype=self.rows.dtype)

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([t.numel() for t in self.tensors])
        return [part.view(t.shape) for part, t in zip(parts, self.tensors, strict=True)]

    def sum_in_order(self) -> None:
        self.total.zero_()
        for row in self.rows:
            self.total += row


class LogicalGradients:
    """The sum over logical shares of a module's gradients.

    Args:
        module: The module.
        num_shares: Logical workers.
        seed: Seed of the random numbers of all passes.

    Attributes:
        links: The members; ``None`` or one member exchanges nothing.
        share: The present share's part of the global batch.
    """

    def __init__(self, module: nn.Module, num_shares: int, seed: int = 0):
        self.links: Links | None = None
        self.share = 1.0
        self.num_shares, self._seed = num_shares, seed
        self._position = 0
        self._gradients = [_Rows(list(bucket.views), num_shares) for bucket in make_buckets(module, 25 << 20)]
        buffers = [b for b in module.buffers() if b.numel()]
        self._means = [
            _Rows([b for b in buffers if b.dtype == kind], num_shares)
            for kind in sorted({b.dtype for b in buffers if b.dtype.is_floating_point}, key=str)
        ]
        self._buffers, self._before = buffers, [b.clone() for b in buffers]

    @property
    def next_share(self) -> int:
        """The share to compute now."""
        return self._mine()[self._position]

    @property
    def is_first(self) -> bool:
        """Whether it is this worker's first of the step."""
        return self._position == 0

    def _mine(self) -> range:
        links = self.links
        return shares_of(links.rank, links.size, self.num_shares) if links else range(self.num_shares)

    def begin(self, step: int) -> None:
        """Set random numbers and buffers for a pass of the next share."""
        if self.is_first:
            self._before = [b.detach().clone() for b in self._buffers]
        self._restore()
        digest = hashlib.sha256(f"{self._seed}/{step}/{self.next_share}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))

    def keep(self) -> bool:
        """Keep the gradients of the present share; returns whether it was this worker's last."""
        for rows in self._gradients:
            for parameter, view in zip(rows.tensors, rows.views(rows.rows[self.next_share]), strict=True):
                if parameter.grad is None or self.share == 0:
                    view.zero_()
                else:
                    torch.mul(parameter.grad, self.share, out=view)
        for rows in self._means:
            for buffer, view in zip(rows.tensors, rows.views(rows.rows[self.next_share]), strict=True):
                torch.mul(buffer, self.share, out=view) if self.share else view.zero_()
        self._position += 1
        return self._position == len(self._mine())

    def finish(self) -> None:
        """Exchange the shares and add them up.

        Raises:
            RuntimeError: A member was lost.
        """
        try:
            if self.links is not None and self.links.size > 1:
                works = [
                    self.links.broadcast_async(rows.rows[share], rank)
                    for rows in (*self._gradients, *self._means)
                    for rank in range(self.links.size)
                    for share in shares_of(rank, self.links.size, self.num_shares)
                ]
                for work in works:
                    work.wait()
        except RuntimeError:
            self.reset()
            raise
        for rows in self._gradients:
            rows.sum_in_order()
            for parameter, view in zip(rows.tensors, rows.views(rows.total), strict=True):
                parameter.grad = view
        for rows in self._means:
            rows.sum_in_order()
            for buffer, view in zip(rows.tensors, rows.views(rows.total), strict=True):
                buffer.copy_(view)
        self._position, self._before = 0, []

    def reset(self) -> None:
        """Forget what was kept since the last step."""
        self._restore()
        self._position = 0

    def _restore(self) -> None:
        for buffer, value in zip(self._buffers, self._before, strict=False):
            buffer.detach().copy_(value)
