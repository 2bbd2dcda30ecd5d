"""CPU time per edge and memory of graph operations, small against large: the cost per edge should stay flat.

    python packages/core-kernels/benchmarks/bench_scale.py [--json FILE] [--large 10000000 200000000] [--graph rmat]

One thread, CPU time, best of five runs on the small graph and two on the large one, in memory that was touched before;
about three minutes and 9 GB (a smaller graph is taken where the machine has less). Edges are random, the worst case for
the caches; with ``--graph rmat`` they are those of R-MAT with randomly named nodes, whose heavy-tailed degrees are
what large graphs have. Steps:

- build, transpose, partition (random, 8 parts, cut counted), reorder (renumber by the partition): per edge;
- sample: 10 in-edges of an eighth of the nodes, in random and in ascending order: per edge drawn;
- aggregate: the sum over in-edges of rows of 16 float32, one cache line each, on huge pages: per edge;
- floor: reading one random cache line of such a table per edge, nothing else, without asking for it ahead.

Memory is the highest resident size, in a run of its own, above the one before the edge list was made, in units of the
graph (indptr, indices and edge ids). The edge list has int32 ids, is counted, and is dropped once the graph is built;
so is the transpose before reordering.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numba import njit

from core_kernels import Graph, ops, partition_graph
from core_kernels import random as counter_random
from core_kernels.console import table
from core_kernels.kernels.numba.generate import rmat_edges

WIDTH, FANOUT, NUM_PARTS = 16, 10, 8
GOAL_RATIO, GOAL_MEMORY = 2.0, 3.0
#: Bytes of the largest moment per edge at 20 edges a node, with a margin.
BYTES_PER_EDGE = 42
GIB = 1 << 30
PEAK = "peak over graph"


def read_status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", status).group(1)) << 10


def available_bytes() -> int:
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text()).group(1)) << 10


@njit
def read_random_lines(rows, ids):
    """Sum the first column of the named rows."""
    total = np.float32(0)
    for place in range(len(ids)):
        total += rows[ids[place], 0]
    return total


class Clock:
    """Collects CPU nanoseconds per edge of named steps."""

    def __init__(self):
        self.nanoseconds: dict[str, float] = {}

    def time(self, name: str, num_edges: int | None, function: Callable[[], object]) -> object:
        start = time.process_time()
        result = function()
        seconds = time.process_time() - start
        self.nanoseconds[name] = seconds / (num_edges or int(result[0][-1])) * 1e9
        return result


def draw_edges(kind: str, num_nodes: int, num_edges: int) -> torch.Tensor:
    """Return the ``[2, num_edges]`` int32 ends of random edges."""
    if kind == "uniform":
        return torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ends, names = torch.empty(2, num_edges, dtype=torch.int32), counter_random.permutation(num_nodes, 0).int()
    thresholds = (round(share * (1 << 16)) for share in (0.57, 0.76, 0.95))
    rmat_edges(0, (num_nodes - 1).bit_length(), *thresholds, names.numpy(), ends[0].numpy(), ends[1].numpy())
    return ends


def measure(kind: str, num_nodes: int, num_edges: int) -> dict[str, float]:
    """Return nanoseconds per edge of each step, and the peak memory over the size of the graph."""
    gc.collect()
    generator, clock = torch.Generator().manual_seed(0), Clock()
    # Writing 5 makes the kernel forget the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    before = read_status_bytes("VmRSS")
    edge_index = draw_edges(kind, num_nodes, num_edges)
    graph = clock.time("build", num_edges, lambda: Graph.from_edge_index(edge_index, num_nodes))
    edge_index = None
    clock.time("transpose", num_edges, graph.transpose)
    graph = Graph(graph.indptr, graph.indices, edge_ids=graph.edge_ids, validate=False)
    book = clock.time("partition", num_edges, lambda: partition_graph(graph, NUM_PARTS, "random"))
    clock.time("reorder", num_edges, lambda: book.reorder(graph))
    book = None
    seeds = torch.randperm(num_nodes, generator=generator)[: num_nodes // 8]
    clock.time("sample, random order", None, lambda: ops.sample_neighbors(graph, seeds, FANOUT))
    seeds = seeds.sort().values
    clock.time("sample, ascending", None, lambda: ops.sample_neighbors(graph, seeds, FANOUT))
    x = torch.ones(num_nodes, WIDTH)
    clock.time(f"aggregate, width {WIDTH}", num_edges, lambda: ops.spmm(graph, x))
    ids = graph.indices.numpy()
    clock.time("floor: random lines", num_edges, lambda: read_random_lines(x.numpy(), ids))
    graph_bytes = sum(array.nbytes for array in (graph.indptr, graph.indices, graph.edge_ids))
    return {**clock.nanoseconds, PEAK: (read_status_bytes("VmHWM") - before) / graph_bytes}


def measure_best(num_runs: int, kind: str, num_nodes: int, num_edges: int) -> dict[str, float]:
    """Return the shortest times of some runs."""
    runs = [measure(kind, num_nodes, num_edges) for _ in range(num_runs)]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def keep_memory(num_bytes: int) -> None:
    """Touch memory once and let the C library keep it for all that follows.

    Else every step is charged for memory that the system, in a virtual machine even its host, first has to provide:
    often longer than the step itself, and by chance. NumPy asks for huge pages, so all of this memory has them.
    """
    mmap_max, trim_threshold = -4, -1
    library = ctypes.CDLL(None)
    if not (library.mallopt(mmap_max, 0) and library.mallopt(trim_threshold, -1)):
        print("this C library cannot keep memory: times include what the system takes to provide it")
    np.empty(num_bytes, np.uint8)[::4096] = 1


def fit_to_memory(num_nodes: int, num_edges: int) -> tuple[int, int]:
    """Return the largest sizes of the same density that the free memory holds."""
    share = min(1.0, available_bytes() * 0.9 / (num_edges * BYTES_PER_EDGE))
    if share < 1:
        print(f"{available_bytes() / GIB:.1f} GiB are free: the large graph shrinks to {share:.0%}")
    return int(num_nodes * share), int(num_edges * share)


def report(small: dict[str, float], large: dict[str, float]) -> list[dict]:
    rows = []
    for name, value in large.items():
        is_memory, is_floor = name == PEAK, name.startswith("floor")
        measured = value if is_memory else value / small[name]
        goal = None if is_floor else GOAL_MEMORY if is_memory else GOAL_RATIO
        verdict = "" if goal is None else "holds" if measured <= goal else "FALLS SHORT"
        rows.append(
            {"step": name, "small": small[name], "large": value, "ratio": measured, "goal": goal} | {"verdict": verdict}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, nargs=2, default=(100_000, 2_000_000), metavar=("NODES", "EDGES"))
    parser.add_argument("--large", type=int, nargs=2, default=(10_000_000, 200_000_000), metavar=("NODES", "EDGES"))
    parser.add_argument("--graph", choices=("uniform", "rmat"), default="uniform")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kind = arguments.graph
    measure(kind, 1000, 5000)  # compiles
    large_size = fit_to_memory(*arguments.large)
    peaks = [measure(kind, *size)[PEAK] for size in (arguments.small, large_size)]
    keep_memory(large_size[1] * BYTES_PER_EDGE)
    small, large = measure_best(5, kind, *arguments.small), measure_best(2, kind, *large_size)
    small[PEAK], large[PEAK] = peaks
    rows = report(small, large)
    lines = [
        (row["step"], f"{row['small']:.2f}", f"{row['large']:.2f}", f"{row['ratio']:.2f}")
        + (f"<= {row['goal']}" if row["goal"] else "", row["verdict"])
        for row in rows
    ]
    sizes = [f"{edges / 1e6:g}M edges" for _, edges in (arguments.small, large_size)]
    table("CPU nanoseconds per edge; memory", ("step", *sizes, "ratio", "goal", "verdict"), lines)
    if arguments.json:
        result = {"graph": kind, "small_size": arguments.small, "large_size": large_size, "rows": rows}
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
