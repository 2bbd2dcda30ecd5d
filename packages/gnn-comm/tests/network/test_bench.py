"""Plans on real sockets over slow links: predicted gains must be there, and no byte crosses twice."""

from __future__ import annotations

import pytest

from core_kernels.testing.hosts import skip_reason
from gnn_comm.bench import bench_hosts

pytestmark = [pytest.mark.network, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _needs_hosts():
    reason = skip_reason()
    if reason:
        pytest.skip(reason)


def test_two_hosts_of_two_ranks():
    found = bench_hosts([2, 2], 2000, 200, [1 << 20], repeats=3)
    (result,) = found["results"]
    for direction in ("forward", "backward"):
        entry = result[direction]
        assert entry["slow_link_bytes"] <= 1.06 * entry["slow_link_bytes_minimum"]
        # On a busy machine a run may be late; the prediction itself is compared in the benchmark.
        assert entry["ratio_measured"] >= 0.75 * entry["ratio_model"]
        assert entry["planned_seconds"] < entry["p2p_seconds"]
        assert entry["planned_seconds"] < entry["all_to_all_seconds"]
    assert 0 < found["measured"]["link_bytes_per_second"] < 1.1 * 25e6
    assert 0.2 < found["average_saving_limit"] < 0.6
