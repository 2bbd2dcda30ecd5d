"""Measure training epochs on shaped hosts: the same model with straight and with planned exchanges.

Both train over the same links with the same settings, in turns, so that what else the machine does meets both alike.
The share of communication is the time straight exchanges take in an epoch, overlapped work included.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_kernels.comm import Group
from core_kernels.console import progress
from gnn_comm.bench import shaped_topology
from gnn_comm.calibration import measure_hosts, nominal_rates
from gnn_comm.communicator import Communicator
from gnn_comm.partitioning import Partition, partition
from gnn_comm.plan import Plan
from gnn_comm.planner import plan
from gnn_comm.sources import load_graph_data
from gnn_comm.training import TrainResult, TrainSettings, train

__all__ = ["bench_epochs"]

_EPOCHS_PER_TURN = 3
_in_rank: dict[str, Any] = {}


def bench_epochs(
    hosts: Sequence[int],
    local_rate_mbit: float,
    link_rate_mbit: float,
    dataset: str = "rmat:11",
    model: str = "gcn",
    hidden: int = 128,
    num_layers: int = 3,
    turns: int = 3,
    method: str = "hierarchical",
) -> dict[str, Any]:
    """Train with straight and planned exchanges in turns.

    Args:
        hosts: Ranks of each host.
        local_rate_mbit: Rate of each rank's link inside its host.
        link_rate_mbit: Rate of each host's uplink.
        dataset: Graph, see :mod:`gnn_comm.sources`.
        model: One of :data:`gnn_comm.layers.MODELS`.
        hidden: Width between layers.
        num_layers: Number of layers.
        turns: Times each of the two trains for 3 epochs, of which the first does not count.
        method: Partition.

    Returns:
        ``p2p_epoch_seconds``, ``planned_epoch_seconds``, their ratio ``speedup``, ``communication_share``,
        ``losses_equal`` (to 1e-5) and the settings.
    """
    from core_kernels.testing import ShapedHosts

    data = load_graph_data(dataset)
    settings = TrainSettings(model, hidden, num_layers, _EPOCHS_PER_TURN)
    seconds: dict[str, list[float]] = {"p2p": [], "planned": []}
    exchange: list[float] = []
    losses: dict[str, list[float]] = {}
    with (
        ShapedHosts(hosts, link_rate_mbit, local_rate_mbit, timeout_seconds=120.0) as machine,
        progress(f"epochs of {model}", 2 * turns) as advance,
        tempfile.TemporaryDirectory() as folder,
    ):
        measured = machine.run(measure_hosts, machine.host_of_rank, nominal_rates(local_rate_mbit, link_rate_mbit))[0]
        topology = shaped_topology(hosts, measured)
        split = partition(data.graph, topology, method)
        split.save(folder)
        planner = ""
        for name in seconds:
            made = plan(split, topology, "p2p" if name == "p2p" else "auto", hidden)
            made.save(Path(folder) / f"{name}.npz")
            planner = made.planner
        machine.run(_prepare, folder, dataset)
        for _ in range(turns):
            for name in seconds:
                result: TrainResult = machine.run(_train_turn, name, settings)[0]
                seconds[name] += result.epoch_seconds[1:]
                losses[name] = result.losses
                if name == "p2p":
                    exchange += result.exchange_seconds[1:]
                advance()
    straight, planned = (statistics.median(seconds[name]) for name in ("p2p", "planned"))
    pairs = zip(losses["p2p"], losses["planned"], strict=True)
    return {
        "hosts": list(hosts),
        "local_rate_mbit": local_rate_mbit,
        "link_rate_mbit": link_rate_mbit,
        "dataset": dataset,
        "model": model,
        "partition": method,
        "hidden": hidden,
        "num_layers": num_layers,
        "planner": planner,
        "p2p_epoch_seconds": straight,
        "planned_epoch_seconds": planned,
        "speedup": straight / planned,
        "communication_share": statistics.median(exchange) / straight,
        "losses_equal": all(abs(a - b) <= 1e-5 * abs(a) for a, b in pairs),
    }


def _prepare(group: Group, folder: str, dataset: str) -> None:
    split = Partition.load(folder)
    _in_rank["data"] = load_graph_data(dataset)
    for name in ("p2p", "planned"):
        made = Plan.load(Path(folder) / f"{name}.npz", split)
        _in_rank[name] = Communicator(made, group, validate=group.rank == 0)


def _train_turn(group: Group, scheme: str, settings: TrainSettings) -> TrainResult:
    return train(_in_rank[scheme], _in_rank["data"], settings)
