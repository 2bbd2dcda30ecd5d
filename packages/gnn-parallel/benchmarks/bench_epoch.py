"""CPU seconds of a one-rank MovieLens epoch against PyG's NeighborLoader with the same model; prints the ratio.

    python packages/gnn-parallel/benchmarks/bench_epoch.py [--threads 2] [--rounds 5]

PyG needs torch-sparse or pyg-lib for its sampler.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from core_kernels import datasets, partition_graph
from gnn_parallel import Engine, make_model, plan


class PygSage(nn.Module):
    def __init__(self, width, hidden, num_classes):
        super().__init__()
        from torch_geometric.nn import SAGEConv

        self.convs = nn.ModuleList([SAGEConv(width, hidden), SAGEConv(hidden, num_classes)])

    def forward(self, x, edge_index):
        return self.convs[1](F.relu(self.convs[0](x, edge_index)), edge_index)


def make_ours(data, seeds, batch_size):
    model = make_model("sage", data.num_features, 64, data.num_classes, 2)
    made = plan(
        data.graph,
        model,
        features=data.features,
        partition=partition_graph(data.graph, 1),
        fanouts=[10, 10],
        batch_size=batch_size,
        seeds=seeds,
        measure=False,
        num_steps=1,
    )
    engine = Engine(made, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def run(epoch):
        for batch in engine.loader(seeds, data.labels, epoch):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(engine(batch), batch.y))
            optimizer.step()

    return run


def make_pyg(data, seeds, batch_size):
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    graph = Data(x=data.features, y=data.labels, edge_index=data.graph.edge_index())
    loader = NeighborLoader(graph, [10, 10], seeds, batch_size=batch_size, shuffle=True)
    model = PygSage(data.num_features, 64, data.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def run(epoch):
        for batch in loader:
            optimizer.zero_grad()
            output = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(output, batch.y[: batch.batch_size]).backward()
            optimizer.step()

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = datasets.movielens()
    seeds = data.train_mask.nonzero().view(-1)
    has_sampler = any(importlib.util.find_spec(name) for name in ("torch_sparse", "pyg_lib"))
    if not has_sampler:
        raise SystemExit("PyG's NeighborLoader needs torch-sparse or pyg-lib; install one of them to compare")
    runs = {"gnn-parallel": make_ours(data, seeds, args.batch_size), "pyg": make_pyg(data, seeds, args.batch_size)}
    cpu = {name: [] for name in runs}
    wall = {name: [] for name in runs}
    for epoch in range(args.rounds + 1):
        for name, run in runs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            run(epoch)
            if epoch:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - start_cpu)
    for name in runs:
        print(f"{name:<14}wall {statistics.median(wall[name]):.3f} s  CPU {statistics.median(cpu[name]):.3f} s")
    ratios = [statistics.median(kind["gnn-parallel"]) / statistics.median(kind["pyg"]) for kind in (wall, cpu)]
    print(f"ratio         wall {ratios[0]:.2f}    CPU {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
