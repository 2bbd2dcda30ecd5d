"""Wrong calls and their messages: each holds the offending name, the value and what to do about it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from core_kernels.comm import Group
from core_kernels.interconnect import Interconnect
from recsys_embed import (
    SGD,
    AccessStats,
    EmbeddingBagConfig,
    IdRangeError,
    InputError,
    KeyedJaggedTensor,
    Plan,
    PlanMismatchError,
    PrefetchPipeline,
    TieredEmbeddingBagCollection,
    make_optimizer,
    plan_tiers,
)
from recsys_embed.data import FieldSpec, make_clicks, read_criteo_tsv
from recsys_embed.models import make_model
from recsys_embed.training import load_clicks

TABLE = EmbeddingBagConfig("film", 10, 4, ["seen"])


def collection(**settings):
    return TieredEmbeddingBagCollection([TABLE], group=Group.single(), **settings)


def batch(ids, weights=None, key="seen"):
    ids = torch.tensor(ids)
    return KeyedJaggedTensor([key], ids, torch.ones(len(ids), dtype=torch.int64), weights)


def count_foreign_statistics():
    AccessStats([TABLE]).merge(AccessStats([EmbeddingBagConfig("book", 7, 4, ["read"])]))


def plan_nothing():
    plan_tiers(AccessStats([TABLE]), Interconnect.preset("loopback-cpu"), [TABLE], 2, 8, SGD())


def read_short_line():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "short.txt"
        path.write_text("1\t2\t3\n")
        read_criteo_tsv(path)


# What is wrong: (the call, its error, and parts of the message: name, value, remedy).
WRONG_CALLS = {
    "optimiser nobody knows": (
        lambda: make_optimizer("lion"), InputError, ("optimizer=", "'lion'", "choose one of them")),
    "negative learning rate": (lambda: SGD(lr=-1.0), InputError, ("lr", "-1.0", "correct them")),
    "pooling": (
        lambda: EmbeddingBagConfig("film", 10, 4, ["seen"], pooling="max"), InputError,
        ("pooling=", "'max'", "change table 'film'")),
    "table without rows": (
        lambda: EmbeddingBagConfig("film", 0, 4, ["seen"]), InputError, ("'film'", "(0, 4", "correct the config")),
    "two tables of one name": (
        lambda: TieredEmbeddingBagCollection([TABLE, TABLE], group=Group.single()), InputError,
        ("table names=", "['film']", "rename")),
    "reduction": (lambda: collection(reduction="max"), InputError, ("reduction=", "'max'", "choose one of them")),
    "policy for ids": (lambda: collection(id_policy="wrap"), InputError, ("id_policy=", "'wrap'", "choose one")),
    "leaves": (lambda: collection(num_leaves=3), InputError, ("num_leaves=", "3", "8 allows 1, 2, 4 or 8 ranks")),
    "plan for other ranks": (
        lambda: collection(plan=Plan.without_tier([TABLE], 4)), PlanMismatchError,
        ("world_size=4", "1", "plan for 1")),
    "plan for other tables": (
        lambda: collection(plan=Plan.without_tier([EmbeddingBagConfig("book", 7, 4, ["read"])], 1)), PlanMismatchError,
        ("tables", "'book'", "plan again")),
    "lengths that do not add up": (
        lambda: KeyedJaggedTensor(["seen"], torch.arange(3), torch.tensor([1, 1])), InputError,
        ("lengths.sum()=", "2", "count every id once")),
    "weights of another shape": (
        lambda: batch([1, 2], torch.ones(3)), InputError, ("weights.shape=", "(3,)", "pass a factor per id")),
    "id past the table": (
        lambda: collection()(batch([3, 12])), IdRangeError, ("'seen'", "12", "enlarge the table")),
    "id counted past the table": (
        lambda: AccessStats([TABLE]).add(batch([12])), IdRangeError, ("'seen'", "12", "enlarge the table")),
    "ids that are no integers": (
        lambda: collection()(batch([0.5])), InputError, ("values.dtype=", "torch.float32", "values.long()")),
    "feature of no table": (
        lambda: collection()(batch([1], key="who")), InputError, ("batch.keys()=", "['who']", "pass every feature")),
    "infinite weight": (
        lambda: collection()(batch([1], torch.tensor([float("inf")]))), InputError,
        ("weights[0]=", "inf", "clean the batch")),
    "uneven": (
        lambda: PrefetchPipeline(torch.nn.Linear(1, 1), None, collection(), uneven="wait"), InputError,
        ("uneven=", "'wait'", "choose one of them")),
    "statistics of other tables": (count_foreign_statistics, InputError, ("other=", "'book'", "count with the same")),
    "plan from no batch": (plan_nothing, InputError, ("num_batches", "(0, 2, 8)", "count some batches")),
    "model nobody knows": (
        lambda: make_model("bert", collection(), 0), InputError, ("model=", "'bert'", "choose one of them")),
    "data set nobody knows": (
        lambda: load_clicks("films"), InputError, ("dataset=", "'films'", "correct the name")),
    "no samples": (
        lambda: make_clicks(0, [FieldSpec("user", 5)]), InputError, ("num_samples", "(0, 1)", "ask for more")),
    "line of another format": (read_short_line, InputError, ("short.txt, line 1", "3 columns", "tabs")),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "parts"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_message_holds_name_value_and_remedy(call, error, parts):
    with pytest.raises(error) as caught:
        call()
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
