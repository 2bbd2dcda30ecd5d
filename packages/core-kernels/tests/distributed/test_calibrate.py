"""Measuring an interconnect, and the command that does."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from core_kernels.cli import main
from core_kernels.comm import Group
from core_kernels.interconnect import COLLECTIVES, Interconnect
from core_kernels.interconnect.measure import machine_facts

pytestmark = pytest.mark.distributed


def test_calibrate_measures_every_collective_within_its_budget(tmp_path, capsys):
    path = tmp_path / "interconnect.json"
    begin = time.monotonic()
    assert main(["calibrate", "--ranks", "2", "--out", str(path), "--budget-seconds", "2", "--json"]) == 0
    assert time.monotonic() - begin < 40
    document = json.loads(capsys.readouterr().out)
    interconnect = Interconnect.load(path)
    assert document["fingerprint"] == interconnect.fingerprint
    assert interconnect.machine == machine_facts()
    assert interconnect.group_shape == "1x2"
    for collective in COLLECTIVES:
        assert interconnect.is_measured(collective)
        assert 0 < interconnect.seconds(collective, 0) <= interconnect.seconds(collective, 10**8)
        assert interconnect.seconds(collective, 10**9, "1x4") > 0
    assert all(rate > 0 for rate in interconnect.rates.values())
    assert interconnect.seconds("row_gather", 10**6) > 0


def test_one_rank_measures_memory_and_kernels_only():
    interconnect = Interconnect.measure(Group.single(), budget_seconds=1.0)
    assert interconnect.group_shapes == []
    assert interconnect.seconds("all_reduce", 10**6) == 0.0
    assert interconnect.seconds("host_copy", 10**6) > 0


def test_the_command_names_bad_input():
    assert main(["calibrate", "--ranks", "0"]) == 2
    done = subprocess.run(
        [sys.executable, "-m", "core_kernels", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("core-kernels ")
