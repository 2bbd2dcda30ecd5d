"""gnn-comm: plan the exchange of full-graph training over two hosts, then run a plan on local ranks.

python examples/full_graph_exchange.py
python examples/full_graph_exchange.py --planetoid planetoid/ cora
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from chapter import Chapter, finish, new_figure, parser

import gnn_comm
from core_kernels import datasets, launch, nn
from core_kernels.console import format_bytes
from core_kernels.datasets import GraphData
from core_kernels.topology import cluster, processor_topology
from gnn_comm.layers import exchanged

HIDDEN = 64


class Net(torch.nn.Module):
    """Two GraphSAGE layers that read remote rows through a communicator."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.convs = torch.nn.ModuleList([nn.SAGEConv(width, HIDDEN), nn.SAGEConv(HIDDEN, classes)])

    def forward(self, communicator: gnn_comm.Communicator, x: torch.Tensor) -> torch.Tensor:
        first, second = self.convs
        # Features never change, so their remote rows are fetched once and kept.
        hidden = exchanged(communicator, lambda block, rows, _: first(block, rows), x, keep="features").relu()
        return exchanged(communicator, lambda block, rows, _: second(block, rows), hidden)


def fit(group, communicator, model, x, labels, mask, epochs: int, learning_rate: float) -> list[float]:
    """Train the model on the whole graph; returns the loss of each epoch. Collective."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=5e-4)
    num_train, losses = int(group.all_reduce(mask.sum())), []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(communicator, x)[mask], labels[mask], reduction="sum") / num_train
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = group.all_reduce(parameter.grad, tag="parameters", ordered=True)
        optimizer.step()
        losses.append(group.all_reduce(loss.detach(), ordered=True).item())
    return losses


def train(group, plan: gnn_comm.Plan, data: GraphData, epochs: int) -> dict:
    """Train on this rank's part of the graph."""
    torch.manual_seed(0)
    communicator = gnn_comm.Communicator(plan, group)
    everything = torch.arange(data.graph.num_nodes, dtype=torch.float32)[:, None]
    is_exact = torch.equal(communicator.collect(communicator.dispatch(everything)), everything)
    x, labels = communicator.dispatch(data.features), communicator.dispatch(data.labels, own_only=True)
    masks = [communicator.dispatch(mask, own_only=True) for mask in (data.train_mask, data.test_mask)]
    model = Net(data.num_features, data.num_classes)
    losses = fit(group, communicator, model, x, labels, masks[0], epochs, learning_rate=0.01)
    with torch.no_grad():
        hits = (model(communicator, x).argmax(1) == labels)[masks[1]]
    counts = group.all_reduce(torch.tensor([int(hits.sum()), len(hits)]))
    sent = int(group.all_reduce(torch.tensor(communicator.sent_bytes())))
    communicator.close()
    return {"exact": is_exact, "losses": losses, "accuracy": float(counts[0] / counts[1]), "bytes": sent}


def run(data: GraphData | None = None, epochs: int = 30, ranks: int = 2) -> Chapter:
    """Compare plans on paper for two hosts of four devices, then train on local ranks."""
    data = data or datasets.movielens()
    hosts = cluster([4, 4], local_bytes_per_second=2e9, link_bytes_per_second=2e8)
    split = gnn_comm.partition(data.graph, hosts)
    plans = {name: gnn_comm.plan(split, hosts, planner=name, width=HIDDEN) for name in ("p2p", "auto")}
    seconds = {name: plan.estimate().seconds for name, plan in plans.items()}
    bound = float(plans["auto"].lower_bound())

    local = processor_topology(ranks)
    plan = gnn_comm.plan(gnn_comm.partition(data.graph, local), local, width=HIDDEN)
    results = launch.run_ranks(train, ranks, plan, data, epochs, timeout_seconds=120.0)

    figure, (left, right) = new_figure(8, num_axes=2)
    left.bar(["sent straight", "planned", "no plan below"], [1e3 * s for s in (*seconds.values(), bound)])
    left.set(ylabel="exchange on 2 x 4 devices, ms")
    right.plot(results[0]["losses"])
    right.set(xlabel="epoch", ylabel="training loss")
    rows = [
        ("exchange on 2 x 4 devices, sent straight", f"{1e3 * seconds['p2p']:.2f} ms"),
        ("the same, planned", f"{1e3 * seconds['auto']:.2f} ms, no plan below {1e3 * bound:.2f} ms"),
        (f"rows after a round trip over {ranks} ranks", "bitwise equal" if results[0]["exact"] else "DIFFER"),
        (f"sent in {epochs} epochs on {ranks} ranks", format_bytes(results[0]["bytes"])),
        (f"test accuracy, {data.name}", f"{results[0]['accuracy']:.1%}"),
    ]
    question = "full-graph training waits for the network"
    return Chapter("gnn-comm", question, rows, plans["auto"].explain(), [figure])


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--planetoid", nargs=2, metavar=("DIR", "NAME"), help="Planetoid files instead of films")
    options.add_argument("--epochs", type=int, default=30)
    options.add_argument("--ranks", type=int, default=2)
    args = options.parse_args()
    chosen = datasets.planetoid(*args.planetoid) if args.planetoid else None
    finish([run(chosen, args.epochs, args.ranks)], args.report)
