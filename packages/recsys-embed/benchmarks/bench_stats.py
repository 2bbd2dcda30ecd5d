"""Access statistics against ``np.unique``, and at a given number of distinct rows.

python bench_stats.py                       ratio on 26 Zipf fields
python bench_stats.py --rows 1000000000     memory and time of counting and planning, every row seen once or more
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import numpy as np

from core_kernels.interconnect import Interconnect
from recsys_embed import SGD, AccessStats, EmbeddingBagConfig, plan_tiers
from recsys_embed.data.synthetic import draw_zipf

FIELDS, ROWS = 26, 200_000


def compare(repeats: int = 5) -> None:
    generator = np.random.default_rng(0)
    tables = [EmbeddingBagConfig(f"C{i}", ROWS, 64, [f"C{i}"]) for i in range(FIELDS)]
    ids = np.stack([draw_zipf(generator, ROWS, 1.05, 65_536) for _ in range(FIELDS)])
    shifted = (ids + np.arange(FIELDS)[:, None] * ROWS).reshape(-1)
    names = [t.name for t in tables]
    starts = np.arange(0, 513 * FIELDS, 512)
    batches = [np.ascontiguousarray(ids[:, s : s + 512]).reshape(-1) for s in range(0, ids.shape[1], 512)]
    ours, theirs, per_batch = [], [], []
    for _ in range(repeats + 1):
        begin = time.process_time()
        stats = AccessStats(tables)
        for batch in batches:
            stats.add_ids(names, batch, starts, 512)
        ours.append(time.process_time() - begin)
        begin = time.process_time()
        _, counts = np.unique(shifted, return_counts=True)
        theirs.append(time.process_time() - begin)
        begin = time.process_time()
        for batch in batches:
            np.unique(batch, return_counts=True)
        per_batch.append(time.process_time() - begin)
    assert stats.describe()["num_distinct_rows"] == len(counts)
    mine, whole, split = (statistics.median(x[1:]) for x in (ours, theirs, per_batch))  # seconds of this process
    print(f"{shifted.size} ids: {mine * 1e3:.0f} ms; np.unique {whole * 1e3:.0f} ms ({whole / mine:.1f}x),")
    print(f"np.unique batch by batch {split * 1e3:.0f} ms ({split / mine:.1f}x, without adding the batches up)")


def scale(num_rows: int) -> None:
    table = EmbeddingBagConfig("t", num_rows, 64, ["f"])
    stats, chunk = AccessStats([table]), 1 << 22
    generator = np.random.default_rng(0)
    begin = time.perf_counter()
    for start in range(0, num_rows, chunk):
        stop = min(start + chunk, num_rows)
        popular = draw_zipf(generator, num_rows, 1.05, 1 << 18)
        values = np.concatenate([np.arange(start, stop), popular])
        stats.add_ids(["f"], values, np.array([0, len(values)]), len(values))
    counted = time.perf_counter()
    plan = plan_tiers(stats, Interconnect.preset("h100-8x8-ib"), [table], 64, 4096, SGD(0.1), memory_cap=80e9)
    planned = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{stats.num_accesses} accesses to {num_rows} distinct rows: {counted - begin:.0f} s, plan of "
          f"{plan.num_hot_rows} hot rows: {planned - counted:.0f} s, peak {peak:.2f} GiB")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int)
    args = parser.parse_args()
    scale(args.rows) if args.rows else compare()
