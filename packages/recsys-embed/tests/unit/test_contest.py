"""Paired comparison: noise that all share cancels, luck of the best is not counted, and wide data decides nothing."""

import numpy as np
import pytest

from recsys_embed.contest import Contest


def contest_of(seconds, num_rounds, own=0.02, shared=0.3, seed=0):
    """Rounds of ways with given true seconds, disturbed together and each on its own."""
    generator, contest = np.random.default_rng(seed), Contest()
    for _ in range(num_rounds):
        together = np.exp(shared * generator.standard_normal())
        contest.add({way: s * together * np.exp(own * generator.standard_normal()) for way, s in seconds.items()})
    return contest


def test_shared_noise_cancels():
    ratio = contest_of({0: 1.0, 8: 0.95}, 12).ratio(8, 0)
    assert ratio.low < 0.95 < ratio.high < 1
    assert ratio.is_settled


def test_intervals_hold_the_truth_as_often_as_they_say():
    inside = [(r := contest_of({0: 1.0, 8: 0.97}, 6, seed=seed).ratio(8, 0)).low < 0.97 < r.high for seed in range(400)]
    assert 0.91 < np.mean(inside) < 0.985


def test_regret_among_equals_is_not_that_of_the_luckiest():
    equal = dict.fromkeys(range(6), 1.0)
    found = [contest_of(equal, 8, seed=seed) for seed in range(100)]
    naive = [c.ratio(0, c.fastest(equal)).mean - 1 for c in found]
    assert np.mean([c.regret(0).mean - 1 for c in found]) < 0.5 * np.mean(naive)
    assert np.mean([c.regret(0).low == 1 for c in found]) > 0.95


def test_a_real_regret_is_found():
    regret = contest_of({0: 1.0, 4: 1.02, 8: 0.9}, 12).regret(0)
    assert regret.mean == pytest.approx(1 / 0.9, abs=0.02)
    assert 1 < regret.low < regret.mean < regret.high


def test_few_rounds_decide_nothing():
    contest = contest_of({0: 1.0, 4: 0.5}, 1)
    assert contest.ratio(4, 0).high == np.inf
    assert not contest.ratio(4, 0).is_settled
    assert contest.ratio(0, 0).mean == 1
    assert Contest().ratio(0, 1).num_rounds == 0
