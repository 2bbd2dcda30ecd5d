from __future__ import annotations

import numpy as np
import pytest

from core_kernels.testing import RankPool
from core_kernels.topology.measure import hosts_by_bandwidth, measure_topology


@pytest.mark.distributed
def test_measured_topology_is_the_same_on_all_ranks():
    with RankPool(3) as pool:
        found = pool.run(measure_topology, 1 << 16, 2)
    assert len({topology.fingerprint() for topology in found}) == 1
    topology = found[0]
    assert topology.num_devices == 3
    for i in range(3):
        for j in range(3):
            if i != j:
                assert topology.bytes_per_second(i, j) > 1e6
                assert 0 < topology.latency_seconds(i, j) < 1


def test_hosts_are_told_apart_by_a_clear_step_only():
    rate = np.full((4, 4), 20.0)
    rate[:2, :2] = rate[2:, 2:] = 200.0
    assert hosts_by_bandwidth(rate) == [0, 0, 1, 1]
    assert hosts_by_bandwidth(np.full((4, 4), 20.0) + np.arange(4)) == [0, 0, 0, 0]
    assert hosts_by_bandwidth(np.ones((1, 1))) == [0]
