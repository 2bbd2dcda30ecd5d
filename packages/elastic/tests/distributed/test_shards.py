"""A job that reads files through a queue of shards and changes its batch size, against a run of one worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastic_train import Controller
from elastic_train.launchers import LocalJob

pytestmark = pytest.mark.distributed
SCRIPT = str(Path(__file__).parent / "training_script.py")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Return a folder of files with the numbers of 1,000 samples, of different lengths and one of them empty."""
    folder, begin = tmp_path_factory.mktemp("shards"), 0
    for number, length in enumerate([130, 70, 0, 250, 33, 17, 200, 90, 110, 100]):
        (folder / f"{number}.txt").write_text("".join(f"{i}\n" for i in range(begin, begin + length)))
        begin += length
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory, shards):
    """Return the folder of a run of one worker."""
    folder = tmp_path_factory.mktemp("reference")
    with LocalJob([SCRIPT, str(folder), "--step-seconds", "0", "--adapt", "--shards", str(shards)], folder) as job:
        job.scale_out(1)
        assert job.wait(90) == {"w0": 0}
    return job


def test_a_worker_is_killed_and_another_joins(start_job, wait_for_step, wait_for_size, read_logs, reference, shards):
    job = start_job(2, "--adapt", "--shards", str(shards), "--step-seconds", "0.4")
    wait_for_step(job, "w0", 1)
    job.scale_out(1)
    wait_for_size(job, 3)
    controller = Controller(job.store, "job")
    assert controller.status()["data"] == "exactly once"
    controller.close()
    (job.folder / "hurry").touch()
    wait_for_step(job, "w0", 9)
    job.processes["w1"].kill()
    codes = job.wait(90)
    assert [codes["w0"], codes["w2"]] == [0, 0]
    logs, expected = read_logs(job), read_logs(reference)
    finals, target = logs.finals(), expected.finals()["w0"]
    assert len(finals) == 2
    assert len({final["hash"] for final in finals.values()}) == 1
    assert next(iter(finals.values()))["step"] == target["step"] != 64, "the size of batches changes on the way"
    assert finals["w0"]["norm"] == pytest.approx(target["norm"], rel=1e-9)
    for epoch, ids in logs.samples().items():
        assert len(ids) == len(set(ids)), f"epoch {epoch} repeats samples"
    # The killed worker may have committed a step without having written it.
    steps, quiet = logs.steps(), expected.steps()
    whole = [step for step in quiet if sum(len(e["ids"]) for e in steps[step]) == len(quiet[step][0]["ids"])]
    assert len(whole) >= len(quiet) - 1
    assert {len(entries[0]["ids"]) for entries in quiet.values()} >= {16, 32, 48}
    for step in whole:
        assert sorted(i for e in steps[step] for i in e["ids"]) == sorted(quiet[step][0]["ids"])
    losses = [[sum(e["loss"] for e in of[step]) for step in whole] for of in (steps, quiet)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


@pytest.mark.slow
def test_logical_workers_read_a_stream_each_and_give_the_same_bits(start_job, read_logs, shards):
    hashes = set()
    for num_workers in (1, 3):
        job = start_job(num_workers, "--logical", "4", "--step-seconds", "0", "--shards", str(shards))
        assert set(job.wait(90).values()) == {0}
        hashes |= {final["hash"] for final in read_logs(job).finals().values()}
    assert len(hashes) == 1
