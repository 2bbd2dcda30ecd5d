"""The index arithmetic of the strategies, against loops over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_parallel.features import column_slices
from gnn_parallel.layers import VirtualRows
from gnn_parallel.loader import BatchSchedule, share_seeds
from gnn_parallel.strategies.base import add_self_edges, join_runs, split_runs
from gnn_parallel.strategies.snp import split_by_source_owner


@st.composite
def edge_lists(draw):
    """In-edges of a few destinations: empty rows and repeated sources included."""
    num_nodes = draw(st.integers(1, 8))
    rows = draw(st.lists(st.lists(st.integers(0, num_nodes - 1), max_size=6), max_size=6))
    indptr = torch.tensor([0, *torch.tensor([len(row) for row in rows], dtype=torch.int64).cumsum(0).tolist()])
    sources = torch.tensor([source for row in rows for source in row], dtype=torch.int64)
    owner = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes)))
    return rows, indptr, sources, owner


@settings(max_examples=60, deadline=None)
@given(edge_lists())
def test_split_by_source_owner_keeps_every_edge_once(case):
    rows, indptr, sources, owner = case
    split = split_by_source_owner(indptr, sources, owner[sources], 3)
    expected = [(q, d, [s for s in row if owner[s] == q]) for q in range(3) for d, row in enumerate(rows)]
    expected = [(q, d, kept) for q, d, kept in expected if kept]
    assert split.virtual.destination.tolist() == [d for _, d, _ in expected]
    assert split.virtual.counts.tolist() == [len(kept) for _, _, kept in expected]
    assert split.sources.tolist() == [s for _, _, kept in expected for s in kept]
    assert split.row_counts == [sum(q == part for q, _, _ in expected) for part in range(3)]
    assert split.edge_counts == [sum(len(kept) for q, _, kept in expected if q == part) for part in range(3)]
    assert split.virtual.total_counts().tolist() == [len(row) for row in rows]


@settings(max_examples=60, deadline=None)
@given(edge_lists())
def test_every_destination_gets_one_self_edge_in_last_place(case):
    rows, indptr, sources, _ = case
    destinations = torch.arange(len(rows)) % 8
    new_indptr, new_sources = add_self_edges(indptr, sources, destinations)
    for number, row in enumerate(rows):
        node = int(destinations[number])
        found = new_sources[new_indptr[number] : new_indptr[number + 1]].tolist()
        assert found == [source for source in row if source != node] + [node]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=3))
def test_runs_are_split_as_they_were_joined(parts):
    arrays = [(torch.arange(sum(counts)) + 10 * number, list(counts)) for number, counts in enumerate(parts)]
    message, lengths = join_runs(arrays, torch.int32)
    assert lengths == [sum(counts[rank] for _, counts in arrays) for rank in range(3)]
    for (array, _), found in zip(arrays, split_runs(message, [counts for _, counts in arrays]), strict=True):
        assert found.tolist() == array.tolist()


def test_virtual_rows_merge_sums_and_maxima():
    virtual = VirtualRows(torch.tensor([0, 2, 0]), torch.tensor([1, 3, 2]), 4)
    rows = torch.tensor([[1.0, -5.0], [2.0, 2.0], [4.0, -7.0]])
    assert virtual.sum(rows).tolist() == [[5.0, -12.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    assert virtual.max(rows).tolist() == [[4.0, -5.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    assert virtual.total_counts().tolist() == [3, 0, 3, 0]


@pytest.mark.parametrize(("width", "ranks"), [(7, 3), (2, 4), (8, 4), (1, 1)])
def test_column_slices_cover_all_columns(width, ranks):
    columns = [c for part in column_slices(width, ranks) for c in range(part.start, part.stop)]
    assert columns == list(range(width))


def test_every_rank_has_the_same_number_of_steps_and_all_seeds_are_used_once():
    schedule = BatchSchedule(torch.arange(4097), 4, seed=3)
    owner = torch.arange(4097) % 4
    batches = schedule.batches(epoch=1)
    assert len(batches) == schedule.steps_per_epoch == 1025
    shares = [share_seeds(batch, owner, 4) for batch in batches]
    assert all(len(share) == 4 for share in shares)
    assert sorted(torch.cat([seeds for share in shares for seeds in share]).tolist()) == list(range(4097))
    assert [len(seeds) for seeds in shares[-1]] == [1, 0, 0, 0]


def test_the_order_depends_on_the_epoch_and_the_seed_only():
    first = BatchSchedule(torch.arange(50), 7, seed=3)
    assert torch.equal(torch.cat(first.batches(2)), torch.cat(BatchSchedule(torch.arange(50), 9, seed=3).batches(2)))
    assert not torch.equal(torch.cat(first.batches(2)), torch.cat(first.batches(3)))
