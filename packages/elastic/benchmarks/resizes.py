"""Let a worker join and leave a job of two over and over; nothing that the two hold may grow.

    python benchmarks/resizes.py 1000     # about 4 minutes

``early`` is taken after a tenth of the resizes, ``late`` after all: resident memory, threads and descriptors of a
worker that stays, and keys in the job's store.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import forked

import elastic_train
from elastic_train.stores import open_store


def resize(num_resizes: int, limit_seconds: float) -> dict[str, Any]:
    """Return what the two that stay hold before and after."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = forked.Settings(2, 0.004, epochs=10**6)
        stay = [forked.fork(folder, f"w{i}", settings) for i in range(2)]
        store = open_store(f"file://{folder}")
        controller = elastic_train.Controller(store, "job")

        def wait(size: int) -> None:
            while True:
                status = controller.status()
                if status["status"] == "commit" and len(status["members"]) == size:
                    return
                time.sleep(0.005)

        wait(2)
        samples, index, begin = [], 0, time.monotonic()
        for index in range(num_resizes // 2):
            if time.monotonic() - begin > limit_seconds:
                break
            pid = forked.fork(folder, f"x{index}", settings)
            wait(3)
            controller.scale_in([f"x{index}"])
            os.waitpid(pid, 0)
            wait(2)
            if (index + 1) % max(num_resizes // 20, 1) == 0:
                time.sleep(1.5)  # the leases of those that left run out
                samples.append({**forked.usage(stay[0]), "keys": len(store.scan("")), "resizes": 2 * index + 2})
        for pid in stay:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        store.close()
    return {
        "resizes": num_resizes,
        "seconds": time.monotonic() - begin,
        "early": samples[0],
        "late": samples[-1],
        "all": samples,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("resizes", type=int, nargs="?", default=1000)
    parser.add_argument("--limit-seconds", type=float, default=3600, help="go no further after this long")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    forked.warm_up()
    result = resize(args.resizes, args.limit_seconds)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
