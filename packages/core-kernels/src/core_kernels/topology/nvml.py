"""Ask the NVIDIA driver (NVML) for the topology of this host.

Read per device: its PCIe generation and width, the state of every NVLink and what the link's other end is. Read per
pair: the common ancestor in the PCIe tree, and whether the driver lets the two talk over NVLink. A link counts only
when the driver also reports the pair as able: an active link can lead to a device of another partition.
"""

from __future__ import annotations

from typing import Any

from core_kernels.topology.levels import NVLinks, tree_from_levels
from core_kernels.topology.model import Topology

__all__ = ["nvml_topology"]

# NVML's codes of the nearest common ancestor.
_LEVEL_OF_ANCESTOR = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# Payload GB/s of one PCIe lane by generation, and of one NVLink by compute capability.
PCIE_LANE_GB_PER_SECOND = {1: 0.19, 2: 0.375, 3: 0.75, 4: 1.5, 5: 3.0, 6: 6.0}
NVLINK_GB_PER_SECOND = {6: 18.0, 7: 20.0, 8: 20.0, 9: 20.6, 10: 40.1, 12: 40.1}
_MAX_LINKS = 18


def nvml_topology(library: Any = None) -> Topology | None:
    """Describe the devices of this host, or return ``None`` where there is no driver or no device.

    Args:
        library: The ``pynvml`` module or a stand-in; imported when left out.
    """
    if library is None:
        try:
            import pynvml as library
        except ImportError:
            return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    try:
        count = library.nvmlDeviceGetCount()
        handles = [library.nvmlDeviceGetHandleByIndex(k) for k in range(count)]
        return _describe(library, handles) if handles else None
    finally:
        library.nvmlShutdown()


def _describe(library: Any, handles: list[Any]) -> Topology:
    bus = [_bus_id(library.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    levels = {}
    for i in range(len(handles)):
        for j in range(i + 1, len(handles)):
            ancestor = library.nvmlDeviceGetTopologyCommonAncestor(handles[i], handles[j])
            levels[(i, j)] = _LEVEL_OF_ANCESTOR.get(int(ancestor), "SYS")
    pairs, into_switch = _nvlinks(library, handles, bus)
    majors = [library.nvmlDeviceGetCudaComputeCapability(handle)[0] for handle in handles]
    rate = min(NVLINK_GB_PER_SECOND.get(major, NVLINK_GB_PER_SECOND[9]) for major in majors)
    names = [f"GPU{k}" for k in range(len(handles))]
    pcie = [_pcie_gb_per_second(library, handle) for handle in handles]
    links = NVLinks(pairs, into_switch, rate)
    return tree_from_levels(
        "nvml", names, levels, [None] * len(names), links, (), pcie, source="NVML, inferred PCIe tree"
    )


def _nvlinks(library: Any, handles: list[Any], bus: list[str]) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """Count active links per pair and per switch; each cable is seen from both ends, counted from the lower."""
    pairs: dict[tuple[int, int], int] = {}
    into_switch: dict[int, int] = {}
    for device, handle in enumerate(handles):
        for link in range(_MAX_LINKS):
            try:
                if not library.nvmlDeviceGetNvLinkState(handle, link):
                    continue
                remote = _bus_id(library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
            except library.NVMLError:
                continue  # the device has fewer links
            if remote not in bus:
                into_switch[device] = into_switch.get(device, 0) + 1
                continue
            peer = bus.index(remote)
            if device < peer and _able(library, handle, handles[peer]):
                pairs[(device, peer)] = pairs.get((device, peer), 0) + 1
    return pairs, into_switch


def _able(library: Any, a: Any, b: Any) -> bool:
    index = library.NVML_P2P_CAPS_INDEX_NVLINK
    return library.nvmlDeviceGetP2PStatus(a, b, index) == library.NVML_P2P_STATUS_OK


def _pcie_gb_per_second(library: Any, handle: Any) -> float:
    generation = library.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    return library.nvmlDeviceGetMaxPcieLinkWidth(handle) * PCIE_LANE_GB_PER_SECOND.get(generation, 0.75)


def _bus_id(value: Any) -> str:
    text = value.decode() if isinstance(value, bytes) else str(value)
    return text.rstrip("\0").lower()
