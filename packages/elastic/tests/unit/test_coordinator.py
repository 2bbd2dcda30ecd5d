"""The leader's decisions, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from elastic_train.coordinator import Limits, Member, decide
from elastic_train.errors import InputError
from elastic_train.generation import Generation
from elastic_train.gradients import GradientSum
from elastic_train.state import State
from elastic_train.stragglers import find_straggler

RUNS = Generation(3, 1, ("a", "b", "c"), status="commit")


def running(names, number=3):
    return {name: Member(name, "running", number) for name in names}


def test_a_job_starts_when_enough_are_ready():
    ready = {name: Member(name, joined=index) for index, name in enumerate("cab")}
    assert decide(None, ready, Limits(4)) is None
    assert decide(None, ready, Limits(3)).members == ("c", "a", "b")
    assert decide(None, ready, Limits(1, 2)).members == ("c", "a")


def test_newcomers_come_last_and_leavers_go():
    alive = running("abc") | {"d": Member("d")}
    assert decide(RUNS, alive, Limits()).members == ("a", "b", "c", "d")
    alive["b"] = replace(alive["b"], is_leaving=True)
    change = decide(RUNS, alive, Limits())
    assert (change.members, change.reason) == (("a", "c", "d"), "replace")
    del alive["d"]
    assert decide(RUNS, alive, Limits()).members == ("a", "c")
    assert decide(RUNS, alive, Limits(min_workers=3)) is None
    assert decide(RUNS, running("abc"), Limits()) is None


def test_a_replacement_takes_the_place_in_one_switch_and_its_death_changes_nothing():
    alive = running("abc") | {"d": Member("d", replaces="b")}
    change = decide(RUNS, alive, Limits(max_workers=3))
    assert (change.members, change.reason) == (("a", "c", "d"), "replace")
    prepared = Generation(4, 1, ("a", "c", "d"), reason="replace")
    assert decide(prepared, running("abc"), Limits()).members == ("a", "c", "b")
    # Once it trains, it replaces nobody.
    assert decide(Generation(4, 1, ("a", "c", "d"), status="commit"), running("acd", 4), Limits()) is None


def test_a_cohort_joins_in_one_switch_or_after_a_minute():
    alive = running("abc") | {"d": Member("d", cohort="x", cohort_size=2, joined=5.0)}
    assert decide(RUNS, alive, Limits(), now=6.0) is None
    assert decide(RUNS, alive, Limits(), now=66.0).members == ("a", "b", "c", "d")
    alive["e"] = Member("e", cohort="x", cohort_size=2, joined=6.0)
    assert decide(RUNS, alive, Limits(), now=6.0).members == ("a", "b", "c", "d", "e")


def test_a_straggler_is_the_one_that_computes_longer():
    pace = {w: replace(m, compute_seconds=1.0, num_timed=20) for w, m in running("abc").items()}
    assert find_straggler(pace) is None
    pace["c"] = replace(pace["c"], compute_seconds=1.5)
    assert find_straggler(pace) == "c"
    assert find_straggler(pace, ratio=2.0) is None
    pace["a"] = replace(pace["a"], num_timed=3)
    assert find_straggler(pace) is None
    assert find_straggler({"c": pace["c"]}) is None


def test_a_failure_waits_until_all_survivors_know():
    alive = {"a": Member("a", "failed", 3), "c": Member("c", "running", 3)}
    assert decide(RUNS, alive, Limits()) is None
    alive["c"] = Member("c", "failed", 3)
    change = decide(RUNS, alive, Limits())
    assert (change.members, change.reason) == (("a", "c"), "failure")
    proposed = Generation(4, 1, ("a", "c"))
    assert decide(proposed, alive, Limits()) is None
    # One of them is lost on the way, or cannot connect: again.
    assert decide(proposed, {"a": alive["a"]}, Limits()).members == ("a",)
    alive["a"] = replace(alive["a"], broken=4)
    assert decide(proposed, alive, Limits()).members == ("a", "c")


def test_a_prepared_generation_is_committed_when_all_run_it_and_replaced_when_a_newcomer_dies():
    prepared = Generation(4, 1, ("a", "b", "c", "d"), reason="scale-out")
    alive = running("abc") | {"d": Member("d")}
    assert decide(prepared, alive, Limits()) is None
    assert decide(prepared, running("abcd", 4), Limits()).reason == "commit"
    assert decide(prepared, running("abc"), Limits()).members == ("a", "b", "c")


def test_gradients_are_weighted_and_repeatable():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1), torch.nn.Linear(2, 2))
    x = torch.randn(5, 3)
    model[:2](x).mean().backward()
    expected = [None if p.grad is None else p.grad * 0.25 for p in model.parameters()]
    model.zero_grad()
    gradients = GradientSum(model, bucket_bytes=16)
    gradients.share = 0.25
    for _ in range(2):
        model[:2](x).mean().backward()
        gradients.finish()
        for parameter, target in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, torch.zeros_like(parameter) if target is None else target)
        model.zero_grad()
    model[:2](x).mean().backward()
    with pytest.raises(InputError, match="one backward pass per step"):
        model[:2](x).mean().backward()


def test_making_an_optimizer_state_changes_nothing():
    model = torch.nn.Linear(3, 2)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer)
    state.prepare()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert state.num_bytes() == 4 * 8 * 3 + 4 * 2
    with pytest.raises(InputError, match="state_dict and load_state_dict"):
        State(step=3)
