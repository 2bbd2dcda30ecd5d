"""Seconds and bytes of a plan: pure functions of its messages and the topology.

Stages run one after the other; inside a stage all messages flow at once and share what their routes share:

    T = sum over stages k of ( a_k + max over resources r of  n[k, r] * w / b[r] )

Symbols: ``n[k, r]`` rows that occupy resource ``r`` in stage ``k``; ``w`` bytes of a row; ``b[r]`` bytes per second
of the resource; ``a_k`` the largest route latency among the messages of the stage. Backward runs the same messages
in the other direction, so its loads are those of the reversed pairs.

Source: DGCL (EuroSys 2021), cost model. We differ in measured bandwidths, in the latency term and in contention
groups.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from core_kernels.topology import Topology
from gnn_comm.errors import GnnCommArgumentError
from gnn_comm.planners.chunks import ragged_arange
from gnn_comm.transfers import Transfers

__all__ = ["PlanEstimate", "estimate_transfers", "latency_of_pairs", "reversed_transfers", "row_bytes_of"]


@dataclass(frozen=True)
class PlanEstimate:
    """Predicted cost of one exchange.

    Attributes:
        seconds: Total.
        latency_seconds: Share of the stages' latencies.
        stage_seconds: Seconds of each stage, latency included.
        bottlenecks: Name of the busiest resource of each stage.
        sent_bytes: Payload that leaves all devices together, each hop counted.
        max_device_sent_bytes: Payload that leaves the busiest device.
        row_bytes: Bytes of one row.
    """

    seconds: float
    latency_seconds: float
    stage_seconds: tuple[float, ...]
    bottlenecks: tuple[str, ...]
    sent_bytes: int
    max_device_sent_bytes: int
    row_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return asdict(self)


def row_bytes_of(width: int, dtype: torch.dtype | str = torch.float32) -> int:
    """Return the bytes of a row of ``width`` values.

    >>> row_bytes_of(256), row_bytes_of(3, torch.bfloat16), row_bytes_of(2, "float64")
    (1024, 6, 16)

    Raises:
        GnnCommArgumentError: The width is negative, or the type unknown.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if width < 0 or not isinstance(found, torch.dtype):
        raise GnnCommArgumentError(
            f"width={width}, dtype={dtype!r}: expected at least 0 values of a torch type; pass such as 256, 'float32'"
        )
    return width * found.itemsize


def reversed_transfers(transfers: Transfers) -> Transfers:
    """Return the messages of the backward pass: last stage first, ends swapped.

    The row array keeps its order, so message ``m`` of the result has the rows of the same message.
    """
    stage = transfers.num_stages - 1 - transfers.stage
    return Transfers(
        transfers.num_devices, stage, transfers.receiver, transfers.sender, transfers.row_indptr, transfers.rows
    )


def estimate_transfers(transfers: Transfers, topology: Topology, row_bytes: int) -> PlanEstimate:
    """Predict the seconds of one exchange of rows of ``row_bytes`` bytes.

    Raises:
        UnreachablePairError: A message has no route.
    """
    loads = transfers.row_loads(topology) * row_bytes / topology.resource_bytes_per_second
    pair = transfers.sender * topology.num_devices + transfers.receiver
    for cut_off in np.flatnonzero(~topology.routes.reachable[pair])[:1]:
        topology.route(int(transfers.sender[cut_off]), int(transfers.receiver[cut_off]))
    latency = np.zeros(transfers.num_stages)
    np.maximum.at(latency, transfers.stage, latency_of_pairs(topology)[pair])
    seconds = loads.max(axis=1, initial=0.0) + latency
    sent = np.bincount(transfers.sender, transfers.num_rows, minlength=topology.num_devices) * row_bytes
    return PlanEstimate(
        float(seconds.sum()),
        float(latency.sum()),
        tuple(float(value) for value in seconds),
        tuple(topology.resource_names[int(k)] for k in loads.argmax(axis=1)) if loads.size else (),
        int(sent.sum()),
        int(sent.max(initial=0)),
        row_bytes,
    )


def latency_of_pairs(topology: Topology) -> np.ndarray:
    """Return float64 ``[P * P]``: the summed latency of every pair's links; 0 for pairs without a route."""
    routes = topology.routes
    of_link = np.array([link.latency_seconds for link in topology.links], np.float64)
    pair = np.repeat(np.arange(len(routes.num_links)), routes.num_links)
    links = routes.items[routes.indptr[pair] + ragged_arange(routes.num_links)]
    return np.bincount(pair, of_link[links], minlength=len(routes.num_links))
