"""Time and memory of planning at scale.

    python packages/gnn-comm/benchmarks/planning_time.py million    # 1M vertices, 10M edges, 8 devices, beside METIS
    python packages/gnn-comm/benchmarks/planning_time.py devices64  # RMAT-20 on 8 hosts x 8, about 1.5 minutes
    python packages/gnn-comm/benchmarks/planning_time.py devices256 # RMAT-20 on 32 hosts x 8, about 2 minutes
    python packages/gnn-comm/benchmarks/planning_time.py flat       # two levels against flat, about 1 minute

The compiled kernels are warmed on a small graph first. Hosts are planned in as many threads as torch uses; seconds of
the clock and of the processors are both shown, and the bound is timed by itself. With ``flat``, ``over_flat`` is the
estimate of the plan in two levels over that of the flat one, latency included.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from core_kernels import datasets
from gnn_comm import Topology, partition, plan


def warm() -> None:
    small = datasets.rmat(2**10, 2**13).graph
    for name, planner in (("dgx1", "spst"), ("2xdgx1", "hierarchical")):
        topology = Topology.preset(name)
        plan(partition(small, topology, "random"), topology, planner)


def measure(topology_name: str, scale: int, num_edges: int, method: str, planner: str) -> dict:
    topology = Topology.preset(topology_name)
    graph = datasets.rmat(2**scale, num_edges).graph
    start = time.perf_counter()
    split = partition(graph, topology, method)
    partition_seconds = time.perf_counter() - start
    start, start_cpu = time.perf_counter(), time.process_time()
    made = plan(split, topology, planner)
    planning_seconds, planning_cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    start = time.perf_counter()
    bound_ratio = made.bound_ratio()
    return {
        "topology": topology_name,
        "devices": topology.num_devices,
        "partition": method,
        "planner": made.planner,
        "classes": split.requests.num_classes,
        "partition_seconds": partition_seconds,
        "planning_seconds": planning_seconds,
        "planning_cpu_seconds": planning_cpu_seconds,
        "bound_seconds": time.perf_counter() - start,
        "seconds": made.estimate().seconds,
        "stages": made.transfers.num_stages,
        "bound_ratio": bound_ratio,
        "considered": made.considered,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


CASES = {
    "million": [("dgx1", 20, 10_000_000, "metis", "spst"), ("dgx1", 20, 10_000_000, "random", "spst")],
    "devices64": [
        ("8xdgx1", 20, 2**24, "random", "hierarchical"),
        ("8xnvswitch8", 20, 2**24, "random", "hierarchical"),
    ],
    "devices256": [("32xnvswitch8", 20, 2**24, "random", "hierarchical")],
    "flat": [
        (machine, 15, 14 * 2**15, method, planner)
        for machine in ("2xdgx1", "2xnvswitch8", "2xpcie8")
        for method in ("random", "metis", "hierarchical")
        for planner in ("spst", "hierarchical")
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--json", help="write the results to this file too")
    args = parser.parse_args()
    warm()
    found: list[dict] = []
    for case in CASES[args.case]:
        entry = measure(*case)
        if args.case == "flat" and entry["planner"] == "hierarchical":
            entry["over_flat"] = entry["seconds"] / found[-1]["seconds"]
        found.append(entry)
        print(json.dumps(entry), flush=True)
    if args.case == "flat":
        print(f"worst over flat: {max(entry.get('over_flat', 0.0) for entry in found):.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
