"""The feature store gives the rows of its source whatever the tiers, and counts what each tier gave."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernels.errors import ArgumentError, ArgumentTypeError, CoreKernelsError
from core_kernels.store import FeatureStore, NpyRows, TierCounters, place_by_hotness
from core_kernels.store import disk as disk_module
from core_kernels.store.placement import plan_replacement

NUM_ROWS = 200
TABLE = torch.arange(NUM_ROWS * 3, dtype=torch.float32).view(NUM_ROWS, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "table.npy"
    np.save(path, TABLE.numpy())
    return path


def random_batches(num: int, size: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(NUM_ROWS, (size,), generator=generator) for _ in range(num)]


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("refresh_every", [None, 2])
@pytest.mark.parametrize("num_device_rows", [0, 17, 150])
def test_gathered_rows_are_the_rows_of_the_source(path, on_disk, reuse, refresh_every, num_device_rows):
    source = path if on_disk else TABLE
    num_host_rows = 30 if on_disk else 0
    hotness = torch.rand(NUM_ROWS, generator=torch.Generator().manual_seed(1))
    with FeatureStore(
        source,
        num_device_rows=num_device_rows,
        num_host_rows=num_host_rows,
        hotness=hotness,
        reuse=reuse,
        refresh_every=refresh_every,
    ) as store:
        out = torch.empty(60, 3)
        for count, ids in enumerate(random_batches(8, 60), start=1):
            got = store.gather(ids, out=out if count % 2 else None)
            assert torch.equal(got, TABLE[ids])
            got.zero_()  # a caller's change must not reach the next batch
            assert sum(store.counters.rows.values()) == 60 * count
        assert store.gather(torch.empty(0, dtype=torch.int64)).shape == (0, 3)
        assert store.counters.bytes["device"] == store.counters.rows["device"] * 12


def test_the_hottest_rows_come_from_the_fastest_tier(path):
    hotness = torch.arange(NUM_ROWS)
    with FeatureStore(path, num_device_rows=10, num_host_rows=20, hotness=hotness, reuse=False) as store:
        store.gather(torch.arange(NUM_ROWS))
        assert store.counters.rows == {"reused": 0, "device": 10, "host": 20, "disk": 170}
        store.counters.reset()
        store.gather(torch.arange(NUM_ROWS - 10, NUM_ROWS))
        assert store.counters.hit_rate("device") == 1.0


def test_rows_of_the_batch_before_are_reused(path):
    with FeatureStore(path) as store:
        store.gather(torch.tensor([1, 2, 3]))
        store.gather(torch.tensor([3, 2, 9]))
        store.gather(torch.tensor([9, 1]))
        assert store.counters.rows == {"reused": 3, "device": 0, "host": 0, "disk": 5}


def test_refresh_follows_the_reads(path):
    """The twin without refreshing keeps its static placement and misses."""
    hot = torch.arange(150, 160)
    hits = {}
    for refresh_every in (None, 3):
        with FeatureStore(
            path, num_device_rows=10, num_host_rows=10, reuse=False, refresh_every=refresh_every
        ) as store:
            for _ in range(10):
                assert torch.equal(store.gather(hot), TABLE[hot])
            hits[refresh_every] = store.counters.hit_rate("device")
            if refresh_every is None:
                with pytest.raises(ArgumentError, match="refresh_every=None"):
                    store.refresh()
    assert hits == {None: 0.0, 3: 0.7}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 24), min_size=1, max_size=30), min_size=1, max_size=8), st.booleans())
def test_replacement_never_mixes_rows_up(batches, refresh_often):
    table = TABLE[:25]
    store = FeatureStore(table, num_device_rows=6, reuse=True, refresh_every=1 if refresh_often else 2)
    for ids in batches:
        ids = torch.tensor(ids)
        assert torch.equal(store.gather(ids), table[ids])
    held = (store._position_of_row < 6).nonzero().squeeze(1)
    assert sorted(store._rows_on_device.tolist()) == held.tolist()


def test_replacement_moves_only_what_differs():
    slots, newcomers = plan_replacement(torch.tensor([4, 1, 7]), torch.tensor([7, 9, 4]), 10)
    assert (slots.tolist(), newcomers.tolist()) == ([1], [9])


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_iteration_reads_ahead_and_gives_every_batch(path, look_ahead):
    batches = random_batches(7, 40, seed=2)
    with FeatureStore(path, num_device_rows=10) as store:
        for ids, (given, rows) in zip(batches, store.iterate(iter(batches), look_ahead), strict=True):
            assert torch.equal(given, ids)
            assert torch.equal(rows, TABLE[ids])
        rows_read = store._disk.bytes_read
    with FeatureStore(path, num_device_rows=10) as store:
        for ids in batches:
            store.gather(ids)
        # Small gaps are read along; look-ahead must not read rows the batch before brings.
        assert rows_read <= store._disk.bytes_read * 1.1


def test_gathers_out_of_order_are_still_right(path):
    first, second = random_batches(2, 50, seed=3)
    with FeatureStore(path) as store:
        store.prefetch(first)
        store.prefetch(second)
        assert torch.equal(store.gather(second), TABLE[second])
        assert torch.equal(store.gather(first), TABLE[first])
        store.prefetch(second)  # never gathered: closing waits for it


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, NUM_ROWS - 1)), st.integers(0, 60), st.integers(12, 200), st.integers(2, 8))
def test_reads_are_exact_for_every_way_to_cut(path, rows, gap_bytes, call_bytes, num_buffers):
    rows = torch.tensor(sorted(rows), dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "_MAX_GAP_BYTES", gap_bytes)
        patch.setattr(disk_module, "_MAX_CALL_BYTES", call_bytes)
        patch.setattr(disk_module, "_MAX_BUFFERS", num_buffers)
        reader = NpyRows(path, num_threads=2)
        assert torch.equal(reader.read(rows), TABLE[rows])
        reader.close()


def test_neighbours_share_a_call(path):
    reader = NpyRows(path)
    reader.read(torch.arange(NUM_ROWS))
    assert (reader.num_calls, reader.bytes_read) == (1, NUM_ROWS * 12)
    reader.read(torch.tensor([0, 2, 4]))
    assert (reader.num_calls, reader.bytes_read) == (2, NUM_ROWS * 12 + 5 * 12)
    reader.close()


def test_short_reads_are_continued(path, monkeypatch):
    whole = os.preadv

    def preadv_of_five_bytes(file, buffers, offset):
        return whole(file, [buffers[0][:5]], offset)

    monkeypatch.setattr(os, "preadv", preadv_of_five_bytes)
    reader = NpyRows(path)
    rows = torch.tensor([0, 1, 5, 199])
    assert torch.equal(reader.read(rows), TABLE[rows])
    reader.close()


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "short.npy"
    np.save(path, TABLE.numpy())
    reader = NpyRows(path)
    os.truncate(path, path.stat().st_size - 20)
    with pytest.raises(CoreKernelsError, match=r"short\.npy ends at byte \d+; its header promises 200 rows"):
        reader.read(torch.tensor([199]))
    reader.close()


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
def test_every_dtype_of_rows(tmp_path, dtype):
    table = np.arange(60).reshape(20, 3).astype(dtype)
    np.save(tmp_path / "table.npy", table)
    with FeatureStore(tmp_path / "table.npy", num_host_rows=5) as store:
        ids = torch.tensor([19, 0, 7, 7])
        assert np.array_equal(store.gather(ids).numpy(), table[ids])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: FeatureStore(TABLE[0]), ArgumentError, r"source=.*\[num_rows, num_features\]"),
        (lambda: FeatureStore([1.0]), ArgumentTypeError, "source is a list"),
        (lambda: FeatureStore("none.npy"), ArgumentError, r"path='none\.npy'"),
        (lambda: FeatureStore(TABLE, num_device_rows=201), ArgumentError, "num_rows=200"),
        (lambda: FeatureStore(TABLE, num_device_rows=-1), ArgumentError, "num_device_rows"),
        (lambda: FeatureStore(TABLE, num_host_rows=1), ArgumentError, "num_host_rows=1"),
        (lambda: FeatureStore(TABLE, hotness=torch.ones(3)), ArgumentError, r"hotness=\(3,\)"),
        (lambda: FeatureStore(TABLE, hotness=torch.full((200,), torch.nan)), ArgumentError, "NaN"),
        (lambda: FeatureStore(TABLE, refresh_every=0), ArgumentError, "refresh_every=0"),
        (lambda: FeatureStore(TABLE).gather(torch.tensor([200])), ArgumentError, r"ids=200 .*\[0, 200\)"),
        (lambda: FeatureStore(TABLE).gather(torch.tensor([-1])), ArgumentError, "ids=-1"),
        (lambda: FeatureStore(TABLE).gather(torch.tensor([1.0])), ArgumentError, "ids="),
        (lambda: FeatureStore(TABLE).gather(torch.tensor([1]), torch.empty(2, 3)), ArgumentError, "out="),
        (lambda: FeatureStore(TABLE).gather(torch.tensor([1]), torch.empty(1, 3).double()), ArgumentError, "out="),
        (lambda: list(FeatureStore(TABLE).iterate([], -1)), ArgumentError, "look_ahead=-1"),
        (lambda: place_by_hotness(torch.ones(2), -1, 0), ArgumentError, "num_device_rows=-1"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_files_that_hold_no_table_are_refused(tmp_path, path):
    for name, array, words in (("one", np.zeros(3), "two-dim"), ("fortran", np.zeros((4, 3), order="F"), "Fortran")):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(ArgumentError, match=words):
            NpyRows(tmp_path / f"{name}.npy")
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ArgumentError, match=r"text\.npy"):
        NpyRows(tmp_path / "text.npy")
    with pytest.raises(ArgumentError, match="num_threads=0"):
        NpyRows(path, num_threads=0)
    reader = NpyRows(path)
    with pytest.raises(ArgumentError, match=r"rows=\[2, 1\]"):
        reader.read(torch.tensor([2, 1]))
    with pytest.raises(ArgumentError, match="rows=200"):
        reader.read(torch.tensor([200]))
    reader.close()


def test_counters_start_empty():
    counters = TierCounters(row_bytes=4)
    assert counters.hit_rate("device") == 0.0
    assert sum(counters.bytes.values()) == 0
