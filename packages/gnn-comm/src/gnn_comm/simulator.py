"""Run a plan without barriers, with links shared max-min fairly.

The cost model lets every stage wait for the one before. Real ranks do not: a message starts when its sender has the
rows it passes on and its own messages of earlier stages have left. Here messages are fluid flows: at every moment
each resource shares its bandwidth so that no flow can get more without taking from one that has less. The result is
what the runtime should take, and an upper check on the stage-wise estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnn_comm.cost_model import reversed_transfers
from gnn_comm.plan import Plan
from gnn_comm.transfers import Transfers

__all__ = ["Simulation", "max_min_rates", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """Times of one simulated exchange.

    Attributes:
        seconds: When the last message ended.
        message_start_seconds: Start of each message.
        message_end_seconds: End of each message.
        resource_bytes: Bytes over each resource, by name; only those used.
    """

    seconds: float
    message_start_seconds: np.ndarray
    message_end_seconds: np.ndarray
    resource_bytes: dict[str, int]


def simulate(plan: Plan, row_bytes: int | None = None, direction: str = "forward") -> Simulation:
    """Simulate one exchange.

    Args:
        plan: The plan.
        row_bytes: Bytes of a row; those the plan was made for when left out.
        direction: ``"forward"`` or ``"backward"``.

    Cost: one fair-share computation per message end.
    """
    transfers = plan.transfers if direction == "forward" else reversed_transfers(plan.transfers)
    row_bytes = plan.row_bytes if row_bytes is None else row_bytes
    topology = plan.topology
    resources = [
        topology.routes.resources(int(i), int(j)) for i, j in zip(transfers.sender, transfers.receiver, strict=True)
    ]
    before = _dependencies(transfers)
    num_messages = len(transfers)
    left = transfers.num_rows.astype(np.float64) * row_bytes
    latency = [
        topology.latency_seconds(int(i), int(j)) for i, j in zip(transfers.sender, transfers.receiver, strict=True)
    ]
    start, end = np.full(num_messages, np.inf), np.full(num_messages, np.inf)
    waiting = [len(b) for b in before]
    after: list[list[int]] = [[] for _ in range(num_messages)]
    for m, needs in enumerate(before):
        for n in needs:
            after[n].append(m)
    now = 0.0
    pending = {m: latency[m] for m in range(num_messages) if waiting[m] == 0}
    for m in pending:
        start[m] = 0.0
    active: list[int] = []
    while pending or active:
        rates = max_min_rates([resources[m] for m in active], topology.resource_bytes_per_second)
        finish = [now + left[m] / rate for m, rate in zip(active, rates, strict=True)]
        then = min([*finish, *pending.values()])
        for m, rate in zip(active, rates, strict=True):
            left[m] -= rate * (then - now)
        now = then
        done = [m for m, at in zip(active, finish, strict=True) if at <= now * (1 + 1e-12)]
        active = [m for m in active if m not in done]
        for m in [m for m, at in pending.items() if at <= now]:
            del pending[m]
            active.append(m)
        for m in done:
            end[m] = now
            for n in after[m]:
                waiting[n] -= 1
                if waiting[n] == 0:
                    start[n] = now
                    pending[n] = now + latency[n]
    loads = transfers.row_loads(topology).sum(axis=0) * row_bytes
    used = {topology.resource_names[k]: int(loads[k]) for k in np.flatnonzero(loads)}
    return Simulation(float(end.max(initial=0.0)), start, end, used)


def max_min_rates(resources: list[np.ndarray], bytes_per_second: np.ndarray) -> list[float]:
    """Share the resources max-min fairly among flows.

    Args:
        resources: Resources of each flow.
        bytes_per_second: Capacity of every resource.

    Returns:
        Bytes per second of each flow.

    >>> max_min_rates([np.array([0]), np.array([0, 1])], np.array([10.0, 3.0]))
    [7.0, 3.0]
    """
    spare = bytes_per_second.astype(np.float64).copy()
    rates = np.full(len(resources), np.inf)
    growing = set(range(len(resources)))
    members = np.zeros(len(spare), np.int64)
    for flow in growing:
        members[resources[flow]] += 1
    while growing:
        share = np.full(len(spare), np.inf)
        np.divide(spare, members, out=share, where=members > 0)
        tightest = int(share.argmin())
        for flow in [f for f in growing if tightest in resources[f]]:
            rates[flow] = share[tightest]
            spare[resources[flow]] = np.maximum(spare[resources[flow]] - share[tightest], 0.0)
            members[resources[flow]] -= 1
            growing.remove(flow)
    return [float(rate) for rate in rates]


def _dependencies(transfers: Transfers) -> list[list[int]]:
    """List, per message, those that must end before it starts: bringers of its rows, the sender's earlier stages."""
    found: list[list[int]] = []
    for m in range(len(transfers)):
        rows = transfers.rows_of(m)
        inbound = np.flatnonzero((transfers.receiver == transfers.sender[m]) & (transfers.stage < transfers.stage[m]))
        needs = [int(n) for n in inbound if np.isin(rows, transfers.rows_of(n)).any()]
        sent = np.flatnonzero((transfers.sender == transfers.sender[m]) & (transfers.stage < transfers.stage[m]))
        found.append(sorted({*needs, *(int(n) for n in sent)}))
    return found
