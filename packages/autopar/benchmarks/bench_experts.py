"""What placing experts gains on routings by Zipf's law that drift, against plain expert parallelism and full shadowing.

    python packages/autopar/benchmarks/bench_experts.py            # about half a minute

Every row plays 32 steps of 32 experts on a preset machine; ``planned`` has seen only the steps before and pays for
moved homes, ``shadow`` sees the step itself. The last table says how far descent is from the exact placement on small
cases.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from autopar import Cluster
from autopar.experts import ExpertLayer, place_experts, simulate, zipf_counts
from core_kernels.console import format_bytes, format_seconds, table

MACHINES = {"a100-nvlink-8": 8, "a100-8x8-ib": 16, "pcie4-8": 8}


def play(machine: str, exponent: float, drift: float, steps: int) -> dict[str, Any]:
    """Play one row."""
    layer = ExpertLayer.feed_forward(Cluster.preset(machine, MACHINES[machine]), 1024, 4096, 4)
    routings = zipf_counts(steps, 32, MACHINES[machine], 8192, exponent, drift)
    begin = time.process_time()
    reports = simulate(layer, routings)
    return {name: asdict(report) for name, report in reports.items()} | {"cpu_seconds": time.process_time() - begin}


def gap_to_exact(num_cases: int) -> dict[str, float]:
    """Return mean and largest ratio of descent's time to the exact placement's."""
    layer = ExpertLayer(Cluster.preset("loopback-cpu", 3), 4096, 1 << 18, 2e-6)
    ratios = []
    for seed in range(num_cases):
        counts = zipf_counts(1, 4, 3, 800, 1.5, seed=seed)[0]
        took = [layer.cost(counts, place_experts(layer, counts, method=m)).seconds for m in ("descent", "exact")]
        ratios.append(took[0] / took[1])
    return {"mean": float(np.mean(ratios)), "largest": float(np.max(ratios))}


def main() -> None:
    """Play every row and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="steps of each row (default %(default)s)")
    parser.add_argument("--cases", type=int, default=20, help="small cases solved exactly (default %(default)s)")
    parser.add_argument("--json", help="file for the rows")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for machine in MACHINES:
        for exponent, drift in ((0.5, 0.05), (1.2, 0.05), (1.2, 0.5)):
            found[f"{machine}, Zipf {exponent:g}, drift {drift:g}"] = play(machine, exponent, drift, args.steps)
    rows = [
        (key, *(format_seconds(r[s]["seconds"]) for s in ("plain", "shadow", "planned")),
         f"{r['plain']['balance']:.2f} / {r['planned']['balance']:.2f}",
         f"{format_bytes(r['plain']['exchange_bytes'])} / {format_bytes(r['planned']['exchange_bytes'])}",
         f"{r['plain']['seconds'] / r['planned']['seconds']:.2f}")
        for key, r in found.items()
    ]  # fmt: skip
    columns = [
        "routing",
        "plain",
        "shadow",
        "planned",
        "balance, plain / planned",
        "tokens moved, plain / planned",
        "gain",
    ]
    table("mean step of a layer", columns, rows)
    found["descent over exact"] = gap_to_exact(args.cases)
    gap = found["descent over exact"]
    print(f"descent over exact on {args.cases} small cases: mean {gap['mean']:.4f}, largest {gap['largest']:.4f}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
