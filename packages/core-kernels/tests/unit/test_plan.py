"""Plans as files: what goes out comes back, and wrong files are refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import ClassVar

import numpy as np
import pytest
import torch

from core_kernels.errors import ArgumentError, ArgumentTypeError
from core_kernels.plan import PlanDocument


@dataclasses.dataclass(frozen=True)
class Term:
    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class DemoPlan(PlanDocument):
    schema: ClassVar[str] = "demo.plan"
    version: ClassVar[int] = 3

    strategy: str
    terms: tuple[Term, ...]
    by_name: dict[str, Term] = dataclasses.field(default_factory=dict)
    shape: tuple[int, float] = (1, 2.0)
    parent: Term | None = None
    sizes: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class OtherPlan(PlanDocument):
    schema: ClassVar[str] = "demo.other"


def make_plan(**changes) -> DemoPlan:
    term = Term("load", 0.25)
    fields = {"strategy": "snp", "terms": (term, Term("send", 2.0)), "by_name": {"load": term}, "parent": term}
    return DemoPlan(**{**fields, **changes})


def test_a_plan_survives_a_file(tmp_path):
    plan = make_plan(sizes=[1, 2])
    path = plan.save(tmp_path / "plan.json")
    assert DemoPlan.load(path) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    assert json.loads(path.read_text())["schema"] == "demo.plan"


def test_scalars_of_numpy_and_torch_become_numbers():
    plan = make_plan(sizes=[np.int64(4), torch.tensor(5)], shape=(np.int32(1), np.float64(0.5)))
    again = DemoPlan.from_json(plan.to_json())
    assert again.sizes == [4, 5]
    assert again.shape == (1, 0.5)
    assert make_plan(sizes=np.arange(3)).to_dict()["sizes"] == [0, 1, 2]


def test_infinite_seconds_survive():
    plan = make_plan(terms=(Term("never", math.inf),))
    assert DemoPlan.from_json(plan.to_json()).terms[0].seconds == math.inf


def test_the_fingerprint_follows_the_content():
    assert make_plan().fingerprint == make_plan().fingerprint
    assert len(make_plan().fingerprint) == 16
    assert make_plan().fingerprint != make_plan(strategy="gdp").fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "demo.other"}, "schema='demo.other' is not valid: expected 'demo.plan'"),
        ({"version": 2}, "version=2 is not valid: expected 3"),
        ({"extra": 1}, r"unknown \['extra'\]"),
        ({"terms": [{"name": "load"}]}, r"demo.plan.terms=\"missing \['seconds'\]\""),
    ],
)
def test_other_documents_are_refused(change, words):
    with pytest.raises(ArgumentError, match=words):
        DemoPlan.from_dict({**make_plan().to_dict(), **change})


def test_a_bad_file_is_named(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ArgumentError, match=r"broken\.json: text is not JSON"):
        DemoPlan.load(path)
    with pytest.raises(ArgumentError, match=r"schema='demo\.plan'"):
        OtherPlan.load(make_plan().save(tmp_path / "plan.json"))


def test_values_without_a_json_form_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"DemoPlan.sizes\[0\] holds a object"):
        make_plan(sizes=[object()]).to_dict()
    with pytest.raises(ArgumentTypeError, match=r"DemoPlan\.by_name has the key 1"):
        make_plan(by_name={1: Term("x", 1.0)}).to_dict()
