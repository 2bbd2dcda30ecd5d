"""Large tensors move to huge pages where that pays; what is read stays the same."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch

from core_kernels import Graph, _huge_pages, ops

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux takes advice on pages")


@pytest.fixture
def advised(monkeypatch):
    """What the system is asked, with every tensor counted as large."""
    calls = []
    monkeypatch.setattr(_huge_pages, "_ADVISED_BYTES", 1 << 21)
    monkeypatch.setattr(_huge_pages, "_COLLAPSED_BYTES", 1 << 21)
    monkeypatch.setattr(_huge_pages, "_refusals", 0)
    monkeypatch.setattr(_huge_pages, "_madvise", lambda: lambda *call: calls.append(call) or 0)
    return calls


def test_advice_covers_whole_pages_inside_the_tensor(advised):
    x = torch.zeros(3 << 20, dtype=torch.float32)[1:]
    _huge_pages.advise(x)
    _huge_pages.collapse(x, x.numel())
    for (begin, num_bytes, _), page_bytes in zip(advised, (1 << 12, 1 << 21), strict=True):
        assert begin % page_bytes == num_bytes % page_bytes == 0
        assert x.data_ptr() <= begin < x.data_ptr() + page_bytes
        assert x.nbytes - 2 * page_bytes < num_bytes <= x.nbytes


def test_only_what_pays_and_belongs_to_the_allocator_is_moved(advised, tmp_path):
    x = torch.zeros(1 << 20)
    _huge_pages.collapse(x, x.nbytes // 4 - 1)
    np.zeros(1 << 20, np.float32).tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", np.float32, "r+")
    for other in (torch.from_numpy(mapped), torch.zeros(1 << 20).share_memory_(), torch.zeros(16), x[::2]):
        _huge_pages.collapse(other, 1 << 40)
    assert not advised
    _huge_pages.collapse(x, x.nbytes // 4)
    assert len(advised) == 1


def test_a_system_that_refuses_is_soon_left_alone(advised, monkeypatch):
    monkeypatch.setattr(_huge_pages, "_madvise", lambda: lambda *call: advised.append(call) or -1)
    for _ in range(5):
        _huge_pages.collapse(torch.zeros(1 << 20), 1 << 40)
    assert len(advised) == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only reports and ends
def test_a_process_that_forks_moves_no_more(advised):
    child = os.fork()
    if child == 0:
        os._exit(_huge_pages._refusals)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == _huge_pages._refusals == 3


def test_results_are_the_same_bits_on_huge_pages(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    graph = Graph.from_edge_index(torch.randint(0, 1 << 16, (2, 1 << 18), generator=generator), 1 << 16)
    x = torch.randn(1 << 16, 16, generator=generator)
    index = graph.indices.long()
    plain = [ops.spmm(graph, x), ops.gather(x, index), ops.sddmm(graph, x, x)]
    monkeypatch.setattr(_huge_pages, "_COLLAPSED_BYTES", 0)
    monkeypatch.setattr(_huge_pages, "_BYTES_PER_READ", 1 << 20)
    monkeypatch.setattr(_huge_pages, "_refusals", 0)
    before = x.clone()
    huge = [ops.spmm(graph, x), ops.gather(x, index), ops.sddmm(graph, x, x)]
    assert torch.equal(x, before)
    assert all(torch.equal(one, other) for one, other in zip(plain, huge, strict=True))
