"""Tables and states do not depend on tiers, pre-fetching or ranks, bit by bit; and the checks notice when they do."""

import pytest

from recsys_embed.grid import RULES, run_cases
from recsys_embed.optimizers import OPTIMIZERS
from recsys_embed.verify import Case, compare, reference_tables

pytestmark = pytest.mark.distributed
_HOT = (0, 1, 12, 40, 125)  # none, one, the root of all rows, some, all


def cases_of(optimizer, hot=_HOT):
    return [Case(h, p, optimizer, weight_decay=0.01) for h in hot for p in (False, True)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_combination_equals_one_process_with_embedding_bags(pools, tables, make_batches, world_size):
    batches = make_batches(6, 16)
    # Four ranks share two cores in most test runs: they get fewer combinations here, all of them in the slow test.
    names, hot = (list(OPTIMIZERS), (0, 12)) if world_size < 4 else (["sgd", "rowwise_adagrad", "adam"], (12, 125))
    cases = [case for name in names for case in cases_of(name, hot)]
    found = pools(world_size).run(run_cases, tables, batches, cases)[0]
    expected = {name: reference_tables(tables, batches, cases_of(name)[0]) for name in names}
    wrong = [(c, compare(f, expected[c.optimizer])) for c, f in zip(cases, found, strict=True)]
    assert not [w for w in wrong if not w[1].is_bitwise_equal]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_whole_grid_over_fifty_steps(pools, tables, make_batches, world_size):
    batches = make_batches(50, 16)
    for name in OPTIMIZERS:
        expected = reference_tables(tables, batches, cases_of(name)[0])
        found = pools(world_size).run(run_cases, tables, batches, cases_of(name))[0]
        wrong = [(c, compare(f, expected)) for c, f in zip(cases_of(name), found, strict=True)]
        assert not [w for w in wrong if not w[1].is_bitwise_equal]


def test_sample_weights_and_three_ranks_agree_within_themselves(pools, tables, make_batches):
    batches = make_batches(8, 12, weighted=True)
    cases = [Case(h, p, "adam") for h in (0, 40, 125) for p in (False, True)]
    found = pools(3).run(run_cases, tables, batches, cases)[0]
    assert all(compare(f, found[0]).is_bitwise_equal for f in found[1:])


def test_fast_mode_is_within_rounding(pools, tables, make_batches):
    batches = make_batches(12, 16)
    cases = [Case(h, p, o, deterministic=False) for o in ("sgd", "adagrad") for h in (0, 40) for p in (False, True)]
    found = pools(4).run(run_cases, tables, batches, cases)[0]
    for case, state in zip(cases, found, strict=True):
        assert compare(state, reference_tables(tables, batches, case)).worst_relative < 2e-6, case


@pytest.mark.parametrize("rule", sorted(RULES))
def test_rows_with_pending_updates_must_wait_for_the_union_of_all_ranks(pools, tables, make_batches, rule):
    batches, case = make_batches(8, 16), Case(0, True, "sgd")
    found = pools(2).run(run_cases, tables, batches, [case], rule)[0][0]
    equal = compare(found, reference_tables(tables, batches, case)).is_bitwise_equal
    assert equal == (rule == "union")
