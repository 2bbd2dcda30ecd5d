"""Plan cost over the cut lower bound and over straight messages: presets x partitions x graphs.

    python packages/gnn-comm/benchmarks/planner_quality.py --scale 16 --json quality.json  # about 6 minutes
    python packages/gnn-comm/benchmarks/planner_quality.py --topologies dgx1               # about 2 minutes

``over bound`` is the busy time of the links over the cut bound (latency left out, as in the bound); ``p2p over plan``
is the busy time of straight messages over that of the plan, and ``at most`` the same for a plan that reaches the
bound: what the partition leaves to win. Graphs have ``2**scale`` vertices: RMAT with Graph500's 16 undirected edges
per vertex (``--edge-factor``, ``--directed`` change that), a square grid, and a block model with 16 blocks. METIS runs
with its defaults: recursive bisection, least edge cut.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from core_kernels import datasets
from core_kernels.console import table
from gnn_comm import Topology, partition, plan
from gnn_comm.sources import grid

TOPOLOGIES = ("dgx1", "pcie8", "2xdgx1", "nvswitch8", "hosts4")
METHODS = ("metis", "hierarchical", "random")


def busy_seconds(made) -> float:
    estimate = made.estimate()
    return estimate.seconds - estimate.latency_seconds


def run(args: argparse.Namespace) -> list[dict]:
    scale, planner, topologies, width = args.scale, args.planner, args.topologies.split(","), args.width
    rmat = datasets.rmat(2**scale, args.edge_factor * 2**scale).graph
    graphs = {
        "rmat": rmat if args.directed else rmat.symmetrized(),
        "grid": grid(2 ** (scale // 2)),
        "sbm": datasets.sbm(2**scale, 16, 12.0, num_features=0).graph,
    }
    found = []
    for name in topologies:
        topology = Topology.preset(name)
        for graph_name, graph in graphs.items():
            for method in METHODS:
                start = time.perf_counter()
                split = partition(graph, topology, method)
                partition_seconds = time.perf_counter() - start
                straight, made = plan(split, topology, "p2p", width), plan(split, topology, planner, width)
                entry = {
                    "topology": name,
                    "graph": graph_name,
                    "partition": method,
                    "planner": made.planner,
                    "stages": made.transfers.num_stages,
                    "bound_ratio": made.bound_ratio(),
                    "p2p_ratio": busy_seconds(straight) / busy_seconds(made),
                    "p2p_ratio_limit": busy_seconds(straight) / float(made.lower_bound()),
                    "total_over_p2p": made.estimate().seconds / straight.estimate().seconds,
                    "total_over_bound": made.estimate().seconds / float(made.lower_bound()),
                    "partition_seconds": partition_seconds,
                    "planning_seconds": made.planning_seconds,
                }
                found.append(entry)
                print(entry, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--edge-factor", type=int, default=16, help="RMAT edges per vertex (default %(default)s)")
    parser.add_argument("--directed", action="store_true", help="keep RMAT edges one way")
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES))
    parser.add_argument("--json")
    args = parser.parse_args()
    found = run(args)
    rows = [
        (
            f"{e['topology']} {e['graph']} {e['partition']}",
            f"{e['bound_ratio']:.3f}",
            f"{e['p2p_ratio']:.2f}",
            f"{e['p2p_ratio_limit']:.2f}",
            e["stages"],
        )
        for e in found
    ]
    table("planner quality", ("case", "over bound", "p2p over plan", "at most", "stages"), rows)
    ratios = [entry["bound_ratio"] for entry in found]
    for name in args.topologies.split(","):
        for method in METHODS:
            cells = [e["p2p_ratio"] for e in found if (e["topology"], e["partition"]) == (name, method)]
            worst = max(e["total_over_p2p"] for e in found if (e["topology"], e["partition"]) == (name, method))
            low, middle, high = min(cells), statistics.geometric_mean(cells), max(cells)
            print(
                f"{name} {method}: p2p over plan {low:.1f} to {high:.1f}, geometric mean {middle:.1f}; "
                f"plan with latency at most {worst:.3f} of p2p"
            )
    print(f"mean {statistics.mean(ratios):.3f}, worst {max(ratios):.3f} over the bound")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
