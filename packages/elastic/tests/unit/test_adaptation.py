"""Noise scale against its closed form, learning-rate rules, and wishes that all workers agree on."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from elastic_train.adaptation import (
    Adaptation,
    AdaScale,
    BatchSchedule,
    FollowThroughput,
    GrowWithNoise,
    Legw,
    NoiseScale,
    Policy,
    StepReport,
    Wish,
    estimate_noise,
    linear_rule,
    sqrt_rule,
)
from elastic_train.adaptation.rates import RateFacts
from elastic_train.coordinator import Limits
from elastic_train.errors import StateMismatchError
from elastic_train.generation import GenerationLog
from elastic_train.gradients import GradientSum
from elastic_train.stores import MemoryStore

SIZES = (3, 5, 8)  # samples of three workers


def measure(center, spread, num_steps, sizes=SIZES, unit_weights=False):
    """Return the mean estimates on the quadratic ``|w - x|^2 / 2`` at 0, where ``x`` is normal."""
    rng = np.random.default_rng(0)
    total, estimates = sum(sizes), []
    for _ in range(num_steps):
        means = [-(center + rng.normal(size=(size, len(center))) * spread).mean(0) for size in sizes]
        whole = sum(size / total * mean for size, mean in zip(sizes, means, strict=True))
        squares = [float(mean @ mean) for mean in means]
        inverse = len(sizes) if unit_weights else float(np.mean([total / size for size in sizes]))
        estimates.append(estimate_noise(float(np.mean(squares)), float(whole @ whole), inverse, total))
    return np.mean(estimates, 0), np.std(estimates, 0) / np.sqrt(num_steps)


def test_estimates_are_unbiased_on_a_quadratic():
    center, spread = np.array([1.0, -0.5, 2.0]), np.array([0.5, 3.0, 1.0])
    exact = np.array([center @ center, (spread**2).sum()])
    mean, error = measure(center, spread, 20_000)
    assert (np.abs(mean - exact) < 4 * error).all()
    assert (error < 0.05 * exact).all()
    # The twin: as if all workers had as many samples.
    mean, error = measure(center, spread, 20_000, unit_weights=True)
    assert (np.abs(mean - exact) > 4 * error).any()


class Sums:
    """Members of one process: a sum is there when it is waited for, once all have asked."""

    def __init__(self, size):
        self.size, self.asked = size, {}

    def of(self, rank):
        counter = iter(range(1000))
        return SimpleNamespace(
            rank=rank, size=self.size, sum_async=lambda tensor: self.ask(next(counter), rank, tensor)
        )

    def ask(self, number, rank, tensor):
        asked = self.asked.setdefault(number, {})
        asked[rank] = (tensor, tensor.clone())
        return SimpleNamespace(wait=lambda: tensor.copy_(sum(copy for _, copy in asked.values())))


def test_squares_are_those_of_the_gradients():
    torch.manual_seed(0)
    x, sums = torch.randn(16, 4, dtype=torch.float64), Sums(2)
    models = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    alone = [GradientSum(model) for model in models]
    own = []
    for rank, rows in enumerate((x[:6], x[6:])):
        gradients = alone[rank]
        gradients.measures_squares, gradients.share = True, len(rows) / 16
        gradients.links = sums.of(rank)
        models[rank](rows).square().mean().backward()
        own.append(sum(float((p.grad / gradients.share).square().sum()) for p in models[rank].parameters()))
    # The last exchange waits for the other, which asks for it only afterwards: put its numbers there beforehand.
    number = len(sums.asked)
    sums.asked[number] = {1: (torch.zeros(3), torch.tensor([own[1], 16 / 10, 1.0], dtype=torch.float64))}
    alone[0].finish()
    whole = sum(float(p.grad.square().sum()) for p in models[0].parameters())
    expected = (np.mean(own), whole, (16 / 6 + 16 / 10) / 2)
    assert alone[0].squares == pytest.approx(expected, rel=1e-12)
    alone[0].links = SimpleNamespace(size=1)
    models[0](x).square().mean().backward()
    alone[0].finish()
    assert alone[0].squares is None


def test_learning_rate_rules():
    noise = NoiseScale()
    noise.update(2.0, 8.0 * 16)
    noise.update(4.0, 8.0 * 16)
    assert (noise.square, noise.variance, noise.value) == (3.0, 128.0, 128 / 3)
    facts = RateFacts(64, 16, 100, noise)
    assert (linear_rule(facts), sqrt_rule(facts)) == (4.0, 2.0)
    assert AdaScale()(facts) == pytest.approx((8 + 3) / (8 / 4 + 3))
    assert AdaScale(0.5)(facts) == pytest.approx(np.sqrt(11 / 5))
    assert AdaScale()(RateFacts(64, 16, 0, NoiseScale())) == 1.0
    assert Legw(1000)(facts) == pytest.approx(2 * 164 / 4000)
    assert Legw(1000)(RateFacts(64, 16, 9000, noise)) == 2.0
    again = NoiseScale()
    again.load_state_dict(noise.state_dict())
    assert again.state_dict() == noise.state_dict()


def report(step=10, num_workers=2, size=64, seconds=0.1, noise_scale=None):
    return StepReport(step, 0, 640, num_workers, size, seconds, noise_scale)


def test_policies_wish_what_they_should():
    grow = GrowWithNoise(200, every_steps=10, multiple=16)
    wishes = [grow.after_step(report(step, noise_scale=scale)) for step, scale in
              ((9, None), (8, 500.0), (9, 500.0), (9, 100.0), (9, 20.0))]  # fmt: skip
    assert wishes == [None, None, Wish(128), Wish(96), None]
    assert grow.after_step(report(9, size=128, noise_scale=900.0)) == Wish(192)
    follow = FollowThroughput(4, settle_steps=3)
    found = [follow.after_step(report(num_workers=1, seconds=1.0)) for _ in range(4)]
    assert found == [None, None, None, Wish(num_workers=2)]
    assert [follow.after_step(report(num_workers=2, seconds=0.55)) for _ in range(4)][-1] == Wish(num_workers=3)
    assert [follow.after_step(report(num_workers=3, seconds=0.5)) for _ in range(4)][-1] == Wish(num_workers=2)
    assert follow.after_step(report(num_workers=2, seconds=0.55)) is None, "three were not worth it"


class Stub:
    """What an adaptation needs of a job."""

    def __init__(self, size=64, is_leader=False):
        self.global_batch_size, self.batch_size, self.rate_factor = size, size, 1.0
        self.step, self.epoch, self.links, self.gradients = 0, 0, SimpleNamespace(size=2), None
        self.parts, self.events = {}, SimpleNamespace(write=lambda *_, **__: None)
        self.store = MemoryStore()
        GenerationLog(self.store, "job/generation").propose(1, ("a", "b"), "", "start")
        limits = Limits(1, 5)
        self.agent = SimpleNamespace(is_leader=is_leader, limits=limits, store=self.store, job_id="job")

    def add_part(self, name, part):
        self.parts[name] = part


def run_steps(adaptations, jobs, num_steps):
    """Commit steps as a vote of these workers would; returns batch size and rate of each step."""
    history = []
    for _ in range(num_steps):
        history.append({(job.global_batch_size, job.rate_factor) for job in jobs})
        lowest = [min(column) for column in zip(*(a.ballot() for a in adaptations), strict=True)]
        for adaptation, job in zip(adaptations, jobs, strict=True):
            job.batch_size, job.step = job.global_batch_size, job.step + 1
            adaptation.committed(lowest)
            adaptation.updated()
    assert all(len(found) == 1 for found in history), "workers disagree"
    return [found.pop() for found in history]


def test_a_schedule_holds_on_every_worker_also_on_one_that_joins_in_the_middle():
    jobs = [Stub(), Stub()]
    pair = [Adaptation((BatchSchedule({3: 128, 6: 32}),), "linear", job) for job in jobs]
    first = run_steps(pair, jobs, 2)
    jobs.append(Stub())
    pair.append(Adaptation((BatchSchedule({3: 128, 6: 32}),), "linear", jobs[2]))
    state = pair[0].state_dict()
    jobs[2].step, jobs[2].global_batch_size = jobs[0].step, jobs[0].global_batch_size
    pair[2].load_state_dict(state)
    pair[2]._set_rate()
    history = first + run_steps(pair, jobs, 6)
    assert history == [(64, 1.0)] * 3 + [(128, 2.0)] * 3 + [(32, 0.5)] * 2
    with pytest.raises(StateMismatchError, match="pass the same policies on every worker"):
        Adaptation((), None, Stub()).load_state_dict(state)


class Local(Policy):
    """Wishes what it alone knows."""

    def __init__(self, size):
        self.size = size

    def after_step(self, report):
        return Wish(self.size)


def test_the_smallest_wish_counts():
    jobs = [Stub(), Stub()]
    pair = [Adaptation((Local(size),), None, job) for size, job in zip((256, 96), jobs, strict=True)]
    assert run_steps(pair, jobs, 3) == [(64, 1.0), (64, 1.0), (96, 1.0)]


class Staff(Policy):
    """Wishes a number of workers."""

    def __init__(self, num_workers):
        self.num_workers = num_workers

    def after_step(self, report):
        return Wish(num_workers=self.num_workers)


def orders(job):
    return [entry.value["count"] for entry in job.store.scan("job/order/").values()]


def test_the_leader_orders_workers_once_and_only_when_all_wish():
    leader, other = Stub(is_leader=True), Stub()
    leader.store.put("job/launcher/w", {})
    pair = [Adaptation((Staff(9),), None, leader), Adaptation((Staff(4),), None, other)]
    run_steps(pair, [leader, other], 4)
    assert (orders(leader), orders(other)) == ([2], [])
    pair[1]._policies[0].num_workers = None
    run_steps(pair, [leader, other], 1)
    pair[0].entered(leader.links)
    run_steps(pair, [leader, other], 3)
    assert orders(leader) == [2], "one worker wishes nothing"


def test_fewer_workers_are_let_go_and_a_missing_launcher_is_told(caplog):
    job = Stub(is_leader=True)
    adaptation = Adaptation((Staff(1),), None, job)
    run_steps([adaptation], [job], 3)
    assert list(job.store.scan("job/leave/")) == ["job/leave/b"]
    adaptation._policies[0].num_workers = 3
    run_steps([adaptation], [job], 4)
    assert caplog.text.count("has no launcher") == 1
