"""Groups over NCCL against a stand-in of torch's class, as there is no GPU here."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from elastic_train.errors import InputError
from elastic_train.group import Links
from elastic_train.nccl import DeviceWork, connect_nccl, nccl_features


class FakeNccl:
    """What is used of ``ProcessGroupNCCL``."""

    class Options:
        def __init__(self):
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, store, rank, size, options):
        self.rank, self.size, self.options = rank, size, options
        self.calls = []

    def eager_connect_single_device(self, device):
        self.calls.append(("connect", device))

    def allreduce(self, tensors, options):
        self.calls.append(("allreduce", options.reduceOp))
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: self.calls.append("waited"))

    def abort(self):
        self.calls.append("abort")


class OnGpu:
    """Stands for a tensor of a GPU."""

    is_cuda = True


def test_a_communicator_can_be_aborted_and_is_connected_at_once(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    group = connect_nccl(None, 1, 2, "cuda:1", timedelta(seconds=3))
    assert group.options.config.blocking == 0
    assert group.options._timeout == timedelta(seconds=3)
    assert group.calls == [("connect", torch.device("cuda:1"))]
    links = Links(1, ("a", "b"), 1, None, group)
    links.sum_async(OnGpu()).wait()
    assert group.calls[1:] == [("allreduce", dist.ReduceOp.SUM), "waited"]
    links.drop()
    assert group.calls[-1] == "abort"


def test_without_nccl_it_is_named(monkeypatch):
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(InputError, match="keep the module on the CPU"):
        connect_nccl(None, 0, 1, "cuda:0", timedelta(seconds=1))
    assert nccl_features() == {
        "available": False, "version": "", "abort": False, "shrink": False, "shrink_abort": False, "grow": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "shrink", "shrink_abort", "grow"),
    [((2, 26, 5), False, False, False), ((2, 27, 3), True, True, False), ((2, 32, 3), True, False, True)],
)
def test_features_follow_the_version(monkeypatch, version, shrink, shrink_abort, grow):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(dist, "shrink_group", lambda: None, raising=False)
    monkeypatch.setattr("elastic_train.nccl._version", lambda: version)
    found = nccl_features()
    assert (found["shrink"], found["shrink_abort"], found["grow"]) == (shrink, shrink_abort, grow)


def test_an_operation_that_hangs_is_given_up():
    hanging = SimpleNamespace(is_completed=lambda: False, wait=lambda: None)
    with pytest.raises(RuntimeError, match=r"an operation of NCCL is not done: expected within 0\.01 s"):
        DeviceWork(hanging, 0.01).wait()
    begin = time.monotonic()
    late = SimpleNamespace(is_completed=lambda: time.monotonic() > begin + 0.01, wait=lambda: "done")
    DeviceWork(late, 60).wait()
