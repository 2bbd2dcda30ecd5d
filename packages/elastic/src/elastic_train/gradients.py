"""Gradients summed over the workers while the backward pass still runs.

Parameters are put into buckets, last ones first, as their gradients come in about that order. When all gradients of a
bucket are there, they are scaled by this worker's share of the global batch and their sum is started; buckets start in
the same order on every worker. ``finish`` waits for them. Scaling by the share and summing gives the mean over the
global batch for any split of it, which dividing by the number of workers does not.

Callers may not assume that gradients accumulate over several backward passes: one pass belongs to one step. Nor may
they change gradients before ``finish``, as the sums are under way; what should happen to the sums belongs into the
update of :class:`elastic_train.Optimizer`. A parameter that no worker used has a gradient of zero, not none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elastic_train.errors import input_error
from elastic_train.group import Links

__all__ = ["GradientSum", "make_buckets"]


class _Bucket:
    """Some parameters whose gradients travel together."""

    def __init__(self, parameters: list[nn.Parameter]):
        first, length = parameters[0], sum(p.numel() for p in parameters)
        self.buffer = torch.zeros(length, dtype=first.dtype, device=first.device)
        parts = self.buffer.split([p.numel() for p in parameters])
        self.views = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
        self.filled: set[nn.Parameter] = set()
        self.work: Any = None
        self.version = 0  # of the buffer when its sum began; torch counts changes in place, gloo's are not counted


class GradientSum:
    """The sum of a module's gradients over the members of the present generation.

    Args:
        module: The module; its parameters that require gradients are summed.
        bucket_bytes: Size from which a bucket is full.

    Attributes:
        links: The members; ``None`` or one member makes no sum.
        share: This worker's part of the global batch, in ``[0, 1]``.
        measures_squares: Whether to measure the gradients' squared norms.
        squares: Of the last step, the means over workers of the squared norm of their own gradients and of one over
            their shares, and the squared norm of the sum in between; ``None`` when it had one worker.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 << 20):
        self.links: Links | None = None
        self.share = 1.0
        self.measures_squares = False
        self.squares: tuple[float, float, float] | None = None
        self._local_square = 0.0
        self._failure: Exception | None = None
        self._next = 0
        self._buckets = make_buckets(module, bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        bucket = self._bucket_of[parameter]
        if parameter in bucket.filled:
            raise input_error("backward", "a second pass", "one backward pass per step", "call the optimizer's step")
        if parameter.grad.layout != torch.strided:
            shown, shape = f"of layout {parameter.grad.layout}", tuple(parameter.shape)
            raise input_error(f"gradient of a parameter of shape {shape}", shown, "a dense one", "use sparse=False")
        torch.mul(parameter.grad, self.share, out=bucket.views[parameter])
        parameter.grad = bucket.views[parameter]
        bucket.filled.add(parameter)
        while self._next < len(self._buckets) and self._is_full(self._buckets[self._next]):
            self._start(self._buckets[self._next])

    def _is_full(self, bucket: _Bucket) -> bool:
        return len(bucket.filled) == len(bucket.views)

    def _start(self, bucket: _Bucket) -> None:
        self._next += 1
        bucket.version = bucket.buffer._version
        if self.links is None or self.links.size == 1 or self._failure is not None:
            return
        if self.measures_squares:
            self._local_square += bucket.buffer.double().square().sum().item()
        try:
            bucket.work = self.links.sum_async(bucket.buffer)
        except RuntimeError as error:  # a lost peer; finish() reports it, outside of the backward pass
            self._failure = error

    def finish(self) -> None:
        """Wait until all gradients are summed.

        Raises:
            RuntimeError: A member was lost.
            InputError: Gradients were changed since the backward pass, or parameters came to require them.
        """
        self._check_untouched()
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            for parameter, view in bucket.views.items():
                if parameter not in bucket.filled:  # took no part in this worker's forward pass
                    view.zero_()
                    parameter.grad = view if parameter.requires_grad else None
            self._start(bucket)
        try:
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.wait()
            if self._failure is not None:
                raise self._failure
            self.squares = self._measure() if self.measures_squares else None
        finally:
            self.reset()

    def _check_untouched(self) -> None:
        """Refuse what would make workers differ: gradients changed while they are summed, or not summed at all."""
        if any(bucket.buffer._version != bucket.version for bucket in self._buckets[: self._next]):
            raise input_error(
                "gradients", "changed between backward() and step()", "as the backward pass left them, as their sums "
                "over the workers are under way", "clip or unscale in elastic_train.Optimizer(inner, update=...)",
            )  # fmt: skip
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            expected = "the parameters that required gradients when wrap was called, or fewer"
            raise input_error("requires_grad", thawed[:3], expected, "wrap the module first and freeze parameters then")

    def _measure(self) -> tuple[float, float, float] | None:
        """Return what ``squares`` says, after all sums are done."""
        if self.links is None or self.links.size == 1:
            return None
        mine = [self._local_square / self.share**2, 1 / self.share, 1.0] if self.share else [0.0, 0.0, 0.0]
        total = torch.tensor(mine, dtype=torch.float64)
        self.links.sum_async(total).wait()
        local_square, inverse_share, count = total.tolist()
        if count < 2:
            return None
        whole = sum(bucket.buffer.double().square().sum().item() for bucket in self._buckets)
        return local_square / count, whole, inverse_share / count

    def reset(self) -> None:
        """Forget what was gathered since the last step."""
        self._next, self._failure, self._local_square = 0, None, 0.0
        for bucket in self._buckets:
            bucket.filled.clear()
            bucket.work = None


def make_buckets(module: nn.Module, bucket_bytes: int) -> list[_Bucket]:
    """Return the parameters that require gradients in buckets of one type and device each, last ones first."""
    buckets: list[_Bucket] = []
    current: list[nn.Parameter] = []
    for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
        if current and (parameter.dtype, parameter.device) != (current[0].dtype, current[0].device):
            buckets.append(_Bucket(current))
            current = []
        current.append(parameter)
        if sum(p.numel() * p.element_size() for p in current) >= bucket_bytes:
            buckets.append(_Bucket(current))
            current = []
    if current:
        buckets.append(_Bucket(current))
    return buckets
