"""Readers of public cluster traces: Philly, Pollux workloads, Tiresias and Alibaba.

Each reader returns a :class:`~elastic_train.scheduler.jobs.Workload`. Pollux workloads come with measured step times of
six applications, from which scaling curves are fitted. The other traces know durations only, so their jobs follow an
Amdahl curve whose serial share is an argument. A Pollux workload has no job lengths either: ``POLLUX_GPU_HOURS`` gives
each application one, within the size class its paper puts it in.

Source: "Pollux" (OSDI 2021), section 4.1 for the form of the step time; we fit it by least squares without the overlap
exponent, since the traces give computation and synchronisation apart.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from elastic_train.errors import InputError, input_error
from elastic_train.scheduler.jobs import Workload, amdahl_curve

__all__ = ["POLLUX_GPU_HOURS", "StepModel", "read_alibaba", "read_philly", "read_pollux", "read_tiresias"]

# Length of one job on one GPU. Size classes of the paper: small below 1, medium 1 to 10, large 10 to 100, then extra.
POLLUX_GPU_HOURS = {"ncf": 0.3, "cifar10": 0.6, "bert": 3.0, "deepspeech2": 5.0, "yolov3": 20.0, "imagenet": 100.0}
_POLLUX_GPUS_PER_HOST = 4


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _rows(path: str | Path, columns: Mapping[str, Callable[[str], Any]]) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV that has some columns, in each of which every value can be converted."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    number, name, value = 1, "", None
    try:
        with opener(path, "rt", newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = sorted(set(columns) - set(reader.fieldnames or ()))
            if missing:
                raise input_error(str(path), f"columns {reader.fieldnames}", f"also {missing}", "name the right format")
            for row in reader:
                number = reader.line_num
                for name, convert in columns.items():
                    value = row[name]
                    convert(value)
                yield row
    except InputError:
        raise
    except (ValueError, TypeError, csv.Error) as error:
        remedy = "correct the line, or delete it"
        raise input_error(
            f"{path}, line {number}", {name: value}, "a CSV of jobs with times and counts", remedy
        ) from error
    if number == 1:
        raise input_error(str(path), "no rows", "at least one", "check the file")


@dataclass(frozen=True)
class StepModel:
    """Seconds of one training step, ``accumulations * (a + b * local_batch) + sync(gpus)``.

    Attributes:
        compute_constant_seconds: ``a``.
        compute_seconds_per_sample: ``b``.
        sync_one_host: Constant and seconds per GPU past two, on one host.
        sync_many_hosts: The same over several hosts.
        max_local_batch: Largest local batch that fits.
        median_error: Median relative error of the fit.
    """

    compute_constant_seconds: float
    compute_seconds_per_sample: float
    sync_one_host: tuple[float, float]
    sync_many_hosts: tuple[float, float]
    max_local_batch: int
    median_error: float

    def step_seconds(self, global_batch: int, num_gpus: np.ndarray, gpus_per_host: int) -> np.ndarray:
        """Return the seconds of one step at each number of GPUs, packed on as few hosts as possible."""
        num_gpus = np.asarray(num_gpus)
        accumulations = np.ceil(global_batch / (num_gpus * self.max_local_batch))
        local = global_batch / (num_gpus * accumulations)
        compute = self.compute_constant_seconds + self.compute_seconds_per_sample * local
        return accumulations * compute + self._sync(num_gpus, num_gpus > gpus_per_host)

    def _sync(self, num_gpus: np.ndarray, is_many_hosts: np.ndarray) -> np.ndarray:
        one = self.sync_one_host[0] + self.sync_one_host[1] * (num_gpus - 2)
        many = self.sync_many_hosts[0] + self.sync_many_hosts[1] * (num_gpus - 2)
        return np.where(num_gpus < 2, 0.0, np.where(is_many_hosts, many, one))

    @classmethod
    def fit(cls, scalability: str | Path, placements: str | Path) -> StepModel:
        """Fit the model to two files of measured steps, see ``read_pollux``."""
        columns = ("local_bsz", "step_time", "sync_time")
        points = [
            (int(row["num_nodes"]), int(row["num_replicas"]), *(float(row[name]) for name in columns))
            for row in _rows(scalability, {"num_nodes": int, "num_replicas": int, **dict.fromkeys(columns, _seconds)})
        ]
        points += [
            (len(row["placement"]), sum(map(int, row["placement"])), *(float(row[name]) for name in columns))
            for row in _rows(placements, {"placement": int, **dict.fromkeys(columns, _seconds)})
        ]
        hosts, gpus, local, step, sync = np.array(points).T
        a, b = _line(local, step - sync)
        one, many = (hosts == 1) & (gpus > 1), hosts > 1
        model = cls(a, b, _line(gpus[one] - 2, sync[one]), _line(gpus[many] - 2, sync[many]), int(local.max()), 0.0)
        predicted = a + b * local + model._sync(gpus, many)
        return cls(**{**vars(model), "median_error": float(np.median(np.abs(predicted / step - 1)))})


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fit ``y = a + b x`` with small relative errors and no negative term."""
    y = np.maximum(y, 1e-6)
    columns = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    a, b = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
    if b < 0:
        return float(np.median(y)), 0.0
    if a < 0:
        slopes = x / y
        return 0.0, float(slopes.sum() / (slopes**2).sum())
    return float(a), float(b)


def read_pollux(path: str | Path, applications: str | Path, max_gpus: int = 64) -> Workload:
    """Read a Pollux workload (``name,time,application,num_replicas,batch_size``).

    Args:
        path: The workload CSV.
        applications: Folder of ``APP-scalability.csv`` and ``APP-placements.csv``.
        max_gpus: Most GPUs a job may grow to.

    Returns:
        Jobs whose curves are in samples per second at their own global batch.
    """
    columns = {"name": str, "time": _seconds, "application": str, "num_replicas": int, "batch_size": int}
    rows = sorted(_rows(path, columns), key=_pollux_time)
    folder = Path(applications)
    kinds = sorted({(row["application"], int(row["batch_size"])) for row in rows})
    unknown = sorted({application for application, _ in kinds} - set(POLLUX_GPU_HOURS))
    if unknown:
        raise input_error("application", unknown, f"among {sorted(POLLUX_GPU_HOURS)}", "add its length in GPU hours")
    names = sorted({application for application, _ in kinds})
    models = {n: StepModel.fit(folder / f"{n}-scalability.csv", folder / f"{n}-placements.csv") for n in names}
    gpus, curves = np.arange(1, max_gpus + 1), np.zeros((len(kinds), max_gpus + 1))
    for row_index, (application, batch) in enumerate(kinds):
        curves[row_index, 1:] = batch / models[application].step_seconds(batch, gpus, _POLLUX_GPUS_PER_HOST)
    curve = np.array([kinds.index((row["application"], int(row["batch_size"]))) for row in rows])
    hours = np.array([POLLUX_GPU_HOURS[row["application"]] for row in rows])
    requested = np.minimum([int(row["num_replicas"]) for row in rows], max_gpus)
    submit = np.array([_pollux_time(row) for row in rows])
    widest = np.maximum(curves[curve, 1:].argmax(axis=1) + 1, requested)
    return _workload(
        submit, hours * 3600 * curves[curve, 1], requested, widest, curve, curves, [r["name"] for r in rows]
    )


def _pollux_time(row: dict[str, str]) -> float:
    return float(row["time"])


def read_philly(path: str | Path, serial_share: float = 0.02, max_growth: int = 2) -> Workload:
    """Read Philly jobs (``timestamp,duration,num_gpus,gpu_time,cluster``, plain or ``.gz``); clusters become groups."""
    columns = {"timestamp": datetime.fromisoformat, "duration": _seconds, "num_gpus": int, "cluster": str}
    rows = list(_rows(path, columns))
    submit = [datetime.fromisoformat(row["timestamp"]).timestamp() for row in rows]
    return _from_durations(
        submit, rows, "duration", "num_gpus", serial_share, max_growth, [row["cluster"] for row in rows]
    )


def read_tiresias(path: str | Path, serial_share: float = 0.02, max_growth: int = 2) -> Workload:
    """Read Tiresias jobs (``job_id,num_gpu,submit_time,…,duration,…``)."""
    rows = list(_rows(path, {"job_id": str, "num_gpu": int, "submit_time": _seconds, "duration": _seconds}))
    submit = [float(row["submit_time"]) for row in rows]
    return _from_durations(submit, rows, "duration", "num_gpu", serial_share, max_growth, None)


def read_alibaba(path: str | Path, serial_share: float = 0.02, max_growth: int = 2) -> Workload:
    """Read Alibaba GPU pods that ask for whole GPUs and have ended; their quality of service becomes the group."""
    times = dict.fromkeys(("deletion_time", "scheduled_time"), str)  # may be empty
    columns = {"name": str, "num_gpu": int, "gpu_milli": int, "qos": str, "creation_time": _seconds, **times}
    rows = [row for row in _rows(path, columns) if int(row["num_gpu"]) > 0 and row["scheduled_time"]]
    rows = [row for row in rows if int(row["gpu_milli"]) == 1000 and row["deletion_time"]]
    for row in rows:
        row["seconds"] = str(float(row["deletion_time"]) - float(row["scheduled_time"]))
    rows = [row for row in rows if float(row["seconds"]) > 0]
    submit = [float(row["creation_time"]) for row in rows]
    groups = [row["qos"] for row in rows]
    return _from_durations(submit, rows, "seconds", "num_gpu", serial_share, max_growth, groups)


def _from_durations(submit, rows, duration, gpus, serial_share, max_growth, groups) -> Workload:
    """Build a workload of jobs that ran ``duration`` seconds on the GPUs they asked for."""
    order = np.argsort(submit, kind="stable")
    submit = np.asarray(submit)[order]
    requested = np.array([int(row[gpus]) for row in rows])[order]
    seconds = np.array([float(row[duration]) for row in rows])[order]
    widest = requested * max_growth
    curves = amdahl_curve(int(widest.max()), serial_share)[None]
    work = np.maximum(seconds, 1.0) * curves[0, requested]
    group_names = sorted(set(groups)) if groups else ["all"]
    number = {name: index for index, name in enumerate(group_names)}
    group = np.array([number[groups[i]] for i in order]) if groups else None
    names = [rows[i].get("job_id") or rows[i].get("name") or f"job-{i}" for i in order]
    curve = np.zeros(len(rows), dtype=np.int64)
    return _workload(submit, work, requested, widest, curve, curves, names, group, group_names)


def _workload(submit, work, requested, widest, curve, curves, names, group=None, group_names=("all",)) -> Workload:
    ones = np.ones(len(submit), dtype=np.int64)
    return Workload(
        submit_seconds=np.asarray(submit, dtype=np.float64) - submit[0],
        work=np.asarray(work, dtype=np.float64),
        requested=np.asarray(requested, dtype=np.int64),
        min_gpus=ones,
        max_gpus=np.asarray(widest, dtype=np.int64),
        curve=np.asarray(curve, dtype=np.int64),
        curves=curves,
        group=0 * ones if group is None else group,
        names=list(names),
        group_names=list(group_names),
    )
