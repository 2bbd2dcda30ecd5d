"""A benchmark that is cut short keeps what it measured, and goes on after it."""

from __future__ import annotations

import json

import pytest

from elastic_train.bench import command
from elastic_train.bench.kept import KeptRows
from elastic_train.cli import main
from elastic_train.errors import InputError


def test_a_run_that_is_cut_short_goes_on_after_what_it_kept(tmp_path, monkeypatch, capsys):
    measured, path = [], tmp_path / "bench.json"

    def measure(old, new, megabytes, step_seconds):
        if len(measured) == 1:
            measured.append("cut short")
            raise KeyboardInterrupt
        measured.append((old, new, megabytes))
        return {"pause_seconds": 0.5, "step_seconds": step_seconds}

    monkeypatch.setattr(command, "measure_change", measure)
    arguments = ["bench", "--parts", "change", "--megabytes", "6", "400", "--changes", "1:4", "--json", str(path)]
    with pytest.raises(KeyboardInterrupt):
        command.run_bench([6.0, 400.0], ["1:4"], 0.02, ["change"], keep_in=str(path))
    assert [row["state_megabytes"] for row in json.loads(path.read_text())["sizes"]] == [6.0]
    assert main([*arguments, "--resume"]) == 0
    assert measured == [(1, 4, 6.0), "cut short", (1, 4, 400.0)]
    assert [row["state_megabytes"] for row in json.loads(path.read_text())["sizes"]] == [6.0, 400.0]
    assert main(arguments) == 0  # without --resume all is measured anew
    assert measured[3:] == [(1, 4, 6.0), (1, 4, 400.0)]
    capsys.readouterr()
    assert main([*arguments, "--resume", "--step-seconds", "0.5"]) == 2
    assert "settings in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"sizes": 3, "settings": {}}', '{"sizes": [{"change": 1}], "settings": {}}', "\xff"]
)
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "bench.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"bench\.json.*expected a result of elastic-train bench"):
        KeptRows(path, {}, is_resumed=True)
    KeptRows(path, {})  # it is written over


def test_there_is_nothing_to_resume_from_without_a_file():
    with pytest.raises(InputError, match="--json FILE"):
        KeptRows(None, {}, is_resumed=True)
