"""Batch scripts for Slurm: one that serves the job's store, one whose array members are workers.

Every member of the array is a worker of its own, so members are added by submitting more of the same script and leave
one by one: Slurm's SIGTERM, be it from ``scancel --signal=TERM``, a preemption or the warning ahead of the time limit,
lets a worker leave in good order. With a store in etcd the first script is not needed, and no process of the job is
one that must not end.

Callers may not assume that scripts were tried on a cluster: they are checked as shell scripts, and their commands
against a stand-in of ``srun``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.errors import input_error
from elastic_train.launchers.manifest import check_name, check_workers

__all__ = ["SlurmJob", "slurm_store_script", "slurm_worker_script"]


@dataclass(frozen=True)
class SlurmJob:
    """What the scripts are made of.

    Attributes:
        name: Name of the job, also its job id.
        command: Program and arguments of a worker.
        folder: Folder that all hosts share, for token, events and the store's address.
        min_workers: Members to start with.
        max_workers: Most members.
        store: Address of a store that is there already; empty for one that the first script serves.
        device: Network device whose address workers bind to; empty for the host's first address.
        drain_seconds: How long before the time limit workers are asked to leave.
        options: More options of ``sbatch`` for workers, such as ``--gpus-per-task=1``.
    """

    name: str
    command: Sequence[str]
    folder: str
    min_workers: int = 1
    max_workers: int = 64
    store: str = ""
    device: str = ""
    drain_seconds: int = 120
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        check_workers(self.command, self.min_workers, self.max_workers, self.drain_seconds)
        if not self.folder.startswith("/") or "\n" in self.folder:
            raise input_error("folder", self.folder, "an absolute path that all hosts share", "correct it")
        if self.device and not re.fullmatch(r"[\w.:-]{1,15}", self.device):
            raise input_error("device", self.device, "the name of a network device", "see ip addr")
        for option in self.options:
            if not option.startswith("--") or not option.isprintable():
                raise input_error("options", option, "options such as --gpus-per-task=1", "correct it")


def slurm_store_script(job: SlurmJob) -> str:
    """Return the script that serves the job's store; submit it first."""
    return "\n".join([
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}-store",
        "#SBATCH --ntasks=1 --cpus-per-task=1",
        f"#SBATCH --output={_directive(job.folder)}/store-%j.log",
        "set -euo pipefail",
        *_place(job),
        'exec elastic-train serve --interface "$ELASTIC_TRAIN_INTERFACE" --folder "$folder"',
        "",
    ])  # fmt: skip


def slurm_worker_script(job: SlurmJob) -> str:
    """Return the script whose array members are workers."""
    if job.store:
        store = [f"export ELASTIC_TRAIN_STORE={shlex.quote(job.store)}"]
    else:
        store = [
            'until [ -s "$folder/store.address" ]; do sleep 1; done',
            'ELASTIC_TRAIN_STORE=$(cat "$folder/store.address")',
            "export ELASTIC_TRAIN_STORE",
        ]
    return "\n".join([
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --array=0-{job.min_workers - 1}",
        "#SBATCH --ntasks=1",
        f"#SBATCH --signal=TERM@{job.drain_seconds}",
        f"#SBATCH --output={_directive(job.folder)}/worker-%A-%a.log",
        *(f"#SBATCH {option}" for option in job.options),
        f"# more workers:  sbatch --array=0-1 {job.name}-workers.sbatch",
        "# one leaves:    scancel --signal=TERM JOBID_TASKID",
        "set -euo pipefail",
        *_place(job),
        *store,
        f"export ELASTIC_TRAIN_JOB={job.name} ELASTIC_TRAIN_WORKER=s$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID",
        f"export ELASTIC_TRAIN_MIN_WORKERS={job.min_workers} ELASTIC_TRAIN_MAX_WORKERS={job.max_workers}",
        f'export ELASTIC_TRAIN_EVENTS="$folder/{job.name}-events-$(hostname).jsonl"',
        f"exec srun --ntasks=1 {shlex.join(job.command)}",
        "",
    ])  # fmt: skip


def _place(job: SlurmJob) -> list[str]:
    """Return the lines that set folder, token and interface."""
    if job.device:
        address = f"ip -4 -o addr show dev {job.device} | awk '{{print $4}}' | cut -d/ -f1 | head -n 1"
    else:
        address = "hostname -I | awk '{print $1}'"
    return [
        f"folder={shlex.quote(job.folder)}",
        'mkdir -p "$folder"',
        "umask 077",
        'if [ ! -s "$folder/token" ]; then  # whole and only once, whoever comes first',
        '  scratch=$(mktemp "$folder/.token-XXXXXX")',
        '  od -An -N16 -tx1 /dev/urandom | tr -d " \\n" > "$scratch"',
        '  ln "$scratch" "$folder/token" 2> /dev/null || true',
        '  rm "$scratch"',
        "fi",
        'ELASTIC_TRAIN_TOKEN=$(cat "$folder/token")',
        f"ELASTIC_TRAIN_INTERFACE=$({address})",
        "export ELASTIC_TRAIN_TOKEN ELASTIC_TRAIN_INTERFACE",
    ]


def _directive(text: str) -> str:
    """Quote a path for a line that Slurm reads, in which ``%`` stands for a pattern."""
    quoted = text.replace("%", "%%")
    return f'"{quoted}"' if " " in text else quoted
