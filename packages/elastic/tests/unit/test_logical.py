"""Logical workers: gradients and buffers have the same bits however shares are spread over workers."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from elastic_train.errors import InputError
from elastic_train.logical import LogicalGradients, shares_of
from elastic_train.session import init

SHARES = 6


class FakeLinks:
    """Members in one process: a broadcast reads the source's row when it is waited for."""

    def __init__(self, peers, rank):
        self.peers, self.rank, self.size = peers, rank, len(peers)

    def broadcast_async(self, tensor, rank):
        mine, theirs = self.peers[self.rank], self.peers[rank]
        for own, other in zip((*mine._gradients, *mine._means), (*theirs._gradients, *theirs._means), strict=True):
            for row, source in zip(own.rows, other.rows, strict=True):
                if row.data_ptr() == tensor.data_ptr():
                    return SimpleNamespace(wait=partial(row.copy_, source))
        raise AssertionError("not a row")


def make_model():
    torch.manual_seed(0)
    layers = (nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3), nn.Embedding(2, 2))
    return nn.ModuleList(layers)


def run_steps(sizes, num_shares):
    """Train some steps, over ``sizes[i]`` workers in step i; returns the content of each worker's model at the end."""
    size = max(sizes)
    models = [make_model() for _ in range(size)]
    workers = [LogicalGradients(model, num_shares(sizes[0])) for model in models]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    data = torch.randn(len(sizes), 25, 5, generator=torch.Generator().manual_seed(1))
    for step, present in enumerate(sizes):
        if step and num_shares(present) != workers[0].num_shares:
            workers = [LogicalGradients(model, num_shares(present)) for model in models]
        for rank in range(present):
            workers[rank].links = FakeLinks(workers[:present], rank)
            is_last = False
            while not is_last:
                share, count = workers[rank].next_share, workers[rank].num_shares
                rows = data[step, 25 * share // count : 25 * (share + 1) // count]
                workers[rank].share = len(rows) / 25
                workers[rank].begin(step)
                models[rank].zero_grad()
                hidden = rows
                for layer in models[rank][:5]:
                    hidden = layer(hidden)
                hidden.square().mean().backward()
                is_last = workers[rank].keep()
        for rank in range(present):
            workers[rank].finish()
        for rank in range(present):
            optimizers[rank].step()
        for rank in range(present, size):  # who is not there gets the state when it joins
            models[rank].load_state_dict(models[0].state_dict())
            optimizers[rank].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    return [b"".join(v.numpy().tobytes() for v in model.state_dict().values()) for model in models]


@pytest.mark.parametrize("sizes", [[2] * 4, [3] * 4, [4] * 4, [6] * 4, [1, 3, 2, 6], [5, 1, 4, 2]])
def test_any_history_gives_the_same_bits(sizes):
    (expected,) = run_steps([1] * 4, lambda size: SHARES)
    assert set(run_steps(sizes, lambda size: SHARES)) == {expected}


def test_shares_that_follow_the_workers_do_not():
    assert run_steps([1] * 4, lambda size: size)[0] != run_steps([2] * 4, lambda size: size)[0]


def test_every_share_has_one_worker():
    for size in range(1, 8):
        assert [share for rank in range(size) for share in shares_of(rank, size, 7)] == list(range(7))


def test_a_pass_that_is_dropped_leaves_buffers_as_they_were():
    model = make_model()
    gradients = LogicalGradients(model, 2)
    before = model[1].running_mean.clone()
    gradients.begin(0)
    model[1](model[0](torch.randn(4, 5)))
    assert not torch.equal(model[1].running_mean, before)
    gradients.reset()
    assert torch.equal(model[1].running_mean, before)
    assert gradients.is_first


def test_fewer_logical_than_physical_workers_are_refused(tmp_path):
    with pytest.raises(InputError, match="at least min_workers=4"):
        init(f"file://{tmp_path}", "job", min_workers=4, logical_workers=2)
