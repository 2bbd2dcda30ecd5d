"""Every store against the same rules, and the file store between processes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from elastic_train.errors import InputError, StoreError
from elastic_train.stores import FileStore, MemoryStore, open_store


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else FileStore(tmp_path)
    yield made
    made.close()


def test_compare_and_swap(store):
    first = store.put("a", {"x": 1}, expected=0)
    assert store.put("a", {"x": 2}, expected=0) is None
    second = store.put("a", {"x": 3}, expected=first)
    assert second > first
    assert store.put("a", {"x": 4}, expected=first) is None
    assert store.get("a").value == {"x": 3}
    assert store.put("b", {}, expected=None) > second
    assert not store.delete("a", expected=first)
    assert store.delete("a", expected=second)
    assert not store.delete("a")
    assert store.get("a") is None


def test_scan_returns_what_begins_with_the_prefix(store):
    for key in ("m/1", "m/2", "n/1"):
        store.put(key, {"key": key})
    assert list(store.scan("m/")) == ["m/1", "m/2"]


def test_leases_run_out(store):
    store.put("a", {}, lease_seconds=0.05)
    store.put("b", {}, lease_seconds=30)
    while store.get("a") is not None:
        time.sleep(0.01)
    assert list(store.scan("")) == ["b"]
    assert store.put("a", {}, expected=0) is not None


INCREMENT = """
import sys
from elastic_train.stores import FileStore
store = FileStore(sys.argv[1])
for _ in range(100):
    while True:
        entry = store.get("n")
        count, version = (entry.value["n"], entry.version) if entry else (0, 0)
        if store.put("n", {"n": count + 1}, expected=version):
            break
"""


def test_file_store_loses_no_update_between_processes(tmp_path):
    started = [subprocess.Popen([sys.executable, "-c", INCREMENT, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(60) for process in started] == [0, 0]
    store = FileStore(tmp_path)
    assert store.get("n").value == {"n": 200}
    store.close()


def test_addresses(tmp_path):
    open_store(f"file://{tmp_path}/job").close()
    with pytest.raises(InputError, match="correct the address"):
        open_store("http://somewhere")
    (tmp_path / "plain").write_text("")
    with pytest.raises(StoreError, match="name another folder"):
        open_store(f"file://{tmp_path}/plain")


def test_a_full_disk_is_told_as_an_error_of_the_store(tmp_path):
    store = FileStore(tmp_path)
    store.put("a", {"x": 1})
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreError, match=r"store.sqlite: database or disk is full.*start the job anew"):
        store.put("b", {"x": "y" * 100_000})
    assert store.get("b") is None
    assert store.put("a", {"x": 2}) is not None
    store.close()
