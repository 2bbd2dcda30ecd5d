"""A model sharded inside of replicas that join and leave, against one process that holds all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elastic_train.events import read_events

pytestmark = pytest.mark.distributed
SCRIPT = Path(__file__).parent / "sharded_script.py"


def read(folder: Path) -> tuple[list[dict], dict[str, list[float]]]:
    """Return the steps that counted, and the weights of those that trained to the end."""
    lines = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in sorted(folder.glob("?*.jsonl"))}
    del lines["events"]
    steps = [line for found in lines.values() for line in found if "ids" in line]
    return steps, {worker: found[-1]["weights"] for worker, found in lines.items() if found and "weights" in found[-1]}


def run(folder: Path, *arguments: str) -> dict[str, int]:
    """Run the job; returns exit codes of the processes of its replicas."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["others"] == [0, 0, 0], done.stderr
    return result["codes"]


def test_a_replica_of_two_shards_joins_and_the_first_one_leaves(tmp_path):
    assert set(run(tmp_path, "leave", "a.1").values()) == {0}
    _, expected = read(tmp_path / "alone")
    steps, weights = read(tmp_path / "sharded")
    assert sorted(weights) == ["b.0", "b.1"]
    assert sorted(i for step in steps for i in step["ids"]) == list(range(600))
    for found in weights.values():
        np.testing.assert_allclose(found, expected["w"], rtol=1e-11, atol=1e-13)
    sizes = [len(e["members"]) for e in read_events(tmp_path / "sharded" / "events.jsonl") if e["event"] == "commit"]
    assert sizes == [2, 4, 2]
    _, unweighted = read(tmp_path / "twin")
    assert np.abs(np.subtract(unweighted["a.0"], expected["w"])).max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a.0", "b.1"])
def test_a_killed_process_takes_its_replica_along_and_the_other_goes_on(tmp_path, victim):
    codes = run(tmp_path, "kill", victim)
    fellow = victim[:2] + ("1" if victim.endswith("0") else "0")
    survivors = sorted(set(codes) - {victim, fellow})
    assert codes[victim] == -9
    assert codes[fellow] == 1
    assert {codes[worker] for worker in survivors} == {0}
    _, expected = read(tmp_path / "alone")
    steps, weights = read(tmp_path / "sharded")
    assert sorted(weights) == survivors
    for found in weights.values():
        np.testing.assert_allclose(found, expected["w"], rtol=1e-11, atol=1e-13)
    assert {i for step in steps for i in step["ids"]} == set(range(600))
