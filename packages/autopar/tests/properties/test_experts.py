"""Placements of experts: exact on small cases, never worse than none, loads that conserve tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import Cluster
from autopar.experts import (
    ExpertLayer,
    Placement,
    place_experts,
    plain_placement,
    shadow_experts,
    simulate,
    zipf_counts,
)

SMALL = settings(max_examples=25, deadline=None)


def layer_on(num_devices, token_bytes=4096, expert_bytes=1 << 18, seconds=2e-6, capacity=None):
    cluster = Cluster.preset("loopback-cpu", num_devices)
    return ExpertLayer(cluster, token_bytes, expert_bytes, seconds, capacity, 3 * expert_bytes)


def slow_seconds(layer, counts, placement):
    """The cost model again, token by token."""
    num_devices = counts.shape[1]
    computed, sent, received, given, taken = (np.zeros(num_devices) for _ in range(5))
    for expert, home in enumerate(placement.homes):
        holders = {home, *placement.replicas[expert]}
        for device in range(num_devices):
            goes_to = device if device in holders else home
            computed[goes_to] += counts[expert, device]
            if goes_to != device:
                sent[device] += counts[expert, device]
                received[goes_to] += counts[expert, device]
        for device in placement.replicas[expert]:
            given[home] += 1
            taken[device] += 1

    def move(num_bytes):
        return layer.cluster.interconnect.seconds("all_to_all", num_bytes, f"1x{num_devices}") if num_bytes else 0.0

    exchange = 4 * move(max(sent.max(), received.max()) * layer.token_bytes)
    transfer = 2 * move(max(given.max(), taken.max()) * layer.expert_bytes)
    return exchange + 3 * layer.seconds_per_token * computed.max() + transfer


def every_placement(num_experts, num_devices, capacity):
    choices = [
        (home, replicas)
        for home in range(num_devices)
        for number in range(num_devices)
        for replicas in itertools.combinations([d for d in range(num_devices) if d != home], number)
    ]
    for combination in itertools.product(choices, repeat=num_experts):
        placement = Placement(tuple(c[0] for c in combination), tuple(c[1] for c in combination))
        if capacity is None or placement.held(num_devices).max() <= capacity:
            yield placement


@st.composite
def cases(draw):
    num_devices = draw(st.integers(2, 3))
    num_experts = draw(st.integers(1, 3 if num_devices == 2 else 2))
    counts = draw(st.lists(st.integers(0, 900), min_size=num_experts * num_devices, max_size=num_experts * num_devices))
    least = -(-num_experts // num_devices)
    capacity = draw(st.sampled_from([None, least, least + 1]))
    bytes_of = draw(st.sampled_from([1 << 10, 1 << 16, 1 << 20]))
    return np.array(counts).reshape(num_experts, num_devices), layer_on(
        num_devices, expert_bytes=bytes_of, capacity=capacity
    )


@SMALL
@given(cases())
def test_the_exact_search_equals_enumeration(case):
    counts, layer = case
    least = min(slow_seconds(layer, counts, p) for p in every_placement(*counts.shape, layer.capacity))
    found = place_experts(layer, counts, method="exact")
    assert slow_seconds(layer, counts, found) == pytest.approx(least, rel=1e-9)
    assert layer.cost(counts, found).seconds == pytest.approx(least, rel=1e-9)


@SMALL
@given(st.integers(2, 8), st.integers(2, 12), st.integers(0, 1 << 16), st.sampled_from([0.0, 1.0, 2.0]))
def test_planned_is_never_worse_than_plain_or_shadowing(num_devices, num_experts, seed, exponent):
    layer = layer_on(num_devices)
    counts = zipf_counts(1, num_experts, num_devices, 500, exponent, seed=seed)[0]
    plain, shadow = plain_placement(num_experts, num_devices), shadow_experts(layer, counts)
    for moves_homes in (True, False):
        found = place_experts(layer, counts, moves_homes=moves_homes, method="descent")
        cost = layer.cost(counts, found)
        assert cost.seconds == pytest.approx(slow_seconds(layer, counts, found), rel=1e-9)
        for other in (plain, shadow):
            assert cost.seconds <= slow_seconds(layer, counts, other) * (1 + 1e-9)
        assert moves_homes or found.homes == plain.homes


def test_a_cost_that_forgets_transfers_is_seen():
    """The twin: without the price of copies everything is copied, and enumeration tells."""
    counts = np.array([[500, 400], [10, 20]])
    layer, careless = layer_on(2, expert_bytes=1 << 24), layer_on(2, expert_bytes=1)
    least = min(slow_seconds(layer, counts, p) for p in every_placement(2, 2, None))
    assert slow_seconds(layer, counts, place_experts(careless, counts)) > least * 1.1
    assert slow_seconds(layer, counts, place_experts(layer, counts)) == pytest.approx(least)


def test_uneven_routing_gains_and_even_routing_is_left_alone():
    layer = layer_on(6)
    uneven = simulate(layer, zipf_counts(8, 12, 6, 4096, 1.5, 0.02))
    plain, shadow, planned = (uneven[name] for name in ("plain", "shadow", "planned"))
    after_the_first = (8 * planned.seconds - planned.slowest_seconds) / 7  # nothing is known before the first step
    assert after_the_first <= shadow.seconds < plain.seconds
    assert planned.seconds < plain.seconds
    assert planned.balance < plain.balance / 1.5
    assert planned.exchange_bytes < plain.exchange_bytes
    even = simulate(layer_on(4, expert_bytes=1 << 28), zipf_counts(3, 8, 4, 64, 0.0, 0.0), moves_homes=False)
    assert even["planned"] == even["plain"]
