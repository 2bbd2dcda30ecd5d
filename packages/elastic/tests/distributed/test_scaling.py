"""Jobs of real processes that grow, shrink and lose workers, against a run of one worker that nothing happens to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from elastic_train import Controller
from elastic_train.events import read_events
from elastic_train.launchers import LocalJob

pytestmark = pytest.mark.distributed
SCRIPT = str(Path(__file__).parent / "training_script.py")
STEPS_PER_EPOCH = 32  # 1,000 samples in batches of 32, the last of 8


def check(job, read_logs, reference, num_survivors, lost=()):
    """Check that all survivors agree, and that every sample counted once, as in a run of one worker."""
    logs, expected = read_logs(job), read_logs(reference)
    finals = logs.finals()
    assert len(finals) == num_survivors
    assert len({final["hash"] for final in finals.values()}) == 1
    assert {final["step"] for final in finals.values()} == {2 * STEPS_PER_EPOCH}
    final, target = next(iter(finals.values())), expected.finals()["w0"]
    assert final["norm"] == pytest.approx(target["norm"], rel=1e-9)
    assert final["sum"] == pytest.approx(target["sum"], rel=1e-7)
    assert list(logs.steps()) == list(range(2 * STEPS_PER_EPOCH))
    for epoch, ids in logs.samples().items():
        assert len(ids) == len(set(ids)), f"epoch {epoch} repeats samples"
        if not lost:
            assert ids == list(range(1000)), f"epoch {epoch} loses samples"
    if not lost:
        np.testing.assert_allclose(logs.losses(), expected.losses(), rtol=1e-9)
    generations = [event["generation"] for event in read_events(job.events) if event["event"] == "propose"]
    assert generations == list(range(1, len(generations) + 1))


def test_two_workers_take_a_third_and_one_moves(start_job, wait_for_step, wait_for_size, read_logs, reference):
    job = start_job(2, "--step-seconds", "1")
    wait_for_step(job, "w0", 0)
    job.serve_orders()
    controller = Controller(job.store, "job")
    controller.scale_out(1)
    assert job.serve_orders() == ["w2"]
    wait_for_size(job, 3)
    job.serve_orders()
    controller.migrate("w1")
    controller.close()
    assert job.serve_orders() == ["w3"]
    while not any(e["event"] == "commit" and "w3" in e["members"] for e in read_events(job.events)):
        time.sleep(0.01)
    (job.folder / "hurry").touch()
    assert set(job.wait(90).values()) == {0}
    check(job, read_logs, reference, 3)
    proposed = [(e["reason"], e["members"]) for e in read_events(job.events) if e["event"] == "propose"]
    assert proposed == [
        ("start", proposed[0][1]), ("scale-out", [*proposed[0][1], "w2"]),
        ("replace", [*(w for w in proposed[0][1] if w != "w1"), "w2", "w3"]),
    ]  # fmt: skip


@pytest.mark.parametrize("leaver", ["leader", pytest.param("follower", marks=pytest.mark.slow)])
def test_a_worker_leaves_in_good_order(start_job, wait_for_size, read_logs, reference, leaver):
    job = start_job(3, "--step-seconds", "1", min_workers=2)
    wait_for_size(job, 3)
    leader = next(e["worker"] for e in read_events(job.events) if e["event"] == "leader")
    name = leader if leaver == "leader" else next(w for w in job.processes if w != leader)
    if leaver == "leader":
        job.processes[name].send_signal(signal.SIGTERM)
    else:
        job.scale_in([name])
    while job.processes[name].poll() is None:
        time.sleep(0.01)
    (job.folder / "hurry").touch()
    assert set(job.wait(90).values()) == {0}
    check(job, read_logs, reference, 2)
    assert not [e for e in read_events(job.events) if e["event"] in ("failed", "killed")]


@pytest.mark.parametrize("victim", ["leader", pytest.param("follower", marks=pytest.mark.slow)])
def test_a_killed_worker_costs_at_most_the_step(start_job, wait_for_step, read_logs, reference, victim):
    job = start_job(3)
    wait_for_step(job, "w0", 7)
    leader = next(e["worker"] for e in read_events(job.events) if e["event"] == "leader")
    name = leader if victim == "leader" else next(w for w in job.processes if w != leader)
    job.processes[name].kill()
    codes = job.wait(90)
    assert codes.pop(name) == -signal.SIGKILL
    assert set(codes.values()) == {0}
    check(job, read_logs, reference, 2, lost=[name])
    recovered = [e for e in read_events(job.events) if e["event"] == "recovered"]
    assert len(recovered) == 2


def test_a_hung_worker_is_killed_when_its_lease_ends(start_job, wait_for_step, read_logs, reference):
    job = start_job(3, environment={"ELASTIC_TRAIN_LEASE_SECONDS": "1.5"})
    wait_for_step(job, "w0", 7)
    leader = next(e["worker"] for e in read_events(job.events) if e["event"] == "leader")
    os.kill(job.processes[leader].pid, signal.SIGSTOP)
    codes = job.wait(90)
    assert codes.pop(leader) == -signal.SIGKILL
    assert set(codes.values()) == {0}
    check(job, read_logs, reference, 2, lost=[leader])


def test_a_newcomer_that_dies_costs_nothing(start_job, wait_for_step, read_logs, reference):
    job = start_job(2, "--step-seconds", "1")
    wait_for_step(job, "w0", 0)
    (name,) = job.scale_out(1)
    while not any(e["worker"] == name and e["event"] == "ready" for e in read_events(job.events)):
        time.sleep(0.002)
    job.processes[name].kill()
    (job.folder / "hurry").touch()
    codes = job.wait(90)
    assert [codes[w] for w in ("w0", "w1")] == [0, 0]
    check(job, read_logs, reference, 2, lost=[name])
    assert all(len(entries) >= 1 for entries in read_logs(job).steps().values())


def test_a_script_without_notify_is_told_so(start_job, capfd):
    job = start_job(1, "--forget-to-notify")
    assert job.wait(60) == {"w0": 1}
    assert "expected notify_batch_end() after each optimizer step" in capfd.readouterr().err


@pytest.mark.slow
def test_a_newcomer_with_other_state_is_refused(start_job, wait_for_step, read_logs, reference, capfd):
    job = start_job(2, "--step-seconds", "1")
    wait_for_step(job, "w0", 0)
    command = [SCRIPT, str(job.folder)]
    with LocalJob(command, job.folder, prefix="odd") as other:
        other.scale_out(1)
        assert other.wait(90) == {"odd0": 1}
    (job.folder / "hurry").touch()
    assert set(job.wait(90).values()) == {0}
    check(job, read_logs, reference, 2)
    assert "worker 'odd0' cannot take the state of the job" in capfd.readouterr().err
