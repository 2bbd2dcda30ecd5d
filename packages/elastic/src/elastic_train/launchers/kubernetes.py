"""Manifests for Kubernetes: a served store behind a headless service, and an indexed Job whose pods are workers.

The Job is an elastic indexed one: its parallelism is changed while it runs, and each pod is a worker of its own. A pod
that is deleted, evicted or scaled away gets SIGTERM and leaves in good order within its grace period; a hook asks for
that through the store as well, for programs under a shell that keeps the signal to itself. The token comes from a
Secret that is made apart, so that manifests can be shown to anybody.

Callers may not assume that manifests were applied to a cluster: they are checked as YAML and for what they must hold.
With a store in etcd the first two objects are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import input_error
from elastic_train.launchers.manifest import check_name, check_workers, to_yaml

__all__ = ["KubernetesJob", "kubernetes_manifests"]

_PORT = 7070


@dataclass(frozen=True)
class KubernetesJob:
    """What the manifests are made of.

    Attributes:
        name: Name of the job, also its job id.
        command: Program and arguments of a worker.
        image: Container image with the program and elastic-train.
        min_workers: Pods to start with.
        max_workers: Most workers.
        store: Address of a store that is there already; empty for one that a pod serves.
        gpus: GPUs of a pod.
        drain_seconds: Grace period of a pod.
        namespace: Where the objects live.
    """

    name: str
    command: Sequence[str]
    image: str
    min_workers: int = 1
    max_workers: int = 64
    store: str = ""
    gpus: int = 0
    drain_seconds: int = 120
    namespace: str = "default"

    def __post_init__(self) -> None:
        check_name(self.name)
        check_name(self.namespace)
        check_workers(self.command, self.min_workers, self.max_workers, self.drain_seconds)
        if not re.fullmatch(r"[\w][\w.:/@-]*", self.image):
            raise input_error("image", self.image, "a container image", "write for example registry/train:1")
        if self.gpus < 0:
            raise input_error("gpus", self.gpus, "at least 0", "use 0 for workers without a GPU")


def kubernetes_manifests(job: KubernetesJob) -> str:
    """Return the manifests as one YAML text."""
    objects = [_workers(job)] if job.store else [_service(job), _store(job), _workers(job)]
    secret = f"create secret generic {job.name}-token --from-literal=token=$(openssl rand -hex 16)"
    patch = '\'{"spec":{"parallelism":4,"completions":4}}\''
    return "\n".join([
        f"# The token, once:  kubectl -n {job.namespace} {secret}",
        f"# Other sizes:      kubectl -n {job.namespace} patch job {job.name} --type=merge -p {patch}",
        *(f"---\n{to_yaml(one)}" for one in objects),
        "",
    ])  # fmt: skip


def _meta(job: KubernetesJob, name: str, role: str) -> dict[str, Any]:
    return {"name": name, "namespace": job.namespace, "labels": _labels(job, role)}


def _labels(job: KubernetesJob, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": job.name, "app.kubernetes.io/component": role}


def _service(job: KubernetesJob) -> dict[str, Any]:
    ports = [{"name": "store", "port": _PORT}]
    spec = {"clusterIP": "None", "selector": _labels(job, "store"), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(job, f"{job.name}-store", "store"), "spec": spec}


def _store(job: KubernetesJob) -> dict[str, Any]:
    command = ["elastic-train", "serve", "--interface", "$(ELASTIC_TRAIN_INTERFACE)", "--port", str(_PORT)]
    container = {
        "name": "store", "image": job.image, "command": command, "env": _environment(job),
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False},
    }  # fmt: skip
    template = {"metadata": {"labels": _labels(job, "store")}, "spec": {"containers": [container]}}
    spec = {
        "serviceName": f"{job.name}-store", "replicas": 1, "selector": {"matchLabels": _labels(job, "store")},
        "template": template,
    }  # fmt: skip
    meta = _meta(job, f"{job.name}-store", "store")
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": spec}


def _workers(job: KubernetesJob) -> dict[str, Any]:
    store = job.store or f"tcp://{job.name}-store.{job.namespace}.svc:{_PORT}"
    place = {
        "ELASTIC_TRAIN_STORE": store, "ELASTIC_TRAIN_JOB": job.name,
        "ELASTIC_TRAIN_MIN_WORKERS": str(job.min_workers), "ELASTIC_TRAIN_MAX_WORKERS": str(job.max_workers),
    }  # fmt: skip
    leave = 'elastic-train scale-in --store "$ELASTIC_TRAIN_STORE" --job "$ELASTIC_TRAIN_JOB" "$ELASTIC_TRAIN_WORKER"'
    container = {
        "name": "worker", "image": job.image,
        "command": [part.replace("$", "$$") for part in job.command],  # Kubernetes would put variables in
        "env": [
            *({"name": name, "value": value} for name, value in place.items()),
            {"name": "ELASTIC_TRAIN_WORKER", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            *_environment(job),
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", f"{leave} || true"]}}},
        "securityContext": {"allowPrivilegeEscalation": False},
        **({"resources": {"limits": {"nvidia.com/gpu": job.gpus}}} if job.gpus else {}),
    }  # fmt: skip
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": job.drain_seconds, "containers": [container],
    }  # fmt: skip
    spec = {
        "completionMode": "Indexed", "completions": job.min_workers, "parallelism": job.min_workers,
        "backoffLimit": 6 * job.max_workers,
        "template": {"metadata": {"labels": _labels(job, "worker")}, "spec": pod},
    }  # fmt: skip
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(job, job.name, "worker"), "spec": spec}


def _environment(job: KubernetesJob) -> list[dict[str, Any]]:
    """Return the variables with the token, from its Secret, and the pod's own address."""
    secret = {"secretKeyRef": {"name": f"{job.name}-token", "key": "token"}}
    return [
        {"name": "ELASTIC_TRAIN_TOKEN", "valueFrom": secret},
        {"name": "ELASTIC_TRAIN_INTERFACE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
