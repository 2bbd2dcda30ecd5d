"""The connected members of one generation: gloo for votes and for tensors of the CPU, NCCL for tensors of a GPU.

Each generation meets at a rendezvous of its own, served by the leader that proposed it, so nothing of an earlier
attempt can be in the way and nothing of it stays behind. Groups of two generations exist side by side: the new one is
connected by a background thread while the old one trains.

Members of a sharded job are named ``REPLICA.SHARD``. All of them vote together; sums and state stay among ``peers``,
the members of the same shard, one of each replica.

Callers may not assume that a failed operation leaves the group usable: drop it, which closes its connections and so
frees the members that still wait in it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.errors import WorkerLostError
from elastic_train.generation import Generation
from elastic_train.nccl import DeviceWork, connect_nccl
from elastic_train.stores.signed import sign

__all__ = ["Links", "connect", "serve_rendezvous", "shard_of"]


def serve_rendezvous(interface: str = "127.0.0.1") -> tuple[dist.TCPStore, str]:
    """Start a rendezvous on a free port; returns it, to be kept while members connect, and its ``host:port``."""
    with socket.socket() as listener:  # left to itself, torch's server binds to every address of the host
        listener.bind((interface, 0))
        listener.listen(512)
        port = listener.getsockname()[1]
        server = dist.TCPStore(
            interface, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
    return server, f"{interface}:{port}"


def shard_of(worker: str) -> str:
    """Return the shard that a worker of a sharded job is named after.

    >>> shard_of("w3.1")
    '1'
    """
    return worker.rpartition(".")[2]


def connect(
    generation: Generation,
    worker: str,
    interface: str = "127.0.0.1",
    timeout_seconds: float = 10.0,
    token: str = "",
    num_shards: int = 1,
    device: torch.device | str = "cpu",
) -> Links:
    """Connect this worker with all members of a generation.

    Args:
        generation: The generation; ``worker`` is one of its members.
        worker: This worker.
        interface: Address the sockets bind to.
        timeout_seconds: Longest wait for the members, and later for one operation.
        token: The job's token; members meet under keys that cannot be known without it.
        num_shards: Processes that hold the model together; above 1, members are named ``REPLICA.SHARD``.
        device: Where gradients are; on a CUDA device they are summed by NCCL.

    Returns:
        The links, once all members are there.

    Collective: all members of the generation.
    """
    host, _, port = generation.address.rpartition(":")
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    meeting = dist.PrefixStore(sign(token, str(generation.number), *generation.members), store)

    def join(name: str, members: Sequence[str], with_device: bool) -> Links:
        place, rank = dist.PrefixStore(name, meeting), members.index(worker)
        group = _connect_gloo(place, rank, len(members), interface, timeout)
        fast = None
        if with_device and torch.device(device).type == "cuda" and len(members) > 1:
            fast = connect_nccl(dist.PrefixStore("nccl", place), rank, len(members), device, timeout)
        return Links(generation.number, members, rank, group, fast, timeout_seconds)

    links = join("all", generation.members, num_shards == 1)
    if num_shards > 1:
        same = [member for member in generation.members if shard_of(member) == shard_of(worker)]
        links.peers = join(f"shard{shard_of(worker)}", same, True)
    return links


def _connect_gloo(store: Any, rank: int, size: int, interface: str, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


class Links:
    """What the members of one generation do together.

    Args:
        number: Number of the generation.
        members: Worker ids in order of rank.
        rank: This worker's rank.
        group: The gloo group of the members.
        fast: Their NCCL group, for tensors of a GPU.
        timeout_seconds: Longest wait for one operation of the NCCL group.

    Attributes:
        number: Number of the generation.
        members: Worker ids in order of rank.
        rank: This worker's rank.
        size: Number of members.
        peers: The members that hold the same part of the state as this one; all of them unless it is sharded.
    """

    def __init__(
        self,
        number: int,
        members: Sequence[str],
        rank: int,
        group: Any,
        fast: Any = None,
        timeout_seconds: float = 10.0,
    ):
        self.number, self.members, self.rank, self.size = number, tuple(members), rank, len(members)
        self._group, self._fast, self._timeout_seconds = group, fast, timeout_seconds
        self.peers = self

    def newest_peers(self, steps: Sequence[int]) -> list[int]:
        """Return the ranks, among ``peers``, of those that have the newest state.

        Args:
            steps: Steps of each member, plus one; 0 for one that has none. All 0 makes the first peer's the state.

        Raises:
            WorkerLostError: No peer has it: of a sharded state, a part is lost.
        """
        newest = max(steps)
        if not newest:
            return [0]
        step_of = dict(zip(self.members, steps, strict=True))
        found = [rank for rank, member in enumerate(self.peers.members) if step_of[member] == newest]
        if not found:
            raise WorkerLostError(
                f"no worker of shard {shard_of(self.members[self.rank])} has the state of step {newest - 1}: expected "
                f"one of {list(self.peers.members)}; start the job from its last checkpoint"
            )
        return found

    def sum_async(self, tensor: Tensor) -> Any:
        """Start summing a tensor in place over all members; returns a handle with ``wait()``."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        if self._fast is not None and tensor.is_cuda:
            return DeviceWork(self._fast.allreduce([tensor], options), self._timeout_seconds)
        return self._group.allreduce([tensor], options)

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        """Return the smallest of each of some integers over all members."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([tensor], options).wait()
        return tensor.tolist()

    def gather(self, number: int) -> list[int]:
        """Return one integer of each member, in order of rank."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        self.sum_async(numbers).wait()
        return numbers.tolist()

    def send_async(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Start sending a contiguous tensor to a member; one of a GPU goes through the host's memory."""
        return self._group.send([tensor.cpu()], rank, tag)

    def receive_async(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Start filling a contiguous tensor from a member; one of a GPU is filled by the handle's ``wait()``."""
        if not tensor.is_cuda:
            return self._group.recv([tensor], rank, tag)
        host = torch.empty_like(tensor, device="cpu")
        return _Fill(self._group.recv([host], rank, tag), host, tensor)

    def broadcast_async(self, tensor: Tensor, rank: int) -> Any:
        """Start sending a contiguous tensor of one member to all others, into theirs."""
        options: Any = dist.BroadcastOptions()
        options.rootRank = rank
        if self._fast is not None and tensor.is_cuda:
            return DeviceWork(self._fast.broadcast([tensor], options), self._timeout_seconds)
        return self._group.broadcast([tensor], options)

    def drop(self) -> None:
        """Close the connections; what waits in them fails."""
        if self._fast is not None:
            self._fast.abort()
        self._group = self._fast = None
        if self.peers is not self:
            self.peers.drop()

    def retire(self) -> None:
        """Close the connections in the background; for a group that no member waits in.

        Closing joins the group's threads, which takes milliseconds.
        """
        held = [self._group, self._fast]
        self._group = self._fast = None
        threading.Thread(target=_close, args=(held,), daemon=True).start()
        if self.peers is not self:
            self.peers.retire()


class _Fill:
    """A tensor of the host's memory on its way to one of a GPU."""

    def __init__(self, work: Any, host: Tensor, tensor: Tensor):
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._host)


def _close(held: list[Any]) -> None:
    """Give up the only references to the groups of a generation."""
    if held[1] is not None:
        held[1].abort()
    held.clear()
