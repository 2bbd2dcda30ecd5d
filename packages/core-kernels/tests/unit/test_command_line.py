"""The ``core-kernels`` command: every wrong call ends in one line and exit code 2, before anything is measured."""

from __future__ import annotations

import json

import pytest

from core_kernels.cli import main
from core_kernels.console import CommandLine


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate", "--ranks", "0"], "--ranks=0"),
        (["calibrate", "--budget-seconds", "-3"], "--budget-seconds=-3.0"),
        (["calibrate", "--shape", "two"], "--shape='two'"),
        (["calibrate", "--ranks", "2", "--shape", "2x2"], "2 ranks together"),
        (["calibrate", "--out", "no/such/folder/x.json"], "--out='no/such/folder/x.json'"),
        (["compile", "--arch", "volta"], "sm_90"),
        (["compile", "--arch", ","], "--arch=','"),
        (["compile", "--arch", "sm_90", "--report", "."], "--report='.'"),
    ],
)
def test_wrong_values(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["measure"], ["calibrate", "--ranks", "two"], ["doctor", "more"]])
def test_what_cannot_be_parsed(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: core-kernels" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["calibrate", "compile", "doctor"])
def test_help_shows_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"core-kernels {command}" in shown.partition("examples:")[2]
    assert "--json" in shown


def test_json_alone_goes_to_standard_output(capsys):
    assert main(["doctor", "--json"]) == 0
    assert "libraries" in json.loads(capsys.readouterr().out)


def test_an_interrupt_ends_without_a_traceback(capsys):
    def stop(args):
        raise KeyboardInterrupt

    cli = CommandLine("demo", "Stops.", "1.0")
    cli.command("stop", stop, "stop", "demo stop")
    assert cli.run(["stop"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
