"""While rows cross a slow link, the caller computes: an asynchronous gather must not cost both times in a row."""

from __future__ import annotations

import time

import pytest
import torch

from core_kernels.testing.hosts import ShapedHosts, skip_reason
from gnn_comm import Communicator, partition, plan
from gnn_comm.bench import everyone_needs, shaped_topology
from gnn_comm.calibration import nominal_rates

pytestmark = [pytest.mark.network, pytest.mark.timeout(240)]
COMPUTE_SECONDS = 0.6


def busy(seconds: float) -> None:
    """Aggregate something, as interior vertices do, for a given time."""
    end, rows = time.perf_counter() + seconds, torch.ones(256, 64)
    while time.perf_counter() < end:
        rows = rows @ torch.eye(64)


def three_ways(group, made):
    communicator = Communicator(made, group)
    x = torch.randn(communicator.num_local, 256)

    def clock(run) -> float:
        group.barrier()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def overlapped():
        handle = communicator.graph_all_gather_async(x)
        busy(COMPUTE_SECONDS)
        handle.wait()

    def in_a_row():
        communicator.graph_all_gather(x)
        busy(COMPUTE_SECONDS)

    communicator.graph_all_gather(x)
    found = [[clock(way) for way in (lambda: communicator.graph_all_gather(x), overlapped, in_a_row)] for _ in range(3)]
    communicator.close()
    return torch.tensor(found).median(0).values.tolist()


def test_computing_overlaps_the_exchange():
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    topology = shaped_topology([1, 1], nominal_rates(200, 40))
    graph, parts = everyone_needs(2, 4096)
    made = plan(partition(graph, topology, "given", parts=parts), topology, "p2p")
    with ShapedHosts([1, 1], link_rate_mbit=40, local_rate_mbit=200) as machine:
        ways = torch.tensor(machine.run(three_ways, made))
    exchange, overlapped, in_a_row = ways.max(0).values.tolist()
    assert exchange > 0.6  # 4 MiB over 40 Mbit/s
    assert overlapped < in_a_row - 0.5 * COMPUTE_SECONDS
    assert overlapped < exchange + 0.5 * COMPUTE_SECONDS
