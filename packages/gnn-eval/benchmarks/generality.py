"""Generate the table of supported and refused models; takes about 4 minutes of CPU time.

    python packages/gnn-eval/benchmarks/generality.py [--only TEXT] [--jobs N] [--table FILE] [--json [FILE]]

Each supported model is evaluated in blocks of 41 destinations in clustered order and of 97 in natural order, unfused
and fused, and compared with its full forward; unfused results are also compared bit for bit. Each model that mixes rows
must be refused with an operator and a line of code. Exit code 1 if a result is wrong, fewer than 95 % pass, or a model
that must be refused is not. ``--table`` writes the page of the documentation.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from model_zoo import REFUSED, SUPPORTED

import gnn_eval
from core_kernels.console import CheckFailedError, CommandLine, progress, say, table
from gnn_eval.model_call import bind_call
from gnn_eval.verify import relative_error

TOLERANCE = 1e-5
UNFUSED_RUNS = ({"batch_rows": 41, "order": "cluster"}, {"batch_rows": 97, "order": "natural"})


def check_supported(make: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    started = time.process_time()
    try:
        plan = gnn_eval.compile(model, inputs)
    except gnn_eval.GnnEvalError as error:
        return {"result": "refused", "detail": str(error)[:300]}
    compile_seconds = time.process_time() - started
    call = bind_call(model, inputs)
    args, kwargs = call.arguments(call.tensors[: len(call.tensors) - len(call.lifted)])
    with torch.no_grad():
        expected = model(*args, **kwargs)
    wanted = _tensors(expected)
    plain = [_tensors(plan.run(inputs, fuse=False, **options)) for options in UNFUSED_RUNS]
    runs = [*plain, _tensors(plan.run(inputs, batch_rows=41, fuse=True))]
    error = max(relative_error(f, e) for run in runs for f, e in zip(run, wanted, strict=True))
    same = all(torch.equal(f, e) for run in plain for f, e in zip(run, wanted, strict=True))
    return {
        "result": "equal" if error <= TOLERANCE else "WRONG",
        "error": error,
        "bit_identical": same,
        "frontend": plan.compiled.frontend,
        "stages": len(plan.stages),
        "compile_seconds": compile_seconds,
    }


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [tensor for part in parts for tensor in _tensors(part)]


def check_refused(make: Any, in_training: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = make()
    if not in_training:
        model.eval()
    try:
        gnn_eval.compile(model, inputs)
    except gnn_eval.UnsupportedModelError as error:
        has_line = re.search(r"\.py:\d+", error.source) is not None
        result = "refused" if has_line else "refused without a line"
        return {"result": result, "operator": error.operator, "source": error.source, "detail": str(error)[:300]}
    except gnn_eval.GnnEvalError as error:
        return {"result": "refused without an operator", "detail": str(error)[:300]}
    return {"result": "NOT REFUSED"}


def check(name: str) -> tuple[str, dict[str, Any]]:
    """Check one model, named ``supported/...`` or ``refused/...``; the work of one process."""
    torch.set_num_threads(1)
    kind, _, model = name.partition("/")
    if kind == "supported":
        return name, check_supported(SUPPORTED[model])
    return name, check_refused(REFUSED[model], "training mode" in model)


def check_all(names: list[str], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the result of each model in order."""
    if jobs == 1:
        yield from map(check, names)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(check, names)


def run(args: argparse.Namespace) -> dict[str, Any]:
    named = [f"supported/{name}" for name in SUPPORTED] + [f"refused/{name}" for name in REFUSED]
    chosen = [name for name in named if args.only in name]
    found: dict[str, dict[str, dict[str, Any]]] = {"supported": {}, "refused": {}}
    with progress("models", len(chosen)) as advance:
        for name, entry in check_all(chosen, args.jobs):
            kind, _, model = name.partition("/")
            found[kind][model] = entry
            advance(1, model)
    supported, refused = found["supported"], found["refused"]
    rows = [_row(name, entry) for name, entry in supported.items()]
    table("Supported", ["model", "result", "relative error", "bit-identical", "front end", "stages", "compile"], rows)
    names = [
        [name, entry["result"], entry.get("operator", ""), entry.get("detail", "")[:90]]
        for name, entry in refused.items()
    ]
    table("Refused", ["model", "result", "operator", "message"], names)
    passed = sum(entry["result"] == "equal" for entry in supported.values())
    wrong = [n for n, entry in supported.items() if entry["result"] == "WRONG"]
    missed = [n for n, entry in refused.items() if entry["result"] != "refused"]
    same = [n for n, entry in supported.items() if entry.get("bit_identical")]
    slowest = max((entry.get("compile_seconds", 0.0) for entry in supported.values()), default=0.0)
    say(f"{passed} of {len(supported)} supported models pass, {len(wrong)} wrong, compiled in {slowest:.1f} s or less")
    say(f"{len(same)} of {passed} are bit-identical to the full forward unfused, for each block size and order tried")
    say(f"{len(refused) - len(missed)} of {len(refused)} models that mix rows are refused")
    result = {"supported": supported, "refused": refused, "passed": passed, "wrong": wrong, "missed": missed}
    result |= {"bit_identical": len(same), "rounded": [n for n in supported if n not in same]}
    if args.table:
        Path(args.table).write_text(_markdown(supported, refused))
    if wrong or missed or passed < 0.95 * len(supported):
        raise CheckFailedError(f"wrong: {wrong}; not refused: {missed}; passed {passed} of {len(supported)}", result)
    return result


def _row(name: str, entry: dict[str, Any]) -> list[str]:
    if "error" not in entry:
        return [name, entry["result"], "", "", "", "", entry["detail"][:80]]
    same = "yes" if entry["bit_identical"] else "no"
    seconds = f"{entry['compile_seconds']:.1f} s"
    return [name, entry["result"], f"{entry['error']:.1e}", same, entry["frontend"], str(entry["stages"]), seconds]


def _markdown(supported: dict[str, dict[str, Any]], refused: dict[str, dict[str, Any]]) -> str:
    passed = [entry for entry in supported.values() if entry["result"] == "equal"]
    same = sum(entry["bit_identical"] for entry in passed)
    lines = [
        "# Models gnn-eval evaluates, and models it refuses",
        "",
        "This page is written by `python packages/gnn-eval/benchmarks/generality.py --table FILE`. Each model is built",
        "from PyG layers, with or without PyG's own model classes, and evaluated on a random graph of 300 nodes with",
        "self-loops, duplicate edges and isolated nodes, in blocks of 41 nodes in clustered order and of 97 in natural",
        "order, unfused and fused. The error is the largest difference from the full forward over its largest value.",
        "",
        f"{len(passed)} of {len(supported)} models are equal to their full forward within {TOLERANCE:g}; {same} are",
        "equal bit for bit when kernels are not fused.",
        "",
        "## Supported",
        "",
        "| model | result | relative error | bit-identical unfused | front end | stages |",
        "|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(map(_cell, _row(name, entry)[:6])) + " |" for name, entry in supported.items()]
    reasons = [(n, e) for n, e in supported.items() if e["result"] != "equal"]
    lines += ["", *(f"{n}: {_cell(e.get('detail', ''))}" for n, e in reasons)]
    lines += ["", "## Refused", "", "| model | operator | where |", "|---|---|---|"]
    lines += [f"| {n} | `{e.get('operator', '')}` | {_cell(e.get('source', ''))} |" for n, e in refused.items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(argv: list[str] | None = None) -> int:
    cli = CommandLine("generality", "Which models are evaluated exactly, and which are refused.", gnn_eval.__version__)
    command = cli.command("run", run, "check all models", "generality.py run --table table.md")
    command.add_argument("--only", default="", help="check only models whose name contains this text")
    command.add_argument("--jobs", type=int, default=1, help="processes that check models side by side")
    command.add_argument("--table", help="write the page of the documentation to this file")
    return cli.run(["run", *(argv if argv is not None else sys.argv[1:])])


if __name__ == "__main__":
    sys.exit(main())
