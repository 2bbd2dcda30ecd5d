"""Let a worker join and leave a job of two over and over; nothing that the two hold may grow.

    python benchmarks/resizes.py 1000     # about 4 minutes

Of a worker that stays, samples are taken every ten resizes. ``early`` has the mean and the scatter (standard deviation)
over the second tenth of the resizes, ``late`` over the last: resident memory of its own (anonymous pages), bytes in use
according to the allocator, blocks of Python, threads and descriptors. Keys of the job's store are counted at the end of
both, after the leases of those that left have run out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import forked

import elastic_train
from elastic_train.stores import open_store


class _MallocInfo(ctypes.Structure):
    """What glibc's allocator says of itself."""

    _names: ClassVar = (
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keepcost",
    )
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def answer(job: elastic_train.Job) -> None:
    """Let a worker write what it holds whenever it gets SIGUSR1."""
    path, library = Path(os.environ["ELASTIC_TRAIN_EVENTS"]).parent / f"{job.agent.worker}.held", ctypes.CDLL(None)
    library.mallinfo2.restype = _MallocInfo

    def write(*_: object) -> None:
        gc.collect()
        info = library.mallinfo2()
        held = {"in_use_bytes": info.uordblks + info.hblkhd, "python_blocks": sys.getallocatedblocks()}
        path.with_suffix(".new").write_text(json.dumps(held))
        path.with_suffix(".new").rename(path)

    signal.signal(signal.SIGUSR1, write)


def ask(folder: Path, worker: str, pid: int) -> dict[str, float]:
    """Return what a worker holds now."""
    path = folder / f"{worker}.held"
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    while not path.exists():
        time.sleep(0.002)
    return {**forked.usage(pid), **json.loads(path.read_text())}


def resize(num_resizes: int, limit_seconds: float) -> dict[str, Any]:
    """Return what one of the two that stay holds early and late."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = forked.Settings(2, 0.004, epochs=10**6, prepare=answer)
        stay = [forked.fork(folder, f"w{i}", settings) for i in range(2)]
        store = open_store(f"file://{folder}")
        controller = elastic_train.Controller(store, "job")

        def wait(size: int) -> None:
            while True:
                status = controller.status()
                if status["status"] == "commit" and len(status["members"]) == size:
                    return
                time.sleep(0.005)

        def count_keys() -> int:
            time.sleep(1.5)  # the leases of those that left run out
            return len(store.scan(""))

        wait(2)
        samples, keys, begin = [], {}, time.monotonic()
        for done in range(2, num_resizes + 1, 2):
            if time.monotonic() - begin > limit_seconds:
                break
            pid = forked.fork(folder, f"x{done}", settings)
            wait(3)
            controller.scale_in([f"x{done}"])
            os.waitpid(pid, 0)
            wait(2)
            if done % 10 == 0:
                samples.append({"resizes": done, **ask(folder, "w0", stay[0])})
            if done == num_resizes // 5:
                keys["early"] = count_keys()
        keys["late"] = count_keys()
        for pid in stay:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        store.close()
    return summarise(samples, keys) | {"seconds": time.monotonic() - begin, "all": samples}


def summarise(samples: list[dict[str, float]], keys: dict[str, int]) -> dict[str, Any]:
    """Return means and scatters of the second and of the last tenth, and the growth from one to the other."""
    last = samples[-1]["resizes"]
    windows = {
        "early": [sample for sample in samples if last / 10 < sample["resizes"] <= last / 5],
        "late": [sample for sample in samples if last * 9 / 10 < sample["resizes"]],
    }
    result: dict[str, Any] = {"resizes": last}
    for name, window in windows.items():
        result[name] = {
            field: {"mean": mean(found := [sample[field] for sample in window]), "scatter": stdev(found)}
            for field in window[0]
        } | {"keys": keys[name]}
    between = result["late"]["resizes"]["mean"] - result["early"]["resizes"]["mean"]
    result["growth"] = {
        field: {"share": late / early - 1, "per_resize": (late - early) / between}
        for field in samples[0]
        if field != "resizes"
        for early, late in [(result["early"][field]["mean"], result["late"][field]["mean"])]
    }
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("resizes", type=int, nargs="?", default=1000, help="a multiple of 100, at least 300")
    parser.add_argument("--limit-seconds", type=float, default=3600, help="go no further after this long")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    if args.resizes < 300 or args.resizes % 100:
        parser.error(f"resizes={args.resizes}: expected a multiple of 100 from 300 on; give for example 1000")
    forked.warm_up()
    result = resize(args.resizes, args.limit_seconds)
    print(json.dumps({key: value for key, value in result.items() if key != "all"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
