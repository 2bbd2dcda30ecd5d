"""Sum the gradients of parameters over ranks: exactly, or compressed when asked for.

The exact sum is taken in rank order, so that every rank gets the same bits and the result is that of one process up
to the order of additions. Two lossy forms trade that for fewer bytes, and carry what they lose into the next step, so
that over a run nothing is dropped: ``s2`` keeps the largest 1 % of the values and sums them through a count sketch,
``casq`` rounds every value to one of 16 cluster centres.

Source: S2 Reducer (arXiv 2110.02140) and CASQ (CLUSTER 2021), see :mod:`core_kernels.comm.compress`. Dense gradients
are made sparse here by their size, since a sketch of all values would carry mostly noise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from core_kernels.comm import Group
from core_kernels.comm.compress import ClusterAllReduce, SketchAllReduce
from gnn_comm.errors import GnnCommArgumentError

__all__ = ["COMPRESSIONS", "PARAMETER_TAG", "GradientReducer"]

COMPRESSIONS = ("s2", "casq")
PARAMETER_TAG = "gnn_comm.parameters"
_KEPT_SHARE = 0.01
_COLUMNS_PER_KEPT = 2
"""Sketch columns per value that some rank may keep; twice the non-zeros of the sum at least."""
_SKETCH_ROWS = 3
_CASQ_BITS = 4


class GradientReducer:
    """Sums the gradients of a model's parameters over ranks.

    Args:
        group: The ranks.
        compress: ``None`` for exact sums, ``"s2"`` or ``"casq"``.
        seed: Of the sketch's hashes, the same on all ranks.

    Raises:
        GnnCommArgumentError: The compression is not known.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model(torch.tensor([[1.0, 3.0]])).sum().backward()
    >>> GradientReducer(Group.single()).reduce(model)
    >>> model.weight.grad
    tensor([[1., 3.]])
    """

    def __init__(self, group: Group, compress: str | None = None, seed: int = 0):
        if compress is not None and compress not in COMPRESSIONS:
            raise GnnCommArgumentError(
                f"compress={compress!r} is not known; expected None or one of {COMPRESSIONS}; choose one"
            )
        self.group, self.compress, self._seed = group, compress, seed
        self._sketch: SketchAllReduce | None = None
        self._clusters = ClusterAllReduce(group, _CASQ_BITS) if compress == "casq" else None
        self._unsent: Tensor | None = None

    def reduce(self, model: nn.Module) -> None:
        """Replace the gradient of every parameter by the sum over ranks; a missing gradient counts as zero.

        Collective: all ranks.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        flat = self.sum(flat)
        for parameter, block in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = block.view_as(parameter).clone()

    def sum(self, flat: Tensor) -> Tensor:
        """Return the sum of a vector over ranks.

        Collective: all ranks.
        """
        if self.compress == "s2":
            return self._sum_largest(flat)
        if self._clusters is not None:
            return self._clusters.all_reduce(flat, "parameters", tag=PARAMETER_TAG)
        return self.group.all_reduce(flat, tag=PARAMETER_TAG, ordered=True)

    def carried(self) -> Tensor | None:
        """Return what this rank has yet to hand over: with it, over all ranks, results so far add up to the inputs."""
        if self._clusters is not None:
            return self._clusters.carried.get("parameters")
        if self._sketch is None or self._unsent is None:
            return None
        return self._unsent + self._sketch.carried["parameters"]

    def sent_bytes(self) -> int:
        """Return the bytes this rank has sent for parameters."""
        return self.group.counters.sent(PARAMETER_TAG) + self.group.counters.sent(f"{PARAMETER_TAG}.bitmap")

    def _sum_largest(self, flat: Tensor) -> Tensor:
        """Sum the largest values through a sketch; the others, and what the sketch loses, wait for the next step."""
        kept = max(1, int(_KEPT_SHARE * len(flat)))
        if self._sketch is None:
            columns = _COLUMNS_PER_KEPT * kept * self.group.size
            self._sketch = SketchAllReduce(self.group, columns, _SKETCH_ROWS, self._seed)
        whole = flat.float() if self._unsent is None else flat.float() + self._unsent
        largest = whole.abs().topk(kept).indices
        sparse = torch.zeros_like(whole)
        sparse[largest] = whole[largest]
        self._unsent = whole - sparse
        # What the sketch carries is added to its own next input, not ranked again: it has been chosen before.
        return self._sketch.all_reduce(sparse, "parameters", tag=PARAMETER_TAG).to(flat.dtype)
