"""The thread that prepares batches: order, context, and what happens after a failure."""

from __future__ import annotations

import contextvars

import pytest

from core_kernels.errors import CollectiveError
from gnn_parallel.background import BackgroundThread

SETTING = contextvars.ContextVar("SETTING", default="default")


def fail(error):
    raise error


def test_work_runs_in_order_and_sees_the_callers_context():
    thread, seen = BackgroundThread("test"), []
    SETTING.set("mine")
    for number in range(20):
        thread.submit(seen.append, (number, SETTING.get()))
    read = thread.submit(SETTING.get)
    thread.settle()
    assert seen == [(number, "mine") for number in range(20)]
    assert read.result() == "mine"


def test_a_fault_of_the_caller_reaches_the_caller_and_the_thread_goes_on():
    thread = BackgroundThread("test")
    with pytest.raises(KeyError):
        thread.submit(fail, KeyError("labels")).result()
    assert thread.submit(max, 1, 2).result() == 2


def test_after_a_failed_collective_nothing_else_is_tried():
    thread, seen = BackgroundThread("test"), []
    error = CollectiveError("gone", rank=0, world_size=2, collective="all_to_all_v", tag="ids", seconds=1.0)
    for future in (thread.submit(fail, error), thread.submit(seen.append, 1)):
        with pytest.raises(CollectiveError, match="gone"):
            future.result()
    assert seen == []
