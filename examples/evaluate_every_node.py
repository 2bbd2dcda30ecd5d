"""gnn-eval: evaluate a trained GNN on every film, layer by layer, in little memory, and equal to the full forward.

python examples/evaluate_every_node.py
python examples/evaluate_every_node.py --planetoid planetoid/ cora
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from chapter import Chapter, finish, new_figure, parser, shown_error

import gnn_eval
from core_kernels import datasets, nn
from core_kernels.console import format_seconds
from core_kernels.datasets import GraphData


class Net(torch.nn.Module):
    """An ordinary model; nothing in it knows of layer-wise evaluation."""

    def __init__(self, width: int, hidden: int, classes: int):
        super().__init__()
        self.convs = torch.nn.ModuleList([nn.SAGEConv(width, hidden), nn.SAGEConv(hidden, classes)])

    def forward(self, graph, x: torch.Tensor) -> torch.Tensor:
        return self.convs[1](graph, F.relu(self.convs[0](graph, x)))


def train(model: Net, data: GraphData, epochs: int) -> None:
    """Train on the whole graph."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(epochs):
        logits = model(data.graph, data.features)
        optimizer.zero_grad()
        F.cross_entropy(logits[data.train_mask], data.labels[data.train_mask]).backward()
        optimizer.step()


def run(data: GraphData | None = None, weights: Path | None = None, epochs: int = 20) -> Chapter:
    """Take weights from a file or train some, then evaluate in several ways."""
    data = data or datasets.movielens()
    torch.manual_seed(0)
    model = Net(data.num_features, 64, data.num_classes)
    if weights:
        model.load_state_dict(torch.load(weights))
    else:
        train(model, data, epochs)
    model.eval()
    inputs = (data.graph, data.features)
    with torch.no_grad():
        full = model(*inputs)
    plan = gnn_eval.compile(model, inputs)
    plan.run(inputs)
    begin = time.process_time()
    out = plan.run(inputs)
    seconds = time.process_time() - begin
    budgets = [16, 24, 40, 64]
    blocks = []
    for budget in budgets:
        bounded = plan.run(inputs, memory=f"{budget}MB")
        blocks.append(sum(stage.blocks for stage in plan.last_report.stages))
    some = plan.run(inputs, nodes=[7, 3])
    visited = plan.last_report.num_edges / (2 * data.graph.num_edges)

    figure, axes = new_figure()
    axes.plot(budgets, blocks, "o-")
    axes.set(xlabel="memory budget, MB", ylabel="blocks")
    accuracy = (out.argmax(1) == data.labels)[data.test_mask].float().mean().item()
    scale = full.abs().max()
    rows = [
        (f"every one of {data.graph.num_nodes} nodes, CPU time", format_seconds(seconds)),
        ("largest relative difference to the full forward", shown_error(float((out - full).abs().max() / scale))),
        (f"the same in {budgets[-1]} MB", shown_error(float((bounded - full).abs().max() / scale))),
        ("edges visited for two nodes", f"{visited:.2%}, equal: {torch.allclose(some, full[[7, 3]], atol=1e-4)}"),
        (f"test accuracy, {data.name}", f"{accuracy:.1%}"),
    ]
    return Chapter("gnn-eval", "every node, exactly, in bounded memory", rows, plan.explain(), [figure])


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--planetoid", nargs=2, metavar=("DIR", "NAME"), help="Planetoid files instead of films")
    options.add_argument("--weights", type=Path, metavar="FILE", help="as written by parallel_training.py")
    args = options.parse_args()
    chosen = datasets.planetoid(*args.planetoid) if args.planetoid else None
    finish([run(chosen, args.weights)], args.report)
