"""A model sharded inside a replica, over replicas that come and go (HSDP, elastic on the replicate dimension).

A replica is a fixed set of processes that hold the model together: they meet once, and torch's ``fully_shard`` splits
the parameters over them. Replicas join and leave as a whole. Every process takes its share of the global batch:

    forward, backward       parameters gathered, gradients summed and split, inside the replica (fully_shard)
    finish                  each shard's gradient summed over the same shard of all replicas
    vote, switch            all processes of all replicas together
    newcomer replica        each of its processes takes its shard from the same shard of the old replicas

The loss is a mean over a process's own samples; its gradient is weighted by the process's share of the global batch on
the way back, before any sum, so that the result is the mean over the batch for any split of it.

Callers may not assume that a replica survives a process: when one is lost, its fellows stop as well.

Source: the elastic replicate dimension is that of torchft's HSDP; sharding is torch's own.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_train.errors import WorkerLostError, input_error
from elastic_train.gradients import GradientSum
from elastic_train.group import Links, serve_rendezvous, shard_of
from elastic_train.logical import LogicalGradients
from elastic_train.stores.signed import sign

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elastic_train.job import Job

__all__ = ["ShardedGradients", "gradients_of", "is_sharded", "replica_mesh"]


def replica_mesh(job: Job, timeout_seconds: float = 60.0) -> DeviceMesh:
    """Meet the other processes of this replica; returns their mesh, for ``fully_shard(module, mesh=...)``.

    Args:
        job: The job of this process, started with several shards.
        timeout_seconds: Longest wait for the other processes, and later for one operation among them.

    Raises:
        InputError: The job was not started with shards.
        WorkerLostError: The others did not come.

    Collective: all processes of the replica, once, before ``wrap``.
    """
    from torch.distributed.device_mesh import init_device_mesh

    agent = job.agent
    if agent.num_shards < 2:
        raise input_error("shards", agent.num_shards, "at least 2", "start the job with elastic-train run --shards 2")
    timeout = timedelta(seconds=timeout_seconds)
    shard, key = int(shard_of(agent.worker)), f"replica/{agent.worker.rpartition('.')[0]}"
    try:
        if shard == 0:
            server, address = serve_rendezvous(agent.interface)
            agent.store.put(f"{agent.job_id}/{key}", {"address": address}, None, timeout_seconds)
        else:
            server, address = None, _wait_for_address(job, key, timeout_seconds)
        host, _, port = address.rpartition(":")
        meeting = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_name(agent.interface))
        place = dist.PrefixStore(sign(agent.token, key), meeting)
        dist.init_process_group("gloo", store=place, rank=shard, world_size=agent.num_shards, timeout=timeout)
        dist.barrier()
    except (RuntimeError, TimeoutError) as error:
        raise WorkerLostError(
            f"the replica of worker {agent.worker!r} is not complete: expected its {agent.num_shards} processes within "
            f"{timeout_seconds:g} s, but {str(error)[:200]}; start all of them together"
        ) from error
    if shard == 0:
        agent.store.delete(f"{agent.job_id}/{key}")
    del server  # all have met
    return init_device_mesh("cpu", (agent.num_shards,))


def _wait_for_address(job: Job, key: str, timeout_seconds: float) -> str:
    deadline = time.monotonic() + timeout_seconds
    while (entry := job.agent.store.get(f"{job.agent.job_id}/{key}")) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("shard 0 did not start")
        time.sleep(0.02)
    return entry.value["address"]


def interface_name(address: str) -> str:
    """Return the name of the network interface that has an address, as gloo wants it.

    >>> interface_name("127.0.0.1")
    'lo'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]  # SIOCGIFADDR
            except OSError:
                continue  # has no address
            if socket.inet_ntoa(found) == address:
                return name
    raise input_error("interface", address, "an IPv4 address of this host", "see ip addr")


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a module or a part of it."""
    return any(hasattr(part, "set_gradient_divide_factor") for part in module.modules())


def gradients_of(module: nn.Module, num_logical: int) -> GradientSum | LogicalGradients | ShardedGradients:
    """Return what sums the gradients of a module: in logical shares, of shards, or of whole copies."""
    if not is_sharded(module):
        return LogicalGradients(module, num_logical) if num_logical else GradientSum(module)
    if num_logical:
        raise input_error("logical_workers", num_logical, "0 for a sharded module", "leave logical_workers out")
    return ShardedGradients(module)


class _Weigh(torch.autograd.Function):
    """The identity whose gradient is weighted by the present share."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, owner: ShardedGradients) -> Tensor:
        ctx.owner = owner
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.owner.share, None


class ShardedGradients:
    """The sum of a sharded module's gradients over the replicas of the present generation.

    Args:
        module: The module, after ``fully_shard``; its outputs must be tensors, in lists or dicts if need be.
        bucket_bytes: Size from which gradients that travel together are enough.

    Attributes:
        links: All members; sums run over ``links.peers``.
        share: This process's part of the global batch, in ``[0, 1]``.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 << 20):
        self.links: Links | None = None
        self.share = 1.0
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._bucket_bytes = bucket_bytes
        for part in module.modules():
            if hasattr(part, "set_gradient_divide_factor"):  # shares are weights already: sum, do not average
                setters: Any = part
                setters.set_gradient_divide_factor(1.0)
                setters.set_force_sum_reduction_for_comms(True)
        module.register_forward_hook(lambda _, __, output: self._weigh(output))

    def _weigh(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return _Weigh.apply(output, self) if output.requires_grad else output
        if isinstance(output, dict):
            return {name: self._weigh(value) for name, value in output.items()}
        if isinstance(output, list | tuple):
            return type(output)(self._weigh(value) for value in output)
        return output

    def finish(self) -> None:
        """Sum each shard's gradient over the replicas.

        Raises:
            RuntimeError: A member was lost.
        """
        buckets = self._buckets()
        if self.links is None or self.links.peers.size == 1:
            return
        sent: list[tuple[Any, Tensor, list[Tensor]]] = []
        for gradients in buckets:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            sent.append((self.links.peers.sum_async(flat), flat, gradients))
        for work, flat, gradients in sent:
            work.wait()
            parts = flat.split([gradient.numel() for gradient in gradients])
            for part, gradient in zip(parts, gradients, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _buckets(self) -> list[list[Tensor]]:
        """Return the local gradients in lists of one type each; a parameter without one counts as zero."""
        buckets: list[list[Tensor]] = []
        size = 0
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with torch.no_grad():
                gradient: Any = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if not buckets or size >= self._bucket_bytes or buckets[-1][0].dtype != local.dtype:
                buckets.append([])
                size = 0
            buckets[-1].append(local)
            size += local.nbytes
        return buckets

    def reset(self) -> None:
        """Forget the gradients of a step that failed."""
        for parameter in self._parameters:
            parameter.grad = None
