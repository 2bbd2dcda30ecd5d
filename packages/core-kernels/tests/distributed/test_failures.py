"""Ranks that die, hang or raise: who failed is named, nothing hangs, no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from core_kernels.errors import CollectiveError
from core_kernels.launch import RankFailedError, current_group, run_ranks
from core_kernels.testing import FaultPlan, RankPool

pytestmark = pytest.mark.distributed


def train(group, num_steps=8):
    """A loop with the shape of data-parallel training."""
    total = torch.zeros(1000)
    for step in range(num_steps):
        group.set_step(step)
        group.all_gather_v(torch.ones(group.rank, 2), tag="rows")
        total += group.all_reduce(torch.ones(1000), tag="grads")
    return total[0].item(), os.getpid()


def children():
    """The processes below this one: pools of other test files may be among them."""
    return set(psutil.Process().children(recursive=True))


def test_a_killed_rank_is_named_with_signal_collective_tag_and_step():
    begin, before = time.monotonic(), children()
    with pytest.raises(RankFailedError) as caught:
        run_ranks(train, 3, faults=FaultPlan.kill(2, step=5, during="all_reduce"))
    assert "rank 2 of 3 died with SIGKILL during all_reduce (tag 'grads') at step 5" in str(caught.value)
    assert caught.value.rank == 2
    assert "where the other ranks were" in "".join(caught.value.__notes__)
    assert time.monotonic() - begin < 30
    assert children() <= before


def test_the_same_run_without_the_fault_succeeds():
    # The twin: were the fault above without effect, it would end like this.
    assert [total for total, _ in run_ranks(train, 3, faults=FaultPlan.kill(2, step=50))] == [24.0] * 3


def test_a_stopped_rank_ends_in_a_collective_error_within_the_time_out():
    begin, before = time.monotonic(), children()
    with pytest.raises(CollectiveError) as caught:
        run_ranks(train, 2, timeout_seconds=3.0, faults=FaultPlan.stop(1, during="all_reduce", call=2))
    error = caught.value
    assert (error.rank, error.world_size, error.collective, error.tag) == (0, 2, "all_reduce", "grads")
    assert 2.8 < error.seconds < 30.0  # a loaded machine notices late
    assert "rank 1: stopped by a signal, during all_reduce (tag 'grads') at step 2" in "".join(error.__notes__)
    assert time.monotonic() - begin < 40
    assert children() <= before


def delayed(group):
    group.barrier()
    begin = time.monotonic()
    group.all_reduce(torch.ones(1))
    return time.monotonic() - begin


def test_a_delay_makes_the_others_wait():
    seconds = run_ranks(delayed, 2, faults=FaultPlan.delay(1, 0.5, during="all_reduce"))
    assert min(seconds) >= 0.45


class OddError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def misbehave(group, how):
    if how == "collective" and group.rank == 0:
        return group.timeout_seconds
    if how == "raise" and group.rank == 1:
        raise KeyError("the first failure")
    if how == "odd" and group.rank == 1:
        raise OddError(1, 2)
    if how == "exit" and group.rank == 1:
        os._exit(7)
    if how == "sleep" and group.rank == 1:
        time.sleep(600)
    if how == "unpicklable":
        return lambda: None
    return group.all_reduce(torch.ones(1), tag="loss").item()


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout_seconds=3.0) as pool:
        yield pool


def test_the_first_failure_comes_with_its_traceback(pool):
    with pytest.raises(KeyError, match="the first failure") as caught:
        pool.run(misbehave, "raise")
    note = caught.value.__notes__[0]
    assert note.startswith("raised on rank 1 of 2")
    assert 'raise KeyError("the first failure")' in note
    assert "rank 0: during all_reduce (tag 'loss')" in "".join(caught.value.__notes__)


def test_a_pool_starts_new_ranks_after_a_failure(pool):
    assert pool.run(misbehave, "") == [2.0, 2.0]


def test_errors_and_results_that_cannot_be_pickled_are_still_reported(pool):
    with pytest.raises(RankFailedError, match="rank 1 of 2 raised OddError: 1 and 2"):
        pool.run(misbehave, "odd")
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        pool.run(misbehave, "unpicklable")


def test_a_rank_that_exits_and_one_that_is_overdue_are_named(pool):
    with pytest.raises(
        RankFailedError, match=r"rank 1 of 2 ended without a result .exit code 7. outside any collective"
    ):
        pool.run(misbehave, "exit")
    assert pool.run(misbehave, "") == [2.0, 2.0]
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 was not done after deadline_seconds=1; rank 1 was outside"):
        pool.run(sleep_on_one, deadline_seconds=1.0)


def sleep_on_one(group):
    if group.rank == 1:
        time.sleep(600)


def test_a_late_peer_is_a_collective_error_after_the_time_out(pool):
    with pytest.raises(CollectiveError, match=r"rank 0 of 2: all_reduce .tag 'loss'.*timeout_seconds=3") as caught:
        pool.run(misbehave, "sleep")
    assert 2.8 < caught.value.seconds < 5.0


LAUNCHER = """
import os, signal, time
from core_kernels.launch import run_ranks

def hang(group):
    os.write(1, f"pid {os.getpid()}\\n".encode())
    time.sleep(600)

if __name__ == "__main__":
    # A shell that starts a job in the background makes it ignore interrupts; this test is about one that does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_ranks(hang, 2)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_orphan_stays_when_the_launcher_ends(tmp_path, how):
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
    os.kill(pids[0], signal.SIGSTOP)  # a stopped rank cannot notice by itself
    launcher.send_signal(how)
    launcher.wait(20)
    launcher.stdout.close()
    limit = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def ask_for_group(group):
    inner = current_group()
    return inner is group, os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), torch.distributed.get_world_size()


def test_a_single_rank_and_its_current_group():
    assert run_ranks(ask_for_group, 1, threads=2) == [(True, "2", 2, 1)]


TORCHRUN = """
import os
import torch
from core_kernels.launch import current_group

group = current_group()
total = group.all_reduce(torch.tensor([group.rank + 1.0])).item()
assert current_group() is group
os.write(1, f"rank {group.rank} of {group.size}: {total}\\n".encode())
group.barrier()
"""


def test_current_group_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2: 3.0",
        "rank 1 of 2: 3.0",
    ]
