"""All workers of a job are killed; others, of another number, go on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from elastic_train.checkpoints import CheckpointFolder
from elastic_train.events import read_events
from elastic_train.launchers import LocalJob

pytestmark = pytest.mark.distributed
SCRIPT = str(Path(__file__).parent / "training_script.py")
LAST_STEP = 64


@pytest.mark.parametrize("after", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_workers_goes_on(start_job, read_logs, reference, tmp_path, after):
    kept = tmp_path / "checkpoints"
    job = start_job(2, "--checkpoint", str(kept), "--step-seconds", "0.05")
    while not (job.events.exists() and any(event["event"] == "checkpoint" for event in read_events(job.events))):
        assert None in [process.poll() for process in job.processes.values()]
        time.sleep(0.01)
    for process in job.processes.values():
        process.kill()
    job.wait(60)
    before = [event["step"] for event in read_events(job.events) if event["event"] == "checkpoint"]
    logs = read_logs(job)  # the lines of both lives: those of the second come later
    (job.folder / "hurry").touch()
    command = [SCRIPT, str(job.folder), "--checkpoint", str(kept)]
    with LocalJob(command, job.folder, min_workers=after, environment={"OMP_NUM_THREADS": "1"}) as second:
        second.scale_out(after)
        assert set(second.wait(90).values()) == {0}
    both, expected = read_logs(job), read_logs(reference)
    restored = {event["step"] for event in read_events(job.events) if event["event"] == "restored"}
    assert len(restored) == 1
    (begin,) = restored
    assert begin >= before[-1]
    lines = [line for name, found in both.lines.items() for line in found[len(logs.lines.get(name, [])) :]]
    steps: dict[int, list[dict]] = {}
    for line in lines:
        if "ids" in line:
            steps.setdefault(line["step"], []).append(line)
    assert sorted(steps) == list(range(begin, LAST_STEP))
    losses = [sum(entry["loss"] for entry in steps[step]) for step in sorted(steps)]
    np.testing.assert_allclose(losses, expected.losses()[begin:], rtol=1e-9)
    quiet = expected.steps()
    for step, entries in steps.items():
        assert sorted(i for entry in entries for i in entry["ids"]) == sorted(quiet[step][0]["ids"])
    finals = [line for line in lines if "hash" in line]
    assert len({final["hash"] for final in finals}) == 1
    assert finals[0]["norm"] == pytest.approx(expected.finals()["w0"]["norm"], rel=1e-9)
    generations = [event["generation"] for event in read_events(job.events) if event["event"] == "propose"]
    assert generations == list(range(1, len(generations) + 1))
    assert CheckpointFolder(kept).newest()[1]["step"] > begin
