"""Hosts joined by slow links: rates hold in both directions, counters count, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from core_kernels.comm import Recv, Send
from core_kernels.errors import ArgumentError
from core_kernels.interconnect import Interconnect
from core_kernels.testing import FaultPlan, ShapedHosts
from core_kernels.testing.hosts import HostsError, _process_prefix, skip_reason, sweep_stale_namespaces

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(skip_reason() is not None, reason=f"{skip_reason()}"),
]
MIB = 2**20


def send_seconds(group, pairs, num_bytes):
    """Seconds until all transfers ``(source, target)`` are done, the slowest rank's."""
    ops = [Send(torch.zeros(num_bytes, dtype=torch.uint8), target) for source, target in pairs if source == group.rank]
    ops += [Recv(torch.empty(num_bytes, dtype=torch.uint8), source) for source, target in pairs if target == group.rank]
    group.send_recv([type(op)(op.tensor[:1024], op.peer) for op in ops])  # connects
    group.barrier()
    begin = time.perf_counter()
    group.send_recv(ops)
    return group.all_reduce(torch.tensor(time.perf_counter() - begin), "max").item()


@pytest.fixture(scope="module")
def two_by_two():
    """Two hosts of two ranks on uplinks of 100 Mbit/s; the ranks of a host talk over its loopback."""
    with ShapedHosts([2, 2], link_rate_mbit=100) as hosts:
        yield hosts


def test_slow_links_are_slow_both_ways_shared_by_a_host_and_counted(two_by_two):
    hosts = two_by_two
    assert hosts.host_of_rank == [0, 0, 1, 1]
    one_way = 2 * MIB * 8 / (0.956 * 100e6)
    local = hosts.run(send_seconds, [(0, 1), (3, 2)], 2 * MIB)[0]
    before = hosts.link_bytes()
    for pairs in ([(0, 2)], [(3, 1)]):
        assert 0.8 * one_way < hosts.run(send_seconds, pairs, 2 * MIB)[0] < 2 * one_way
    after = hosts.link_bytes()
    shared = hosts.run(send_seconds, [(0, 2), (1, 3)], 2 * MIB)[0]
    assert 1.7 * one_way < shared < 3.5 * one_way
    assert local < 0.5 * one_way
    for host in range(2):
        for way in ("sent_bytes", "received_bytes"):
            assert 2 * MIB < after[host][way] - before[host][way] < 1.06 * 2 * MIB + 40_000


def measured(group, budget_seconds):
    return Interconnect.measure(group, budget_seconds=budget_seconds).to_dict()


def check_links(interconnect, shape, link_rate_mbit):
    """The rate between hosts is that of the shaped link, far beyond the sizes that were measured too."""
    assert interconnect.group_shape == shape
    payload_rate = 0.956 * link_rate_mbit * 1e6 / 8
    assert interconnect.links["network"].bytes_per_second < 1.3 * payload_rate
    assert interconnect.links["local"].bytes_per_second > 1.5 * interconnect.links["network"].bytes_per_second
    for collective in ("all_to_all", "all_gather", "send_recv"):
        assert interconnect.seconds(collective, 10**7) > 0.6 * 10**7 / payload_rate


def test_a_small_budget_measures_the_steady_rate_of_shaped_links(two_by_two):
    check_links(Interconnect.from_dict(two_by_two.run(measured, 1.0)[0]), "2x2", 100)


def test_a_measurement_inside_the_burst_would_be_wrong(two_by_two):
    # The twin of the test above: message sizes that the link's bucket holds cost next to nothing.
    small = min(two_by_two.run(send_seconds, [(0, 2)], 48 * 1024)[0] for _ in range(3))
    assert 48 * 1024 / small > 1.5 * 100e6 / 8


def test_local_links_have_their_own_rate():
    with ShapedHosts([2, 1], link_rate_mbit=50, local_rate_mbit=400) as hosts:
        assert not {path.name for path in Path("/sys/class/net").iterdir()} & {"uplink", "bridge"}
        local = hosts.run(send_seconds, [(0, 1)], 2 * MIB)[0]
        remote = hosts.run(send_seconds, [(0, 2)], 1 * MIB)[0]
        assert 0.7 * 2 * MIB * 8 / 400e6 < local < 3 * 2 * MIB * 8 / 400e6
        assert 0.7 * MIB * 8 / 50e6 < remote < 2 * MIB * 8 / 50e6
        check_links(Interconnect.from_dict(hosts.run(measured, 1.0)[0]), "2x2", 50)


def sum_of_ranks(group):
    return group.all_reduce(torch.tensor([group.rank])).item()


def test_other_shapes():
    with ShapedHosts([1, 2, 1], link_rate_mbit=200, local_rate_mbit=1000) as hosts:
        assert hosts.run(sum_of_ranks) == [6] * 4


def own_namespaces():
    return {path.name for path in Path("/var/run/netns").glob(f"{_process_prefix(os.getpid())}*")}


def test_failures_are_named_and_namespaces_removed():
    before = own_namespaces()
    with pytest.raises(Exception, match=r"rank 1 of 2 died with SIGKILL during all_reduce"):
        with ShapedHosts([1, 1], link_rate_mbit=100, faults=FaultPlan.kill(1)) as hosts:
            hosts.run(sum_of_ranks)
    assert own_namespaces() == before


CRASHING = """
import time
from core_kernels.testing import ShapedHosts

if __name__ == "__main__":
    hosts = ShapedHosts([1, 1], link_rate_mbit=100)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_namespaces_of_a_crashed_process_are_swept(tmp_path):
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "ready\n"
    prefix = _process_prefix(process.pid)
    assert not [name for name in sweep_stale_namespaces() if name.startswith(prefix)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len([name for name in sweep_stale_namespaces() if name.startswith(prefix)]) == 3
    assert not list(Path("/var/run/netns").glob(f"{prefix}*"))


def test_bad_arguments_and_refusals_are_named(monkeypatch):
    with pytest.raises(ArgumentError, match=r"hosts=\[2, 0\]"):
        ShapedHosts([2, 0], 100)
    with pytest.raises(ArgumentError, match="link_rate_mbit=0"):
        ShapedHosts([1], 0)
    skip_reason.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostsError, match="ip and tc; install iproute2"):
        ShapedHosts([1], 100)
    skip_reason.cache_clear()
