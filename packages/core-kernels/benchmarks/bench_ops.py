"""CPU time of the operators against named peers, interleaved in one run; medians and ratios.

    python packages/core-kernels/benchmarks/bench_ops.py [--json FILE] [--repeats 7]

CPU time (``time.process_time``) counts all threads: set OMP_NUM_THREADS=1 for a comparison core by core. The graph has
100,000 nodes and 2,000,000 edges whose ends follow a power law. Peers that are not installed are named and left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch

from core_kernels import Graph, ops
from core_kernels._version import __version__
from core_kernels.console import CommandLine, progress, say, table

NUM_NODES, NUM_EDGES, WIDTH = 100_000, 2_000_000, 128
#: Most microseconds of a call beyond its work.
DISPATCH_GOALS = {"no autograd registered": 3.0, "autograd, no gradient": 7.0, "autograd, gradient": 12.0}


class Comparison:
    """One question: our function, its peers, and the ratio that is asked of them."""

    def __init__(
        self,
        name: str,
        ours: Callable[[], object],
        peers: dict[str, Callable[[], object]],
        goal: float | dict[str, float] | None = None,
    ):
        """Take ``goal``, the least time of a peer over ours: of every peer, of some by name, or of none."""
        self.name, self.ours, self.peers = name, ours, peers
        self.goals = goal if isinstance(goal, dict) else {} if goal is None else dict.fromkeys(peers, goal)

    def measure(self, repeats: int) -> dict:
        functions = {"ours": self.ours, **self.peers}
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        for function in functions.values():
            function()
        for _ in range(repeats):
            for name, function in functions.items():
                start = time.process_time()
                function()
                seconds[name].append(time.process_time() - start)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ours = medians.pop("ours")
        peers = {name: {"ms": value * 1e3, "peer_over_ours": value / ours} for name, value in medians.items()}
        return {"op": self.name, "ours_ms": ours * 1e3, "peers": peers, "goals": self.goals}


def power_law_graph(generator: torch.Generator) -> Graph:
    weights = torch.arange(1, NUM_NODES + 1, dtype=torch.float64) ** -0.8

    def ends() -> torch.Tensor:
        ranks = torch.multinomial(weights, NUM_EDGES, replacement=True, generator=generator)
        return torch.randperm(NUM_NODES, generator=generator)[ranks]

    sources, destinations = ends(), ends()
    order = destinations.argsort(stable=True)
    return Graph.from_edge_index(torch.stack([sources[order], destinations[order]]), NUM_NODES)


def aggregation(graph: Graph) -> list[Comparison]:
    x, out = torch.randn(NUM_NODES, WIDTH), torch.empty(NUM_NODES, WIDTH)
    indices, indptr = graph.indices.long(), graph.indptr
    matrix = torch.sparse_csr_tensor(indptr, indices, torch.ones(NUM_EDGES), (NUM_NODES, NUM_NODES))
    destinations = graph.coo()[1]
    peers = {
        "torch.sparse.mm CSR": lambda: torch.sparse.mm(matrix, x),
        "F.embedding_bag": lambda: torch.nn.functional.embedding_bag(indices, x, indptr[:-1], mode="sum"),
    }
    goals = {"torch.sparse.mm CSR": 3.1, "F.embedding_bag": 1.0}
    return [
        Comparison("spmm sum F=128", lambda: ops.spmm(graph, x), peers, goals),
        Comparison("spmm sum F=128 out=", lambda: ops.spmm(graph, x, out=out), peers, goals),
        Comparison(
            "sddmm dot F=128",
            lambda: ops.sddmm(graph, x, x),
            {"gather-multiply-sum": lambda: (x[indices] * x[destinations]).sum(1)},
            10,
        ),
        softmax(graph, destinations),
    ]


def softmax(graph: Graph, destinations: torch.Tensor) -> Comparison:
    logits, peers = torch.randn(NUM_EDGES, 4), {}
    try:
        from torch_geometric.utils import softmax as pyg_softmax
    except ImportError:
        say("torch_geometric is not installed: no peer for segment softmax")
    else:
        peers = {
            "PyG softmax (index)": lambda: pyg_softmax(logits, destinations, num_nodes=NUM_NODES),
            "PyG softmax (ptr)": lambda: pyg_softmax(logits, ptr=graph.indptr),
        }
    return Comparison("segment softmax, 4 heads", lambda: ops.segment_softmax(graph, logits), peers, 3)


def sampling(graph: Graph, generator: torch.Generator) -> list[Comparison]:
    seeds = torch.randperm(NUM_NODES, generator=generator)[:1024]
    keys = torch.randint(0, NUM_NODES, (455_000,), generator=generator)
    no_seeds, fanouts, peers = keys[:0], [15, 10, 5], {}
    try:
        import torch_sparse  # noqa: F401
    except ImportError:
        say("torch_sparse is not installed: no peer for blocks")
    else:
        sources = graph.indices.long()
        peers["torch-sparse neighbor_sample"] = lambda: torch.ops.torch_sparse.neighbor_sample(
            graph.indptr, sources, seeds, fanouts, False, True
        )
    return [
        Comparison("blocks, 1,024 seeds, 15-10-5", lambda: ops.sample_blocks(graph, seeds, fanouts), peers, 20),
        Comparison(
            "relabel 455k keys",
            lambda: ops.unique_relabel(no_seeds, keys),
            {
                "torch.unique (inverse)": lambda: torch.unique(keys, return_inverse=True),
                "torch.unique": lambda: torch.unique(keys),
            },
            2,
        ),
    ]


def rows(generator: torch.Generator) -> list[Comparison]:
    x = torch.randn(NUM_NODES, WIDTH)
    index = torch.randint(0, NUM_NODES, (NUM_EDGES,), generator=generator)
    out, other = torch.zeros(NUM_EDGES, WIDTH), torch.zeros(NUM_EDGES, WIDTH)
    small, target = x[:50_000].clone(), torch.zeros(NUM_NODES, WIDTH)
    places = torch.randperm(NUM_NODES, generator=generator)[:50_000]
    return [
        Comparison(
            "gather 2M x 512 B, out=",
            lambda: ops.gather(x, index, out=out),
            {"copy_": lambda: out.copy_(other), "index_select out=": lambda: torch.index_select(x, 0, index, out=out)},
            {"copy_": 0.6},
        ),
        Comparison(
            "unpack 50k x 512 B",
            lambda: ops.unpack_rows(target, places, small),
            {"index_copy_": lambda: target.index_copy_(0, places, small)},
        ),
        Comparison(
            "scatter_add 2M rows",
            lambda: ops.scatter_add(out, index, NUM_NODES),
            {"index_add_": lambda: torch.zeros(NUM_NODES, WIDTH).index_add_(0, index, out)},
        ),
    ]


def embedding(generator: torch.Generator) -> list[Comparison]:
    num_rows, num_bags, length, width = 1_000_000, 16_384, 10, 64
    popularity = torch.arange(1, num_rows + 1, dtype=torch.float64) ** -1.05
    ids = torch.multinomial(popularity, num_bags * length, replacement=True, generator=generator)
    offsets, grad = torch.arange(num_bags + 1) * length, torch.randn(num_bags, width)
    bag = torch.nn.EmbeddingBag(num_rows, width, mode="sum", sparse=True)
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.01)
    weight, state = torch.randn(num_rows, width), torch.zeros(num_rows)

    def torch_step() -> None:
        bag(ids, offsets[:-1]).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    def our_step() -> None:
        ops.embedding_bag(weight, ids, offsets)
        ops.fused_rowwise_adagrad_(weight, state, ids, offsets, grad, lr=0.01)

    peers = {"EmbeddingBag(sparse) + Adagrad": torch_step}
    return [Comparison("embedding forward + fused row-wise Adagrad", our_step, peers, 3)]


def dispatch_overheads(calls: int = 20_000) -> dict[str, float]:
    """Return microseconds that torch's dispatcher adds to our own function, per call."""
    from core_kernels.ops import rows as module

    x, index = torch.randn(4, 4), torch.arange(4)
    differentiable = x.clone().requires_grad_()
    offsets = torch.tensor([0, 2, 4])

    def microseconds(function: Callable[..., object], *args: object) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            for _ in range(calls // 5):
                function(*args)
            best = min(best, time.process_time() - start)
        return best / (calls // 5) * 1e6

    raw, gather = torch.ops.core_kernels, module._dispatch_gather
    return {
        "no autograd registered": microseconds(raw.bucket_by_owner.default, index, offsets, False)
        - microseconds(module._dispatch_bucket, index, offsets, False),
        "autograd, no gradient": microseconds(raw.gather.default, x, index, False)
        - microseconds(gather, x, index, False),
        "autograd, gradient": microseconds(raw.gather.default, differentiable, index, False)
        - microseconds(gather, x, index, False),
    }


def verdict(measured: float, goal: float | None) -> tuple[str, str]:
    """Return how a goal reads and whether it holds; negative numbers are upper bounds."""
    if goal is None:
        return "", ""
    text = f"<= {-goal:g}" if goal < 0 else f">= {goal:g}x"
    return text, "holds" if measured >= goal else "FALLS SHORT"


def run(args: argparse.Namespace) -> dict:
    warnings.filterwarnings("ignore")
    generator = torch.Generator().manual_seed(0)
    graph = power_law_graph(generator)
    results = []
    groups = (
        lambda: aggregation(graph),
        lambda: sampling(graph, generator),
        lambda: rows(generator),
        lambda: embedding(generator),
    )
    with progress("measuring", len(groups)) as advance:
        for make in groups:
            results += [comparison.measure(args.repeats) for comparison in make()]
            advance()
    lines = [
        (
            result["op"],
            f"{result['ours_ms']:.2f}",
            name,
            f"{peer['ms']:.2f}",
            f"{peer['peer_over_ours']:.2f}x",
            *verdict(peer["peer_over_ours"], result["goals"].get(name)),
        )
        for result in results
        for name, peer in result["peers"].items()
    ]
    table("CPU milliseconds, medians", ("operator", "ours", "peer", "peer ms", "peer / ours", "goal", "verdict"), lines)
    overheads = dispatch_overheads()
    lines = [(kind, f"{value:.1f}", *verdict(-value, -DISPATCH_GOALS[kind])) for kind, value in overheads.items()]
    table("dispatch, microseconds", ("kind", "us", "goal", "verdict"), lines)
    return {"threads": torch.get_num_threads(), "results": results, "dispatch_microseconds": overheads}


def main() -> int:
    cli = CommandLine("bench_ops", __doc__, __version__)
    parser = cli.command("run", run, "measure every operator against its peers", "bench_ops.py run --json ops.json")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each function")
    import sys

    arguments = sys.argv[1:]
    return cli.run(arguments if arguments[:1] in (["run"], ["-h"], ["--help"]) else ["run", *arguments])


if __name__ == "__main__":
    raise SystemExit(main())
