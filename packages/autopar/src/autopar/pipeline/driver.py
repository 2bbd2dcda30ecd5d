"""The 1F1B schedule over ranks: passes of one stage in order, activations and gradients exchanged with its neighbours.

``torch.distributed.pipelining`` knows one peer per stage, so stages of several devices run here: each rank of a stage
exchanges the run of elements it owns with all owners on the other side (:mod:`autopar.pipeline.boundary`). Sends are
posted and waited for at the end of the step; a rank waits only for what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.pipeline.boundary import Boundary, meetings
from autopar.pipeline.piece import Piece
from core_kernels.comm import Group
from core_kernels.comm.handle import Handle, Recv, Send

__all__ = ["Driver"]


class Driver:
    """Runs the passes of this rank's stage.

    Args:
        piece: The stage.
        order: Its passes, from :func:`autopar.pipeline.schedule.stage_order`.
        group: All ranks of the pipeline.
        coordinate: Place of this rank on the stage's mesh.
        others: The neighbours' sides of the cuts before and behind this stage, and their ranks; ``None`` at the ends.
    """

    def __init__(
        self,
        piece: Piece,
        order: Sequence[tuple[str, int]],
        group: Group,
        coordinate: Sequence[int],
        others: Sequence[tuple[Boundary, list[int]] | None],
    ):
        self._piece, self._order, self._group = piece, order, group
        self._meet = [
            _with_ranks(mine, coordinate, other)
            for mine, other in zip((piece.before, piece.behind), others, strict=True)
        ]

    def step(self) -> list[Tensor]:
        """Run all passes of a step; return the losses of the last stage's micro-batches. Collective: all ranks."""
        held: dict[int, tuple[Tensor | None, Tensor]] = {}
        sent: list[Handle] = []
        losses: list[Tensor] = []
        for kind, index in self._order:
            if kind == "F":
                received = self._receive(0)
                inputs = () if received is None else (received.requires_grad_(),)
                result = self._piece(*inputs, micro_batch=torch.tensor(index))
                held[index] = received, result
                if self._piece.behind is None:
                    losses.append(result.detach())
                else:
                    sent.append(self._send(1, result, "activations"))
                continue
            received, result = held.pop(index)
            torch.autograd.backward(result, self._receive(1))
            if received is not None:
                assert received.grad is not None
                sent.append(self._send(0, received.grad, "gradients"))
        for handle in sent:
            handle.wait()
        return losses

    def _receive(self, side: int) -> Tensor | None:
        boundary, peers = self._meet[side]
        if boundary is None:
            return None
        length = max((stop for _, _, stop in peers), default=0)
        run = torch.empty(length, dtype=boundary.info.dtype, device=self._group.device)
        self._group.send_recv([Recv(run[start:stop], rank) for rank, start, stop in peers], tag="received")
        return run

    def _send(self, side: int, run: Tensor, tag: str) -> Handle:
        _, peers = self._meet[side]
        run = run.detach()
        return self._group.send_recv([Send(run[a:b], rank) for rank, a, b in peers], tag=tag, async_op=True)


def _with_ranks(
    mine: Boundary | None, coordinate: Sequence[int], other: tuple[Boundary, list[int]] | None
) -> tuple[Boundary | None, list[tuple[int, int, int]]]:
    if mine is None or other is None:
        return None, []
    boundary, ranks = other
    return mine, [(ranks[place], start, stop) for place, start, stop in meetings(mine, coordinate, boundary)]
