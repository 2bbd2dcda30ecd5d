"""PyG's layers, unchanged: with all neighbours, strategies equal PyG's forward and backward on the full graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core_kernels import partition_graph
from gnn_parallel import Engine, plan
from gnn_parallel.strategies import STRATEGIES

pytest.importorskip("torch_geometric", reason="PyG is an optional peer")

pytestmark = [pytest.mark.distributed, pytest.mark.peer]


class OneLayer(nn.Module):
    """A PyG layer and a linear head."""

    def __init__(self, name):
        from torch_geometric import nn as pyg

        super().__init__()
        self.conv = {
            "sage": lambda: pyg.SAGEConv(7, 6),
            "sage_max": lambda: pyg.SAGEConv(7, 6, aggr="max", normalize=True),
            "gcn": lambda: pyg.GCNConv(7, 6),
            "gin": lambda: pyg.GINConv(nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 6)), train_eps=True),
            "gat": lambda: pyg.GATConv(7, 3, heads=2),
            "gatv2": lambda: pyg.GATv2Conv(7, 6, heads=2, concat=False),
        }[name]()
        self.head = nn.Linear(6, 3)

    def forward(self, blocks, x):
        return self.head(torch.tanh(self.conv(x, blocks[0].edge_index())))


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return OneLayer(name).double()


def compare_with_pyg(group, problem, names):
    """Return per layer and strategy the largest relative difference of a gradient to PyG on the full graph."""
    found = {}
    seeds = problem.seeds
    for name in names:
        reference = build(name)
        output = reference.head(torch.tanh(reference.conv(problem.features, problem.graph.edge_index())))[seeds]
        F.cross_entropy(output, problem.labels[seeds]).backward()
        for strategy in STRATEGIES:
            model = build(name)
            made = plan(
                problem.graph,
                model,
                features=problem.features,
                partition=partition_graph(problem.graph, group.size, "random"),
                fanouts=[-1],
                batch_size=len(seeds),
                seeds=seeds,
                strategy=strategy,
                measure=False,
                group=group,
            )
            engine = Engine(made, model, group)
            for batch in engine.loader(seeds, problem.labels):
                engine.backward(F.cross_entropy(engine(batch), batch.y))
            grads = engine.gradients()
            found[name, strategy] = max(
                float((grads[key] - p.grad).abs().max() / p.grad.abs().max()) for key, p in reference.named_parameters()
            )
    return found


def test_every_layer_and_strategy_equals_pyg_on_the_full_graph(four_ranks, two_way_problem):
    names = ("sage", "sage_max", "gcn", "gin", "gat", "gatv2")
    differences = four_ranks.run(compare_with_pyg, two_way_problem, names)[0]
    assert len(differences) == len(names) * len(STRATEGIES)
    assert max(differences.values()) < 1e-10, differences
