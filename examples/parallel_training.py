"""gnn-parallel: train a sampled GNN on real film ratings over two ranks, the strategy chosen and explained by a plan.

python examples/parallel_training.py --epochs 10 --ranks 2
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from chapter import Chapter, finish, new_figure, parser, shown_error

import gnn_parallel
from core_kernels import datasets, launch, partition_graph
from core_kernels.console import format_bytes, format_seconds

FANOUTS, BATCH_SIZE, HIDDEN = (10, 10), 512, 64


def train(group, epochs: int, weights: str | None) -> dict:
    """Plan and train on one rank; every rank returns the same report."""
    data = datasets.movielens()
    train_ids, val_ids, test_ids = (
        mask.nonzero().view(-1) for mask in (data.train_mask, data.val_mask, data.test_mask)
    )
    model = gnn_parallel.make_model("sage", data.num_features, HIDDEN, data.num_classes, len(FANOUTS))
    plan = gnn_parallel.plan(
        data.graph,
        model,
        features=data.features,
        partition=partition_graph(data.graph, group.size),
        fanouts=FANOUTS,
        batch_size=BATCH_SIZE,
        seeds=train_ids,
        group=group,
    )
    engine = gnn_parallel.Engine(plan, model, group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    accuracies, seconds = [], []
    for epoch in range(epochs):
        begin = time.perf_counter()
        for batch in engine.loader(train_ids, data.labels, epoch):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(engine(batch), batch.y))
            optimizer.step()
        seconds.append(time.perf_counter() - begin)
        accuracies.append(engine.evaluate(val_ids, data.labels))
        if group.rank == 0:
            print(f"epoch {epoch + 1}/{epochs}  validation {accuracies[-1]:.1%}  {seconds[-1]:.2f} s", flush=True)
    differences = gnn_parallel.verify_strategies(
        group,
        data.graph,
        lambda: gnn_parallel.make_model("sage", data.num_features, HIDDEN, data.num_classes, len(FANOUTS)),
        data.features,
        data.labels,
        partition_graph(data.graph, group.size),
        train_ids,
        FANOUTS,
        BATCH_SIZE,
        1,
    )
    if weights and group.rank == 0:
        torch.save(model.state_dict(), weights)
    return {
        "strategy": plan.strategy,
        "explanation": plan.explain(),
        "candidates": [(c.strategy, c.predicted_seconds, c.bytes) for c in plan.candidates],
        "accuracies": accuracies,
        "epoch_seconds": sorted(seconds)[len(seconds) // 2],
        "test_accuracy": engine.evaluate(test_ids, data.labels),
        "differences": {name: d.largest for name, d in differences.items() if not isinstance(d, str)},
    }


def run(epochs: int = 5, ranks: int = 2, weights: Path | None = None) -> Chapter:
    """Train, and compare every strategy with one process; writes the weights where asked."""
    report = launch.run_ranks(train, ranks, epochs, str(weights) if weights else None, timeout_seconds=120.0)[0]
    figure, axes = new_figure()
    axes.plot(range(1, epochs + 1), report["accuracies"], "o-")
    axes.set(xlabel="epoch", ylabel="validation accuracy", title=f"{report['strategy']}, {ranks} ranks")
    seconds, num_bytes = next((s, b) for name, s, b in report["candidates"] if name == report["strategy"])
    rows = [
        (f"strategy chosen for {ranks} ranks", report["strategy"]),
        ("epoch", f"{format_seconds(report['epoch_seconds'])}, predicted {format_seconds(seconds)}"),
        ("bytes of an epoch, predicted", format_bytes(num_bytes)),
        ("largest difference of a strategy to one process", shown_error(max(report["differences"].values()))),
        (f"test accuracy after {epochs} epochs", f"{report['test_accuracy']:.1%}"),
    ]
    question = "which way to split sampled training"
    return Chapter("gnn-parallel", question, rows, report["explanation"], [figure])


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--weights", type=Path, metavar="FILE", help="write the trained weights here")
    args = options.parse_args()
    finish([run(args.epochs, args.ranks, args.weights)], args.report)
