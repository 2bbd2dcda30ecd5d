"""Machines that were not measured: data sheets, with the fraction of them that is assumed to be reached.

Every preset states its assumption in words. Rates of links are payload per direction; ``network`` is per host, shared
by its ranks. Use a preset to plan for a machine that is not at hand, and measure as soon as it is.
"""

from __future__ import annotations

from core_kernels.interconnect.curve import Link
from core_kernels.interconnect.model import Interconnect

__all__ = ["PRESETS"]

_GB = 1e9
_MBIT = 1e6 / 8

_CPU_RATES = {
    "gather_bytes_per_second": 8 * _GB,
    "spmm_bytes_per_second": 10 * _GB,
    "sample_edges_per_second": 5e7,
    "relabel_ids_per_second": 5e7,
    "matmul_flops_per_second": 5e10,
}
_CPU_LINKS = {
    "local": Link(60e-6, 1.5 * _GB),
    "host_copy": Link(1e-6, 10 * _GB),
    "row_gather": Link(5e-6, 8 * _GB),
}
_CPU_ASSUMPTION = "ranks of a host talk over loopback at 1.5 GB/s and 60 us; one or two cores a rank"


def _gpu_rates(memory_bytes_per_second: float, matmul_flops_per_second: float) -> dict[str, float]:
    return {
        "gather_bytes_per_second": 0.7 * memory_bytes_per_second,
        "spmm_bytes_per_second": 0.6 * memory_bytes_per_second,
        "sample_edges_per_second": 2e9,
        "relabel_ids_per_second": 1e9,
        "matmul_flops_per_second": 0.6 * matmul_flops_per_second,
    }


def _gpu_links(local: Link, host_bytes_per_second: float, memory_bytes_per_second: float) -> dict[str, Link]:
    return {
        "local": local,
        "host_to_device": Link(10e-6, host_bytes_per_second),
        "device_to_host": Link(10e-6, host_bytes_per_second),
        "host_copy": Link(1e-6, 10 * _GB),
        "row_gather": Link(5e-6, 0.7 * memory_bytes_per_second),
    }


def _ethernet(name: str, mbit: float, latency_seconds: float) -> Interconnect:
    return Interconnect(
        name=name,
        assumption=f"CPU hosts on {mbit:g} Mbit/s Ethernet, 95 % of it payload; {_CPU_ASSUMPTION}",
        group_shape="2x1",
        links={**_CPU_LINKS, "network": Link(latency_seconds, 0.95 * mbit * _MBIT)},
        rates=_CPU_RATES,
    )


_V100_NVLINK = Link(8e-6, 0.8 * 150 * _GB)
_A100_NVLINK = Link(6e-6, 0.8 * 300 * _GB)
_H100_NVLINK = Link(5e-6, 0.8 * 450 * _GB)
_V100 = _gpu_rates(900 * _GB, 15.7e12)
_A100 = _gpu_rates(2039 * _GB, 156e12)
_H100 = _gpu_rates(3350 * _GB, 494e12)

_ALL = [
    Interconnect(
        name="loopback-cpu", assumption=_CPU_ASSUMPTION, group_shape="1x2", links=_CPU_LINKS, rates=_CPU_RATES
    ),
    _ethernet("ethernet-100mbit", 100, 200e-6),
    _ethernet("ethernet-1gbit", 1_000, 150e-6),
    _ethernet("ethernet-10gbit", 10_000, 100e-6),
    Interconnect(
        name="pcie4-8",
        assumption="8 GPUs of the A100 class on PCIe 4.0 x16 (32 GB/s a direction), no NVLink; 70 % of it reached",
        group_shape="1x8",
        links=_gpu_links(Link(12e-6, 0.7 * 32 * _GB), 0.8 * 32 * _GB, 2039 * _GB),
        rates=_A100,
    ),
    Interconnect(
        name="v100-nvlink-8",
        assumption="8 V100 with 6 NVLinks each (150 GB/s a direction), 80 % reached; PCIe 3.0 x16 to the host; fp32",
        group_shape="1x8",
        links=_gpu_links(_V100_NVLINK, 0.8 * 16 * _GB, 900 * _GB),
        rates=_V100,
    ),
    Interconnect(
        name="a100-nvlink-8",
        assumption="8 A100 80 GB on NVSwitch (300 GB/s a direction), 80 % reached; PCIe 4.0 x16 to the host; TF32",
        group_shape="1x8",
        links=_gpu_links(_A100_NVLINK, 0.8 * 32 * _GB, 2039 * _GB),
        rates=_A100,
    ),
    Interconnect(
        name="a100-8x8-ib",
        assumption="8 hosts of a100-nvlink-8, each with 8 HDR InfiniBand ports (8 x 25 GB/s), 85 % reached",
        group_shape="8x8",
        links={**_gpu_links(_A100_NVLINK, 0.8 * 32 * _GB, 2039 * _GB), "network": Link(12e-6, 0.85 * 200 * _GB)},
        rates=_A100,
    ),
    Interconnect(
        name="h100-nvlink-8",
        assumption="8 H100 SXM on NVSwitch (450 GB/s a direction), 80 % reached; PCIe 5.0 x16 to the host; TF32",
        group_shape="1x8",
        links=_gpu_links(_H100_NVLINK, 0.8 * 64 * _GB, 3350 * _GB),
        rates=_H100,
    ),
    Interconnect(
        name="h100-8x8-ib",
        assumption="8 hosts of h100-nvlink-8, each with 8 NDR InfiniBand ports (8 x 50 GB/s), 85 % reached",
        group_shape="8x8",
        links={**_gpu_links(_H100_NVLINK, 0.8 * 64 * _GB, 3350 * _GB), "network": Link(10e-6, 0.85 * 400 * _GB)},
        rates=_H100,
    ),
]

PRESETS: dict[str, Interconnect] = {preset.name: preset for preset in _ALL}
