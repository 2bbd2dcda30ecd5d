"""Three tiers at once over a file larger than the memory given to it: what is read, by how many calls, and kept."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from core_kernels.errors import CoreKernelsError
from core_kernels.store import FeatureStore, NpyRows

NUM_ROWS, WIDTH = 200_000, 64
ROW_BYTES = 4 * WIDTH
FILE_BYTES = NUM_ROWS * ROW_BYTES  # 51 MB
NUM_DEVICE, NUM_HOST = 4_000, 16_000


def value_of(ids):
    """Every element of a row is a function of the row, so no second copy of the table is needed."""
    return (ids.float() * 0.5).unsqueeze(1) + torch.arange(WIDTH)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiers") / "table.npy"
    table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(NUM_ROWS, WIDTH))
    for first in range(0, NUM_ROWS, 20_000):
        table[first : first + 20_000] = value_of(torch.arange(first, first + 20_000)).numpy()
    table.flush()
    return path


@pytest.fixture
def calls(monkeypatch):
    """What goes through the system call: the bytes of every call."""
    sizes, preadv = [], os.preadv

    def counted(file, buffers, offset):
        count = preadv(file, buffers, offset)
        sizes.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return sizes


def skewed_batches(num_batches, size, seed=0):
    """Ids of which low ones are frequent, as in a power-law graph."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        draw = torch.rand(size, generator=generator, dtype=torch.float64)
        yield (NUM_ROWS * draw**4).long().clamp(max=NUM_ROWS - 1)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_stays_at_the_budget(path):
    list(skewed_batches(1, 10))
    hotness = torch.arange(NUM_ROWS, 0, -1)
    before = resident_bytes()
    with FeatureStore(path, num_device_rows=NUM_DEVICE, num_host_rows=NUM_HOST, hotness=hotness) as store:
        for ids in skewed_batches(20, 2_000):
            assert torch.equal(store.gather(ids), value_of(ids))
        grown = resident_bytes() - before
        rows = store.counters.rows
    budget = (NUM_DEVICE + NUM_HOST) * ROW_BYTES
    # Caches, the table of positions and the last batches; the file is ten times the caches.
    assert grown < budget + 3 * 8 * NUM_ROWS + 6 * 2_000 * ROW_BYTES + (8 << 20)
    assert grown < 0.6 * FILE_BYTES
    assert all(rows[tier] > 0 for tier in ("reused", "device", "host", "disk"))
    assert rows["device"] > rows["host"] > 0


def test_every_row_is_counted_once_and_bytes_follow(path, calls):
    hotness = torch.arange(NUM_ROWS, 0, -1)
    with FeatureStore(path, num_device_rows=NUM_DEVICE, num_host_rows=NUM_HOST, hotness=hotness, reuse=False) as store:
        calls.clear()  # those that filled the caches
        ids = torch.cat(list(skewed_batches(5, 3_000, seed=1)))
        store.gather(ids)
        expected = {
            "device": int((ids < NUM_DEVICE).sum()),
            "host": int(((ids >= NUM_DEVICE) & (ids < NUM_DEVICE + NUM_HOST)).sum()),
            "disk": int((ids >= NUM_DEVICE + NUM_HOST).sum()),
        }
        assert {tier: store.counters.rows[tier] for tier in expected} == expected
        assert store.counters.bytes["disk"] == expected["disk"] * ROW_BYTES
        distinct = ids[ids >= NUM_DEVICE + NUM_HOST].unique().numel()
        # A row wanted several times in a batch is read once; gaps between wanted rows may be read along.
        assert distinct * ROW_BYTES <= sum(calls) <= NUM_ROWS * ROW_BYTES


def test_static_placement_reads_only_what_is_not_cached(path, calls):
    with FeatureStore(path, num_host_rows=1_000, hotness=torch.arange(NUM_ROWS), reuse=False) as store:
        calls.clear()
        store.gather(torch.arange(NUM_ROWS - 1_000, NUM_ROWS))
        assert calls == []
        store.gather(torch.arange(0, 10))
        assert calls == [10 * ROW_BYTES]


def test_dynamic_replacement_stops_the_reads(path, calls):
    hot = torch.arange(50_000, 50_500)
    reads = {}
    for refresh_every in (None, 2):
        with FeatureStore(path, num_device_rows=500, reuse=False, refresh_every=refresh_every) as store:
            for _ in range(6):
                store.gather(hot)
            calls.clear()
            store.gather(hot)
            reads[refresh_every] = sum(calls)
    assert reads[None] == 500 * ROW_BYTES
    assert reads[2] == 0


def test_reuse_reads_each_row_of_two_batches_once(path, calls):
    with FeatureStore(path) as store:
        store.gather(torch.arange(100_000, 101_000))
        store.gather(torch.arange(100_500, 101_500))
    assert sum(calls) == 1_500 * ROW_BYTES


@pytest.mark.parametrize(
    ("step", "num_calls"),
    [
        (1, 1),  # neighbours: one range
        (2, 3),  # small gaps are read along: pairs of buffers, at most 512 a call
        (1_000, 200),  # wide gaps: a call for each row
    ],
)
def test_neighbours_share_system_calls(path, calls, step, num_calls):
    count = 200 if step == 1_000 else 600
    reader = NpyRows(path)
    rows = torch.arange(0, count * step, step)
    assert torch.equal(reader.read(rows), value_of(rows))
    reader.close()
    assert len(calls) == reader.num_calls == num_calls
    assert sum(calls) == reader.bytes_read
    assert sum(calls) <= (count * step if step < 1_000 else count) * ROW_BYTES


def test_foreign_byte_order_and_a_closed_file_are_refused_in_words(tmp_path):
    np.save(tmp_path / "swapped.npy", np.ones((3, 2), ">f4"))
    with pytest.raises(ValueError, match=r"swapped.npy.*expected.*>f4; save"):
        NpyRows(tmp_path / "swapped.npy")
    np.save(tmp_path / "rows.npy", np.ones((3, 2), np.float32))
    store = FeatureStore(tmp_path / "rows.npy")
    store.close()
    with pytest.raises(CoreKernelsError, match="was closed"):
        store.gather(torch.tensor([1]))
