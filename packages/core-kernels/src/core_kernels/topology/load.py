"""Read a topology from whatever describes it, or find the one of this machine.

Files are told apart by content: Sextet JSON or YAML, the GCCL device-graph JSON, NCCL's topology XML, the text of
``nvidia-smi topo -m``. ``"auto"`` takes the file named by ``GNN_COMM_TOPO``, else asks the NVIDIA driver, else
describes the processors of this host with a measured copy rate and latency.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from core_kernels.topology.gccl import from_gccl
from core_kernels.topology.model import Link, Node, Topology, TopologyError
from core_kernels.topology.nccl_xml import from_nccl_xml
from core_kernels.topology.smi import from_smi_text

__all__ = ["ENVIRONMENT_VARIABLE", "load_topology", "processor_topology"]

ENVIRONMENT_VARIABLE = "GNN_COMM_TOPO"


def load_topology(path: str | Path = "auto") -> Topology:
    """Read a topology file of any known form, or find this machine's topology.

    Args:
        path: A file, or ``"auto"``.

    Raises:
        FileNotFoundError: There is no such file.
        TopologyError: The file is of no known form, or describes an impossible machine.
    """
    if str(path) == "auto":
        named = os.environ.get(ENVIRONMENT_VARIABLE)
        return load_topology(named) if named else _find()
    try:
        text = Path(path).read_text()
    except UnicodeDecodeError as error:
        raise TopologyError(
            f"{path} is no text ({error}); expected JSON, YAML, XML or a table; check the path"
        ) from error
    name = Path(path).stem
    if text.lstrip().startswith("<"):
        return from_nccl_xml(text, name)
    fields = _parse_fields(text)
    if fields is None:
        return from_smi_text(text, name)
    return from_gccl(fields, name) if "n_devs" in fields else Topology.from_dict(fields)


def _parse_fields(text: str) -> dict[str, Any] | None:
    """Parse JSON or YAML; ``None`` when the text is neither (then it is a table)."""
    try:
        fields = json.loads(text)
    except ValueError:
        import yaml

        try:
            fields = yaml.safe_load(text)
        except yaml.YAMLError:
            return None
    if isinstance(fields, dict):
        return fields
    if isinstance(fields, str):
        return None
    raise TopologyError(
        f"the file holds a {type(fields).__name__}; expected an object with nodes and links; see save()"
    )


def _find() -> Topology:
    from core_kernels.topology.nvml import nvml_topology

    found = nvml_topology()
    return processor_topology(os.cpu_count() or 1) if found is None else found


def processor_topology(num_devices: int) -> Topology:
    """Describe ranks on the processors of this host: a switch with its measured copy rate and message latency.

    Args:
        num_devices: Number of ranks.
    """
    rate, latency = _copy_bytes_per_second(), _message_seconds() / 2
    nodes = [*(Node(f"CPU{k}", "device") for k in range(num_devices)), Node("memory", "switch")]
    links = []
    for device in range(num_devices):
        links += [
            Link(device, num_devices, "MEMORY", rate, latency),
            Link(num_devices, device, "MEMORY", rate, latency),
        ]
    return Topology("processors", tuple(nodes), tuple(links), source="measured copy rate and message latency")


def _message_seconds(repeats: int = 32) -> float:
    """Measure half the round trip of a byte between two threads over a local socket."""
    near, far = socket.socketpair()

    def answer() -> None:
        while byte := far.recv(1):
            far.sendall(byte)

    with near, far:
        echo = threading.Thread(target=answer, daemon=True)
        echo.start()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            near.sendall(b"x")
            near.recv(1)
            times.append((time.perf_counter() - start) / 2)
        near.shutdown(socket.SHUT_WR)
        echo.join()
    return sorted(times)[repeats // 2]


def _copy_bytes_per_second(num_bytes: int = 1 << 25) -> float:
    source = np.ones(num_bytes, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return num_bytes / best
