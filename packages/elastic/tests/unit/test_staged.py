"""Jobs of stages: schedules worked out by hand, and what scheduling branches together is worth."""

from __future__ import annotations

import json

import numpy as np
import pytest

from elastic_train.cli import main
from elastic_train.errors import InputError
from elastic_train.scheduler import (
    STAGED_POLICIES,
    Stage,
    StagedJob,
    policy,
    random_staged,
    read_staged,
    simulate_staged,
)

# Two branches of 8 and 2 seconds on two slots each, then a join of 2 seconds.
FORK = (Stage(16.0, 2), Stage(4.0, 2), Stage(4.0, 2, (0, 1)))


def test_a_job_alone_takes_its_longest_path():
    for name in STAGED_POLICIES:
        outcome = simulate_staged([StagedJob("a", 5.0, FORK)], policy(name), 4)
        assert outcome.completion_seconds.tolist() == [10.0]
        assert outcome.slowdown.tolist() == [1.0]


def test_a_branch_with_time_to_spare_leaves_slots_to_others():
    jobs = [StagedJob("a", 0.0, FORK), StagedJob("b", 0.0, (Stage(24.0, 4),))]
    # Both have a path of 10 and 6 seconds; b goes first in the order of paths and takes all but one slot for 6 s.
    greedy = simulate_staged(jobs, policy("stage-fifo"), 4)
    # FIFO gives a both branches at full speed for 2 s, so b has 0 slots, then 2 until 8, 12 of 24 done; 2 s of join
    # leave it 2 slots again: 16 at 10; then 4 slots for 2 s.
    assert greedy.completion_seconds.tolist() == [10.0, 12.0]
    together = simulate_staged([jobs[0], StagedJob("b", 0.0, (Stage(60.0, 4),))], policy("cobranch"), 4)
    # a's path is 10, b's 15: a goes first. Its short branch gets 1 slot for 4 s, so b has 1 slot at once, then 2.
    assert together.completion_seconds[0] == 10.0
    late = simulate_staged([jobs[0], StagedJob("b", 0.0, (Stage(60.0, 4),))], policy("critical-path"), 4)
    assert late.completion_seconds[0] == 10.0
    assert together.completion_seconds[1] == late.completion_seconds[1]  # all slots were in use either way


def test_branches_scheduled_together_end_jobs_sooner_on_average():
    ratios, fifo = [], []
    for seed in range(4):
        jobs = random_staged(80, 32, 1.0, seed)
        means = {n: simulate_staged(jobs, policy(n), 32).completion_seconds.mean() for n in STAGED_POLICIES}
        ratios.append(means["cobranch"] / means["critical-path"])
        fifo.append(means["cobranch"] / means["stage-fifo"])
    assert np.mean(ratios) < 0.99
    assert np.mean(fifo) < 0.9


def test_no_slot_is_idle_while_a_stage_could_use_it():
    outcome = simulate_staged(random_staged(40, 16, 3.0, 1), policy("cobranch"), 16)
    is_waiting = outcome.timeline[:, 3] > 0
    assert (outcome.timeline[is_waiting, 1] == 16).all()


class Idle:
    name = "idle"

    def decide(self, ready, num_slots):
        return [0] * len(ready)


class Greedy:
    name = "greedy"

    def decide(self, ready, num_slots):
        return [stage.max_slots for stage in ready]


@pytest.mark.parametrize("bad", [Idle(), Greedy()])
def test_a_decision_that_cannot_be_is_refused(bad):
    with pytest.raises(InputError, match="at most 3 in all"):
        simulate_staged([StagedJob("a", 0.0, FORK)], bad, 3)


def test_jobs_are_read_and_checked(tmp_path, capsys):
    path = tmp_path / "jobs.json"
    stages = [{"work": 16, "max_slots": 2}, {"work": 4, "max_slots": 2}, {"work": 4, "max_slots": 2, "after": [0, 1]}]
    path.write_text(json.dumps([{"name": "a", "submit_seconds": 0, "stages": stages}]))
    assert read_staged(path) == [StagedJob("a", 0.0, FORK)]
    command = ["simulate", "--format", "staged", "--trace", str(path), "--gpus", "4"]
    assert main([*command, "--plot", str(tmp_path / "p.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert {r["policy"] for r in found} == set(STAGED_POLICIES)
    assert "<svg" in (tmp_path / "p.html").read_text()
    assert main([*command, "--policy", "fifo"]) == 2
    for text in ("{", "[1]", '[{"name": "a", "submit_seconds": 0, "stages": []}]', "{}[]"):
        path.write_text(text)
        with pytest.raises(InputError):
            read_staged(path)
    for stage in (Stage(0.0, 1), Stage(1.0, 0), Stage(1.0, 1, (0,)), Stage(float("nan"), 1)):
        with pytest.raises(InputError):
            StagedJob("a", 0.0, (stage,))
    with pytest.raises(InputError):
        simulate_staged([], policy("cobranch"), 4)
