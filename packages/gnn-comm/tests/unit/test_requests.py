from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernels import Graph
from core_kernels.topology import Topology, cluster
from gnn_comm import GnnCommArgumentError, PlanMismatchError, partition
from gnn_comm.bounds import cut_lower_bound
from gnn_comm.planners.chunks import split_classes
from gnn_comm.requests import collect_requests


@st.composite
def partitioned_edges(draw):
    num_parts = draw(st.integers(1, 70))
    num_nodes = draw(st.integers(0, 40))
    edges = draw(st.lists(st.tuples(*[st.integers(0, max(num_nodes - 1, 0))] * 2), max_size=150 if num_nodes else 0))
    parts = draw(st.lists(st.integers(0, num_parts - 1), min_size=num_nodes, max_size=num_nodes))
    return num_parts, num_nodes, edges, parts


@settings(max_examples=60, deadline=None)
@given(partitioned_edges())
def test_classes_are_what_the_edges_say(case):
    num_parts, num_nodes, edges, parts = case
    graph = Graph.from_edge_index(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T, num_nodes)
    split = partition(graph, cluster([num_parts], 1.0, 1.0), "given", parts=parts)
    requests = split.requests
    place = split.book.to_new(torch.arange(num_nodes)).tolist()
    expected: dict[int, set[int]] = {}
    for source, target in edges:
        if parts[source] != parts[target]:
            expected.setdefault(place[source], set()).add(parts[target])
    found = {}
    for c in range(requests.num_classes):
        for row in requests.rows[requests.row_indptr[c] : requests.row_indptr[c + 1]]:
            found[int(row)] = set(requests.need[requests.need_indptr[c] : requests.need_indptr[c + 1]].tolist())
            assert split.offsets[requests.source[c]] <= row < split.offsets[requests.source[c] + 1]
    assert found == expected
    keys = {(int(requests.source[c]), tuple(requests.needs[c])) for c in range(requests.num_classes)}
    assert len(keys) == requests.num_classes  # no class is split
    assert requests.num_remote_rows().sum() == sum(len(need) for need in expected.values())


@pytest.mark.parametrize("num_chunks", [0, 1, 7, 1000])
def test_chunks_tile_the_classes(num_chunks):
    generator = np.random.default_rng(0)
    indices = generator.integers(0, 300, 2000)
    indptr = np.concatenate([[0], np.sort(generator.integers(0, 2000, 299)), [2000]])
    requests = collect_requests(indptr, indices, np.array([0, 100, 100, 300]))
    chunks = split_classes(requests, num_chunks)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(chunks.row_start, chunks.num_rows, strict=True)])
    assert sorted(covered.tolist()) == list(range(len(requests.rows)))
    assert chunks.num_rows.min() >= 1


def test_bound_is_the_tightest_cut():
    # Two hosts with one slow link; 3 rows must cross it, each once however many devices read it.
    topology = cluster([2, 2], 100.0, 10.0)
    sources = [0, 0, 1, 2]  # devices 0, 0, 0, 1
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 1, 2], [3, 4, 3, 4]]), 5)
    split = partition(graph, topology, "given", parts=[0, 0, 1, 2, 3])
    assert len(sources) == 4
    bound = cut_lower_bound(split.requests, topology, 4)
    assert float(bound) == pytest.approx(3 * 4 / 10.0, rel=1e-4)
    assert bound.sources == (0, 1)


def test_bound_of_nothing_is_zero():
    graph = Graph.from_edge_index(torch.zeros((2, 0), dtype=torch.int64), 6)
    topology = Topology.preset("dgx1")
    assert cut_lower_bound(partition(graph, topology, "random").requests, topology, 4) == 0


def test_hierarchical_partition_crosses_hosts_least():
    # Four grids joined loosely in pairs: the pairs belong on hosts.
    topology = cluster([2, 2], 100.0, 10.0)
    generator = torch.Generator().manual_seed(0)
    side = 8
    block = torch.arange(side * side).view(side, side)
    inside = torch.cat([torch.stack([block[:, :-1].flatten(), block[:, 1:].flatten()]),
                        torch.stack([block[:-1].flatten(), block[1:].flatten()])], 1)  # fmt: skip
    columns = [inside + k * side * side for k in range(4)]
    for a, b, count in ((0, 1, 40), (2, 3, 40), (1, 2, 2)):
        ends = torch.randint(side * side, (2, count), generator=generator)
        columns.append(ends + torch.tensor([[a], [b]]) * side * side)
    edges = torch.cat(columns, 1)
    graph = Graph.from_edge_index(torch.cat([edges, edges.flip(0)], 1), 4 * side * side)
    reports = {m: partition(graph, topology, m).report(topology) for m in ("hierarchical", "metis", "random")}
    assert reports["hierarchical"]["between_host_rows"] <= 12
    assert reports["hierarchical"]["between_host_rows"] < reports["random"]["between_host_rows"]
    assert reports["hierarchical"]["balance"] < 1.3
    uplinks = {n: rows for n, rows in reports["hierarchical"]["rows_per_link"].items() if "UPLINK" in n}
    assert sum(uplinks.values()) <= 4 * 12


def test_partition_files_and_faults(tmp_path):
    graph = Graph.from_edge_index(torch.randint(0, 50, (2, 300)), 50)
    topology = Topology.preset("hosts4")
    split = partition(graph, topology, "random", seed=3)
    split.save(tmp_path)
    loaded = type(split).load(tmp_path)
    assert loaded.fingerprint == split.fingerprint
    assert loaded.graph.fingerprint() == split.graph.fingerprint()
    assert partition(graph, topology, "random", seed=4).fingerprint != split.fingerprint
    with pytest.raises(GnnCommArgumentError, match="hierarchical"):
        partition(graph, topology, "magic")
    with pytest.raises(PlanMismatchError, match="4 parts but topology 'dgx1' has 8"):
        split.report(Topology.preset("dgx1"))


@pytest.mark.parametrize("num_nodes", [0, 1, 3, 9])
@pytest.mark.parametrize("method", ["hierarchical", "metis", "random"])
def test_tiny_graphs_partition(num_nodes, method):
    edges = torch.randint(0, max(num_nodes, 1), (2, 20 if num_nodes else 0))
    split = partition(Graph.from_edge_index(edges, num_nodes), Topology.preset("2xdgx1"), method)
    assert split.offsets[-1] == num_nodes


def test_bound_looks_at_every_device_beyond_64():
    topology = Topology.preset("hosts70")
    # Device 66 sends five rows to 69 and two of them also to 3; all others are idle.
    rows = torch.arange(5)
    graph = Graph.from_edge_index(torch.cat([torch.stack([rows, rows + 5]), torch.tensor([[0, 1], [10, 11]])], 1), 12)
    split = partition(graph, topology, "given", parts=[66] * 5 + [69] * 5 + [3] * 2)
    bound = cut_lower_bound(split.requests, topology, 4)
    assert bound.sources in {(66,), tuple(d for d in range(70) if d != 69)}
    assert bound == pytest.approx(5 * 4 / topology.max_flow({66}, set(range(70)) - {66}), rel=1e-3)
