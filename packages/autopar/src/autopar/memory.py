"""Memory of a plan as it runs: bytes stored, and the allocator's peak over one training step.

The peak is read from the events that torch's own allocator reports to its profiler, so it includes everything an
operator allocates and nothing that this package believes. Gradient buffers are kept between steps
(``zero_grad(set_to_none=False)``), as the predicted memory counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from autopar.execution import ParallelModule

__all__ = ["peak_step_bytes", "stored_bytes"]


def stored_bytes(parallel: ParallelModule) -> tuple[int, int]:
    """Return the bytes of this rank's parameters and of its buffers, tied ones once."""
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in parallel.parameters())
    return parameters, sum(buffer.numel() * buffer.element_size() for buffer in parallel.buffers())


def peak_step_bytes(parallel: ParallelModule, inputs: Sequence[Tensor]) -> int:
    """Return this rank's peak of parameters, gradients, AdamW's state and everything a step allocates, in bytes.

    The batch itself is not counted. Parameters change by two steps of AdamW. Collective: all ranks of the module.
    """
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, foreach=False)
    _step(parallel, inputs, optimizer)
    parameters, buffers = stored_bytes(parallel)
    states = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _step(parallel, inputs, optimizer)
    held = highest = 0
    events = cast(Any, profile).profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return 2 * parameters + buffers + states + highest


def _step(parallel: ParallelModule, inputs: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    parallel(*inputs).backward()
    optimizer.step()
