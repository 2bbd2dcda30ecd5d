"""The command line: plan, explain, run, verify, convert.

Models are named as ``package.module:function``; the function returns ``(model, data)``. With ``--data DIR`` a stored
graph takes the place of ``data``, which is then only an example. Exit codes: 0 success, 1 plan and full forward differ,
2 unsupported model or wrong input.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import math
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core_kernels.console import CheckFailedError, CommandLine, format_bytes, format_seconds, say, table
from gnn_eval._version import __version__
from gnn_eval.disk_rows import load_array
from gnn_eval.errors import EvaluationArgumentError, GnnEvalError, InexactPlanError

__all__ = ["main"]


def _build(name: str) -> tuple[torch.nn.Module, Any]:
    module, _, function = name.partition(":")
    if not function:
        raise EvaluationArgumentError(f"model={name!r} is not valid: expected package.module:function; name a function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError) as error:
        raise EvaluationArgumentError(
            f"{name} cannot be imported: {error}; run where {module} can be imported"
        ) from error
    finally:
        sys.path.pop(0)
    if not callable(build):
        raise EvaluationArgumentError(f"{name} is a {type(build).__name__}; expected a function; name one")
    made = build()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        raise EvaluationArgumentError(f"{name}() returned {type(made).__name__}; expected (model, data); return both")
    return made


def _at_least(lowest: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text} is not valid: expected at least {lowest}")
        return int(text)

    return whole


def _share(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not valid: expected a positive number")
    return float(text)


def _plan_and_data(args: argparse.Namespace, verify: bool = True) -> tuple[Any, Any]:
    from gnn_eval import StoredGraph, compile

    model, data = _build(args.model)
    if getattr(args, "data", None):
        data = StoredGraph(args.data)
    example = data.example(model) if isinstance(data, StoredGraph) else data
    return compile(model, example, args.frontend, verify=verify), data


def _explain(args: argparse.Namespace) -> dict[str, Any]:
    plan, _ = _plan_and_data(args)
    say(plan.explain())
    if args.save:
        plan.save(args.save)
    stages = [vars(stage) | {"stores": dict(stage.stores)} for stage in plan.stages]
    return {"frontend": plan.compiled.frontend, "stages": stages, "stored": sorted(plan.compiled.stored)}


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    from gnn_eval import StoredGraph, compile
    from gnn_eval.estimate import estimate_stages, mean_aggregation, measure_rates, sample_source_share
    from gnn_eval.plan import parse_bytes

    memory_bytes = parse_bytes(args.memory) or 0
    if memory_bytes < 1:
        raise EvaluationArgumentError(f"memory={args.memory!r} is not valid: expected at least 1 byte; pass 4GB or so")
    if args.model is None:
        model, data = mean_aggregation(args.width, args.hidden, args.classes, args.layers)
        plan = compile(model, data, "export", verify=False)
    else:
        plan, data = _plan_and_data(args)
    counts = _counts(plan, data, args)
    rates = measure_rates(args.store)
    share = args.source_share or 1.0
    if isinstance(data, StoredGraph) and not (args.nodes or args.edges or args.source_share):
        share = sample_source_share(data)
    stages = estimate_stages(plan.compiled, counts, memory_bytes, rates, share)
    rows = [
        [str(s.level), f"{s.rows:,}", f"{s.block_rows:,}", f"{s.blocks:,}", format_bytes(s.peak_bytes),
         format_bytes(s.read_bytes), format_bytes(s.written_bytes), format_seconds(s.seconds)]
        for s in stages
    ]  # fmt: skip
    table(
        f"{', '.join(f'{n} = {c:,}' for n, c in counts.items())}, {args.memory}",
        ["stage", "rows", "rows per block", "blocks", "peak", "read", "written", "time"],
        rows,
    )
    disk = max(
        (a.written_bytes + b.written_bytes for a, b in zip(stages, [*stages[1:], stages[-1]], strict=True)), default=0
    )
    seconds = sum(stage.seconds for stage in stages)
    say(f"disk for two stages at a time {format_bytes(disk)}, total time {format_seconds(seconds)}")
    return {
        "counts": counts,
        "source_share": share,
        "rates": vars(rates),
        "stages": [s.to_json() for s in stages],
        "disk_bytes": disk,
        "seconds": seconds,
    }


def _counts(plan: Any, data: Any, args: argparse.Namespace) -> dict[str, int]:
    from gnn_eval import StoredGraph
    from gnn_eval.model_call import bind_call

    if isinstance(data, StoredGraph):
        counts = {"n_node": data.num_nodes, "e_edge_index": data.num_edges}
    else:
        counts = bind_call(plan.model, data).counts()
    for name in counts:
        if args.nodes and name.startswith("n_"):
            counts[name] = args.nodes
        if args.edges and name.startswith("e_"):
            counts[name] = args.edges
    return counts


def _run(args: argparse.Namespace) -> dict[str, Any]:
    plan, data = _plan_and_data(args, verify=not args.no_verify)
    nodes = None if args.nodes is None else torch.from_numpy(load_array(args.nodes))
    in_place = nodes is None and len(plan.compiled.program.outputs) == 1
    result = plan.run(
        data, nodes, args.memory, args.order, args.store, args.out if in_place else None, True, resume=args.resume
    )
    files = [args.out] if in_place else _write_parts(result, Path(args.out))
    report = plan.last_report
    rows = [
        [str(s.level), f"{s.rows:,}", f"{s.edges:,}", str(s.blocks), format_bytes(s.predicted_peak_bytes),
         format_bytes(s.measured_peak_bytes), format_seconds(s.seconds)]
        for s in report.stages
    ]  # fmt: skip
    table("stages", ["stage", "rows", "edges", "blocks", "predicted peak", "measured peak", "time"], rows)
    return {"out": files, "edges": report.num_edges, "stages": [vars(stage) for stage in report.stages]}


def _write_parts(result: Any, path: Path) -> list[str]:
    """Write each tensor of a result; those of a dict or tuple get their key in the file's name."""
    from gnn_eval.containers import take_apart

    files = []
    for place, tensor in take_apart(result)[1]:
        key = "".join(f".{part}" for part in place)
        files.append(str(path.with_suffix(f"{key}.npy")))
        np.save(files[-1], tensor.numpy())
    return files


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    from gnn_eval import StoredGraph
    from gnn_eval.model_call import bind_call
    from gnn_eval.verify import verify_call

    plan, data = _plan_and_data(args, verify=False)
    example = data.example(plan.model) if isinstance(data, StoredGraph) else data
    call = bind_call(plan.model, example)
    checks = []
    for seed in range(args.seeds):
        try:
            checks.append(vars(verify_call(plan, plan.model, call, seed)))
        except InexactPlanError as error:
            raise CheckFailedError(str(error), {"checks": checks, "seed": seed}) from error
    rows = [[str(n), f"{c['blocks']:.1e}", f"{c['fused']:.1e}", f"{c['subset']:.1e}", str(c["bit_identical"])]
            for n, c in enumerate(checks)]  # fmt: skip
    table("relative errors", ["subgraph", "blocks", "fused", "some nodes", "bit-identical"], rows)
    return {"checks": checks}


def _convert(args: argparse.Namespace) -> dict[str, Any]:
    from gnn_eval import convert

    source = Path(args.source)
    inputs: dict[str, Path | torch.Tensor]
    if source.suffix == ".npz":
        try:
            with np.load(source, allow_pickle=False) as arrays:
                inputs = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise EvaluationArgumentError(
                f"{source} cannot be read ({error}); expected arrays of numbers by name; write it with np.savez"
            ) from None
    elif source.is_dir():
        inputs = {file.stem: file for file in sorted(source.glob("*.npy"))}
        if "edge_index" in inputs:
            inputs["edge_index"] = torch.from_numpy(load_array(source / "edge_index.npy"))
    else:
        model, built = _build(args.source)
        data: Any = built
        if isinstance(built, (tuple, list)):
            data = dict(zip(inspect.signature(model.forward).parameters, built, strict=False))
        if hasattr(data, "node_types"):
            raise EvaluationArgumentError(
                f"{args.source} returned data with node types {', '.join(data.node_types)}; expected a graph with one "
                "type of node; evaluate it in memory with gnn_eval.evaluate"
            )
        inputs = {k: v for k, v in (data.items() if isinstance(data, dict) else data.to_dict().items())
                  if isinstance(v, torch.Tensor)}  # fmt: skip
    graph = convert(inputs, args.directory, args.order)
    say(f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges in {args.directory}")
    return {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges, "directory": args.directory}


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    cli = CommandLine("gnn-eval", "Exact layer-wise evaluation of graph neural networks.", __version__, [GnnEvalError])
    plan = cli.command(
        "plan", _plan, "predict bytes, disk and time from counts", "gnn-eval plan app:build --memory 4GB"
    )
    explain = cli.command("explain", _explain, "show the stages of a model", "gnn-eval explain app:build")
    run = cli.command(
        "run", _run, "evaluate and write a .npy file", "gnn-eval run app:build --memory 4GB --out out.npy"
    )
    verify = cli.command("verify", _verify, "compare plan and full forward", "gnn-eval verify app:build --seeds 5")
    for parser in (plan, explain, run, verify):
        needed = None if parser is not plan else "?"
        parser.add_argument("model", nargs=needed, help="package.module:function that returns (model, data)")
        parser.add_argument("--frontend", default="auto", choices=("auto", "export", "fx"))
        parser.add_argument("--data", metavar="DIR", help="a graph written by convert, instead of the function's data")
    plan.add_argument("--nodes", type=_at_least(1), help="number of nodes of each type, instead of the data's")
    plan.add_argument("--edges", type=_at_least(1), help="number of edges of each relation, instead of the data's")
    plan.add_argument("--width", type=_at_least(1), default=128, help="feature width of the model when none is named")
    plan.add_argument("--hidden", type=_at_least(1), default=128, help="width of its layers between")
    plan.add_argument("--classes", type=_at_least(1), default=128, help="width of its result")
    plan.add_argument("--layers", type=_at_least(1), default=3, help="number of its layers of mean aggregation")
    plan.add_argument(
        "--source-share",
        type=_share,
        help="source rows relative to a graph without locality; sampled from a stored graph, else 1",
    )
    plan.add_argument("--memory", default="4GB", help="bytes of one block, such as 4GB")
    plan.add_argument("--store", help="directory whose disk is measured")
    explain.add_argument("--save", metavar="FILE", help="also write the plan as JSON")
    run.add_argument("--nodes", metavar="FILE", help=".npy file of node ids; all nodes when left out")
    run.add_argument("--memory", help="bytes to use beyond the inputs, such as 4GB")
    run.add_argument("--order", default="auto", choices=("auto", "natural", "cluster", "rcm", "metis"))
    run.add_argument("--store", default="ram", metavar="DIR", help="directory for values between layers")
    run.add_argument("--out", required=True, help=".npy file of the result")
    run.add_argument("--resume", action="store_true", help="go on with an unfinished run in the store")
    run.add_argument("--no-verify", action="store_true", help="skip the comparison on a subgraph")
    verify.add_argument("--seeds", type=_at_least(1), default=3, help="number of random subgraphs")
    convert = cli.command(
        "convert", _convert, "write a graph as a directory of .npy files", "gnn-eval convert g.npz dir/"
    )
    convert.add_argument("source", help=".npz file, directory of .npy files, or package.module:function")
    convert.add_argument("directory", help="where to write it; made if it does not exist")
    convert.add_argument("--order", default="natural", choices=("natural", "cluster"), help="order of the rows on disk")
    return cli.run(argv)


if __name__ == "__main__":
    sys.exit(main())
