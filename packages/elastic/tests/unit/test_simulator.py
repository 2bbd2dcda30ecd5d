"""The simulator against schedules worked out by hand, the policies against each other on public traces."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from elastic_train.errors import InputError
from elastic_train.scheduler import (
    Cluster,
    StepModel,
    Workload,
    policy,
    read_alibaba,
    read_philly,
    read_pollux,
    read_tiresias,
    simulate,
)
from elastic_train.scheduler.policies import ProbabilisticLending, StrictQuota
from elastic_train.scheduler.policies.quota import proportional_quotas


def two_jobs() -> Workload:
    """Two jobs of 100 s on 2 GPUs each, the second 60 s later."""
    ones = np.ones(2, dtype=np.int64)
    curves = np.array([[0.0, 1.0, 2.0, 3.0, 4.0]])
    times, work = np.array([0.0, 60.0]), np.array([200.0, 200.0])
    return Workload(times, work, 2 * ones, ones, 4 * ones, 0 * ones, curves, 0 * ones)


def test_fifo_by_hand():
    outcome = simulate(two_jobs(), policy("fifo"), Cluster(2, start_seconds=10, round_seconds=60))
    # First: starts at 0, works from 10 to 110. Second: comes at 60, starts at the round at 120, ends at 230.
    assert outcome.completion_seconds.tolist() == [110.0, 170.0]
    assert outcome.wait_seconds.tolist() == [0.0, 60.0]
    assert outcome.slowdown.tolist() == [1.1, 1.7]


def test_rescaling_costs_what_it_says():
    cluster = Cluster(4, rescale_seconds=0.0, start_seconds=0.0, round_seconds=60)
    free = simulate(two_jobs(), policy("elastic-simple"), cluster)
    # First: 4 GPUs end it at 50. Second: from 60, 4 GPUs, 50 s.
    assert free.completion_seconds.tolist() == [50.0, 50.0]
    late = replace(two_jobs(), work=np.array([400.0, 200.0]))
    outcome = simulate(late, policy("elastic-simple"), cluster)
    charged = simulate(late, policy("elastic-simple"), replace(cluster, rescale_seconds=7.0))
    # The first does 240 of 400 by 60, then shares 2 and 2: 160 left take 80 s, with 7 s for the change 87 s.
    assert outcome.completion_seconds[0] == pytest.approx(140.0)
    assert charged.completion_seconds[0] == pytest.approx(147.0)
    assert charged.num_rescales == outcome.num_rescales > 0


def test_policy_that_gives_too_much_is_refused():
    class Greedy:
        name = "greedy"

        def decide(self, jobs, num_gpus):
            return np.full(len(jobs), 4)

        def observe(self, group, gpus, seconds):
            pass

    with pytest.raises(InputError, match="at most 6 GPUs"):
        simulate(two_jobs(), Greedy(), Cluster(6))
    with pytest.raises(InputError, match="enlarge the cluster"):
        simulate(two_jobs(), policy("fifo"), Cluster(1))
    with pytest.raises(InputError, match="choose one of them"):
        policy("best")


def test_tiresias_lets_short_jobs_pass():
    base = two_jobs()
    long_first = replace(base, work=np.array([40_000.0, 200.0]))
    cluster = Cluster(2, start_seconds=0)
    late = replace(long_first, submit_seconds=np.array([0.0, 4000.0]))
    assert simulate(late, policy("fifo"), cluster).completion_seconds[1] > 10_000
    outcome = simulate(late, policy("tiresias"), cluster)
    assert outcome.completion_seconds[1] < 200
    assert outcome.num_preemptions == 1


def test_step_models_fit_the_measurements(traces):
    folder = traces / "pollux" / "apps"
    for name in ("ncf", "cifar10", "bert", "deepspeech2", "yolov3", "imagenet"):
        model = StepModel.fit(folder / f"{name}-scalability.csv", folder / f"{name}-placements.csv")
        assert model.median_error < 0.25, name


def test_elastic_tiresias_beats_tiresias_at_every_load(traces):
    for number in (1, 2, 3, 4):
        jobs = read_pollux(traces / "pollux" / f"workload-{number}.csv", traces / "pollux" / "apps")
        assert jobs.num_jobs == 160
        for load in (0.5, 1.0, 1.5, 2.0):
            rigid = simulate(jobs.at_load(load), policy("tiresias"), Cluster(64))
            slow = simulate(jobs.at_load(load), policy("elastic-tiresias"), Cluster(64))
            fast = simulate(jobs.at_load(load), policy("elastic-tiresias"), Cluster(64, rescale_seconds=0.5))
            assert slow.completion_seconds.mean() < rigid.completion_seconds.mean(), (number, load)
            assert fast.completion_seconds.mean() < slow.completion_seconds.mean(), (number, load)


def test_a_workload_of_160_jobs_takes_under_five_seconds(traces):
    jobs = read_pollux(traces / "pollux" / "workload-1.csv", traces / "pollux" / "apps")
    begin = time.process_time()
    simulate(jobs, policy("elastic-tiresias"), Cluster(64))
    assert time.process_time() - begin < 5


def test_readers_of_other_traces(traces):
    philly = read_philly(traces / "philly.csv.gz")
    assert philly.num_jobs == 82_247
    assert len(philly.group_names) == 15
    tiresias = read_tiresias(traces / "tiresias" / "60_job.csv")
    assert tiresias.num_jobs == 60
    outcome = simulate(tiresias, policy("elastic-tiresias"), Cluster(64))
    assert np.isfinite(outcome.completion_seconds).all()
    assert read_alibaba(traces / "alibaba" / "openb_pod_list_default.csv.gz").num_jobs > 1_000
    with pytest.raises(InputError, match="name the right format"):
        read_philly(traces / "tiresias" / "60_job.csv")


@pytest.mark.slow
def test_lending_uses_more_and_makes_nobody_wait(traces):
    jobs = read_philly(traces / "philly.csv.gz").first(8_000)
    quotas, cluster = proportional_quotas(jobs, 600), Cluster(600, round_seconds=300)
    strict = simulate(jobs, StrictQuota(quotas), cluster)
    lending = simulate(jobs, ProbabilisticLending(quotas), cluster)
    assert lending.utilization() > strict.utilization()
    waits = strict.wait_percentile()
    for group, wait in lending.wait_percentile().items():
        assert wait <= 1.1 * waits[group], group


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fifo", "tiresias", "elastic-tiresias", "elastic-simple", "goodput"])
def test_100_000_jobs_on_5_000_gpus(traces, name):
    jobs = read_philly(traces / "philly.csv.gz").repeated(100_000, 5_000)
    begin = time.process_time()
    simulate(jobs, policy(name), Cluster(5_000))
    assert time.process_time() - begin < 120
