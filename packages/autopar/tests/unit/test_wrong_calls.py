"""Wrong calls and their messages: each holds the offending name, the value and what to do about it."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Frontier, Problem, models
from autopar.errors import CaptureError, InfeasibleError, PlanMismatchError, ProblemError
from autopar.rules.registry import rule_of
from autopar.verification import load_factory
from core_kernels.comm import Group

PAIR = Cluster.preset("loopback-cpu", num_devices=2)


@functools.cache
def mlp():
    """Return a small model, its batch, its graph, and its frontier on two devices."""
    model, batch = models.mlp()
    graph = autopar.trace(model, batch)
    return model, batch, graph, autopar.search(graph, PAIR)


class Sorted(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x).sum()


class Branching(nn.Module):
    def forward(self, x):
        return x.sum() if x.sum() > 0 else x.mean()


class NoLoss(nn.Module):
    def forward(self, x):
        return x.relu()


def search(**settings):
    return autopar.search(mlp()[2], PAIR, **settings)


def apply_to_another_batch():
    model, _, graph, _ = mlp()
    parallel = autopar.apply(model, autopar.search(graph, PAIR.resized(1)).mini_time(), graph)
    parallel(torch.zeros(3, 16), torch.zeros(3, dtype=torch.int64))


def load_another_document(tmp_path):
    path = tmp_path / "cluster.json"
    PAIR.save(path)
    Frontier.load(path)


# What is wrong: (the call, its error, and parts of the message: name, value, remedy).
WRONG_CALLS = {
    "optimiser nobody knows": (
        lambda: autopar.trace(*models.mlp(), optimizer="lion"), ProblemError, ("optimizer=", "'lion'", "choose the")),
    "control flow on data": (
        lambda: autopar.trace(Branching(), (torch.ones(3),)), CaptureError,
        ("Branching", "cannot be exported", "shows the place")),
    "operator without a rule": (
        lambda: autopar.trace(Sorted(), (torch.ones(3, 3),)), CaptureError,
        ("aten.linalg_svdvals", "test_wrong_calls.py", "add a rule with autopar.rules.rule")),
    "no loss": (
        lambda: autopar.trace(NoLoss(), (torch.ones(3),)), CaptureError, ("returns", "(3,)", "pass loss=...")),
    "no device": (lambda: PAIR.resized(0), ProblemError, ("num_devices=0", "at least 1", "count the devices")),
    "overlap": (lambda: replace(PAIR, overlap=1.5), ProblemError, ("overlap=", "1.5", "0 hides nothing")),
    "mesh of other devices": (
        lambda: search(meshes=[(3,)]), ProblemError, ("mesh", "(3,)", "choose one of [(2,)]")),
    "meshes by name": (lambda: search(meshes="some"), ProblemError, ("meshes=", "'some'", "write [(2, 4)]")),
    "constraint on an unknown parameter": (
        lambda: search(constraints={"head.weight": "R"}), ProblemError,
        ("constraints", "'head.weight'", "check the names")),
    "constraint that does not divide": (
        lambda: autopar.search(
            autopar.trace(*models.mlp(width=15)), PAIR, constraints={"network.0.weight": "S(1)"}), InfeasibleError,
        ("constraints=", "'S(1)'", "[(2,)]", "drop one")),
    "constraint with another number of axes": (
        lambda: search(meshes=[(2,)], constraints={"network.0.weight": "S(0),R"}), InfeasibleError,
        ("constraints=", "'S(0),R'", "one placement per axis", "allow more meshes")),
    "placement": (
        lambda: search(constraints={"network.0.weight": "X"}), ProblemError, ("placement", "'X'", "check the plan")),
    "budget nobody meets": (
        lambda: mlp()[3].mini_time(memory=10), InfeasibleError, ("memory=10", "the least memory", "raise the budget")),
    "slow-down below one": (
        lambda: mlp()[3].min_memory(slowdown=0.5), ProblemError, ("slowdown=", "0.5", "1.2 allows 20 %")),
    "no budget": (
        lambda: autopar.mini_parallelism(mlp()[2], PAIR), ProblemError, ("memory=", "0.0", "pass memory=...")),
    "budget for no number of devices": (
        lambda: autopar.mini_parallelism(mlp()[2], PAIR, memory=10), InfeasibleError,
        ("memory=10", "2 devices", "relax one or add devices")),
    "plan for more ranks": (
        lambda: autopar.apply(mlp()[0], mlp()[3].mini_time(), mlp()[2], Group.single()), PlanMismatchError,
        ("the group has 1", "mesh (2,)", "start as many ranks")),
    "plan for another model": (
        lambda: mlp()[3].mini_time().check(autopar.trace(*models.mlp(hidden=32))), PlanMismatchError,
        ("model=", "was made for model=", "search again for this model")),
    "plan of another torch version": (
        lambda: replace(mlp()[3].mini_time(), torch_version="1.0").check(mlp()[2]), PlanMismatchError,
        ("torch_version=", "torch_version='1.0'", "search again")),
    "plan for another mesh": (
        lambda: mlp()[3].mini_time().check(mlp()[2], (4,)), PlanMismatchError,
        ("mesh=(4,)", "mesh=(2,)", "start as many ranks")),
    "batch of another shape": (apply_to_another_batch, PlanMismatchError, ("inputs", "(3, 16)", "trace and search")),
    "factory nobody has": (
        lambda: load_factory("autopar.models:bert"), ProblemError,
        ("model 'autopar.models:bert'", "has no attribute 'bert'", "check that it can be imported")),
    "rule nobody wrote": (lambda: rule_of("svd"), ProblemError, ("rule", "svd", "add one with rules.rule")),
    "edge to no node": (
        lambda: Problem([[(1, 1)]], {(0, 3): [[(0, 0)]]}), ProblemError, ("edge (0, 3)", "v=3", "number the nodes")),
    "edge of another shape": (
        lambda: Problem([[(1, 1)], [(1, 1)]], {(0, 1): [[(0, 0), (0, 0)]]}), ProblemError,
        ("edge (0, 1)", "(1, 2, 2)", "transpose or regroup")),
    "choices that are too few": (
        lambda: Problem([[(1, 1)], [(1, 1)]]).cost([0]), ProblemError, ("choices", "length 1", "one choice per node")),
    "another document": (load_another_document, ProblemError, ("cluster.json", "autopar.cluster", "write it again")),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "parts"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_message_holds_name_value_and_remedy(call, error, parts, tmp_path):
    with pytest.raises(error) as caught:
        call(tmp_path) if call is load_another_document else call()
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
