"""The raw communicator on a real device, through each binding that is installed."""

from __future__ import annotations

import pytest
import torch

from core_kernels.comm import Group, Recv, Send
from core_kernels.comm.nccl import Communicator
from core_kernels.errors import MissingDependencyError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("library", ["nccl4py", "cupy"])
def test_one_rank_reduces_splits_and_aborts(library):
    try:
        communicator = Communicator.create(Group.single("cuda"), library)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    x = torch.arange(1000.0, device="cuda")
    assert torch.equal(communicator.all_reduce(x), x)
    assert torch.equal(communicator.broadcast(x), x)
    received = torch.zeros(1000, device="cuda", dtype=torch.bfloat16)
    communicator.send_recv([Send(x.bfloat16(), 0), Recv(received, 0)])
    assert torch.equal(received, x.bfloat16())
    part = communicator.split(0, group=Group.single("cuda"))
    assert torch.equal(part.all_reduce(x, "max"), x)
    part.close()
    communicator.abort()
    communicator.close()


def exchange_on_device(group, library):
    bootstrap = group
    communicator = Communicator.create(bootstrap, library)
    x = torch.full((group.rank + 1, 3), float(group.rank), device="cuda")
    total = communicator.all_reduce(torch.ones(5, device="cuda"))
    ahead, behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    received = torch.zeros(behind + 1, 3, device="cuda")
    communicator.send_recv([Send(x, ahead), Recv(received, behind)])
    torch.cuda.synchronize()
    assert torch.equal(received.cpu(), torch.full((behind + 1, 3), float(behind)))
    communicator.close()
    return total.sum().item()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_several_devices_exchange():
    from core_kernels.launch import run_ranks

    num_ranks = torch.cuda.device_count()
    assert run_ranks(exchange_on_device, num_ranks, "auto", backend="nccl") == [5.0 * num_ranks] * num_ranks
