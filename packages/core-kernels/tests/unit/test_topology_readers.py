from __future__ import annotations

import types

import pytest

from core_kernels.topology import Topology, TopologyError
from core_kernels.topology.gccl import from_gccl
from core_kernels.topology.nccl_xml import from_nccl_xml
from core_kernels.topology.nvml import nvml_topology
from core_kernels.topology.smi import from_smi_text

FOUR_GPUS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV2\tNODE\tSYS\tPIX\t0-19\t0\t\tN/A
GPU1\tNV2\t X \tNODE\tSYS\tPIX\t0-19\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\tNODE\t0-19\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t20-39\t1\t\tN/A
NIC0\tPIX\tPIX\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes

NIC Legend:

  NIC0: mlx5_0
"""


def test_smi_table_gives_links_sockets_and_switches():
    topology = from_smi_text(FOUR_GPUS)
    assert [node.name for node in topology.nodes[:4]] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert [topology.links[k].kind for k in topology.route(0, 1)] == ["NV2"]
    assert [topology.links[k].kind for k in topology.route(0, 2)] == ["PCIE"] * 4  # up to the socket and down
    assert "QPI" in [topology.links[k].kind for k in topology.route(0, 3)]
    assert topology.sockets == ((0, 1, 2), (3,))
    # The pair hidden behind NV2 shares the switch of the card both meet.
    switches = [topology.links[topology.routes.links(k, 2)[0]].target for k in (0, 1)]
    assert switches[0] == switches[1]
    assert "inferred" in topology.source


def test_smi_table_of_a_switched_machine():
    names = [f"GPU{k}" for k in range(8)]
    header = "\t".join(["", *names, "CPU Affinity", "NUMA Affinity"])
    rows = ["\t".join([a, *("X" if a == b else "NV12" for b in names), "0-63", "0"]) for a in names]
    topology = from_smi_text("\n".join([header, *rows]))
    # Twelve links to each of seven peers are more than any device has: they lead into a switch.
    assert [topology.nodes[topology.links[k].target].name for k in topology.route(0, 5)] == ["NVSwitch", "GPU5"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello world", "no table"),
        (FOUR_GPUS.replace("GPU3\tSYS\tSYS\tSYS\t X \tSYS\t20-39\t1\t\tN/A\n", ""), "no row for GPU3"),
        (FOUR_GPUS.replace("GPU0\t X \tNV2\tNODE\tSYS\tPIX\t0-19\t0\t\tN/A", "GPU0\t X \tNV2"), "has 2 cells"),
        (FOUR_GPUS.replace("NODE\tSYS\tPIX", "NODE\tFOO\tPIX"), "'FOO'"),
    ],
)
def test_broken_smi_tables_are_refused(text, message):
    with pytest.raises(TopologyError, match=message):
        from_smi_text(text)


DGX1_GCCL = {
    "n_devs": 8,
    "n_virtual_devs": 0,
    "edges": {
        "src": [0, 1, 3, 7, 5, 4, 6, 2, 0, 0, 1, 1, 2, 4, 5, 6],
        "dst": [1, 3, 7, 5, 4, 6, 2, 0, 3, 4, 2, 5, 3, 7, 6, 7],
        "type": ["NV2"] * 8 + ["NV1"] * 8,
    },
    "unconn_edges": [[0, 4]],
}


def test_gccl_device_graph():
    topology = from_gccl(DGX1_GCCL)
    assert topology.bytes_per_second(0, 1) == 48e9
    assert topology.bytes_per_second(2, 3) == 24e9
    assert not topology.is_reachable(0, 4)  # blocked
    assert not topology.is_reachable(0, 7)  # NVLink only: a relay is the planner's business
    slower = {**DGX1_GCCL, "edges": {**DGX1_GCCL["edges"], "contention_factor": [2.0] * 16}}
    assert from_gccl(slower).bytes_per_second(0, 1) == 24e9


def test_gccl_virtual_nodes_are_switches(tmp_path):
    fields = {"n_devs": 2, "n_virtual_devs": 1, "edges": {"src": [0, 1], "dst": [2, 2], "type": ["PCIE", "IB_NET"]}}
    import json

    (tmp_path / "g.json").write_text(json.dumps(fields))
    topology = Topology.load(tmp_path / "g.json")
    assert [topology.links[k].kind for k in topology.route(0, 1)] == ["PCIE", "IB"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_devs": 2}, "lacks"),
        ({"n_devs": 2, "edges": {"src": [0], "dst": [1], "type": []}}, "lengths"),
        ({"n_devs": 2, "edges": {"src": [0], "dst": [1], "type": ["STRING"]}}, "STRING"),
    ],
)
def test_broken_gccl_files_are_refused(fields, message):
    with pytest.raises(TopologyError, match=message):
        from_gccl(fields)


def _xml(host_hash: str, rank: int) -> str:
    return f"""
  <cpu host_hash="{host_hash}" numaid="0" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:05:00.0" class="0x060400" link_speed="8.0 GT/s PCIe" link_width="16">
      <pci busid="0000:07:00.0" class="0x030200" link_speed="8.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="70" rank="{rank}" gdr="1"><nvlink target="0000:0b:00.0" count="2" tclass="0x030200"/></gpu>
      </pci>
      <nic><net name="mlx5_0" dev="0" speed="100000" port="1" latency="1.5" guid="0x1" gdr="1"/></nic>
    </pci>
  </cpu>
  <cpu host_hash="{host_hash}" numaid="1" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:0b:00.0" class="0x030200" link_speed="8.0 GT/s PCIe" link_width="0">
      <gpu dev="1" sm="70" rank="{rank + 1}" gdr="1">
        <nvlink target="0000:07:00.0" count="2" tclass="0x030200"/>
        <nvlink target="fffffff:ffff:ff" count="6" tclass="0x068000"/>
      </gpu>
    </pci>
  </cpu>"""


def test_nccl_xml_of_two_hosts():
    topology = from_nccl_xml(f"<system version='1'>{_xml('0x1', 0)}{_xml('0x2', 2)}</system>")
    assert topology.hosts == ((0, 1), (2, 3))
    assert topology.bytes_per_second(0, 1) == 40e9  # two links of 20 GB/s
    assert [a.name for a in topology.nodes[:4]] == ["h0.GPU0", "h0.GPU1", "h1.GPU0", "h1.GPU1"]
    across = [topology.links[k].kind for k in topology.route(0, 2)]
    assert across.count("IB") == 2
    assert topology.bytes_per_second(0, 2) == 12e9  # PCIe gen 3 x16; the card has 12.5
    assert any(node.name == "h0.NVSwitch" for node in topology.nodes)
    assert topology.sockets == ((0,), (1,), (2,), (3,))


def test_nccl_xml_faults():
    with pytest.raises(TopologyError, match="cannot be parsed"):
        from_nccl_xml("<system>")
    with pytest.raises(TopologyError, match="<graphs>"):
        from_nccl_xml("<graphs/>")
    with pytest.raises(TopologyError, match="no device"):
        from_nccl_xml("<system/>")


def test_load_tells_forms_apart(tmp_path):
    (tmp_path / "t.xml").write_text(f"<system>{_xml('0x1', 0)}</system>")
    (tmp_path / "t.txt").write_text(FOUR_GPUS)
    assert Topology.load(tmp_path / "t.xml").source == "NCCL XML"
    assert Topology.load(tmp_path / "t.txt").num_devices == 4
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(TopologyError, match="holds a list"):
        Topology.load(tmp_path / "list.json")
    with pytest.raises(FileNotFoundError):
        Topology.load(tmp_path / "none.json")


class _Driver:
    """Stands in for the driver: two sockets of two devices, a bridge card on the first pair."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, able: bool = True, count: int = 4):
        self.able, self.count, self.is_open = able, count, False

    def nvmlInit(self):
        if self.count < 0:
            raise self.NVMLError("driver not loaded")
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, k):
        return k

    def nvmlDeviceGetPciInfo(self, k):
        return types.SimpleNamespace(busId=f"00000000:0{k}:00.0".encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return 10 if a // 2 == b // 2 else 50

    def nvmlDeviceGetNvLinkState(self, k, link):
        if link >= 2 or k >= 2:
            raise self.NVMLError("not supported")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, k, link):
        return self.nvmlDeviceGetPciInfo(1 - k)

    def nvmlDeviceGetP2PStatus(self, a, b, index):
        return self.NVML_P2P_STATUS_OK if self.able else 1

    def nvmlDeviceGetCudaComputeCapability(self, k):
        return (8, 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, k):
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, k):
        return 16


def test_nvml_counts_links_once_and_reads_slots():
    driver = _Driver()
    topology = nvml_topology(driver)
    assert not driver.is_open
    assert topology.bytes_per_second(0, 1) == 40e9  # two links of 20, seen from both ends, counted once
    assert topology.bytes_per_second(2, 3) == 24e9  # generation 4, 16 lanes
    assert topology.sockets == ((0, 1), (2, 3))


def test_nvml_link_that_peers_may_not_use_is_no_link():
    topology = nvml_topology(_Driver(able=False))
    assert [topology.links[k].kind for k in topology.route(0, 1)] == ["PCIE", "PCIE"]


def test_nvml_without_driver_or_device_is_none():
    assert nvml_topology(_Driver(count=0)) is None
    assert nvml_topology(_Driver(count=-1)) is None
