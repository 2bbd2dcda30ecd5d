from __future__ import annotations

import numpy as np
import pytest
import torch

from core_kernels import Graph, datasets
from core_kernels.topology import Topology, cluster
from gnn_comm import partition, plan
from gnn_comm.bench import everyone_needs, shaped_topology
from gnn_comm.calibration import nominal_rates
from gnn_comm.simulator import max_min_rates, simulate


def test_rates_are_max_min_fair():
    # Two flows share link 0; one of them is held back by link 1, so the other gets the rest.
    rates = max_min_rates([np.array([0]), np.array([0, 1]), np.array([1])], np.array([10.0, 4.0]))
    assert rates == [8.0, 2.0, 2.0]
    assert max_min_rates([], np.array([1.0])) == []


def test_one_message_takes_latency_and_bytes_over_rate():
    topology = cluster([1, 1], 100.0, 10.0, 0.5, 1.0)
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [2, 2]]), 3)
    split = partition(graph, topology, "given", parts=[0, 0, 1])
    made = plan(split, topology, "p2p", 5)
    # Two rows of 20 bytes over 10 bytes per second; the route has two local links and two uplinks.
    assert simulate(made).seconds == pytest.approx(3.0 + 4.0)
    assert made.estimate().seconds == pytest.approx(3.0 + 4.0)


@pytest.mark.parametrize("name", ["hosts4", "dgx1", "2x2"])
def test_simulation_respects_the_bound_and_counts_all_bytes(name):
    topology = cluster([2, 2], 2e8, 2e7) if name == "2x2" else Topology.preset(name)
    split = partition(datasets.rmat(2**10, 2**13).graph, topology, "random")
    for planner in ("p2p", "spst"):
        made = plan(split, topology, planner, 1024)
        for direction in ("forward", "backward"):
            found = simulate(made, direction=direction)
            assert found.seconds >= float(made.lower_bound()) * (1 - 1e-4)
            busiest = max(
                count / rate
                for count, rate in zip(
                    (found.resource_bytes.get(n, 0) for n in topology.resource_names),
                    topology.resource_bytes_per_second,
                    strict=True,
                )
            )
            assert found.seconds >= busiest * (1 - 1e-9)


def test_messages_wait_for_the_rows_they_pass_on():
    topology = Topology.preset("dgx1")
    split = partition(datasets.rmat(2**10, 2**13).graph, topology, "random")
    made = plan(split, topology, "ring")
    found, t = simulate(made), made.transfers
    for m in range(len(t)):
        for n in np.flatnonzero((t.receiver == t.sender[m]) & (t.stage < t.stage[m])):
            if np.isin(t.rows_of(m), t.rows_of(n)).any():
                assert found.message_start_seconds[m] >= found.message_end_seconds[n]


def test_shaped_topology_predicts_the_ratio_of_crossings():
    topology = shaped_topology([2, 2], nominal_rates(2000, 200))
    graph, parts = everyone_needs(4, 64)
    assert sorted(np.bincount(parts).tolist()) == [64] * 4
    split = partition(graph, topology, "given", parts=parts)
    assert split.report(topology)["between_host_rows"] == 4 * 64
    p2p, planned = plan(split, topology, "p2p"), plan(split, topology, "auto")
    assert 1.7 < p2p.estimate().seconds / planned.estimate().seconds <= 2.0
