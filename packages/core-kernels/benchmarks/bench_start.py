"""Seconds that a process pays once: import, first call of a layer, and several ranks compiling at once.

    python packages/core-kernels/benchmarks/bench_start.py [--json FILE]

About a minute. Every process is fresh and has a cache folder of its own for generated sources and machine code. CPU
seconds, the median of three (of one, where a compilation is measured). Import counts what comes on top of ``import
torch``.

- first call: forward and backward of a layer of which nothing has been compiled yet;
- later process: the same in another process, with the folder that the first one left;
- four at once: four processes share one empty folder; wall seconds of the slowest. Each must give the same output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from core_kernels.console import table

IMPORT = """
import time, torch
start = time.process_time()
import core_kernels
print(time.process_time() - start)
"""
FIRST_CALL = """
import time, torch
from core_kernels import Graph, nn
torch.manual_seed(0)
torch.set_num_threads(1)
layer = nn.{layer}
graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]), 3)
x = torch.ones(3, 8, requires_grad=True)
cpu_start, start = time.process_time(), time.perf_counter()
out = layer(graph, x)
out.sum().backward()
print(time.process_time() - cpu_start, time.perf_counter() - start, float(out.sum() + x.grad.sum()))
"""
LAYERS = {"GCN": "GCNConv(8, 8)", "GraphSAGE": "SAGEConv(8, 8)", "GAT": "GATConv(8, 4, heads=2)"}
GOALS = {"import": 0.3, "first call": 3.0, "later process": 0.2}


def run_python(program: str, cache: str) -> list[float]:
    """Return the numbers that a program prints, run in a process of its own."""
    environment = os.environ | {"SEXTET_CACHE": cache, "NUMBA_CACHE_DIR": f"{cache}/numba", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
    return [float(word) for word in done.stdout.split()]


def measure_layer(layer: str) -> dict[str, float]:
    """Return the seconds of the first call, of that in a later process, and of four at once."""
    program = FIRST_CALL.format(layer=layer)
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as shared:
        first = run_python(program, cache)[0]
        later = statistics.median(run_python(program, cache)[0] for _ in range(3))
        with ThreadPoolExecutor(4) as pool:
            ranks = list(pool.map(lambda _: run_python(program, shared), range(4)))
    results = {result for *_, result in ranks}
    if len(results) > 1:
        raise SystemExit(f"{layer}: four processes that compiled at once gave {results}")
    return {"first call": first, "later process": later, "four at once": max(seconds for _, seconds, _ in ranks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        found = [("core_kernels", "import", statistics.median(run_python(IMPORT, cache)[0] for _ in range(3)))]
    for name in arguments.layers:
        found += [(name, kind, seconds) for kind, seconds in measure_layer(LAYERS[name]).items()]
    rows = []
    for name, kind, seconds in found:
        goal = GOALS.get(kind)
        verdict = "" if goal is None else "holds" if seconds <= goal else "FALLS SHORT"
        rows.append({"of": name, "kind": kind, "seconds": seconds, "goal": goal, "verdict": verdict})
    lines = [(f"{r['of']}, {r['kind']}", f"{r['seconds']:.3f}", f"<= {r['goal']}" if r["goal"] else "", r["verdict"])
             for r in rows]  # fmt: skip
    table("seconds of fresh processes", ("what", "s", "goal", "verdict"), lines)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
