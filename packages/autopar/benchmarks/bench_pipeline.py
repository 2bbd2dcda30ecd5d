"""How long planning pipelines takes, what pipelines gain, and that pipelines which run equal one device.

    python packages/autopar/benchmarks/bench_pipeline.py                   # planning; GPT-3 takes about 4 minutes
    python packages/autopar/benchmarks/bench_pipeline.py --part exact      # ranks on this machine: about 2 minutes
    python packages/autopar/benchmarks/bench_pipeline.py --part unlike     # unlike devices: seconds

``planning``: a GPT is captured on fake tensors and searched on a preset machine; processor seconds and peak memory of
a fresh process. ``exact``: GPT, MLP-Mixer and VGG on stages of one device, of two, of both, and one stage of four, with
1, 2 and 4 micro-batches, the leanest and the fastest pipeline each, three steps of AdamW in float64; the largest
difference of any loss, parameter or optimiser state to one device, and whether every rank sent the messages predicted.
``unlike``: hosts of different speed, cut as such and as if they were alike.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from core_kernels.console import format_bytes, format_seconds, table

CASES: dict[str, dict[str, Any]] = {
    "gpt, 12 layers, 2 x 8": {"layers": 12, "width": 768, "heads": 12, "length": 1024, "batch": 256, "devices": 16},
    "gpt-3, 96 layers, 16 x 8": {
        "layers": 96, "width": 12288, "heads": 96, "length": 2048, "batch": 1024, "devices": 128, "counts": [64, 128],
    },
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "width": 16, "vocabulary": 32, "dropout": 0.1, "tied": True, "batch": 4},
    "mlp_mixer": {"blocks": 2, "width": 16, "image": 16, "patch": 4, "batch": 4, "classes": 8},
    "vgg16": {"image": 32, "shrink": 16, "hidden": 32, "classes": 8, "batch": 4, "dropout": 0.5},
}


# Devices, stages and the sizes a stage may have.
RUNS = [(2, 2, [1]), (4, 4, [1]), (4, 2, [2]), (4, 3, [1, 2]), (4, 1, [4])]


def make(name: str) -> Any:
    """Return a small model in float64, its batch and its graph, the same on every rank."""
    import torch

    from autopar import models, trace

    torch.manual_seed(0)
    module, batch = models.FACTORIES[name](**SIZES[name])
    batch = tuple(x.double() if x.is_floating_point() else x for x in batch)
    return module.double(), batch, trace(module, batch)


def compare(group: Any, name: str, plans: list[Any], losses: list[float], expected: dict[str, Any]) -> list[Any]:
    """Train every pipeline and compare this rank's parts with one device. Collective: all ranks."""
    from autopar import pipeline
    from autopar.pipeline.verification import compare_pipeline

    module, batch, graph = make(name)
    return [compare_pipeline(pipeline.apply(module, plan, graph, group), batch, losses, expected)[0] for plan in plans]


def plan_case(name: str, eps: float) -> dict[str, Any]:
    """Capture and search one GPT in this process."""
    from autopar import Cluster, fake_tensors, models, pipeline, trace

    case = CASES[name]
    with fake_tensors():
        model, inputs = models.gpt(case["layers"], case["width"], case["heads"], 50304, case["length"], case["batch"])
    graph = trace(model, inputs)
    begin = time.process_time()
    cluster = Cluster.preset("a100-8x8-ib", case["devices"], memory_bytes=80e9)
    frontier = pipeline.search(graph, cluster, case.get("counts"), eps=eps)
    seconds = time.process_time() - begin
    best, least = frontier.mini_time(), frontier.min_memory()
    whole = [case["devices"]]
    single = pipeline.search(graph, cluster, case.get("counts"), 1, whole, eps=eps).mini_time()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "capture_seconds": graph.capture_seconds, "search_cpu_seconds": seconds, "points": len(frontier),
        "peak_bytes": used.ru_maxrss * 1024, "stages": best.num_stages, "micro_batches": best.num_micro_batches,
        "step_seconds": best.seconds, "simulated_seconds": best.simulated_seconds, "memory_bytes": best.memory,
        "least_bytes": least.memory, "one_stage_seconds": single.seconds,
    }  # fmt: skip


def measure_planning(eps: float) -> dict[str, Any]:
    """Plan every case in a fresh process and print a table."""
    found = {}
    for name in CASES:
        command = [sys.executable, __file__, "--case", name, "--eps", str(eps)]
        found[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rows = [
        (name, f"{r['capture_seconds']:.1f} s", f"{r['search_cpu_seconds']:.1f} s", format_bytes(r["peak_bytes"]),
         r["points"], f"{r['stages']} / {r['micro_batches']}",
         *(format_seconds(r[key]) for key in ("step_seconds", "simulated_seconds", "one_stage_seconds")))
        for name, r in found.items()
    ]  # fmt: skip
    columns = ["model", "capture", "search, processor", "peak", "points", "stages / micro-batches", "step, bound",
               "played", "without pipeline"]  # fmt: skip
    table(f"planning pipelines, eps={eps}", columns, rows)
    return found


def measure_exact(eps: float) -> dict[str, Any]:
    """Run small pipelines spread over each frontier and print their largest error."""
    from autopar import Cluster, apply, pipeline, search
    from autopar.verification import train_steps
    from core_kernels.comm import Group
    from core_kernels.testing import RankPool

    found: dict[str, Any] = {}
    pools = {size: RankPool(size, timeout_seconds=60.0) for size in sorted({size for size, _, _ in RUNS})}
    for name in SIZES:
        module, batch, graph = make(name)
        whole = search(graph, Cluster.preset("loopback-cpu", 1)).mini_time()
        losses, expected, _ = train_steps(apply(module, whole, graph, Group.single()), batch, 3)
        for size, stages, sub_meshes in RUNS:
            plans = []
            for count in (1, 2, 4):
                cluster = Cluster.preset("loopback-cpu", size)
                points = pipeline.search(graph, cluster, [count], stages, sub_meshes, eps=eps).points
                plans += [plan for plan in (points[0], points[-1]) if plan.num_devices == size]
            ranks = pools[size].run(compare, name, plans, losses, expected, deadline_seconds=300)
            compared = [one for rank in ranks for one in rank]
            found[f"{name}, {stages} stages of {' or '.join(map(str, sub_meshes))}"] = {
                "pipelines": len(plans),
                "largest_error": max(one.largest_error for one in compared),
                "messages_match": all(one.collectives_match for one in compared),
            }
    for pool in pools.values():
        pool.close()
    rows = [
        (key, row["pipelines"], f"{row['largest_error']:.1e}", "yes" if row["messages_match"] else "NO")
        for key, row in found.items()
    ]
    columns = ["pipeline", "pipelines", "largest error", "messages as predicted"]
    table("three steps of AdamW against one device, float64", columns, rows)
    return found


def measure_unlike(eps: float) -> dict[str, Any]:
    """Cut a GPT for unlike hosts, and as if they were alike; print both as they would run."""
    from autopar import Cluster, fake_tensors, models, pipeline, trace

    with fake_tensors():
        model, inputs = models.gpt(24, 1024, 16, 50304, 1024, 64)
    graph = trace(model, inputs)
    found = {}
    for speed in (1.0, 0.5, 0.25):
        hosts = [pipeline.Host(2), pipeline.Host(2, speed)]
        cluster = Cluster.preset("a100-8x8-ib", 4, 2)
        aware = pipeline.search(graph, cluster, [32], 4, [1], hosts, eps).mini_time()
        alike = pipeline.search(graph, cluster, [32], 4, [1], None, eps).mini_time()
        slow = [stage.seconds / (speed if min(stage.devices) >= 2 else 1.0) for stage in alike.stages]
        moved = [stage.send_seconds for stage in alike.stages[:-1]]
        played = pipeline.simulate([s / 3 for s in slow], [2 * s / 3 for s in slow], 32, moved, moved).seconds
        found[f"second host at {speed:g}"] = {"aware": aware.simulated_seconds, "alike": played}
    rows = [
        (k, format_seconds(r["aware"]), format_seconds(r["alike"]), f"{r['alike'] / r['aware']:.2f}")
        for k, r in found.items()
    ]
    table("4 stages on 2 x 2 devices", ["speed", "cut for them", "cut as if alike", "gain"], rows)
    return found


PARTS = {"planning": measure_planning, "exact": measure_exact, "unlike": measure_unlike}


def main() -> None:
    """Run one part and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", choices=sorted(PARTS), default="planning", help="what to measure (default %(default)s)"
    )
    parser.add_argument("--eps", type=float, default=0.1, help="share of memory given up (default %(default)s)")
    parser.add_argument("--case", choices=sorted(CASES), help="plan one case in this process and print it as JSON")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(plan_case(args.case, args.eps)))
        return
    found = PARTS[args.part](args.eps)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
