"""What a checkpoint costs the training: steps with and without one under way, beside PyTorch's own save in between.

One worker trains a model with AdamW. Steps take turns: some in peace, then one checkpoint written beside the training,
then ``torch.distributed.checkpoint.save`` of the same state between two steps, which is what a plain script does.

    python benchmarks/checkpoints.py --megabytes 100        # about a minute
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import elastic_train
from core_kernels.console import format_seconds, table
from elastic_train.bench._model import make_model
from elastic_train.checkpoints import CheckpointFolder


def measure(megabytes: float, step_seconds: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Return medians of steps in peace, that wait for copies, and beside the writing, and of a plain save."""
    gap = 40
    job = elastic_train.init("memory:", "job", checkpoint=folder / "beside", checkpoint_every=gap, checkpoint_keep=1)
    module, x = make_model(megabytes)
    model = elastic_train.wrap(module)
    optimizer = elastic_train.Optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = elastic_train.State(model=model, optimizer=optimizer)
    data = x.expand(8 * gap * (rounds + 1), x.shape[1])
    seconds: dict[str, list[float]] = {"peace": [], "copied": [], "written": [], "plain save": []}
    keeper = job.checkpoints
    assert keeper is not None
    for x in elastic_train.ElasticDataLoader(data, global_batch_size=8, shuffle=False):
        was_busy, is_copying = keeper.is_busy, job.step % gap == 0 and job.step > 0
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).sum().backward()
        time.sleep(step_seconds)
        optimizer.step()
        elastic_train.notify_batch_end()
        kind = "copied" if is_copying else "written" if was_busy else "peace"
        if job.step > 5:
            seconds[kind].append(time.perf_counter() - begin)
        if job.step % gap == gap // 2:
            plain = folder / "plain"
            begin = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=plain)
            seconds["plain save"].append(time.perf_counter() - begin)
            shutil.rmtree(plain)
    whole = CheckpointFolder(folder / "beside").newest()
    return {
        "state_bytes": state.num_bytes(),
        "is_whole": whole is not None,
        **{f"{kind.replace(' ', '_')}_seconds": median(found) for kind, found in seconds.items() if found},
        **{f"num_{kind.replace(' ', '_')}": len(found) for kind, found in seconds.items()},
    }


def _shown(seconds: float | None) -> str:
    return "no such step" if seconds is None else format_seconds(seconds)


def main() -> dict[str, Any]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[6.0, 100.0])
    parser.add_argument("--step-seconds", type=float, default=0.05, help="what a step sleeps")
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints per size")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory() as name:
            results.append(measure(megabytes, args.step_seconds, args.rounds, Path(name)))
    kinds = ("peace", "copied", "written", "plain_save")
    rows = [
        (f"{r['state_bytes'] / 1e6:.0f} MB", *(_shown(r.get(f"{kind}_seconds")) for kind in kinds)) for r in results
    ]
    columns = ["state", "step in peace", "step that waits for copies", "step beside the writing", "plain save, besides"]
    table("What a checkpoint costs", columns, rows)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return {"results": results}


if __name__ == "__main__":
    main()
