"""Random scaling histories against a fixed number of workers: bitwise mode, and the losses of the default mode.

Bitwise mode: 1, 2 and 4 workers, and jobs whose workers join, leave and are killed at random, must end with the same
bits in weights and batch-norm statistics. Default mode: the loss of every step within 1e-5 of a run of one worker.

    python benchmarks/histories.py 20           # about a minute and a half
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked

import elastic_train


def run_fixed(num_workers: int, settings: forked.Settings) -> tuple[dict[str, Any], list[float]]:
    """Return the final line and the losses of a job that nothing happens to."""
    with tempfile.TemporaryDirectory() as name:
        folder, settings = Path(name), replace(settings, min_workers=num_workers)
        for pid in [forked.fork(folder, f"w{i}", settings) for i in range(num_workers)]:
            os.waitpid(pid, 0)
        ends = forked.read(folder)[1]
        assert len({end["final"] for end in ends.values()}) == 1, ends
        return ends["w0"], forked.losses(folder)


def wait_for_all(folder: Path, pids: dict[str, int]) -> None:
    """Wait until all workers have ended; those that came when the others had ended are killed."""
    waiting, ended = dict(pids), float("inf")
    while waiting:
        commits, ends = forked.read(folder)
        ended = min(ended, time.monotonic()) if ends else ended
        for worker, pid in list(waiting.items()):
            if time.monotonic() - ended > 3 and not commits.get(worker):
                os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, os.WNOHANG)[0]:
                del waiting[worker]
        time.sleep(0.02)


def controlled(folder: Path) -> contextlib.closing[elastic_train.Controller]:
    """Open a controller for one look: a file store must not be open while this process forks workers."""
    return contextlib.closing(elastic_train.Controller(f"file://{folder}", "job"))


def run_random(rng: random.Random, settings: forked.Settings, max_workers: int, may_kill: bool) -> dict[str, Any]:
    """Run a job whose workers come and go; returns its final line, its losses and what happened."""
    with tempfile.TemporaryDirectory() as name:
        folder, story = Path(name), []
        settings = replace(settings, min_workers=1, step_seconds=0.02)
        pids = {"w0": forked.fork(folder, "w0", settings)}
        forked.wait_for_event(folder, "commit")
        for index in range(rng.randint(2, 5)):
            time.sleep(rng.uniform(0.0, 0.15))
            with controlled(folder) as controller:
                members = controller.status()["members"]
            if len(members) > 1 and rng.random() < 0.5:
                victim = rng.choice(members)
                if may_kill and rng.random() < 0.5:
                    os.kill(pids[victim], signal.SIGKILL)
                    story.append(f"{victim} killed")
                else:
                    with controlled(folder) as controller:
                        controller.scale_in([victim])
                    story.append(f"{victim} leaves")
            elif len(members) < max_workers:
                worker = f"w{index + 1}"
                pids[worker] = forked.fork(folder, worker, settings)
                story.append(f"{worker} joins")
        wait_for_all(folder, pids)
        ends = forked.read(folder)[1]
        is_struck = any("killed" in line for line in story)
        found = {"finals": sorted({end["final"] for end in ends.values()}), "story": story, "is_struck": is_struck}
        own = {"weights": next(iter(ends.values()))["weights"]}
        found["samples_wrong"] = forked.check(folder, own, None, is_struck)
        found["losses"] = forked.losses(folder)
        return found


def main() -> dict[str, Any]:
    """Run all; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("histories", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    forked.warm_up()
    rng = random.Random(args.seed)
    bitwise = forked.Settings(logical_workers=4, lease_seconds=5.0)
    fixed = {n: run_fixed(n, bitwise)[0]["final"] for n in (1, 2, 3, 4)}
    runs = [run_random(rng, bitwise, 4, may_kill=True) for _ in range(args.histories)]
    default = forked.Settings(lease_seconds=5.0)
    expected = run_fixed(1, default)[1]
    plain = [run_random(rng, default, 4, may_kill=False) for _ in range(args.histories)]
    # The twin: without logical workers, other numbers of workers round otherwise, and the check must see it.
    twin = {run_fixed(n, default)[0]["final"] for n in (1, 2, 4)}
    largest = max(
        abs(a - b) / abs(b) for run in plain for a, b in zip(run["losses"], expected, strict=True)
    )  # fmt: skip
    result = {
        "bitwise_fixed_1_2_3_4_equal": len(set(fixed.values())) == 1,
        "bitwise_histories": len(runs),
        "bitwise_histories_equal": sum(run["finals"] == [fixed[1]] for run in runs),
        "bitwise_changes": sum(len(run["story"]) for run in runs),
        "default_histories": len(plain),
        "default_largest_relative_loss_difference": largest,
        "samples_wrong": [text for run in runs + plain for text in run["samples_wrong"]],
        "twin_sees_rounding": len(twin) > 1,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
