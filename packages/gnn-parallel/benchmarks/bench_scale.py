"""Planning for 64 ranks (8 hosts x 8) on a graph of 10 million nodes and 100 million edges: time and memory.

    python packages/gnn-parallel/benchmarks/bench_scale.py [--nodes 10000000] [--json FILE]

Three layers of fanout 10, 1,024 seeds per rank, sharded features of 256 columns, a preset interconnect. Prints wall and
CPU seconds of planning, peak memory of the process (the graph takes 0.5 GB of it), and the plan. Takes about three
minutes, of which making the graph takes half a minute.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from core_kernels import Graph, PartitionBook
from core_kernels.console import emit, say
from core_kernels.interconnect import Interconnect
from gnn_parallel import make_model, plan
from gnn_parallel.cost_model import Rates

_DEGREE = 10


def make_graph(num_nodes: int, num_parts: int) -> tuple[Graph, PartitionBook]:
    """Make a graph whose edges stay in their part nine times out of ten."""
    generator = torch.Generator().manual_seed(0)
    num_edges, size = _DEGREE * num_nodes, num_nodes // num_parts
    near = torch.randint(0, size, (num_edges,), generator=generator, dtype=torch.int32)
    near += (torch.arange(num_nodes, dtype=torch.int32) // size * size).repeat_interleave(_DEGREE)
    is_far = torch.rand(num_edges, generator=generator) < 0.1
    near[is_far] = torch.randint(0, num_nodes, (int(is_far.sum()),), generator=generator, dtype=torch.int32)
    near.clamp_(max=num_nodes - 1)
    graph = Graph(torch.arange(0, num_edges + 1, _DEGREE), near, validate=False)
    offsets = torch.arange(num_parts + 1) * size
    offsets[-1] = num_nodes
    return graph, PartitionBook(offsets, torch.arange(num_nodes), "given", int(is_far.sum()), 1.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000_000)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    graph, book = make_graph(args.nodes, 64)
    interconnect = Interconnect.preset("a100-8x8-ib")
    wall, cpu = time.perf_counter(), time.process_time()
    made = plan(
        graph,
        make_model("sage", 256, 32, 100, 3),
        features=torch.zeros(1, 256).expand(args.nodes, 256),
        partition=book,
        fanouts=[10, 10, 10],
        batch_size=64 * 1024,
        placement="sharded",
        rates=Rates.of(interconnect),
        interconnect=interconnect,
        group_shape="8x8",
        num_steps=1,
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    say(made.explain())
    say(f"planned in {wall:.0f} s ({cpu:.0f} s CPU), {peak_gb:.1f} GB at most")
    emit({"wall_seconds": wall, "cpu_seconds": cpu, "peak_gb": peak_gb, "plan": made.to_dict()}, args.json)


if __name__ == "__main__":
    main()
