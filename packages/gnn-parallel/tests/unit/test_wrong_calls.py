"""Wrong calls say what was wrong by name and value, what was expected, and what to do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from core_kernels import Graph, partition_graph
from core_kernels.comm import Group
from core_kernels.nn import GCNConv, GINConv
from gnn_parallel import Engine, GnnParallelError, keyed_dropout, load_checkpoint, make_model, plan, try_strategies
from gnn_parallel.adapters import split_layer
from gnn_parallel.input_layer import answering

IDS = torch.arange(10)

WRONG_PLANS = [
    ({"fanouts": [0, 3]}, "fanouts", "[0, 3]", "pass one number per layer"),
    ({"batch_size": 0}, "batch_size", "0", "pass seeds per step"),
    ({"strategy": "best"}, "strategy", "'best'", "correct the spelling"),
    ({"placement": "nowhere"}, "placement", "'nowhere'", "correct the spelling"),
    ({"cache": "many", "placement": "sharded"}, "cache", "'many'", "pass rows, a share"),
    ({"cache": "10%"}, "cache", "'10%'", "leave cache out"),
    ({"cache": 100, "placement": "sharded", "memory_bytes": 500}, "cache", "100", "cache at most 8 rows"),
    ({"seeds": torch.tensor([5, 120])}, "seeds", "120", "pass ids of this graph"),
    ({"seeds": torch.tensor([5, 5, 6])}, "seeds", "3 ids of 2 nodes", "pass seeds.unique()"),
    ({"seeds": IDS.float()}, "seeds", "torch.float32", "mask.nonzero()"),
    ({"seeds": torch.stack([IDS, IDS]), "num_negatives": 0}, "num_negatives", "0", "pass negatives per pair"),
    ({"num_hosts": 2}, "num_hosts", "2", "give every host as many ranks"),
    ({"group_shape": "2by2"}, "group_shape", "'2by2'", "write both numbers"),
    ({"group_shape": "2x2"}, "group_shape", "'2x2'", "name the hosts"),
    ({"reuse": True}, "reuse", "True", "leave reuse out"),
    ({"placement": "disk"}, "features", "a tensor", "numpy.save"),
    ({"placement": "disk", "features": "nowhere.npy"}, "features", "nowhere.npy", "check the path"),
    ({"num_clusters": 500}, "num_clusters", "500", "pass fewer clusters"),
    ({"num_trials": -1}, "num_trials", "-1", "pass 0 for none"),
    ({"num_epochs": 0}, "num_epochs", "0", "pass the epochs you mean to train"),
    ({"num_steps": 0}, "num_steps", "0", "leave it out"),
    ({"seeds": [1, 2]}, "seeds", "list", "torch.tensor(seeds)"),
    ({"features": np.zeros((120, 7))}, "features", "ndarray", "convert it first"),
    ({"partition": None}, "partition", "NoneType", "convert it first"),
    ({"features": torch.zeros(3, 7)}, "features", "(3, 7)", "of the same data"),
    ({"memory_bytes": 10}, "memory", "10 are allowed", "allow another strategy or more memory"),
]


def make(problem, **options):
    model = make_model("sage", 7, 8, 3, 2, dtype=torch.float64)
    arguments = {
        "features": problem.features,
        "partition": partition_graph(problem.graph, 3, "random", seed=1),
        "fanouts": problem.fanouts,
        "batch_size": 18,
        "seeds": problem.seeds,
        "measure": False,
    }
    return plan(problem.graph, model, **(arguments | options)), model


@pytest.mark.parametrize(("options", "name", "value", "remedy"), WRONG_PLANS)
def test_plan(problem, options, name, value, remedy):
    check(lambda: make(problem, **options), name, value, remedy)


def test_everything_else(problem, tmp_path):
    single = {"partition": partition_graph(problem.graph, 1), "num_steps": 1}
    made, model = make(problem, **single)
    engine = Engine(made, model)
    unbound = type(made).from_json(made.to_json())
    np.savez(tmp_path / "other.npz", a=1)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:60])
    layers = SimpleNamespace(wide=make_model("sage", 9, 8, 3, 2, dtype=torch.float64), plain=nn.Linear(7, 3))
    dropping = GINConv(nn.Sequential(nn.Linear(7, 8), nn.Dropout(0.5), nn.Linear(8, 8)))
    other_graph = problem.graph.symmetrized()
    parts = single["partition"]
    damaged = lambda **fields: replace(made, **fields).bind(problem.graph, problem.features, parts)  # noqa: E731
    calls = [
        (lambda: Engine(made, layers.wide), "features", "(120, 7)", "make the model for these features"),
        (lambda: Engine(made, layers.plain), "input_layer", "'convs.0'", "pass one of them"),
        (lambda: Engine(unbound, model), "plan", "no data", "call plan.bind"),
        (lambda: unbound.bind(other_graph, problem.features, parts), "graph", other_graph.fingerprint(), "plan again"),
        (lambda: Engine(make(problem)[0], model), "world_size", "3", "plan again, with one part per rank"),
        (lambda: engine.backward(torch.zeros(())), "loss", "without a batch", "call the engine first"),
        (lambda: engine.clip_grad_norm_(0.0), "max_norm", "0.0", "largest norm you allow"),
        (lambda: try_strategies(made, model, Group.single(), 0), "num_steps", "0", "number of steps"),
        (lambda: keyed_dropout(torch.ones(2, 2), IDS[:2], 1.5, 0), "p", "1.5", "pass 0 for none"),
        (lambda: load_checkpoint(tmp_path / "other.npz", engine), "checkpoint", "other.npz", "check the path"),
        (lambda: load_checkpoint(tmp_path / "cut.npz", engine), "checkpoint", "cut.npz", "check the path"),
        (lambda: make_model("gat", 7, 8, 3, 2, heads=0), "heads", "0", "pass a positive number"),
        (lambda: call_twice(model.convs[0]), "SAGEConv", "2 times", "modules of their own"),
        (lambda: make_model("sage", 7, 0, 3, 2), "hidden", "0", "pass a positive number"),
        (lambda: engine.evaluate(IDS), "labels", "None", "pass labels to evaluate nodes"),
        (lambda: engine.evaluate(IDS, IDS), "labels", "(10,)", "labels of all nodes"),
        (lambda: engine.evaluate(IDS, problem.labels, (3,)), "fanouts", "(3,)", "one number per layer"),
        (lambda: next(engine.loader(IDS + 500)), "seeds", "509", "pass ids of this graph"),
        (lambda: engine.batch_at(IDS, -1), "step", "-1", "from the start of training"),
        (lambda: damaged(placement="moon"), "placement", "'moon'", "plan again"),
        (lambda: damaged(strategy="best", fanouts=()), "strategy", "'best'", "plan again"),
        (lambda: split_layer(dropping, problem.graph), "Dropout(p=0.5)", "other masks", "keyed_dropout"),
    ]
    for call, name, value, remedy in calls:
        check(call, name, value, remedy)


def call_twice(layer):
    with answering(layer, torch.ones(2, 8)):
        layer(layer(None))


def test_loops_of_the_graph_are_replaced_before_degrees_are_counted():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 1, 2, 0, 0], [1, 0, 2, 1, 0, 0]]), 3)
    scale = split_layer(GCNConv(4, 2), graph).source_scale
    assert torch.equal(scale, torch.tensor([2.0, 3.0, 2.0]).pow(-0.5))


def check(call, name, value, remedy):
    with pytest.raises(GnnParallelError) as error:
        call()
    message = str(error.value)
    for part in (name, value, remedy, ";"):
        assert part in message, message
