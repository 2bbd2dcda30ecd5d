from __future__ import annotations

import json

import pytest

from core_kernels.topology import (
    ContentionGroup,
    Link,
    Node,
    Topology,
    TopologyError,
    UnreachablePairError,
    cluster,
    pair_table,
)


def _line(*rates: float) -> Topology:
    """Devices 0 and 1 joined over a chain of switches with the given rates, one way."""
    nodes = [Node("a", "device"), Node("b", "device"), *(Node(f"s{k}", "switch") for k in range(len(rates) - 1))]
    stops = [0, *range(2, len(rates) + 1), 1]
    links = [Link(stops[k], stops[k + 1], "L", rate, 1e-6) for k, rate in enumerate(rates)]
    return Topology("line", tuple(nodes), tuple(links))


@pytest.mark.parametrize(
    ("name", "devices", "hosts"),
    [("dgx1", 8, 1), ("pcie8", 8, 1), ("nvswitch8", 8, 1), ("hosts4", 4, 4), ("2xdgx1", 16, 2), ("3xnvswitch8", 24, 3)],
)
def test_presets_reach_every_pair(name, devices, hosts):
    topology = Topology.preset(name)
    assert (topology.num_devices, len(topology.hosts)) == (devices, hosts)
    for i in range(devices):
        for j in range(devices):
            if i != j:
                assert topology.bytes_per_second(i, j) > 0
                # A route never passes through another device.
                targets = [topology.links[k].target for k in topology.route(i, j)]
                assert targets[-1] == j
                assert all(topology.nodes[t].kind != "device" for t in targets[:-1])


def test_unknown_preset_names_the_known():
    with pytest.raises(ValueError, match="dgx1"):
        Topology.preset("dgx9")
    with pytest.raises(ValueError, match=r"name=.*dgx1"):
        Topology.preset("0xdgx1")


def test_route_is_one_way_and_slowest_link_counts():
    topology = _line(10.0, 4.0, 8.0)
    assert topology.bytes_per_second(0, 1) == 4.0
    assert topology.latency_seconds(0, 1) == pytest.approx(3e-6)
    assert not topology.is_reachable(1, 0)
    with pytest.raises(UnreachablePairError, match="b cannot reach a"):
        topology.route(1, 0)


def test_direct_link_is_taken_and_devices_are_no_switches():
    nodes = tuple(Node(f"d{k}", "device") for k in range(3))
    topology = Topology("v", nodes, (Link(0, 1, "L", 1.0), Link(1, 2, "L", 1.0)))
    assert topology.is_reachable(0, 1)
    assert not topology.is_reachable(0, 2)  # d1 would have to forward: a planner must ask for that


def test_wider_of_equally_short_routes_wins():
    nodes = (Node("a", "device"), Node("b", "device"), Node("s", "switch"), Node("t", "switch"))
    links = (Link(0, 2, "L", 1.0), Link(2, 1, "L", 1.0), Link(0, 3, "L", 5.0), Link(3, 1, "L", 2.0))
    topology = Topology("two ways", nodes, links)
    assert topology.route(0, 1) == (2, 3)


def test_contention_group_is_a_resource_of_its_links_routes():
    nodes = tuple(Node(f"d{k}", "device") for k in range(3))
    links = (Link(0, 1, "L", 4.0), Link(0, 2, "L", 4.0))
    topology = Topology("shared", nodes, links, (ContentionGroup("port", (0, 1), 5.0),))
    assert topology.routes.resources(0, 1).tolist() == [0, 2]
    assert topology.resource_names[-1] == "port"
    assert topology.max_flow([0], [1, 2]) == pytest.approx(5.0, rel=1e-5)
    assert Topology("free", nodes, links).max_flow([0], [1, 2]) == pytest.approx(8.0, rel=1e-5)


def test_max_flow_counts_every_way_out():
    dgx1 = Topology.preset("dgx1")
    # Two double and two single NVLinks, and PCIe.
    assert dgx1.max_flow([0], range(1, 8)) == pytest.approx((48 + 48 + 24 + 24 + 11) * 1e9, rel=1e-4)
    assert dgx1.max_flow([0, 1, 2, 3], [4, 5, 6, 7]) == pytest.approx((24 + 24 + 48 + 48 + 9) * 1e9, rel=1e-4)


def test_parts_of_a_cluster():
    topology = cluster([2, 3], 100.0, 10.0)
    assert topology.hosts == ((0, 1), (2, 3, 4))
    inside = topology.host_topology(1)
    assert inside.num_devices == 3
    assert inside.bytes_per_second(0, 2) == 100.0
    between = topology.between_hosts()
    assert between.num_devices == 2
    assert between.bytes_per_second(0, 1) == 10.0
    assert cluster([2], 1.0, 1.0).hosts == ((0, 1),)
    # One card per device: the host's way out is the sum of its cards.
    cards = Topology.preset("2xnvswitch8")
    assert cards.between_hosts().bytes_per_second(0, 1) == pytest.approx(8 * cards.bytes_per_second(0, 8))


def test_save_and_load_keep_everything(tmp_path):
    topology = cluster([2, 2], 100.0, 10.0, 1e-6, 2e-6)
    for name in ("t.json", "t.yaml"):
        topology.save(tmp_path / name)
        loaded = Topology.load(tmp_path / name)
        assert loaded == topology
        assert loaded.fingerprint() == topology.fingerprint()
    assert cluster([2, 2], 100.0, 11.0).fingerprint() != topology.fingerprint()


def test_environment_variable_names_the_file(tmp_path, monkeypatch):
    cluster([1, 1], 100.0, 10.0).save(tmp_path / "t.json")
    monkeypatch.setenv("GNN_COMM_TOPO", str(tmp_path / "t.json"))
    assert Topology.load("auto").name == "cluster"


def test_auto_without_driver_measures_the_processors(monkeypatch):
    monkeypatch.delenv("GNN_COMM_TOPO", raising=False)
    monkeypatch.setattr("core_kernels.topology.nvml.nvml_topology", lambda: None)
    topology = Topology.load("auto")
    assert topology.links == () or min(a.bytes_per_second for a in topology.links) > 1e8
    assert "measured" in topology.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(nodes=[]), "no device"),
        (lambda d: d["links"][0].update(bytes_per_second=0), "bytes_per_second=0"),
        (lambda d: d["links"][0].update(target=99), "joins nodes"),
        (lambda d: d["nodes"][0].update(kind="toaster"), "toaster"),
        (lambda d: d["nodes"][0].update(host=None), "host None"),
        (lambda d: d["nodes"][1].update(name=d["nodes"][0]["name"]), "two nodes"),
        (lambda d: d["nodes"].reverse(), "first nodes"),
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d.pop("links"), "incomplete"),
        (lambda d: d.update(groups=[{"name": "g", "links": [77], "bytes_per_second": 1.0}]), "'g' is not valid"),
    ],
)
def test_impossible_descriptions_are_refused(change, message, tmp_path):
    fields = cluster([2, 2], 100.0, 10.0).to_dict()
    change(fields)
    (tmp_path / "t.json").write_text(json.dumps(fields))
    with pytest.raises(TopologyError, match=message):
        Topology.load(tmp_path / "t.json")


def test_drawing_names_every_node_and_pair():
    topology = Topology.preset("dgx1")
    drawing = topology.draw()
    assert all(node.name in drawing for node in topology.nodes)
    columns, rows = pair_table(topology)
    assert len(rows) == 8
    assert len(columns) == 9
    assert rows[0][4] == "NV1 24"
    one_way = _line(1e9)
    assert pair_table(one_way)[1][1] == ["b", "-", "X"]


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        (Link(0, 1, "L", float("inf")), "bytes_per_second=inf"),
        (Link(0, 1, "L", float("nan")), "bytes_per_second=nan"),
        (Link(0, 1, "L", 1.0, float("inf")), "latency_seconds=inf"),
        (Link(0.0, 1, "L", 1.0), "nodes 0.0 and 1"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_link_that_no_planner_could_reckon_with_is_refused(link, shown):
    with pytest.raises(ValueError, match=rf"{shown}.*expected"):
        Topology("t", (Node("a", "device"), Node("b", "device")), (link,))
