"""The command line, in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from elastic_train.cli import main
from elastic_train.errors import InputError, JobStateError
from elastic_train.events import EventLog
from elastic_train.generation import GenerationLog
from elastic_train.launchers import LocalJob
from elastic_train.session import current_job, init
from elastic_train.stores import open_store


def test_simulate_prints_json(traces, capsys):
    trace = traces / "tiresias" / "60_job.csv"
    assert main(["simulate", "--trace", str(trace), "--format", "tiresias", "--policy", "fifo", "pps", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["policy"] for r in results] == ["fifo", "pps"]
    assert all(r["num_jobs"] == 60 for r in results)


def test_status_leave_and_events_of_a_job(tmp_path, capsys):
    store = open_store(f"file://{tmp_path}")
    GenerationLog(store, "job/generation").propose(1, ("a", "b"), "", "start")
    address = f"file://{tmp_path}"
    assert main(["status", "--store", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["members"] == ["a", "b"]
    assert main(["scale-in", "--store", address, "b"]) == 0
    assert store.get("job/leave/b") is not None
    assert main(["scale-in", "--store", address, "z"]) == 2
    assert "job 'job' has no workers ['z']" in capsys.readouterr().err
    assert main(["scale-in", "--store", address, "a", "b"]) == 2
    store.close()
    EventLog(tmp_path / "events.jsonl", "a").write("ready", number=1)
    assert main(["events", str(tmp_path / "events.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["events"][0]["event"] == "ready"


def test_wrong_input_is_named(tmp_path, monkeypatch):
    for name in ("STORE", "JOB"):
        monkeypatch.delenv(f"ELASTIC_TRAIN_{name}", raising=False)
    with pytest.raises(InputError, match=r"call it first"):
        current_job()
    with pytest.raises(InputError, match="start the script with elastic-train run"):
        init()
    with pytest.raises(InputError, match="correct the limits"):
        init(f"file://{tmp_path}", "job", min_workers=3, max_workers=2)
    store = open_store(f"file://{tmp_path}")
    store.put("job/member/a", {})
    with pytest.raises(JobStateError, match="worker id 'a' is taken in job 'job'"):
        init(f"file://{tmp_path}", "job", worker_id="a")
    GenerationLog(store, "old/generation").propose(1, ("a",), "", "start")
    with pytest.raises(JobStateError, match="choose another job id"):
        init(f"file://{tmp_path}", "old", worker_id="b")
    store.close()
    with pytest.raises(JobStateError, match="expected at most 2"):
        LocalJob(["none.py"], tmp_path, max_workers=2).scale_out(3)
    assert main(["run", "--workers", "two", "none.py"]) == 2


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("heeds", [True, False], ids=["heeds", "ignores"])
def test_a_terminated_command_leaves_no_worker_behind(tmp_path, heeds):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    ignore = "" if heeds else "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script.write_text(
        f"import os, signal, time\n{ignore}open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "elastic_train", "run", "--workers", "2:2", "--folder", str(tmp_path), str(script)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not pids.exists() or len(pids.read_text().splitlines()) < 2:
                assert process.poll() is None
                time.sleep(0.05)
            workers = [int(line) for line in pids.read_text().splitlines()]
            while any(map(is_running, workers)):  # the first asks the workers, the next ends the command
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            assert process.wait() != 0
        finally:
            process.kill()
