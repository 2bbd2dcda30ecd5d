"""When a planned fault strikes."""

from __future__ import annotations

import pickle
import signal
import time

import pytest

from core_kernels.errors import ArgumentError
from core_kernels.testing.faults import Fault, FaultInjector, FaultPlan


def test_a_fault_strikes_once_at_its_step_and_collective():
    sent = []
    injector = FaultInjector([Fault("kill", 0, during="all_reduce", step=5)], sent.append)
    for step in range(8):
        for collective in ("all_to_all_v", "all_reduce", "all_reduce"):
            injector.strike(collective, "tag", step)
            assert bool(sent) == (step > 5 or (step == 5 and collective == "all_reduce"))
    assert sent == [signal.SIGKILL]


def test_calls_are_counted_among_matching_collectives_only():
    sent = []
    injector = FaultInjector([Fault("stop", 0, tag="grads", call=2)], sent.append)
    for number, tag in enumerate(["grads", "other", "grads", "other", "grads"]):
        injector.strike("all_reduce", tag, -1)
        assert bool(sent) == (number == 4)


def test_a_delay_sleeps_and_a_late_kill_comes_later():
    sent = []
    injector = FaultInjector([Fault("delay", 0, seconds=0.1), Fault("kill", 0, seconds=0.05)], sent.append)
    begin = time.monotonic()
    injector.strike("barrier", "", 0)
    assert time.monotonic() - begin >= 0.1
    assert not sent or sent == [signal.SIGKILL]
    time.sleep(0.3)
    assert sent == [signal.SIGKILL]


def test_plans_add_up_travel_and_reach_their_rank():
    plan = pickle.loads(pickle.dumps(FaultPlan.kill(2, step=5, during="all_reduce") + FaultPlan.delay(0, 0.5)))
    assert plan.for_rank(1) is None
    assert plan.for_rank(2) is not None
    assert [fault.rank for fault in plan.faults] == [2, 0]


def test_bad_faults_are_refused():
    with pytest.raises(ArgumentError, match="action='melt'"):
        Fault("melt", 0)
    with pytest.raises(ArgumentError, match="at least 0"):
        FaultPlan.kill(-1)
