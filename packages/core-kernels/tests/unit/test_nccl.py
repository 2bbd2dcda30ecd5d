"""The raw communicator over a fake binding: calls, bookkeeping, and the rule that abort is final."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from core_kernels.comm import Group, Recv, Send
from core_kernels.comm.nccl import Communicator, CupyNccl, NcclUnsupportedError
from core_kernels.errors import ArgumentError, CollectiveError, MissingDependencyError


class FakeNccl:
    """Binding of an imaginary NCCL in which every peer mirrors this rank; logs its calls."""

    name = "fake"

    def __init__(self):
        self.log, self.depth, self.mail, self.fail = [], 0, {}, None

    def unique_id(self):
        return b"id"

    def init(self, size, rank, unique_id):
        self.log.append(("init", size, rank, unique_id))
        return "handle"

    @contextmanager
    def grouped(self):
        self.depth += 1
        yield
        self.depth -= 1
        for peer, targets in self.mail.pop("recv", {}).items():
            for source, target in zip(self.mail["send"].get(peer, []), targets, strict=True):
                target.copy_(source)

    def send(self, handle, tensor, peer, stream):
        assert self.depth == 1
        assert tensor.dtype == torch.uint8
        self.mail.setdefault("send", {}).setdefault(peer, []).append(tensor)

    def recv(self, handle, tensor, peer, stream):
        assert self.depth == 1
        self.mail.setdefault("recv", {}).setdefault(peer, []).append(tensor)

    def all_reduce(self, handle, tensor, op, stream):
        if self.fail:
            raise self.fail
        tensor *= {"sum": 4, "max": 1, "min": 1}[op]

    def broadcast(self, handle, tensor, root, stream):
        self.log.append(("broadcast", root))

    def split(self, handle, color, key):
        return None if color < 0 else f"{handle}.split"

    def shrink(self, handle, excluded, abort):
        self.log.append(("shrink", excluded, abort))
        return f"{handle}.shrunk"

    def grow_id(self, handle):
        return b"grow"

    def grow(self, handle, size, unique_id, rank):
        self.log.append(("grow", handle, size, unique_id, rank))
        return "grown"

    def abort(self, handle):
        self.log.append(("abort", handle))

    def destroy(self, handle):
        self.log.append(("destroy", handle))


@pytest.fixture
def fake():
    return FakeNccl()


@pytest.fixture
def four(fake):
    return Communicator(fake, "handle", rank=1, size=4)


def test_create_shares_the_id_through_the_group(fake):
    communicator = Communicator.create(Group.single(), fake)
    assert (communicator.rank, communicator.size) == (0, 1)
    assert fake.log == [("init", 1, 0, b"id")]


def test_collectives_run_in_new_tensors_and_count(four):
    x = torch.ones(8)
    assert torch.equal(four.all_reduce(x), torch.full((8,), 4.0))
    assert torch.equal(x, torch.ones(8))
    assert four.counters.sent("all_reduce") == 2 * 3 * 8 * 4 // 4
    four.broadcast(x, root=2)
    assert four.counters.received("broadcast") == 32


def test_sends_and_receives_are_grouped_and_empty_ones_left_out(four):
    buffer = torch.zeros(2, dtype=torch.int64)
    received = four.send_recv([Recv(buffer, 0), Send(torch.tensor([5, 6]), 0), Send(torch.empty(0), 2)])
    assert received[0].tolist() == [5, 6]
    assert four.counters.sent("send_recv") == four.counters.received("send_recv") == 16


def test_all_to_all_moves_rows_and_keeps_its_own(four):
    x = torch.arange(12.0).view(6, 2)
    rows = four.all_to_all_v(x, [1, 2, 0, 3], [1, 2, 0, 3])
    assert torch.equal(rows, x)
    assert four.counters.sent("all_to_all_v") == 4 * 8


def test_shrink_grow_and_join_number_ranks(fake, four):
    assert (four.shrink([0]).rank, four.shrink([0, 3]).size) == (0, 2)
    grown = four.grow(6, four.grow_id())
    assert (grown.rank, grown.size) == (1, 6)
    assert Communicator.join(b"grow", 6, 5, fake).rank == 5
    assert ("grow", None, 6, b"grow", 5) in fake.log
    alone = Communicator(fake, "handle", 0, 1)
    part = alone.split(7, group=Group.single())
    assert (part.rank, part.size) == (0, 1)
    assert alone.split(-1, group=Group.single()) is None


def test_an_intact_communicator_is_destroyed(fake, four):
    four.close()
    four.close()
    assert fake.log == [("destroy", "handle")]


@pytest.mark.parametrize("how", ["abort", "shrink"])
def test_after_an_abort_only_abort_follows(fake, four, how):
    if how == "abort":
        four.abort()
    else:
        four.shrink([3], abort=True)
    with pytest.raises(CollectiveError, match="aborted or closed"):
        four.all_reduce(torch.ones(1))
    four.close()
    four.abort()
    assert [entry for entry in fake.log if entry[0] in ("abort", "destroy")] == [("abort", "handle")]


def test_failures_of_the_binding_name_rank_collective_and_tag(fake, four):
    fake.fail = OSError("unhandled system error")
    with pytest.raises(CollectiveError, match=r"rank 1 of 4: all_reduce .tag 'grads'.*unhandled system error"):
        four.all_reduce(torch.ones(1), tag="grads")


def test_bad_arguments_are_named(four):
    for call in (
        lambda: four.all_reduce(torch.ones(1), op="mean"),
        lambda: four.shrink([1]),
        lambda: four.grow(4),
        lambda: four.split(0),
        lambda: four.all_to_all_v(torch.ones(2), [1, 1, 1, 1], [1, 1, 1, 1]),
        lambda: four.send_recv([Recv(torch.ones(4, 2).t(), 0)]),
    ):
        with pytest.raises(ArgumentError):
            call()


def test_a_missing_binding_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for library in ("auto", "nccl4py", "cupy"):
        with pytest.raises(MissingDependencyError, match="cuda13"):
            Communicator.create(Group.single(), library)
    with pytest.raises(MissingDependencyError, match="mpi"):
        Communicator.create(Group.single(), "mpi")


def test_cupy_says_what_it_cannot_do():
    binding = CupyNccl.__new__(CupyNccl)
    for call in (lambda: binding.shrink(None, [], False), lambda: binding.grow_id(None)):
        with pytest.raises(NcclUnsupportedError, match="nccl4py"):
            call()


def test_importing_loads_no_cuda_library():
    script = (
        "import sys; import core_kernels.comm.nccl;"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('cupy', 'nccl', 'cuda', 'numba')];"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else '';"
        "print(bad, 'libnccl' in maps, 'libcuda.so' in maps)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip().startswith("[]")
    if torch.version.cuda is None:  # a CUDA build of torch itself links NCCL
        assert done.stdout.strip() == "[] False False"
