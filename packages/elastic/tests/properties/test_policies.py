"""Every policy, on random jobs: limits hold, all jobs end, work is done once, and the same comes out twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_train.scheduler import Cluster, policy, simulate
from elastic_train.scheduler.policies.elastic import _running_minimum, expand
from elastic_train.scheduler.policies.quota import proportional_quotas

NAMES = ["fifo", "tiresias", "elastic-tiresias", "elastic-simple", "goodput", "strict-quota", "pps"]
CALM = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(name, jobs):
    return policy(name, quotas=proportional_quotas(jobs, 32)) if name in ("strict-quota", "pps") else policy(name)


@pytest.mark.parametrize("name", NAMES)
@CALM
@given(seed=st.integers(0, 10**6), num_jobs=st.integers(1, 40))
def test_all_jobs_end_and_the_same_comes_twice(make_workload, name, seed, num_jobs):
    jobs = make_workload(num_jobs, 16, seed, num_groups=2)
    cluster = Cluster(32, rescale_seconds=0.0, start_seconds=0.0)
    outcome = simulate(jobs, make(name, jobs), cluster)
    assert np.isfinite(outcome.completion_seconds).all()
    assert (outcome.wait_seconds >= 0).all()
    assert (outcome.timeline[:, 1] <= 32).all()
    # No job is faster than on all the GPUs it can use.
    best = jobs.work / jobs.curves[jobs.curve, jobs.max_gpus]
    assert (outcome.completion_seconds >= best * (1 - 1e-9)).all()
    again = simulate(jobs, make(name, jobs), cluster)
    assert (again.completion_seconds == outcome.completion_seconds).all()
    assert 0 < outcome.fairness() <= 1 + 1e-9


@CALM
@given(seed=st.integers(0, 10**6), num_free=st.integers(0, 20))
def test_expansion_equals_handing_out_one_by_one(make_workload, seed, num_free):
    workload = make_workload(8, 16, seed)
    rng = np.random.default_rng(seed)
    given_gpus = rng.integers(0, 2, 8) * workload.requested

    class Table:
        max_gpus, curve = workload.max_gpus, workload.curve

    result = expand(Table, given_gpus, num_free, workload.curves, min_gain=0.1)
    slow = given_gpus.copy()
    for _ in range(num_free):
        upper = np.minimum(slow + 1, workload.max_gpus)
        gains = workload.curves[workload.curve, upper] - workload.curves[workload.curve, slow]
        gains[(slow == 0) | (slow == workload.max_gpus)] = -1
        if gains.max() <= 0.1:
            break
        slow[int(gains.argmax())] += 1
    total = workload.curves[workload.curve, result].sum()
    assert total == pytest.approx(workload.curves[workload.curve, slow].sum())
    assert result.sum() == slow.sum()


def test_running_minimum_starts_anew_in_each_segment():
    values, segment = np.array([3.0, 5.0, 1.0, 9.0, 2.0]), np.array([0, 0, 0, 1, 1])
    assert _running_minimum(values, segment).tolist() == [3.0, 3.0, 1.0, 9.0, 2.0]
