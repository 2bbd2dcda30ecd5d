"""The leader's decisions, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from elastic_train.controller import Controller
from elastic_train.coordinator import Limits, Member, decide
from elastic_train.errors import InputError, WorkerLostError
from elastic_train.generation import Generation, GenerationLog
from elastic_train.gradients import GradientSum
from elastic_train.group import Links
from elastic_train.state import State
from elastic_train.stores import MemoryStore
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


def test_gradients_that_workers_would_not_share_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    gradients = GradientSum(model)
    for _ in range(2):
        model(torch.ones(5, 3)).mean().backward()
        gradients.finish()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # after the sum, which is right
        model.zero_grad()
    model(torch.ones(5, 3)).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(InputError, match="update="):
        gradients.finish()
    gradients.reset()
    model.requires_grad_(True)
    model(torch.ones(5, 3)).mean().backward()
    with pytest.raises(InputError, match=r"'0.weight', '0.bias'.*wrap the module first"):
        gradients.finish()


def test_parameters_frozen_after_wrapping_have_no_gradient():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    gradients = GradientSum(model)
    model[1].bias.requires_grad_(False)
    model(torch.ones(5, 3)).mean().backward()
    gradients.finish()
    assert model[1].bias.grad is None
    assert model[1].weight.grad is not None


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


def replicas(*names, phase="running", generation=3, **fields):
    return {
        f"{name}.{shard}": Member(f"{name}.{shard}", phase, generation, replica=name, replica_size=2, **fields)
        for name in names
        for shard in (0, 1)
    }


def test_replicas_of_a_sharded_model_come_and_go_as_one():
    runs = Generation(3, 1, ("r.0", "r.1", "s.0", "s.1"), status="commit")
    alive = replicas("r", "s")
    late = replicas("t", phase="ready", generation=0)
    late["t.1"] = replace(late["t.1"], joined=5.0)
    between = {"u.0": Member("u.0", joined=3.0, replica="u", replica_size=2)}
    # u is not complete and waits; t joins next to each other although u.0 came in between.
    assert decide(runs, alive | late | between, Limits(2, 8)).members == (*runs.members, "t.0", "t.1")
    between["u.1"] = replace(between["u.0"], worker="u.1", joined=4.0)
    assert decide(runs, alive | late | between, Limits(2, 8)).members[4:] == ("u.0", "u.1", "t.0", "t.1")
    assert decide(runs, alive | late | between, Limits(2, 6)).members[4:] == ("u.0", "u.1")
    # One process asks to leave: its replica goes.
    assert decide(runs, alive | {"r.1": replace(alive["r.1"], is_leaving=True)}, Limits(2, 8)).members == ("s.0", "s.1")
    # One is replaced: its replica is.
    late = {w: replace(m, replaces="s.0" if w == "t.0" else "") for w, m in late.items()}
    assert set(decide(runs, alive | late, Limits(2, 8)).members) == {"r.0", "r.1", "t.0", "t.1"}


def test_a_lost_process_takes_its_replica_along():
    runs = Generation(3, 1, ("r.0", "r.1", "s.0", "s.1"), status="commit")
    alive = replicas("r", "s")
    del alive["s.1"]
    assert decide(runs, alive, Limits(2, 8)) is None  # those who train will notice
    alive |= replicas("r", phase="failed")
    change = decide(runs, alive, Limits(2, 8))  # s.0 hangs, and is not waited for
    assert (change.members, change.reason) == (("r.0", "r.1"), "failure")


def test_a_part_of_the_state_that_nobody_has_is_named():
    links = Links(4, ("r.0", "r.1", "s.0", "s.1"), 0, None)
    links.peers = Links(4, ("r.0", "s.0"), 0, None)
    assert links.newest_peers([0, 0, 0, 0]) == [0]
    assert links.newest_peers([8, 8, 0, 0]) == [0]
    assert links.newest_peers([7, 8, 8, 7]) == [1]
    with pytest.raises(WorkerLostError, match="no worker of shard 0 has the state of step 7"):
        links.newest_peers([7, 8, 7, 8])


def test_shrinking_counts_replicas():
    store = MemoryStore()
    GenerationLog(store, "job/generation").propose(1, ("r.0", "r.1", "s.0", "s.1"), "", "start")
    controller = Controller(store, "job")
    for worker, member in replicas("r", "s").items():
        store.put(f"job/member/{worker}", vars(member))
    assert controller.scale_in(1) == ["s.0", "s.1"]
    with pytest.raises(InputError, match="between 1 and 1, fewer than all 2"):
        controller.scale_in(2)
