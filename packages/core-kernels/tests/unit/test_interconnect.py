"""Curves, estimates from links, presets and files."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_kernels.comm import Group
from core_kernels.errors import ArgumentError
from core_kernels.interconnect import COLLECTIVES, LOCAL_COPIES, PRESETS, Curve, Interconnect, Link
from core_kernels.interconnect.hosts import exchange_partners, host_id, hosts_of, shape_of

points = st.dictionaries(st.integers(0, 10**9), st.floats(0, 100), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(points, st.lists(st.integers(0, 2 * 10**9), min_size=2, max_size=10))
def test_fitted_curves_are_monotone_and_pass_through_monotone_points(measured, asked):
    curve = Curve.fit(list(measured), list(measured.values()))
    seconds = [curve.at(num_bytes) for num_bytes in sorted(asked)]
    assert all(a <= b * (1 + 1e-9) + 1e-12 for a, b in itertools.pairwise(seconds))
    for num_bytes in measured:
        least = min(seconds for larger, seconds in measured.items() if larger >= num_bytes)
        assert curve.at(num_bytes) == pytest.approx(least)


def test_a_curve_keeps_its_latency_below_and_its_last_slope_above():
    curve = Curve((100.0, 200.0, 300.0), (1.0, 1.0, 3.0))
    assert curve.at(0) == curve.at(100) == 1.0
    assert curve.at(500) == pytest.approx(3.0 + 2.0 * 2)
    assert Curve((8.0,), (2.0,)).at(1e9) == 2.0


@pytest.mark.parametrize("bad", [((), ()), ((1.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)), ((1.0,), (1.0, 2.0))])
def test_curves_refuse_disorder(bad):
    with pytest.raises(ArgumentError, match="increasing num_bytes"):
        Curve(*bad)


def made(**fields):
    links = {"local": Link(1e-3, 1e6), "network": Link(1e-2, 1e5)}
    return Interconnect(name="made", assumption="by hand", group_shape="2x2", links=links, **fields)


def test_estimates_follow_their_formulas():
    interconnect = made()
    assert interconnect.seconds("send_recv", 1000, "1x2") == pytest.approx(1e-3 + 1e-3)
    assert interconnect.seconds("send_recv", 1000, "2x1") == pytest.approx(1e-2 + 1e-2)
    assert interconnect.seconds("broadcast", 1000, "1x8") == pytest.approx(3e-3 + 1e-3)
    assert interconnect.seconds("all_to_all", 3000, "2x2") == pytest.approx(3e-2 + 3000 * 2 * 2 / 3 / 1e5)
    assert interconnect.seconds("all_reduce", 4000, "1x4") == pytest.approx(6e-3 + 2 * 0.75 * 4000 / 1e6)
    assert interconnect.seconds("all_reduce", 4000) == pytest.approx(6e-2 + 2 * 0.5 * 4000 / 1e5)
    assert interconnect.seconds("all_gather", 3000) == pytest.approx(3e-2 + 0.5 * 4000 / 1e5)
    assert interconnect.seconds("reduce_scatter_v", 3000) == interconnect.seconds("all_gather_v", 3000)
    assert interconnect.seconds("all_reduce", 4000, "1x1") == 0.0


def test_measured_curves_come_before_estimates():
    interconnect = made(curves={"2x2": {"all_reduce": Curve((1.0, 2.0), (5.0, 6.0))}})
    assert interconnect.seconds("all_reduce", 3) == pytest.approx(7.0)
    assert interconnect.is_measured("all_reduce")
    assert not interconnect.is_measured("all_reduce", "1x2")
    assert not interconnect.is_measured("broadcast")


def test_one_json_file_holds_everything(tmp_path):
    interconnect = made(
        curves={"2x2": {"all_reduce": Curve((1.0, 2.0), (5.0, 6.0))}},
        rates={"spmm_bytes_per_second": 1e9},
        machine={"num_cores": 2},
    )
    loaded = Interconnect.load(interconnect.save(tmp_path / "interconnect.json"))
    assert loaded == interconnect
    assert loaded.fingerprint == interconnect.fingerprint
    assert loaded.machine_fingerprint == interconnect.machine_fingerprint != made().machine_fingerprint
    assert json.loads((tmp_path / "interconnect.json").read_text())["schema"] == "core_kernels.interconnect"
    assert loaded.rate("spmm_bytes_per_second") == 1e9


def test_hosts_are_told_apart_and_paired():
    assert [shape_of(hosts) for hosts in ([0], [0, 0, 0], [0, 1, 2], [0, 0, 1, 1], [0, 1, 1])] == [
        "1x1", "1x3", "3x1", "2x2", "2x2",
    ]  # fmt: skip
    assert exchange_partners([0, 0, 0, 1, 1, 2, 3], across=True) == {0: 3, 3: 0, 5: 6, 6: 5}
    assert exchange_partners([0, 0, 0, 1, 1, 2, 3], across=False) == {0: 1, 1: 0, 3: 4, 4: 3}
    assert exchange_partners([0, 0], across=True) == {}
    group = Group.single()
    assert hosts_of(group) == [0]


def test_the_environment_overrules_what_the_kernel_says(monkeypatch):
    monkeypatch.delenv("SEXTET_HOST", raising=False)
    assert "/" in host_id() or sys.platform != "linux"
    monkeypatch.setenv("SEXTET_HOST", "host7")
    assert host_id() == "host7"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_answer_everything_and_state_their_assumption(name):
    preset = Interconnect.preset(name)
    assert len(preset.assumption) > 30
    for collective in COLLECTIVES:
        assert (
            0 < preset.seconds(collective, 0) <= preset.seconds(collective, 10**6) < preset.seconds(collective, 10**9)
        )
    copies = LOCAL_COPIES if "host_to_device" in preset.links else LOCAL_COPIES[:2]
    assert all(preset.seconds(copy, 10**6) > 0 for copy in copies)
    assert preset.rate("spmm_bytes_per_second") > 0


def test_presets_are_ordered_as_the_machines_are():
    def seconds(name):
        return Interconnect.preset(name).seconds("all_reduce", 10**9, "8x8" if "8x8" in name else None)

    assert seconds("h100-nvlink-8") < seconds("a100-nvlink-8") < seconds("v100-nvlink-8") < seconds("pcie4-8")
    assert seconds("h100-8x8-ib") < seconds("a100-8x8-ib")
    assert seconds("ethernet-10gbit") < seconds("ethernet-1gbit") < seconds("ethernet-100mbit")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made().seconds("all_to_none", 1), "operation='all_to_none'.*all_reduce"),
        (lambda: made().seconds("all_reduce", -1), "num_bytes=-1"),
        (lambda: made().seconds("all_reduce", 1, "two"), "'HxR'"),
        (lambda: made().seconds("host_to_device", 1), "'host_to_device' link"),
        (lambda: Interconnect.preset("pigeon"), "name='pigeon'.*loopback-cpu"),
        (lambda: made().rate("spmm"), "none"),
        (lambda: Link(-1.0, 1.0), "latency of at least 0"),
        (lambda: PRESETS["loopback-cpu"].seconds("all_reduce", 1, "2x2"), "'network' link"),
    ],
)
def test_bad_questions_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
