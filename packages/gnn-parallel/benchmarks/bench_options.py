"""What batch reuse, cluster order and the disk tiers save, and what cluster order costs in accuracy.

    python packages/gnn-parallel/benchmarks/bench_options.py [--json FILE]

On a generated graph with planted classes. Reuse: rows that were not fetched again over the rows that adjacent batches
of a rank share and do not own, counted apart from the engine. Cluster order: distinct rows per batch, and test accuracy
after the same epochs. Disk: rows by tier, and look-ahead on or off. Takes about one minute.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from core_kernels import datasets, launch, ops, partition_graph
from core_kernels.console import emit, table
from gnn_parallel import Engine, make_model, plan
from gnn_parallel.features import ShardedFeatures
from gnn_parallel.loader import BatchSchedule, share_seeds


def make_data(num_features=64, signal=0.3):
    return datasets.sbm(
        20_000, num_classes=40, average_degree=12, num_features=num_features, feature_signal=signal, seed=1
    )


def make_engine(group, data, **options):
    seeds = data.train_mask.nonzero().view(-1)
    model = make_model("sage", data.num_features, 32, data.num_classes, 2)
    arguments = {
        "features": data.features,
        "partition": partition_graph(data.graph, group.size, "random"),
        "fanouts": [5, 5],
        "batch_size": 256,
        "seeds": seeds,
        "strategy": "gdp",
        "measure": False,
        "num_steps": 1,
        "group": group,
    }
    made = plan(data.graph, model, **(arguments | options))
    return Engine(made, model, group), seeds


def measure_reuse(group):
    """Return rows saved by this rank, and rows of others that its adjacent batches share, counted from the samples."""
    data = make_data()
    engine, seeds = make_engine(group, data, placement="sharded", reuse=True)
    owner, before, overlap = engine.data.owner, torch.empty(0, dtype=torch.int64), 0
    for step, batch in enumerate(BatchSchedule(seeds, 256).batches(0)):
        mine = share_seeds(batch, owner, group.size)[group.rank]
        rows = ops.sample_blocks(data.graph, mine, [5, 5], step=step)[0].src_ids
        rows = rows[owner[rows] != group.rank]
        overlap += int(torch.isin(rows, before).sum())
        before = rows
    for batch in engine.loader(seeds, data.labels):
        engine.backward(F.cross_entropy(engine(batch), batch.y))
    assert isinstance(engine.features, ShardedFeatures)
    return engine.features.rows_reused, overlap, engine.features.rows_fetched


def measure_clusters(group, num_clusters, epochs=12):
    """Return distinct rows per batch and test accuracy."""
    data = make_data()
    engine, seeds = make_engine(group, data, num_clusters=num_clusters)
    optimizer = torch.optim.Adam(engine.model.parameters(), lr=0.01)
    rows = steps = 0
    for epoch in range(epochs):
        for batch in engine.loader(seeds, data.labels, epoch):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(engine(batch), batch.y))
            optimizer.step()
            rows += len(ops.unique_relabel(torch.cat([batch.work.sources.long(), batch.destinations]))[0])
            steps += 1
    return rows / steps, engine.evaluate(data.test_mask.nonzero().view(-1), data.labels)


def measure_disk(group, path, look_ahead):
    """Return rows by tier and the seconds of loading per epoch."""
    data = make_data(num_features=256)
    engine, seeds = make_engine(group, data, features=path, placement="disk", cache="20%", look_ahead=look_ahead)
    for epoch in range(2):
        engine.clock.take()
        engine.features.store.counters.reset()
        started = time.perf_counter()
        for batch in engine.loader(seeds, data.labels, epoch):
            engine.backward(F.cross_entropy(engine(batch), batch.y))
        seconds = time.perf_counter() - started
    rows = dict(engine.features.store.counters.rows)
    engine.close()
    return rows, engine.clock.take()["load"], seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    reuse = [sum(column) for column in zip(*launch.run_ranks(measure_reuse, 2), strict=True)]
    saved, overlap, fetched = reuse
    plain = launch.run_ranks(measure_clusters, 1, 0)[0]
    clustered = launch.run_ranks(measure_clusters, 1, 64)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npy"
        np.save(path, make_data(num_features=256).features.numpy())
        disk = {ahead: launch.run_ranks(measure_disk, 1, str(path), ahead)[0] for ahead in (0, 2)}
    rows = [
        (
            "batch reuse: rows saved / rows shared by adjacent batches",
            f"{saved / overlap:.4f}",
            f"{saved} of {overlap}",
        ),
        ("batch reuse: share of fetches saved", f"{saved / (saved + fetched):.3f}", f"{fetched} still fetched"),
        ("64 clusters: rows per batch", f"{clustered[0] / plain[0]:.3f}", f"{clustered[0]:.0f} of {plain[0]:.0f}"),
        ("64 clusters: accuracy", f"{100 * (clustered[1] - plain[1]):+.2f} pt", f"{clustered[1]:.1%}, {plain[1]:.1%}"),
        *(
            (f"disk, look-ahead {ahead}", f"{load:.2f} s loading of {seconds:.2f} s", str(tiers))
            for ahead, (tiers, load, seconds) in disk.items()
        ),
    ]
    table("options of a plan", ("", "ratio", "counts"), rows)
    emit({"reuse": reuse, "plain": plain, "clustered": clustered, "disk": disk}, args.json)


if __name__ == "__main__":
    main()
