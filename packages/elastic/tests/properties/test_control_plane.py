"""The control plane as a state machine: workers elect, pause, wake, die and propose in any order, on a fake clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from elastic_train.election import Election
from elastic_train.errors import FencedError
from elastic_train.generation import GenerationLog
from elastic_train.stores import MemoryStore

WORKERS = [f"w{i}" for i in range(4)]
SLOW = settings(max_examples=60, stateful_step_count=40, deadline=None)


class RecordingStore(MemoryStore):
    """A store that keeps every generation record ever written."""

    def __init__(self, clock):
        super().__init__(clock)
        self.history: list[dict] = []

    def put(self, key, value, expected=None, lease_seconds=None):
        version = super().put(key, value, expected, lease_seconds)
        if version is not None and key == "generation":
            self.history.append(value)
        return version


class UnfencedLog(GenerationLog):
    """The twin: neither epochs nor compare-and-swap."""

    def _check(self, newest, epoch, phase):
        pass

    def _write(self, generation, version):
        return super()._write(generation, None)


class ControlPlane(RuleBasedStateMachine):
    log_class = GenerationLog

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.store = RecordingStore(lambda: self.now)
        self.elections = {w: Election(self.store, "leader", w, 3.0, lambda: self.now) for w in WORKERS}
        self.logs = {w: self.log_class(self.store, "generation") for w in WORKERS}
        self.believed: dict[str, int] = {}  # epoch each worker acts under, perhaps outdated: it may have been paused

    @rule(worker=st.sampled_from(WORKERS))
    def campaign(self, worker):
        if self.elections[worker].campaign():
            epoch = self.elections[worker].epoch
            if self.believed.get(worker) != epoch:
                self.logs[worker].claim(epoch)
            self.believed[worker] = epoch

    @rule(seconds=st.floats(0.1, 5.0))
    def wait(self, seconds):
        self.now += seconds

    @rule(worker=st.sampled_from(WORKERS), members=st.lists(st.sampled_from(WORKERS), min_size=1, unique=True))
    def propose_as_if_leading(self, worker, members):
        """Even a worker that was paused while it led, and has not looked at its clock since, may try."""
        if worker in self.believed:
            try:
                self.logs[worker].propose(self.believed[worker], tuple(members), "", "test")
            except FencedError:
                assert self.believed[worker] < max(r["epoch"] for r in self.store.history)

    @rule(worker=st.sampled_from(WORKERS))
    def commit_as_if_leading(self, worker):
        newest = self.logs[worker].read()
        if worker in self.believed and newest is not None:
            try:
                self.logs[worker].commit(self.believed[worker], newest.number)
            except FencedError:
                assert self.believed[worker] < newest.epoch

    @rule(worker=st.sampled_from(WORKERS))
    def resign(self, worker):
        self.elections[worker].resign()

    @invariant()
    def at_most_one_worker_leads_by_its_own_clock(self):
        assert sum(election.is_leader for election in self.elections.values()) <= 1

    @invariant()
    def generations_form_one_line(self):
        numbers = [record["number"] for record in self.store.history]
        epochs = [record["epoch"] for record in self.store.history]
        assert epochs == sorted(epochs)
        assert all(after - before in (0, 1) for before, after in pairwise(numbers))
        members: dict[int, list[str]] = {}
        for record in self.store.history:
            assert members.setdefault(record["number"], record["members"]) == record["members"]


class UnfencedControlPlane(ControlPlane):
    log_class = UnfencedLog


def test_one_line_of_generations_in_any_order_of_events():
    run_state_machine_as_test(ControlPlane, settings=SLOW)


def test_two_leaders_without_fencing_break_the_line():
    with pytest.raises(AssertionError):
        run_state_machine_as_test(UnfencedControlPlane, settings=settings(SLOW, print_blob=False))


def test_a_leader_that_was_paused_is_refused():
    now = [0.0]
    store = MemoryStore(lambda: now[0])
    old, new = (Election(store, "leader", w, 2.0, lambda: now[0]) for w in "ab")
    log = GenerationLog(store, "generation")
    assert old.campaign()
    log.propose(old.epoch, ("a", "b"), "", "start")
    stale = old.epoch
    now[0] += 3
    assert not old.is_leader
    assert new.campaign()
    log.claim(new.epoch)
    with pytest.raises(FencedError, match="not the leader any more"):
        log.propose(stale, ("a",), "", "failure")
    assert log.propose(new.epoch, ("b",), "", "failure").number == 2
    assert not old.campaign()
