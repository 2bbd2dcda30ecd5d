"""How long planning takes, GPT of 12 and 96 layers and GPT-3; how near the least memory of a plan is to its bound.

GPT is planned for a 2x4 mesh, GPT-3 for 128x8, with every bound on the working set that a search takes by default.
Every case is a fresh process that imports, captures on fake tensors and searches; processor seconds, and the peak of
its resident memory. The bound of the low-memory end is the states
(parameters, gradients, optimiser) divided by the number of devices, and the largest layer's working set: of the
operators of one module, what is saved and computed with, split over all devices, and its parameters gathered whole.

    python packages/autopar/benchmarks/bench_search.py            # about 3 minutes
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from core_kernels.console import format_bytes, table

CASES: dict[str, dict[str, Any]] = {
    "gpt, 12 layers": {"layers": 12, "mesh": (2, 4), "cluster": "a100-nvlink-8"},
    "gpt, 96 layers": {"layers": 96, "mesh": (2, 4), "cluster": "a100-nvlink-8"},
    "gpt-3, 175B": {
        "layers": 96,
        "mesh": (128, 8),
        "cluster": "a100-8x8-ib",
        "width": 12288,
        "heads": 96,
        "batch": 1024,
    },
}
# Small batches: what is saved for the backward pass of all layers together is no part of the bound.
LOW_MEMORY: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304, "length": 128, "batch": 8},
    "lstm": {"layers": 2, "width": 512, "vocabulary": 8192, "length": 8, "batch": 64},
    "mlp": {"width": 4096, "hidden": 16384, "batch": 64},
    "mlp_mixer": {"batch": 8},
    "vgg16": {"batch": 8},
    "wide_resnet": {"batch": 8},
}


def plan_gpt(case: dict[str, Any], eps: float) -> dict[str, Any]:
    """Capture and search one GPT in this process."""
    from autopar import Cluster, fake_tensors, models, search, trace

    width, heads, batch = case.get("width", 768), case.get("heads", 12), case.get("batch", 8)
    with fake_tensors():
        model, inputs = models.gpt(case["layers"], width, heads, 50304, 1024 if width < 5000 else 2048, batch)
    begin = time.process_time()
    graph = trace(model, inputs)
    captured = time.process_time()
    cluster = Cluster.preset(case["cluster"], math.prod(case["mesh"]))
    frontier = search(graph, cluster, [case["mesh"]], eps)
    searched = time.process_time()
    return {
        "capture_seconds": captured - begin,
        "search_seconds": searched - captured,
        "points": len(frontier),
        "least_bytes": frontier[0].memory,
    }


def low_memory(name: str) -> dict[str, Any]:
    """Compare the least memory of a model on 8 devices with its bound."""
    from autopar import Cluster, fake_tensors, models, search, trace

    with fake_tensors():
        model, inputs = models.FACTORIES[name](**LOW_MEMORY[name])
    graph = trace(model, inputs)
    frontier = search(graph, Cluster.preset("a100-nvlink-8"), [(8,), (2, 4)], eps=0.02, max_levels=4)
    states = sum(parameter.output.num_bytes for parameter in graph.parameters) * (2 + graph.state_factor) / 8
    working: dict[str, float] = defaultdict(float)
    for operator in graph.operators:
        if not operator.is_leaf:
            working[operator.module] += 2 * operator.output.num_bytes / 8
            for source in operator.inputs:
                if graph.operators[source].kind == "parameter":
                    working[operator.module] += graph.operators[source].output.num_bytes
    bound = states + max(working.values())
    least = frontier[0].predicted.memory_bytes
    return {
        "least_bytes": least,
        "states_bytes": states,
        "bound_bytes": bound,
        "over_bound": least / bound,
        "over_states": least / states,
    }


def measure(arguments: list[str]) -> dict[str, Any]:
    """Run this file for one case in a fresh process."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"wall_seconds": time.perf_counter() - begin}


def measure_in_turns(names: list[str], eps: float, num_rounds: int) -> dict[str, dict[str, Any]]:
    """Run cases by turns after a round that compiles; return the medians of what they say."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(num_rounds + 1):
        for name in names if turn else names[:1]:
            found = measure(["--case", name, "--eps", str(eps)])
            if turn:
                runs[name].append(found)
    return {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }


def main() -> None:
    """Run every case and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, default=0.01, help="share of memory given up (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the two depths (default %(default)s)")
    parser.add_argument("--case", help="run one case in this process and print it as JSON")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    if args.case:
        found = plan_gpt(CASES[args.case], args.eps) if args.case in CASES else low_memory(args.case)
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps(found | {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}))
        return
    *depths, huge = CASES
    rows = measure_in_turns(depths, args.eps, args.rounds)
    rows |= {name: measure(["--case", name, "--eps", str(args.eps)]) for name in [huge, *LOW_MEMORY]}
    shown = [
        (name, *(f"{rows[name][f'{key}_seconds']:.1f} s" for key in ("capture", "search", "cpu", "wall")),
         format_bytes(rows[name]["peak_bytes"]), rows[name]["points"])
        for name in CASES
    ]  # fmt: skip
    columns = ["model", "capture", "search", "processor, whole", "wall, whole", "resident peak", "points"]
    table(f"planning, eps={args.eps}", columns, shown)
    deep, shallow = rows["gpt, 96 layers"], rows["gpt, 12 layers"]
    ratios = {key: deep[f"{key}_seconds"] / shallow[f"{key}_seconds"] for key in ("capture", "search", "cpu")}
    print("96 layers over 12, processor seconds:", ", ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items()))
    low = [
        (name, *(format_bytes(rows[name][key]) for key in ("least_bytes", "states_bytes", "bound_bytes")),
         *(f"{rows[name][key]:.2f}" for key in ("over_bound", "over_states")))
        for name in LOW_MEMORY
    ]  # fmt: skip
    columns = ["model", "least memory", "states / 8", "with the largest layer", "over that", "over states / 8"]
    table("least memory on 8 devices", columns, low)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
