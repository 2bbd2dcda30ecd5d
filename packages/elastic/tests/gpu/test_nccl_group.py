"""A job of one worker on a GPU, and a communicator of NCCL that is made, used and aborted."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from elastic_train.group import Links
from elastic_train.nccl import connect_nccl, nccl_features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a build of torch with NCCL"),
]


def test_a_communicator_sums_and_is_aborted():
    group = connect_nccl(dist.HashStore(), 0, 1, torch.device("cuda:0"), timedelta(seconds=60))
    links = Links(1, ("a",), 0, None, group)
    tensor = torch.ones(1000, device="cuda:0")
    links.sum_async(tensor).wait()
    assert tensor.sum().item() == 1000
    links.drop()
    again = connect_nccl(dist.HashStore(), 0, 1, torch.device("cuda:0"), timedelta(seconds=60))
    Links(2, ("a",), 0, None, again).sum_async(tensor).wait()
    again.abort()


def test_the_version_is_known():
    assert nccl_features()["version"]
