"""Access statistics against ``np.unique``; a billion distinct rows; a table file of 100 million rows.

    python bench_stats.py                           ratio on 26 Zipf fields, seconds
    python bench_stats.py --rows 1000000000         counting and planning, every row seen once or more; a minute
    python bench_stats.py --table-rows 100000000    opening a saved table and reading a batch; seconds, sparse file

Baselines count what the statistics count: ``np.unique`` over all ids at once gives accesses; batch by batch, added up,
it also gives the number of batches that touched each row, which is what a planner needs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from core_kernels.interconnect import Interconnect
from recsys_embed import SGD, AccessStats, EmbeddingBagConfig, plan_tiers
from recsys_embed.checkpoint import open_table
from recsys_embed.data.synthetic import draw_zipf

FIELDS, ROWS, BATCH = 26, 200_000, 512


def compare(repeats: int = 9) -> dict[str, float]:
    """Count the same ids in three ways, which take turns; seconds of this process."""
    generator = np.random.default_rng(0)
    tables = [EmbeddingBagConfig(f"C{i}", ROWS, 64, [f"C{i}"]) for i in range(FIELDS)]
    ids = np.stack([draw_zipf(generator, ROWS, 1.05, 65_536) for _ in range(FIELDS)])
    shift = np.arange(FIELDS)[:, None] * ROWS
    shifted = (ids + shift).reshape(-1)
    names = [t.name for t in tables]
    starts = np.arange(0, (BATCH + 1) * FIELDS, BATCH)
    batches = [np.ascontiguousarray(ids[:, s : s + BATCH]).reshape(-1) for s in range(0, ids.shape[1], BATCH)]
    seconds: dict[str, list[float]] = {"ours": [], "at_once": [], "by_batch": []}
    for _ in range(repeats + 1):
        begin = time.process_time()
        stats = AccessStats(tables)
        for batch in batches:
            stats.add_ids(names, batch, starts, BATCH)
        seconds["ours"].append(time.process_time() - begin)
        begin = time.process_time()
        found, counts = np.unique(shifted, return_counts=True)
        seconds["at_once"].append(time.process_time() - begin)
        begin = time.process_time()
        accesses, presence = np.zeros(FIELDS * ROWS, np.int64), np.zeros(FIELDS * ROWS, np.int64)
        for batch in batches:
            rows, times = np.unique((batch.reshape(FIELDS, -1) + shift).reshape(-1), return_counts=True)
            accesses[rows] += times
            presence[rows] += 1
        seconds["by_batch"].append(time.process_time() - begin)
    for which, expected in (("accesses", accesses), ("presence", presence)):
        assert all(np.array_equal(stats.counts(f"C{i}", which), expected[i * ROWS :][:ROWS]) for i in range(FIELDS))
    assert np.array_equal(accesses[found], counts)
    ours, at_once, by_batch = (statistics.median(seconds[name][1:]) for name in ("ours", "at_once", "by_batch"))
    print(f"{shifted.size} ids: {ours * 1e3:.0f} ms of processor time")
    print(f"np.unique over all of them: {at_once * 1e3:.0f} ms, {at_once / ours:.2f} times as long")
    print(f"np.unique batch by batch, added up: {by_batch * 1e3:.0f} ms, {by_batch / ours:.2f} times as long")
    return {"ours_seconds": ours, "at_once_over_ours": at_once / ours, "by_batch_over_ours": by_batch / ours}


def scale(num_rows: int) -> dict[str, float]:
    """Stream every row of a table once, and popular ones more often; then plan."""
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{stats.num_accesses} accesses to {num_rows} distinct rows: {counted - begin:.0f} s, plan of "
          f"{plan.num_hot_rows} hot rows: {planned - counted:.0f} s, peak {peak / 2**30:.2f} GiB")  # fmt: skip
    return {"count_seconds": counted - begin, "plan_seconds": planned - counted, "peak_bytes": peak}


def open_large(num_rows: int) -> dict[str, float]:
    """Open a saved table of width 64 and read 100,000 rows here and there."""
    width = 64
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.weight.npy"
        whole = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num_rows, width))
        wanted = np.sort(np.random.default_rng(0).integers(0, num_rows, 100_000))
        whole[wanted] = (wanted % 1000)[:, None]
        whole.flush()
        del whole
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.perf_counter()
        table = open_table(path)
        opened = time.perf_counter()
        rows = table[wanted]
        read = time.perf_counter()
        assert np.array_equal(rows[:, 0], (wanted % 1000).astype(np.float32))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        size = path.stat().st_size
        print(f"{size / 1e9:.1f} GB file opened in {1e3 * (opened - begin):.1f} ms, {len(rows)} rows read in "
              f"{1e3 * (read - opened):.0f} ms, memory grew by {grown / 2**20:.0f} MiB")  # fmt: skip
    return {"file_bytes": size, "open_seconds": opened - begin, "read_seconds": read - opened, "grown_bytes": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="count and plan this many distinct rows")
    parser.add_argument("--table-rows", type=int, help="open a saved table of this many rows")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    args = parser.parse_args()
    found = scale(args.rows) if args.rows else open_large(args.table_rows) if args.table_rows else compare()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
