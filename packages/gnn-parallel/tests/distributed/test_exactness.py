"""Losses and every gradient agree with one process, for all layers, strategies, numbers of ranks and partitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core_kernels import ops, partition_graph, vertex
from core_kernels.nn import SAGEConv
from gnn_parallel import VertexSplit
from gnn_parallel.linear_split import LinearSplit
from gnn_parallel.models import SampledGNN, make_model
from gnn_parallel.softmax_split import SoftmaxSplit
from gnn_parallel.strategies import STRATEGIES
from gnn_parallel.verify import compare, run_reference, run_strategy

pytestmark = pytest.mark.distributed

ONE_WAY_LAYERS = ("sage", "sage_max", "gin", "gat", "gatv2", "custom")
_subgroups: dict[int, object] = {}


def first_ranks(group, world_size):
    """Return the group of the first ranks, ``None`` on the others."""
    if group.rank >= world_size:
        return None
    if world_size not in _subgroups:
        _subgroups[world_size] = group.subgroup(range(world_size)) if world_size < group.size else group
    return _subgroups[world_size]


def partition(graph, num_parts, kind):
    """Split by METIS, at random, or so that the last rank owns nothing."""
    if kind != "empty":
        return partition_graph(graph, num_parts, kind, seed=1)
    return partition_graph(graph, num_parts, "given", torch.arange(graph.num_nodes) % max(1, num_parts - 1))


@vertex.program
def gated_attention(v):
    """Attention over gated values, a mean, and the vertex itself."""
    alpha = vertex.softmax(vertex.leaky_relu(e.src.k + v.q) for e in v.in_edges)
    weighed = vertex.sum(a * e.src.h for a, e in zip(alpha, v.in_edges, strict=False))
    return vertex.tanh(weighed) + v.own * vertex.mean(vertex.sigmoid(e.src.k) * e.src.h for e in v.in_edges)


class GatedAttention(nn.Module):
    """A layer of the user's own, written as a vertex program."""

    in_channels, out_channels, heads = 7, 6, 2

    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(7, 2), nn.Linear(7, 6, bias=False)
        self.query, self.own = nn.Linear(7, 2), nn.Linear(7, 6)
        self.bias = nn.Parameter(torch.ones(6))

    def finish(self, rows):
        return rows.flatten(1) + self.bias

    def split_layer(self, graph):
        sources, destinations = {"k": self.key, "h": self.value}, {"q": self.query, "own": self.own}
        return VertexSplit(gated_attention, sources, destinations, finish=self.finish, heads=2, output_width=6)

    def forward(self, block, x):
        own = x[: block.num_dst]
        source = {"k": self.key(x).view(-1, 2, 1), "h": self.value(x).view(-1, 2, 3)}
        destination = {"q": self.query(own).view(-1, 2, 1), "own": self.own(own).view(-1, 2, 3)}
        return self.finish(gated_attention(block, src=source, dst=destination))


def build(problem, layer, **options):
    width = problem.features.shape[1]
    if layer in ("custom", "sage_max"):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            first = GatedAttention() if layer == "custom" else SAGEConv(width, 6, aggr="max")
            return SampledGNN([first, SAGEConv(6, 3)], dropout=0.3).to(problem.features.dtype)
    options = {"heads": 2, "dropout": 0.3, "seed": 5, "dtype": problem.features.dtype} | options
    return make_model(layer, width, 6, 3, len(problem.fanouts), **options)


def reference_of_rank_0(group, problem, model, shape, **options):
    """Train without strategies on rank 0, which then has the kernels compiled for the others; ``None`` elsewhere."""
    results = None
    if group.rank == 0:
        results = run_reference(problem.graph, model, problem.features, problem.labels, *shape, **options)
    group.barrier()
    return results


def compare_grid(whole_group, problem, world_size, layers, partitions, options):
    """Return the largest difference of every cell; rank 0 holds the reference."""
    group = first_ranks(whole_group, world_size)
    if group is None:
        return {}
    arguments = (problem.features, problem.labels)
    differences = {}
    for layer in layers:
        shape = (problem.seeds, problem.fanouts, problem.batch_size, 2)
        expected = reference_of_rank_0(group, problem, build(problem, layer), shape)
        for kind in partitions:
            book = partition(problem.graph, world_size, kind)
            for strategy in STRATEGIES:
                found, _ = run_strategy(
                    group, strategy, problem.graph, build(problem, layer), *arguments, book, *shape, **options
                )
                if expected is not None:
                    difference = compare(found, expected)
                    differences[layer, kind, strategy] = (difference.largest, difference.worst_gradient)
    return differences


def partitions_of(world_size):
    """Return the partitions to compare; a rank that owns nothing is tried among three ranks."""
    return ("metis", "random", "empty") if world_size == 3 else ("metis", "random")


def assert_all_below(results, tolerance):
    assert results[0]
    wrong = {cell: found for cell, found in results[0].items() if not found[0] <= tolerance}
    assert not wrong, wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_grid_agrees_with_one_process_in_float64(four_ranks, problem, world_size):
    results = four_ranks.run(compare_grid, problem, world_size, ONE_WAY_LAYERS, partitions_of(world_size), {})
    assert_all_below(results, 1e-10)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gcn_grid_agrees_with_one_process_in_float64(four_ranks, two_way_problem, world_size):
    results = four_ranks.run(compare_grid, two_way_problem, world_size, ("gcn",), partitions_of(world_size), {})
    assert_all_below(results, 1e-10)


@pytest.mark.parametrize("world_size", [3, 4])
def test_grid_agrees_when_features_are_sharded_and_cached(four_ranks, two_way_problem, world_size):
    options = {"placement": "sharded", "cache": "10%"}
    layers = (*ONE_WAY_LAYERS, "gcn")
    results = four_ranks.run(compare_grid, two_way_problem, world_size, layers, ("metis", "empty"), options)
    assert_all_below(results, 1e-10)


def test_grid_agrees_with_one_process_in_float32(four_ranks, problem32):
    results = four_ranks.run(compare_grid, problem32, 4, (*ONE_WAY_LAYERS, "gcn"), ("metis",), {})
    assert_all_below(results, 1e-5)


def break_mean(self, states, virtual, scale):
    """Average the means of the parts, as the released APT does, instead of merging (sum, count)."""
    means = states / virtual.counts[:, None].to(states.dtype)
    num_parts = torch.bincount(virtual.destination, minlength=virtual.num_destinations).clamp(min=1)
    merged = virtual.sum(means) / num_parts[:, None].to(states.dtype)
    return self.project(merged) if self.state_is_raw else merged


def break_softmax(self, states, virtual, scale=None):
    """Average the values of the parts, each normalised by itself."""
    num_parts = torch.bincount(virtual.destination, minlength=virtual.num_destinations).clamp(min=1)
    merged = virtual.sum(states[:, self.heads :]) / num_parts[:, None].to(states.dtype)
    return merged.view(-1, self.heads, self.channels)


def break_stateless_draws(*args, **kwargs):
    """Draw neighbours from a stream that every rank consumes for itself."""
    kwargs["seed"] = int(torch.randint(1 << 30, ()))
    return _sample_neighbors(*args, **kwargs)


_sample_neighbors = ops.sample_neighbors


def compare_broken(group, problem, layer, strategy, owner, name, replacement):
    kept = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        return compare_grid(group, problem, 3, (layer,), ("random",), {})
    finally:
        setattr(owner, name, kept)


def compare_mean_of_means(group, problem):
    return compare_broken(group, problem, "sage", "snp", LinearSplit, "merge", break_mean)


def compare_unmerged_softmax(group, problem):
    return compare_broken(group, problem, "gat", "snp", SoftmaxSplit, "merge", break_softmax)


def compare_streamed_sampler(group, problem):
    torch.manual_seed(group.rank)
    return compare_broken(group, problem, "sage", "dnp", ops, "sample_neighbors", break_stateless_draws)


@pytest.mark.parametrize(
    ("twin", "broken", "whole"),
    [
        (compare_mean_of_means, ("sage", "random", "snp"), ("sage", "random", "dnp")),
        (compare_unmerged_softmax, ("gat", "random", "snp"), ("gat", "random", "dnp")),
        (compare_streamed_sampler, ("sage", "random", "dnp"), None),
    ],
)
def test_twins_that_break_the_merge_or_the_draws_are_caught(four_ranks, problem, twin, broken, whole):
    differences = four_ranks.run(twin, problem)[0]
    assert differences[broken][0] > 1e-3
    assert whole is None or differences[whole][0] < 1e-10


def train_fifty_steps(whole_group, problem):
    group = first_ranks(whole_group, 3)
    if group is None:
        return None
    arguments = (problem.features, problem.labels)
    weights = {}
    shape = (problem.seeds.repeat(1), problem.fanouts, 2, 50)
    reference = build(problem, "sage")
    reference_of_rank_0(group, problem, reference, shape, learning_rate=0.05)
    book = partition(problem.graph, 3, "metis")
    for strategy in STRATEGIES:
        _, engine = run_strategy(
            group, strategy, problem.graph, build(problem, "sage"), *arguments, book, *shape, learning_rate=0.05
        )
        found = engine.state_dict()
        weights[strategy] = max(float((found[k] - v).abs().max()) for k, v in reference.state_dict().items())
    return weights


def test_weights_after_fifty_float32_steps(four_ranks, problem32):
    differences = four_ranks.run(train_fifty_steps, problem32)[0]
    assert max(differences.values()) < 1e-4, differences
