"""The connected members of one generation, on gloo.

Each generation meets at a rendezvous of its own, served by the leader that proposed it, so nothing of an earlier
attempt can be in the way and nothing of it stays behind. Groups of two generations exist side by side: the new one is
connected by a background thread while the old one trains.

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

from elastic_train.generation import Generation
from elastic_train.stores.signed import sign

__all__ = ["Links", "connect", "serve_rendezvous"]


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


def connect(
    generation: Generation,
    worker: str,
    interface: str = "127.0.0.1",
    timeout_seconds: float = 10.0,
    token: str = "",
) -> Links:
    """Connect this worker with all members of a generation.

    Args:
        generation: The generation; ``worker`` is one of its members.
        worker: This worker.
        interface: Address the sockets bind to.
        timeout_seconds: Longest wait for the members, and later for one operation.
        token: The job's token; members meet under keys that cannot be known without it.

    Returns:
        The links, once all members are there.

    Collective: all members of the generation.
    """
    host, _, port = generation.address.rpartition(":")
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
    options._timeout = timeout
    rank = generation.members.index(worker)
    prefix = dist.PrefixStore(sign(token, str(generation.number), *generation.members), store)
    group = dist.ProcessGroupGloo(prefix, rank, len(generation.members), options)
    return Links(generation.number, generation.members, rank, group)


class Links:
    """What the members of one generation do together.

    Attributes:
        number: Number of the generation.
        members: Worker ids in order of rank.
        rank: This worker's rank.
        size: Number of members.
        peers: The members that hold the same part of the state as this one; all of them unless it is sharded.
    """

    def __init__(self, number: int, members: Sequence[str], rank: int, group: Any):
        self.number, self.members, self.rank, self.size = number, tuple(members), rank, len(members)
        self._group = group
        self.peers = self

    def newest_peers(self, steps: Sequence[int]) -> list[int]:
        """Return the ranks, among ``peers``, of those that have the newest state.

        Args:
            steps: Steps of each member, plus one; 0 for one that has none. All 0 makes rank 0's the state.
        """
        newest = max(steps)
        if not newest:
            return [0]
        return [rank for rank, member in enumerate(self.peers.members) if steps[self.members.index(member)] == newest]

    def sum_async(self, tensor: Tensor) -> Any:
        """Start summing a tensor in place over all members; returns a handle with ``wait()``."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
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
        """Start sending a contiguous tensor to a member."""
        return self._group.send([tensor], rank, tag)

    def receive_async(self, tensor: Tensor, rank: int, tag: int) -> Any:
        """Start filling a contiguous tensor from a member."""
        return self._group.recv([tensor], rank, tag)

    def broadcast_async(self, tensor: Tensor, rank: int) -> Any:
        """Start sending a contiguous tensor of one member to all others, into theirs."""
        options: Any = dist.BroadcastOptions()
        options.rootRank = rank
        return self._group.broadcast([tensor], options)

    def drop(self) -> None:
        """Close the connections."""
        self._group = None

    def retire(self) -> None:
        """Close the connections in the background; for a group that no member waits in.

        Closing joins the group's threads, which takes milliseconds.
        """
        held, self._group = [self._group], None
        threading.Thread(target=held.clear, daemon=True).start()
