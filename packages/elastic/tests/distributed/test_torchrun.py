"""A script started by torchrun forms a job, which is then steered like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_train import Controller

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).parent / "torchrun_script.py"


def test_torchrun_forms_a_job_that_shrinks(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_TRAIN_")}
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=try", str(SCRIPT), str(tmp_path),
    ]  # fmt: skip
    log = (tmp_path / "err").open("w")
    process = subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1"}, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not all((tmp_path / f"paused-{rank}").exists() for rank in (0, 1)):
            assert process.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        address = next(
            line.rpartition("store ")[2] for line in (tmp_path / "err").read_text().splitlines() if "store file" in line
        )
        controller = Controller(address, "try-0")
        assert controller.status()["members"] in (["rank0", "rank1"], ["rank1", "rank0"])
        controller.scale_in(["rank1"])
        controller.close()
        time.sleep(0.3)
        (tmp_path / "go").touch()
        assert process.wait(60) == 0, (tmp_path / "err").read_text()
    finally:
        process.kill()
        process.wait()
        log.close()
    lines = [json.loads(line) for path in tmp_path.glob("rank*.jsonl") for line in path.read_text().splitlines()]
    assert sorted(i for line in lines for i in line["ids"]) == list(range(60))
    assert {line["job"] for line in lines} == {"try-0"}
    assert {line["size"] for line in lines} >= {2}
