"""The sub-commands ``launch``, which writes what Slurm and Kubernetes start, and ``serve``, which serves a store."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Any

from core_kernels.console import CommandLine, say
from elastic_train.errors import input_error

__all__ = ["add_commands", "read_limits"]


def read_limits(text: str) -> tuple[int, int]:
    """Return fewest and most workers of ``N`` or ``MIN:MAX``.

    >>> read_limits("2:8")
    (2, 8)
    """
    least, _, most = text.partition(":")
    if not least.isdigit() or not (most.isdigit() or not most):
        raise input_error("workers", text, "N or MIN:MAX", "write for example --workers 2:8")
    return int(least), int(most or least)


def _launch(args: argparse.Namespace) -> dict[str, Any]:
    return _write_slurm(args) if args.target == "slurm" else _write_kubernetes(args)


def _command(args: argparse.Namespace) -> list[str]:
    return [*(["python"] if args.script.endswith(".py") else []), args.script, *args.arguments]


def _write_slurm(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.launchers.slurm import SlurmJob, slurm_store_script, slurm_worker_script

    least, most = read_limits(args.workers)
    job = SlurmJob(
        args.job, _command(args), str(Path(args.folder).absolute()), least, most, args.store, args.device,
        args.drain_seconds, args.option,
    )  # fmt: skip
    scripts = {f"{job.name}-workers.sbatch": slurm_worker_script(job)}
    if not job.store:
        scripts = {f"{job.name}-store.sbatch": slurm_store_script(job), **scripts}
    files = _write(args.out, scripts)
    for file in files:
        say(f"wrote {file}")
    say("submit:      " + "; ".join(f"sbatch {file}" for file in files))
    say(f"two more:    sbatch --array=0-1 {files[-1]}")
    say("one leaves:  scancel --signal=TERM JOBID_TASKID")
    return {"files": files}


def _write_kubernetes(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.launchers.kubernetes import KubernetesJob, kubernetes_manifests

    if not args.image:
        raise input_error("image", args.image, "a container image", "pass --image")
    least, most = read_limits(args.workers)
    job = KubernetesJob(
        args.job, _command(args), args.image, least, most, args.store, args.gpus, args.drain_seconds, args.namespace
    )
    files = _write(args.out, {f"{job.name}.yaml": kubernetes_manifests(job)})
    say(f"wrote {files[0]}: its first lines say how to make the token and how to resize")
    say(f"start: kubectl apply -f {files[0]}")
    return {"files": files}


def _write(folder: Path, texts: dict[str, str]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [str(folder / name) for name in texts]


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    from elastic_train.stores import StoreServer

    token = os.environ.get("ELASTIC_TRAIN_TOKEN")
    if not token:
        token = secrets.token_hex(16)
        say(f"token of the job: {token}")
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    with StoreServer(token, args.interface, args.port) as server:
        if args.folder:
            args.folder.mkdir(parents=True, exist_ok=True)
            scratch = args.folder / f".store.address-{os.getpid()}"
            scratch.write_text(server.address + "\n")
            scratch.rename(args.folder / "store.address")
        say(f"serving {server.address} until SIGTERM")
        end.wait()
        if args.folder:
            (args.folder / "store.address").unlink(missing_ok=True)
        return {"store": server.address, "refused": server.num_refused}


def add_commands(cli: CommandLine) -> None:
    """Add the sub-commands."""
    launch = cli.command(
        "launch", _launch, "write what Slurm or Kubernetes needs to start a job",
        "elastic-train launch slurm --workers 2:8 --folder /shared/job train.py\n"
        "elastic-train launch kubernetes --workers 2:8 --image registry/train:1 train.py",
    )  # fmt: skip
    launch.add_argument("target", choices=["slurm", "kubernetes"])
    launch.add_argument("--workers", default="1:64", help="workers to start, or MIN:MAX; starts MIN")
    launch.add_argument("--job", default="job", help="job id, and name of what is written")
    launch.add_argument(
        "--store", default="", help="address of a store that is there already, such as etcd://HOST:2379"
    )
    launch.add_argument("--out", type=Path, default=Path(), help="folder to write to")
    launch.add_argument("--drain-seconds", type=int, default=120, help="time that a worker has to leave in good order")
    launch.add_argument("--folder", default=".", help="Slurm: folder that all hosts share")
    launch.add_argument("--device", default="", help="Slurm: network device that workers bind to, such as ib0")
    launch.add_argument("--option", action="append", default=[], metavar="=OPTION",
                        help="Slurm: more for sbatch, --option=--gpus-per-task=1; may be repeated")  # fmt: skip
    launch.add_argument("--image", default="", help="Kubernetes: container image")
    launch.add_argument("--gpus", type=int, default=0, help="Kubernetes: GPUs of a pod")
    launch.add_argument("--namespace", default="default", help="Kubernetes: namespace")
    launch.add_argument("script")
    launch.add_argument("arguments", nargs=argparse.REMAINDER)
    serve = cli.command(
        "serve", _serve, "serve the store of jobs over TCP, until SIGTERM",
        "ELASTIC_TRAIN_TOKEN=... elastic-train serve --interface 10.0.0.1 --port 7070",
    )  # fmt: skip
    serve.add_argument("--interface", default="127.0.0.1", help="address of this host to bind to")
    serve.add_argument("--port", type=int, default=0, help="port; 0 takes a free one")
    serve.add_argument("--folder", type=Path, help="write the address to store.address in this folder")
