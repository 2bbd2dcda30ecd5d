"""Reports of a run from its events, and the page of a running job."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest

from elastic_train import Controller
from elastic_train.cli import main
from elastic_train.coordinator import Member
from elastic_train.errors import InputError
from elastic_train.events import EventLog, read_events
from elastic_train.generation import GenerationLog
from elastic_train.report import render_html, summarize, watch
from elastic_train.report.terminal import page
from elastic_train.stores import MemoryStore, open_store


def event(t: float, worker: str, name: str, **fields):
    return {"t": 100.0 + t, "worker": worker, "event": name, **fields}


EVENTS = [
    event(0, "w0", "ready"),
    event(1, "w0", "propose", generation=1, members=["w0"], reason="start"),
    event(1, "w0", "commit", generation=1, members=["w0"]),
    event(2, "w0", "progress", step=5, samples_per_second=80.0),
    event(3, "w1", "ready"),
    event(4, "w0", "propose", generation=2, members=["w0", "w1"], reason="scale-out"),
    event(4.5, "w0", "switched", generation=2, step=9, seconds=0.03),
    event(5, "w0", "commit", generation=2, members=["w0", "w1"]),
    event(6, "w0", "killed", lost="w1"),
    event(6, "w0", "failed", generation=2, step=12, error="<script>alert(1)</script>"),
    event(6.2, "w0", "recovered", generation=3, step=12, seconds=0.2),
    event(6.3, "w0", "propose", generation=3, members=["w0"], reason="failure"),
    event(6.4, "w0", "commit", generation=3, members=["w0"]),
    event(9, "w0", "left", step=20),
]


class Tags(HTMLParser):
    """Collects tags and checks that they close."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_history_is_put_together():
    run = summarize(EVENTS)
    assert (run.duration_seconds, run.last_step) == (9.0, 20)
    assert [(c.generation, c.num_workers, c.reason) for c in run.changes] == [
        (1, 1, "start"), (2, 2, "scale-out"), (3, 1, "failure"),
    ]  # fmt: skip
    lost, left = run.workers["w1"], run.workers["w0"]
    assert (lost.ready_seconds, lost.joined_seconds, lost.end_seconds, lost.ended) == (3.0, 5.0, 6.0, "lost")
    assert (left.end_seconds, left.ended) == (9.0, "left")
    assert [(p.kind, p.pause_seconds) for p in run.pauses] == [("switch", 0.03), ("recovery", 0.2)]
    assert run.throughput == [(2.0, 80.0)]
    assert "events" not in json.loads(json.dumps(run.as_dict()))
    assert summarize([]).changes == []


def test_the_page_stands_alone_and_shows_no_foreign_markup():
    text = render_html(summarize(EVENTS), "run <1>")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.seen.count("svg") == 3
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert not [
        value for name, value in tags.attributes if name in ("src", "href", "xlink:href") or name.startswith("on")
    ]
    assert not re.search(r"https?://|url\(|@import", text)
    assert "run &lt;1&gt;" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    hostile = [event(0, '"><b>', "ready", x="</title>"), event(0, "\x00", "commit", members=["<i>"], generation=1)]
    tags = Tags()
    tags.feed(render_html(summarize(hostile), "</style>"))
    assert "b" not in tags.seen
    assert "i" not in tags.seen
    assert render_html(summarize([]), "nothing").startswith("<!doctype html>")


DAMAGED = [
    b"{",
    b"[1]",
    b'{"t": "x", "worker": "a", "event": "e"}',
    b'{"worker": "a"}',
    b"\xff\xfe",
    b'{"t": NaN, "worker": "a", "event": "e"}',
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_named(tmp_path, line, capsys):
    path = tmp_path / "events.jsonl"
    good = json.dumps(EVENTS[0]).encode() + b"\n"
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(InputError, match=r"line 2=.* is not valid: expected a JSON object with t, worker and event"):
        read_events(path)
    assert main(["report", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields", [{"members": 3}, {"generation": "x", "members": []}, {"generation": None, "members": []}]
)
def test_an_event_with_other_fields_is_named(fields):
    with pytest.raises(InputError, match=r"event 'commit' of worker 'w0' at 100\.0=.*delete its line"):
        summarize([event(0, "w0", "commit", **fields)])


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(EVENTS[0]) + "\n" + json.dumps(EVENTS[1])[:30])
    assert read_events(path) == EVENTS[:1]


def test_report_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in EVENTS))
    assert main(["report", str(path), "--html", str(tmp_path / "run.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["last_step"] == 20
    assert (tmp_path / "run.html").read_text().endswith("</html>\n")
    path.write_text("")
    assert main(["report", str(path)]) == 2


def make_controller() -> Controller:
    store = MemoryStore()
    GenerationLog(store, "job/generation").propose(1, ("b", "a"), "", "start")
    for name in ("a", "b", "new"):
        phase = "ready" if name == "new" else "running"
        store.put(
            f"job/member/{name}", vars(Member(name, phase, 1, "host", step=7, num_timed=3, samples_per_second=50))
        )
    return Controller(store, "job")


def test_the_page_in_the_terminal():
    controller = make_controller()
    text = page(controller.status(), controller.members(), EVENTS, 110.0)
    rows = [line.split()[0] for line in text.splitlines()[3:6]]
    assert rows == ["b", "a", "new"]
    assert "generation 1 (prepare)" in text
    assert "50.0 samples/s" in text
    assert "1.0 s ago  w0               left" in text
    assert "\x1b" not in page(controller.status(), {"\x1b[2J": Member("\x1b[2J")}, [], 0.0)


def test_watching_prints_plain_pages_and_clears_terminals():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    plain, terminal = io.StringIO(), Terminal()
    assert watch(make_controller(), None, 0.01, 2, plain)["members"] == ["b", "a"]
    assert plain.getvalue().count("job job") == 2
    assert "\x1b" not in plain.getvalue()
    watch(make_controller(), None, 0.01, 1, terminal)
    assert terminal.getvalue().startswith("\x1b[H\x1b[2J")


def test_top_from_the_command_line(tmp_path, capsys):
    address = f"file://{tmp_path}"
    assert main(["top", "--store", address, "--pages", "1"]) == 2
    assert "no job 'job'" in capsys.readouterr().err
    store = open_store(address)
    store.put("job/launcher/host", {})
    store.close()
    assert main(["top", "--store", address, "--pages", "1"]) == 0
    assert "(no worker)" in capsys.readouterr().out
    assert main(["top", "--store", address, "--pages", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generation"] == 0
    assert main(["status", "--store", address, "--watch", "0"]) == 2


def test_events_that_cannot_be_written_stop_nobody(tmp_path, caplog):
    log = EventLog(tmp_path / "missing" / "events.jsonl", "w3")
    for _ in range(3):
        log.write("ready")
    assert [record.getMessage()[:42] for record in caplog.records] == ["events of worker w3 are not written: [Errn"]
    (tmp_path / "missing").mkdir()
    log.write("ready")
    assert [event["event"] for event in read_events(tmp_path / "missing" / "events.jsonl")] == ["ready"]
