"""Paths and workloads shared by the tests."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from elastic_train.events import read_events
from elastic_train.launchers import LocalJob
from elastic_train.scheduler import Workload, amdahl_curve

SCRIPT = str(Path(__file__).parent / "distributed" / "training_script.py")


@pytest.fixture(scope="session")
def traces() -> Path:
    """Return the folder of public traces, named by ``SEXTET_DATA`` or beside the repository; skip without it."""
    root = Path(os.environ.get("SEXTET_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
    if not (root / "traces").is_dir():
        pytest.skip(f"no folder of traces at {root / 'traces'}; name its parent in SEXTET_DATA")
    return root / "traces"


@pytest.fixture
def make_workload():
    """Return a function that makes random jobs in ``num_groups`` groups."""

    def make(num_jobs: int = 40, num_gpus: int = 16, seed: int = 0, num_groups: int = 1) -> Workload:
        rng = np.random.default_rng(seed)
        requested = rng.integers(1, max(num_gpus // 2, 2), num_jobs)
        return Workload(
            submit_seconds=np.concatenate([[0.0], np.sort(rng.uniform(0, 3600 * 4, num_jobs - 1))]),
            work=rng.lognormal(8.0, 1.0, num_jobs),
            requested=requested,
            min_gpus=np.ones(num_jobs, dtype=np.int64),
            max_gpus=np.minimum(requested * 2, num_gpus),
            curve=rng.integers(0, 2, num_jobs),
            curves=np.stack([amdahl_curve(num_gpus, 0.02), amdahl_curve(num_gpus, 0.2)]),
            group=rng.integers(0, num_groups, num_jobs),
        )

    return make


class Logs:
    """What the workers of a job wrote."""

    def __init__(self, folder: Path):
        self.lines = {
            path.stem: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(folder.glob("w*.jsonl"))
        }

    def steps(self) -> dict[int, list[dict]]:
        """Return the entries of each step, over all workers."""
        found: dict[int, list[dict]] = {}
        for lines in self.lines.values():
            for line in lines:
                if "ids" in line:
                    found.setdefault(line["step"], []).append(line)
        return dict(sorted(found.items()))

    def losses(self) -> list[float]:
        """Return the loss of each global batch."""
        return [sum(entry["loss"] for entry in entries) for entries in self.steps().values()]

    def finals(self) -> dict[str, dict]:
        """Return the last line of each worker that trained to the end."""
        return {name: lines[-1] for name, lines in self.lines.items() if lines and lines[-1].get("has_left") is False}

    def samples(self) -> dict[int, list[int]]:
        """Return the samples that each epoch used, in order of number."""
        found: dict[int, list[int]] = {}
        for entries in self.steps().values():
            for entry in entries:
                found.setdefault(entry["epoch"], []).extend(entry["ids"])
        return {epoch: sorted(ids) for epoch, ids in found.items()}

    def longest_step(self) -> tuple[float, float]:
        """Return the longest and the median seconds between the ends of two steps, over all workers."""
        seconds = [line["seconds"] for lines in self.lines.values() for line in [x for x in lines if "ended" in x][2:]]
        return max(seconds), float(np.median(seconds))


@pytest.fixture
def start_job(tmp_path):
    """Return a function that starts the training script of the tests on local workers."""
    started: list[LocalJob] = []

    def start(num_workers: int, *arguments: str, script: str = SCRIPT, **settings) -> LocalJob:
        folder = tmp_path / f"job{len(started)}"
        folder.mkdir()
        environment = {"OMP_NUM_THREADS": "1", **settings.pop("environment", {})}
        command = [script, str(folder), *arguments]
        min_workers = settings.pop("min_workers", num_workers)
        job = LocalJob(command, folder, min_workers=min_workers, environment=environment, **settings)
        started.append(job)
        job.scale_out(num_workers)
        return job

    yield start
    for job in started:
        job.close()


@pytest.fixture
def wait_for_step():
    """Return a function that waits until a worker has ended a step."""

    def wait(job: LocalJob, worker: str, step: int, seconds: float = 60) -> None:
        path, deadline = job.folder / f"{worker}.jsonl", time.time() + seconds
        while time.time() < deadline:
            if path.exists() and f'"ended": {step},' in path.read_text():
                return
            time.sleep(0.01)
        raise TimeoutError(f"{worker} did not end step {step} within {seconds} s")

    return wait


@pytest.fixture
def wait_for_size():
    """Return a function that waits until a generation of some size runs."""

    def wait(job: LocalJob, size: int, seconds: float = 60) -> None:
        deadline = time.time() + seconds
        while time.time() < deadline:
            events = read_events(job.events) if job.events.exists() else []
            if any(event["event"] == "commit" and len(event["members"]) == size for event in events):
                return
            time.sleep(0.01)
        raise TimeoutError(f"no generation of {size} workers within {seconds} s")

    return wait


@pytest.fixture
def read_logs():
    """Return a function that reads what the workers of a job wrote."""
    return lambda job: Logs(job.folder)
