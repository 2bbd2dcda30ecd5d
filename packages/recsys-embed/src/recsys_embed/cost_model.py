"""What a step costs for a given hot tier: pure functions from access probabilities and an interconnect.

Symbols, per rank and step::

    q      probability that one rank asks for a row in a step          u = 1 - (1 - q)^N   that any rank does
    N      ranks            r = bytes of a row            f = (N - 1) / N, the part of rows that lives elsewhere
    V      = sum over cold rows of q r f        rows that travel forward, and gradients that travel back
    V_c    = sum over cold rows of q u r f      the part touched in two batches in a row: late rows, urgent gradients
    I      = sum over cold rows of q b f        ids, b bytes each
    A      = sum over hot rows of r             all-reduced every step
    a(x), R(x)   measured seconds of an all-to-all and an all-reduce of x bytes
    P      = B N (1 - (1 - 1/N)^l) r f   partial pools of tables whose owners pool: B bags of l ids, never early
    G      bytes of dense gradients, all-reduced together with the hot tier
    C      seconds of dense compute         W   seconds of work on ids and rows, see recsys_embed.work

    with pre-fetching      exposed = 2 a(V_c) + 2 a(P) + R(A + G) + 2 a(0) + max(0, 2 a(V - V_c) + a(I) - C - W)
    without                exposed = 2 a(V) + 2 a(P) + R(A + G) + a(0) + a(I)
    step   = C + W + exposed

where a(0) is the latency of counts and of the owners' verdicts, and early traffic hides behind compute and work alike.

Callers may not assume that a hot tier pays: with duplicates removed, all-reducing a row moves as many bytes as fetching
it and returning its gradient with q = 1, so a tier wins where an all-reduce is cheaper per byte than an all-to-all, or
where small messages and row work dominate.

Where we differ from FEC: its tier size was a table indexed by batch size; ours follows from measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core_kernels.interconnect import Interconnect
from recsys_embed.plan import Candidate
from recsys_embed.work import WorkCosts, WorkLoad

__all__ = ["Machine", "Traffic", "Workload", "load_of", "price", "traffic_of"]

#: Times the bytes of rows that owners add up pass through memory.
_POOLED_PASSES = 3.0


@dataclass(frozen=True)
class Machine:
    """What a step runs on, and what it does apart from the tables.

    Attributes:
        interconnect: Seconds of collectives, and memory rates.
        work: Processor seconds of ids and rows.
        dense_seconds: Forward and backward of the rest of the model.
        dense_bytes: Its gradients.
        prefetch: Whether rows are fetched a batch ahead.
    """

    interconnect: Interconnect
    work: WorkCosts
    dense_seconds: float = 0.0
    dense_bytes: float = 0.0
    prefetch: bool = True


@dataclass(frozen=True)
class Workload:
    """Rows in descending order of popularity, as cumulated sums over groups of equally popular rows.

    Attributes:
        num_rows: Cumulated rows, from 0.
        cold_bytes: Cumulated ``q r``; cold_critical: ``q u r``; requests: ``q``; row_bytes: ``r``; state_bytes: ``r``
            plus states; accesses: accesses.
        total_state_bytes: Rows and states of all tables, also of rows never seen.
        ids: Ids per batch; id_row_bytes: bytes of the rows they name, duplicates counted.
        pool_bytes: Partial pools of one batch, those of the asking rank included; pool_id_bytes: ids and lengths sent
            for them; pool_row_bytes: rows that owners add up.
    """

    num_rows: np.ndarray
    cold_bytes: np.ndarray
    cold_critical: np.ndarray
    requests: np.ndarray
    row_bytes: np.ndarray
    state_bytes: np.ndarray
    accesses: np.ndarray
    total_state_bytes: float
    ids: float
    world_size: int
    id_bytes: int = 4
    id_row_bytes: float = 0.0
    pool_bytes: float = 0.0
    pool_id_bytes: float = 0.0
    pool_row_bytes: float = 0.0

    @property
    def requested_rows(self) -> float:
        """Rows that any batch asked for."""
        return float(self.num_rows[np.searchsorted(self.requests, self.requests[-1])])

    def hot(self, name: str, num_hot_rows: float) -> float:
        """Return a cumulated sum over the hot rows."""
        return float(np.interp(num_hot_rows, self.num_rows, getattr(self, name)))

    def cold(self, name: str, num_hot_rows: float) -> float:
        """Return a sum over the cold rows."""
        return float(getattr(self, name)[-1]) - self.hot(name, num_hot_rows)


@dataclass(frozen=True)
class Traffic:
    """Payload bytes that leave a rank in one step."""

    late_rows: float
    free_rows: float
    urgent_gradients: float
    deferred_gradients: float
    ids: float
    hot: float
    pools: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the bytes by kind."""
        return {
            "late rows": self.late_rows,
            "free rows": self.free_rows,
            "urgent gradients": self.urgent_gradients,
            "deferred gradients": self.deferred_gradients,
            "ids": self.ids,
            "hot": self.hot,
            "pools and their gradients": 2 * self.pools,
        }


def traffic_of(workload: Workload, num_hot_rows: float) -> Traffic:
    """Return the predicted payload of one step."""
    size = workload.world_size
    elsewhere = (size - 1) / size
    rows = workload.cold("cold_bytes", num_hot_rows) * elsewhere
    critical = workload.cold("cold_critical", num_hot_rows) * elsewhere
    ids = (workload.cold("requests", num_hot_rows) * workload.id_bytes + workload.pool_id_bytes) * elsewhere
    hot = 2 * elsewhere * workload.hot("row_bytes", num_hot_rows)
    pools = workload.pool_bytes * elsewhere
    return Traffic(critical, rows - critical, critical, rows - critical, ids, hot, pools)


def load_of(workload: Workload, num_hot_rows: float) -> WorkLoad:
    """Return what one rank handles in a step."""
    return WorkLoad(
        float(num_hot_rows > 0),
        float(workload.cold("num_rows", num_hot_rows) >= 1),
        workload.ids,
        workload.id_row_bytes,
        workload.cold("requests", num_hot_rows),
        workload.cold("cold_bytes", num_hot_rows),
        workload.hot("row_bytes", num_hot_rows),
    )


def price(workload: Workload, machine: Machine, num_hot_rows: int) -> Candidate:
    """Return what a step costs with the ``num_hot_rows`` most popular rows replicated."""
    traffic, net = traffic_of(workload, num_hot_rows), machine.interconnect
    communicates = workload.world_size > 1

    def all_to_all(num_bytes: float) -> float:
        return net.seconds("all_to_all", num_bytes) if communicates and num_bytes >= 1 else 0.0

    load = load_of(workload, num_hot_rows)
    work = machine.work.seconds(load)
    work += _POOLED_PASSES * workload.pool_row_bytes / net.rate("gather_bytes_per_second")
    reduced = machine.dense_bytes + workload.hot("row_bytes", num_hot_rows)
    critical = net.seconds("all_reduce", reduced) if communicates and reduced else 0.0
    if machine.prefetch:
        critical += all_to_all(traffic.late_rows) + all_to_all(traffic.urgent_gradients)
        critical += (1 + load.has_cold) * all_to_all(1)
        early = all_to_all(traffic.free_rows) + all_to_all(traffic.deferred_gradients) + all_to_all(traffic.ids)
        hidden = min(early, machine.dense_seconds + work)
    else:
        critical += 2 * all_to_all(traffic.late_rows + traffic.free_rows) + all_to_all(1)
        early, hidden = all_to_all(traffic.ids), 0.0
    critical += 2 * all_to_all(traffic.pools)
    exposed = critical + early - hidden
    memory = workload.total_state_bytes / workload.world_size + workload.hot("state_bytes", num_hot_rows)
    accesses = workload.hot("accesses", num_hot_rows) / max(float(workload.accesses[-1]), 1.0)
    sent = {kind: value if communicates else 0.0 for kind, value in traffic.as_dict().items()}
    total = machine.dense_seconds + work + exposed
    return Candidate(int(num_hot_rows), accesses, total, exposed, hidden, work, sent, memory)
