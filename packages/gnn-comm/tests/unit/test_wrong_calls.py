"""Every message of a wrong call names the argument, its value and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core_kernels import Graph, datasets
from core_kernels.comm import Group
from core_kernels.topology import Link, Node, Topology
from gnn_comm import Communicator, Partition, Plan, partition, plan
from gnn_comm.bench_cli import read_hosts, read_numbers
from gnn_comm.gradients import GradientReducer
from gnn_comm.layers import build_model
from gnn_comm.sources import load_graph_data
from gnn_comm.training import TrainSettings, train_alone

RING = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
TWO, ONE = Topology.preset("hosts2"), Topology.preset("hosts1")
NODES = (Node("left", "device", 0), Node("right", "device", 1))
COMPLEX = torch.ones(4, 2, dtype=torch.complex64, requires_grad=True)
CUT = Topology("cut", NODES, (Link(0, 1, "CABLE", 1e9),))


def split(topology: Topology = TWO):
    return partition(RING, topology, "given", parts=[0, 0, 1, 1] if topology.num_devices == 2 else [0] * 4)


def alone(**options):
    return Communicator(plan(split(ONE), ONE), Group.single(), **options)


def unlabelled():
    return replace(datasets.rmat(16, 32), features=torch.ones(16, 4), num_classes=2)


def deeper_than_copies():
    made = plan(split(ONE), ONE, "replication", num_layers=1)
    build_model("gcn", 4, 8, 2)(Communicator(made, Group.single()), torch.ones(4, 4))


CALLS = {
    "layers": (deeper_than_copies, "2 layers", "copies for 1", "plan with num_layers=2"),
    "method": (lambda: partition(RING, TWO, "chaco"), "method='chaco'", "hierarchical", "choose one"),
    "planner": (lambda: plan(split(), TWO, "magic"), "planner='magic'", "spst", "choose one"),
    "parts": (lambda: plan(split(), Topology.preset("hosts4")), "2 parts", "4", "partition for this topology"),
    "route": (lambda: plan(split(CUT), CUT, "p2p"), "right", "left", "missing link"),
    "direction": (lambda: plan(split(), TWO).estimate(direction="up"), "direction='up'", "'backward'", "choose one"),
    "graph": (lambda: load_graph_data("magic:3"), "'magic:3'", "rmat:SCALE", "check the path"),
    "model": (lambda: build_model("cnn", 4, 8, 2), "model='cnn'", "gcn", "choose one"),
    "heads": (lambda: build_model("gat", 4, 10, 2), "hidden=10", "4 heads", "pass 12"),
    "hosts": (lambda: read_hosts("ax2"), "hosts='ax2'", "2x4", "pass hosts and ranks"),
    "rates": (lambda: read_numbers("rates", "fast", 2), "rates='fast'", "2 positive numbers", "200,20"),
    "compress": (lambda: GradientReducer(Group.single(), "zip"), "compress='zip'", "casq", "choose one"),
    "bits": (lambda: alone(quantize_bits=3), "quantize_bits=3", "8 or 4", "choose one"),
    "ranks": (lambda: Communicator(plan(split(), TWO), Group.single()), "2 devices", "1 ranks", "start 2 ranks"),
    "rows": (lambda: alone().graph_all_gather(torch.ones(3, 2)), "(3, 2)", "4 rows", "dispatch()"),
    "complex": (lambda: alone().graph_all_gather(COMPLEX), "complex64", "real numbers", "view_as_real"),
    "grid": (lambda: load_graph_data("grid:9999999"), "side=9999999", "fits into memory", "smaller"),
    "labels": (lambda: train_alone(RING, unlabelled(), TrainSettings()), "'rmat'", "no labels", "complete it"),
    "epochs": (lambda: TrainSettings(num_epochs=0), "num_epochs=0", "at least 1", "raise it"),
    "plan file": (lambda: Plan.load(__file__), "path=", "test_wrong_calls.py", "plan again"),
    "folder": (lambda: Partition.load("nowhere"), "dir='nowhere'", "Partition.save", "partition again"),
    "preset": (lambda: Topology.preset("dgx9"), "'dgx9'", "nvswitch8", "choose one"),
}


@pytest.mark.parametrize("name", CALLS)
def test_message_names_value_expectation_and_remedy(name):
    call, *parts = CALLS[name]
    with pytest.raises(ValueError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
