"""Units, stage costs, hosts, plans and the command lines of pipelines and experts; wrong calls and their messages."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar import Cluster, Plan, experts, models, pipeline, search, trace
from autopar.cli import main
from autopar.errors import InfeasibleError, PlanMismatchError, ProblemError
from autopar.pipeline.hosts import SubMesh, host_orders, place_devices, stage_cluster
from core_kernels.errors import ArgumentError

PAIR = Cluster.preset("loopback-cpu", 2)
SIZES = {
    "gpt": {"layers": 2, "width": 16, "vocabulary": 32, "dropout": 0.1, "batch": 4},
    "mlp_mixer": {"blocks": 2, "width": 16, "image": 16, "patch": 4, "batch": 4, "classes": 8},
    "vgg16": {"image": 32, "shrink": 16, "hidden": 32, "classes": 8, "batch": 8, "dropout": 0.5},
}


@functools.cache
def graph_of(name):
    return trace(*models.FACTORIES[name](**SIZES.get(name, {})))


@functools.cache
def pair_frontier():
    return pipeline.search(graph_of("mlp"), PAIR, [4], sub_meshes=[1])


@pytest.mark.parametrize("name", sorted(SIZES))
def test_units_add_up_to_the_whole_step(name):
    """On one device with one micro-batch the sum over units is what the search of the whole step finds."""
    cluster = Cluster.preset("loopback-cpu", 1)
    whole = search(graph_of(name), cluster)
    units = pipeline.search(graph_of(name), cluster, micro_batches=[1], eps=0.0)
    assert len(units) == len(whole) == 1
    assert units.seconds[0] == pytest.approx(whole.seconds[0], rel=1e-9)
    assert units.memory[0] == pytest.approx(whole.memory[0], rel=0.02)


def test_every_value_is_made_in_one_unit():
    graph = graph_of("gpt")
    units = pipeline.find_units(graph)
    made = [position for unit in units for position in unit.operators]
    assert made == sorted(set(made))
    assert units[-1].result == graph.result
    assert [unit.source for unit in units[1:]] == [unit.result for unit in units[:-1]]
    assert len(pipeline.find_units(graph, max_units=3)) <= 3


def test_slow_devices_get_less_and_lean_devices_fewer_micro_batches():
    graph = trace(*models.gpt(layers=4, width=64, vocabulary=64, batch=8))
    cluster = Cluster.preset("loopback-cpu", 2)
    hosts = [pipeline.Host(1), pipeline.Host(1, speed=0.25)]
    plan = pipeline.search(graph, cluster, [8], 2, [1], hosts, eps=0.0).mini_time()
    share = {stage.devices: len(stage.parameters) for stage in plan.stages}
    assert share[(0,)] > 2 * share[(1,)]
    alike = pipeline.search(graph, cluster, [8], 2, [1], eps=0.0).mini_time()
    tight = alike.stages[0].memory_bytes * 0.8
    hosts = [pipeline.Host(1, memory_bytes=tight), pipeline.Host(1)]
    plan = pipeline.search(graph, cluster, [8], 2, [1], hosts, eps=0.0).mini_time()
    for stage in plan.stages:
        assert stage.memory_bytes <= (tight if stage.devices == (0,) else math.inf)


def test_spread_stages_share_the_hosts_links():
    row = place_devices([pipeline.Host(4)] * 2, (0, 1), 2, [4])
    assert row is not None
    assert [row.devices(first, 4) for first in (0, 4)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert not row.crosses.any()
    cluster = Cluster.preset("a100-8x8-ib", 8, 4)
    seen = stage_cluster(cluster, row.sub_meshes[0])
    assert (seen.num_devices, seen.devices_per_host) == (4, 2)
    whole, shared = (c.interconnect.links["network"].bytes_per_second for c in (cluster, seen))
    assert shared == whole / 2
    assert place_devices([pipeline.Host(4), pipeline.Host(2)], (0, 1), 2) is None
    assert len(host_orders([pipeline.Host(1, speed=s) for s in range(1, 7)])) == 24
    assert SubMesh(pipeline.Host(4), 4, 2, 2) == row.sub_meshes[0]


def test_plan_and_frontier_are_saved_explained_and_compared(tmp_path):
    frontier = pair_frontier()
    plan, single = frontier[0], frontier[-1]
    assert pipeline.PipelinePlan.load(plan.save(tmp_path / "plan.json")) == plan
    assert plan.simulated_seconds <= plan.seconds
    assert "stage 1:" in plan.explain("network")
    assert "stored R, used R" in plan.explain("network")
    assert plan.diff(plan) == ""
    assert len(frontier) == 1 or plan.diff(single)
    frontier.save(tmp_path / "frontier.json")
    assert pipeline.PipelineFrontier.load(tmp_path / "frontier.json")[0] == plan
    assert (np.diff(frontier.memory) > 0).all()
    assert (np.diff(frontier.seconds) < 0).all()


def run(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_command_lines(capsys, tmp_path):
    path = str(tmp_path / "plan.json")
    arguments = ["pipeline", "--model", "autopar.models:mlp", "--cluster", "loopback-cpu", "--micro-batches", "4"]
    found = run(capsys, *arguments, "--stages", "2", "--sub-mesh", "1", "--host", "1", "--host", "1:0.5", "--out", path)
    assert (found["stages"], found["micro_batches"]) == (2, 4)
    assert "stage 1:" in run(capsys, "explain", path)["text"]
    path = str(tmp_path / "experts.json")
    sizes = ["--cluster", "loopback-cpu", "--width", "16", "--hidden", "16"]
    found = run(capsys, "experts", *sizes, "--experts", "4", "--steps", "3", "--tokens", "500", "--out", path)
    assert set(found) == {"plain", "shadow", "planned", "plan"}
    assert "device 1: experts" in run(capsys, "explain", path)["text"]
    assert main(["verify", path, "--model", "autopar.models:mlp"]) == 2
    assert main(["pipeline", "--model", "autopar.models:mlp", "--cluster", "loopback-cpu", "--host", "two"]) == 2
    assert "host='two'" in capsys.readouterr().err


def test_statistics_are_merged_expected_and_compared(tmp_path):
    counter = experts.TokenCounter(num_layers=2, num_experts=3)
    counter.add(1, torch.tensor([0, 2, 2]))
    assert counter.end_step()[1].tolist() == [[1], [0], [2]]
    assert counter.end_step().sum() == 0
    assert experts.expected_counts([[[4]], [[8]]], decay=0.0).tolist() == [[8]]
    assert experts.similarity([[1, 1]], [[2, 2]]) == 1.0
    routings = experts.zipf_counts(3, 4, 2, 100, seed=1)
    assert (routings.sum(1) == 100).all()
    experts.save_counts(tmp_path / "counts.npy", routings)
    assert (experts.load_counts(tmp_path / "counts.npy") == routings).all()


def test_homes_move_only_when_that_pays():
    cluster = Cluster.preset("loopback-cpu", 2)
    routing = np.tile(np.array([[4000, 4000], [4000, 4000], [10, 10], [10, 10]]), (6, 1, 1))
    moves = {}
    for state_bytes in (1, 1 << 40):
        layer = experts.ExpertLayer(cluster, 64, 1 << 24, 1e-6, None, state_bytes)
        planner = experts.ExpertPlanner(layer, 4)
        for counts in routing:
            planner.update(counts)
        moves[state_bytes] = planner.placement.homes != experts.plain_placement(4, 2).homes
    assert moves == {1: True, 1 << 40: False}


LAYER = experts.ExpertLayer(PAIR, 64, 1024, 1e-6)


def batch_norm():
    return pipeline.cut_batch(trace(*models.wide_resnet((1, 1), 4, image=16, batch=4, classes=8)), 2)


def apply(plan):
    return pipeline.apply(models.mlp()[0], plan, graph_of("mlp"))


# What is wrong: (the call, its error, and parts of the message: name, value, remedy).
WRONG_CALLS = {
    "micro-batches that do not divide": (
        lambda: pipeline.search(graph_of("mlp"), PAIR, [3]), ProblemError,
        ("num_micro_batches=3", "8 samples", "choose one")),
    "micro-batches of a normalised batch": (
        batch_norm, ProblemError, ("num_micro_batches=2", "batch_norm", "use 1 micro-")),
    "more stages than units": (
        lambda: pipeline.search(graph_of("mlp"), PAIR, num_stages=9), ProblemError,
        ("num_stages=9", "at most 2", "ask for fewer")),
    "no stage": (
        lambda: pipeline.search(graph_of("mlp"), PAIR, num_stages=0), ProblemError, ("num_stages=0", "leave it out")),
    "sub-mesh of no size": (
        lambda: pipeline.search(graph_of("mlp"), PAIR, sub_meshes=[5]), ProblemError,
        ("sub_meshes", "5", "num_devices=2", "leave it out")),
    "negative eps": (lambda: pipeline.search(graph_of("mlp"), PAIR, eps=-1), ProblemError, ("eps=-1", "use 0")),
    "hosts of other devices": (
        lambda: pipeline.search(graph_of("mlp"), PAIR, hosts=[pipeline.Host(3)]), ProblemError,
        ("3 devices", "num_devices=2", "list every host")),
    "host without speed": (lambda: pipeline.Host(1, speed=0), ProblemError, ("speed=0", "positive", "leave out")),
    "devices that are too small": (
        lambda: pipeline.search(graph_of("mlp"), PAIR, [4], hosts=[pipeline.Host(2, memory_bytes=9)]), InfeasibleError,
        ("at least", "memory_bytes are [9]", "use more devices")),
    "budget nobody meets": (
        lambda: pair_frontier().mini_time(memory=10), InfeasibleError, ("memory=10", "in stage", "raise the budget")),
    "lists of different lengths": (
        lambda: pipeline.simulate([1], [1, 2], 1), ProblemError, ("lengths [1, 2", "S-1", "one number per stage")),
    "negative time": (lambda: pipeline.simulate([-1], [1], 1), ProblemError, ("negative", "at least 0", "check")),
    "more slices than micro-batches": (
        lambda: pipeline.simulate([1], [1], 1, num_sliced=2), ProblemError, ("num_sliced=2", "0 to", "cut the batch")),
    "another model": (
        lambda: pair_frontier()[0].check(graph_of("gpt")), PlanMismatchError,
        ("model=", "was made for", "search again")),
    "ranks that are too few": (
        lambda: apply(pipeline.search(graph_of("mlp"), PAIR, [4], 2, [1]).mini_time()), PlanMismatchError,
        ("the group has 1", "expected 2", "a cluster of 1")),
    "plan of another kind": (
        lambda: Plan.from_dict(pair_frontier()[0].to_dict()), ArgumentError,
        ("autopar.pipeline_plan", "its own class")),
    "counts of another shape": (
        lambda: experts.plan(LAYER, [[1, 2, 3]]), ProblemError, ("(1, 3)", "[experts, 2]", "merge statistics")),
    "negative counts": (lambda: experts.plan(LAYER, [[1, -2]]), ProblemError, ("least -2", "none negative", "merge")),
    "unknown method": (
        lambda: experts.place_experts(LAYER, [[1, 2]], method="best"), ProblemError,
        ("method='best'", "exact, descent")),
    "experts that do not fit": (
        lambda: experts.plan(replace(LAYER, capacity=1), [[1, 1]] * 4), InfeasibleError,
        ("capacity=1", "4 experts", "use more devices")),
    "unknown expert": (
        lambda: experts.TokenCounter(1, 2).add(0, torch.tensor([2])), ProblemError,
        ("ids 2 to 2", "below 2", "padding")),
    "empty history": (lambda: experts.expected_counts([]), ProblemError, ("0 steps", "at least one", "count a step")),
    "routings without steps": (
        lambda: experts.simulate(LAYER, np.zeros((2, 2))), ProblemError,
        ("(2, 2)", "[steps, experts, devices]", "stack")),
    "unknown strategy": (
        lambda: experts.simulate(LAYER, np.ones((1, 1, 2)), ["best"]), ProblemError, ("['best']", "plain", "choose")),
    "layer without bytes": (
        lambda: replace(LAYER, token_bytes=0), ProblemError, ("token_bytes=0", "1 byte", "feed_forward")),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "parts"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_message_holds_name_value_and_remedy(call, error, parts):
    with pytest.raises(error) as caught:
        call()
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "broken.json"
    for text in ("", "[]", '{"schema": "autopar.frontier", "version": 1}', '{"schema": 3}'):
        path.write_text(text)
        with pytest.raises(ProblemError, match=r"broken\.json"):
            pipeline.PipelineFrontier.load(path)
        with pytest.raises(ArgumentError):
            pipeline.PipelinePlan.load(path)
    path = tmp_path / "broken.npy"
    for content in (b"", b"junk"):
        path.write_bytes(content)
        with pytest.raises(ProblemError, match="save_counts wrote"):
            experts.load_counts(path)
    np.save(path, np.ones((2, 2)))
    with pytest.raises(ProblemError, match=r"\(2, 2\)"):
        experts.load_counts(path)
