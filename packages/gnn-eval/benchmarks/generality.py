"""Generate the table of supported and refused models.

    python packages/gnn-eval/benchmarks/generality.py [--only TEXT] [--table FILE] [--json [FILE]]

Each supported model is evaluated in blocks of 41 destinations in clustered order, without and with fused kernels, and
compared with its full forward. Exit code 1 if a result is wrong, fewer than 95 % pass, or a model that must be refused
is not.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from model_zoo import REFUSED, SUPPORTED

import gnn_eval
from core_kernels.console import CheckFailedError, CommandLine, progress, say, table
from gnn_eval.model_call import bind_call
from gnn_eval.verify import relative_error

TOLERANCE = 1e-5


def check_supported(make: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    started = time.perf_counter()
    try:
        plan = gnn_eval.compile(model, inputs)
    except gnn_eval.GnnEvalError as error:
        return {"result": "refused", "detail": str(error)[:300]}
    compile_seconds = time.perf_counter() - started
    call = bind_call(model, inputs)
    args, kwargs = call.arguments(call.tensors[: len(call.tensors) - len(call.lifted)])
    with torch.no_grad():
        expected = model(*args, **kwargs)
    plain = plan.run(inputs, batch_rows=41, order="cluster", fuse=False)
    fused = plan.run(inputs, batch_rows=41, fuse=True)
    pairs = list(zip(*(_tensors(tree) for tree in (plain, fused, expected)), strict=True))
    error = max(max(relative_error(p, e), relative_error(f, e)) for p, f, e in pairs)
    same = all(torch.equal(p, e) for p, _, e in pairs)
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
        return {"result": "refused", "operator": error.operator, "detail": str(error)[:300]}
    except gnn_eval.InexactPlanError as error:
        return {"result": "refused", "operator": "verification", "detail": str(error)[:300]}
    except gnn_eval.GnnEvalError as error:
        return {"result": "refused without operator", "detail": str(error)[:300]}
    return {"result": "NOT REFUSED"}


def run(args: argparse.Namespace) -> dict[str, Any]:
    chosen = {n: m for n, m in SUPPORTED.items() if args.only in n}
    to_refuse = {n: m for n, m in REFUSED.items() if args.only in n}
    supported: dict[str, dict[str, Any]] = {}
    refused: dict[str, dict[str, Any]] = {}
    with progress("models", len(chosen) + len(to_refuse)) as advance:
        for name, make in chosen.items():
            supported[name] = check_supported(make)
            advance(1, name)
        for name, make in to_refuse.items():
            refused[name] = check_refused(make, "training mode" in name)
            advance(1, name)
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
    say(f"{passed} of {len(supported)} supported models pass, {len(wrong)} wrong")
    say(f"{len(refused) - len(missed)} of {len(refused)} models that mix rows are refused")
    result = {"supported": supported, "refused": refused, "passed": passed, "wrong": wrong, "missed": missed}
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
    lines = [
        "| model | result | relative error | bit-identical unfused | front end | stages |",
        "|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(_row(name, entry)[:6]) + " |" for name, entry in supported.items()]
    lines += ["", "| refused model | operator | message |", "|---|---|---|"]
    for name, entry in refused.items():
        detail = entry.get("detail", "").replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | `{entry.get('operator', '')}` | {detail} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    cli = CommandLine("generality", "Which models are evaluated exactly, and which are refused.", gnn_eval.__version__)
    command = cli.command("run", run, "check all models", "generality.py run --table table.md")
    command.add_argument("--only", default="", help="check only models whose name contains this text")
    command.add_argument("--table", help="write the table as Markdown to this file")
    return cli.run(["run", *(argv if argv is not None else sys.argv[1:])])


if __name__ == "__main__":
    sys.exit(main())
