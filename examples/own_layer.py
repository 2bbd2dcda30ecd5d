"""core-kernels: measure this machine, then write attention over film neighbours for one vertex and train it.

python examples/own_layer.py
python examples/own_layer.py --planetoid planetoid/ cora     # ind.cora.* files instead of films
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from chapter import Chapter, finish, new_figure, parser, shown_error

from core_kernels import datasets, launch, vertex
from core_kernels.console import format_seconds
from core_kernels.datasets import GraphData
from core_kernels.interconnect import Interconnect


@vertex.program
def attention(v):
    alpha = vertex.softmax(F.leaky_relu(e.src.score + v.score, 0.2) for e in v.in_edges)
    return vertex.sum(a * e.src.h for a, e in zip(alpha, v.in_edges, strict=True))


def materialised(edges: torch.Tensor, h: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute the same layer the usual way, with one row per edge in memory."""
    source, destination = edges
    logits = F.leaky_relu(left[source] + right[destination], 0.2)
    largest = torch.full_like(right, -torch.inf).scatter_reduce(0, destination[:, None], logits, "amax")
    weights = (logits - largest[destination]).exp()
    total = torch.zeros_like(right).index_add(0, destination, weights)
    return torch.zeros_like(h).index_add(0, destination, h[source] * (weights / total[destination]))


class Net(torch.nn.Module):
    """Two attention layers."""

    def __init__(self, width: int, hidden: int, classes: int):
        super().__init__()
        self.maps = torch.nn.ModuleList([torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, classes)])
        self.left = torch.nn.ModuleList([torch.nn.Linear(hidden, 1), torch.nn.Linear(classes, 1)])
        self.right = torch.nn.ModuleList([torch.nn.Linear(hidden, 1), torch.nn.Linear(classes, 1)])

    def forward(self, layer, x: torch.Tensor) -> torch.Tensor:
        for depth, (linear, left, right) in enumerate(zip(self.maps, self.left, self.right, strict=True)):
            h = linear(x)
            x = layer(h, left(h), right(h))
            if depth == 0:
                x = F.relu(x)
        return x


def measure(group, budget_seconds: float) -> Interconnect:
    return Interconnect.measure(group, budget_seconds=budget_seconds)


def train(data: GraphData, layer, epochs: int) -> tuple[list[float], float, float]:
    """Return losses, test accuracy and the CPU seconds of an epoch, median."""
    torch.manual_seed(0)
    model = Net(data.num_features, 64, data.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses, seconds = [], []
    for _ in range(epochs):
        begin = time.process_time()
        logits = model(layer, data.features)
        loss = F.cross_entropy(logits[data.train_mask], data.labels[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.process_time() - begin)
    with torch.no_grad():
        hits = model(layer, data.features).argmax(1) == data.labels
    return losses, hits[data.test_mask].float().mean().item(), sorted(seconds)[epochs // 2]


def run(data: GraphData | None = None, epochs: int = 30, budget_seconds: float = 3.0) -> Chapter:
    """Measure, train both ways, compare."""
    data = data or datasets.movielens()
    net = launch.run_ranks(measure, 2, budget_seconds)[0]
    graph, edges = data.graph, data.graph.edge_index()

    def fused(h, left, right):
        return attention(graph, src={"h": h, "score": left}, dst={"score": right})

    def by_edges(h, left, right):
        return materialised(edges, h, left, right)

    losses, accuracy, seconds = train(data, fused, epochs)
    expected, _, usual_seconds = train(data, by_edges, max(5, epochs // 4))
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=False))

    figure, axes = new_figure()
    axes.plot(losses, label="one vertex program")
    axes.plot(expected, "--", label="a row per edge")
    axes.set(xlabel="epoch", ylabel="loss")
    axes.legend()
    rows = [
        ("all_reduce of 1 MiB, 2 ranks", format_seconds(net.seconds("all_reduce", 1 << 20))),
        ("attention epoch, CPU time", format_seconds(seconds)),
        ("of the time with a row per edge", f"{seconds / usual_seconds:.2f}"),
        ("largest difference of a loss", shown_error(difference)),
        (f"test accuracy, {data.name}", f"{accuracy:.1%}"),
    ]
    return Chapter("core-kernels", "a layer of my own, as fast as a built-in one", rows, str(data.graph), [figure])


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--planetoid", nargs=2, metavar=("DIR", "NAME"), help="Planetoid files instead of films")
    options.add_argument("--epochs", type=int, default=30)
    args = options.parse_args()
    chosen = datasets.planetoid(*args.planetoid) if args.planetoid else None
    finish([run(chosen, args.epochs)], args.report)
