"""Input that would give a wrong result, or a message of some library below, is refused in words of this package."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from core_kernels import Graph, datasets
from core_kernels.comm import Group
from core_kernels.topology import Topology
from gnn_comm import Communicator, GnnCommError, Partition, partition, plan
from gnn_comm.training import TrainSettings, train, train_alone

RING = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
ONE, TWO = Topology.preset("hosts1"), Topology.preset("hosts2")
DATA = datasets.sbm(16, 2, num_features=3)


def alone(graph: Graph = RING) -> Communicator:
    return Communicator(plan(partition(graph, ONE), ONE), Group.single())


CALLS = {
    "no parts": (lambda: partition(RING, TWO, "given"), "method='given' without parts", "pass both"),
    "parts unused": (lambda: partition(RING, TWO, "random", parts=[0, 0, 1, 1]), "method='random' with parts", "both"),
    "rounded parts": (lambda: partition(RING, TWO, "given", parts=[0.9, 0.0, 1.5, 1.0]), "float32", "ids"),
    "seed": (lambda: partition(RING, TWO, seed=-1), "seed=-1", "pass such as 0"),
    "seed of a plan": (lambda: plan(partition(RING, TWO), TWO, seed=-1), "seed=-1", "pass such as 0"),
    "short table": (lambda: alone().dispatch(torch.ones(3, 2)), "shape (3, 2)", "4 rows"),
    "long table": (lambda: alone().dispatch(np.ones((9, 2))), "shape (9, 2)", "4 rows"),
    "list": (lambda: alone().dispatch([1, 2, 3, 4]), "a list", "4 rows"),
    "root": (lambda: alone().dispatch(torch.ones(4), src=1), "src=1", "below 1"),
    "rows to collect": (lambda: alone().collect(torch.ones(3, 2)), "(3, 2)", "4 own rows"),
    "no features": (lambda: train_alone(RING, replace(DATA, features=None), TrainSettings()), "no features", "it"),
    "no labels": (
        lambda: train(alone(DATA.graph), replace(DATA, labels=None, test_mask=None), TrainSettings()),
        "no labels, no test_mask",
        "complete it",
    ),
    "dtype": (lambda: TrainSettings(dtype="int32"), "dtype='int32'", "'float64'"),
    "learning rate": (lambda: TrainSettings(learning_rate=float("nan")), "learning_rate=nan", "above 0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_by_name(name):
    call, *words = CALLS[name]
    with pytest.raises(ValueError, match="expected") as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_parts_may_be_narrow_integers_and_none_at_all():
    narrow = partition(RING, TWO, "given", parts=np.array([0, 0, 1, 1], np.uint8))
    assert narrow.offsets.tolist() == [0, 2, 4]
    empty = Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 0)
    assert partition(empty, TWO, "given", parts=[]).offsets.tolist() == [0, 0, 0]


def test_a_saved_graph_whose_inner_edges_were_changed_is_refused(tmp_path):
    partition(RING, TWO, "given", parts=[0, 0, 1, 1]).save(tmp_path)
    indices = np.load(tmp_path / "graph" / "indices.npy")
    assert indices[1] == 0  # vertex 1 reads vertex 0 of its own part; now it reads itself: the same rows travel
    indices[1] = 1
    np.save(tmp_path / "graph" / "indices.npy", indices)
    with pytest.raises(GnnCommError, match="changed since it was saved"):
        Partition.load(tmp_path)
