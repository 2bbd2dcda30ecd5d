"""Stores that other hosts can reach: both behave as the one in memory, and strangers are refused."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import time

import pytest

from elastic_train.errors import StoreError
from elastic_train.group import serve_rendezvous
from elastic_train.stores import EtcdStore, FileStore, StoreServer, TcpStore, open_store


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for found in sockets:
        found.bind(("127.0.0.1", 0))
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    """Return the address of an etcd of our own."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here; apt-get install etcd-server")
    pytest.importorskip("etcd3gw", reason="no etcd client here; pip install 'elastic-train[etcd]'")
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    command = ["etcd", "--data-dir", str(tmp_path_factory.mktemp("etcd")), "--unsafe-no-fsync",
               "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
               "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address, deadline = client.removeprefix("http://"), time.monotonic() + 60
    try:
        while True:
            try:
                EtcdStore(address).close()
                break
            except StoreError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def server():
    with StoreServer("secret") as found:
        yield found


@pytest.mark.parametrize("kind", ["tcp", "etcd"])
def test_swaps_scans_and_leases(kind, request):
    address = (
        request.getfixturevalue("server").address if kind == "tcp" else f"etcd://{request.getfixturevalue('etcd')}"
    )
    store, other = open_store(address, "secret"), open_store(address, "secret")
    first = store.put("t/a", {"x": 1}, 0)
    assert first > 0
    assert other.put("t/a", {"x": 2}, 0) is None
    assert other.get("t/a").value == {"x": 1}
    second = other.put("t/a", {"x": 2}, first)
    assert second > first
    assert store.put("t/a", {"x": 3}, first) is None
    assert store.put("t/b/c", {}, None, 60.0) > second
    assert list(store.scan("t/")) == ["t/a", "t/b/c"]
    assert list(store.scan("t/b")) == ["t/b/c"]
    assert not store.delete("t/a", first)
    assert store.delete("t/a", second)
    assert not store.delete("t/a")
    assert store.get("t/a") is None
    store.put("t/lease", {}, None, 1.0)
    while store.get("t/lease") is not None:
        time.sleep(0.05)
    assert store.put("t/lease", {}, 0) is not None
    for found in (store, other):
        found.close()


def test_a_stranger_is_refused_and_logged(server, caplog):
    place = server.address.removeprefix("tcp://")
    with caplog.at_level(logging.WARNING):
        with pytest.raises(StoreError, match="check address and token"):
            TcpStore(place, "guess", retry_seconds=0.1)
        with socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2]))) as stranger:
            stranger.sendall(b"\xff\xfe no request at all\n")
            reader = stranger.makefile("rb")
            reader.readline()  # the number that every client is sent
            assert reader.readline() == b""
    assert server.num_refused >= 2
    assert any("refused a request from ('127.0.0.1'" in line for line in caplog.messages)
    friend = TcpStore(place, "secret")
    assert friend.get("job/generation") is None
    friend.close()


def test_a_request_cannot_be_played_back(server):
    host, port = server.address.removeprefix("tcp://").split(":")
    friend = TcpStore(f"{host}:{port}", "secret", retry_seconds=0.2)
    sent = []
    friend._socket, inner = type("Tap", (), {"sendall": sent.append, "close": lambda self: None})(), friend._socket
    with pytest.raises(Exception, match="timed out"):
        friend._exchange(json.dumps(["put", "job/leader", {"worker": "me"}, None, None]))
    with socket.create_connection((host, int(port))) as stranger:
        reader = stranger.makefile("rb")
        reader.readline()
        stranger.sendall(sent[0])
        assert reader.readline() == b""
    inner.close()
    honest = TcpStore(f"{host}:{port}", "secret")
    assert honest.get("job/leader") is None
    honest.close()


def test_an_entry_without_the_token_is_refused_and_logged(tmp_path, caplog):
    store, raw = open_store(f"file://{tmp_path}"), FileStore(tmp_path)
    raw.put("job/leader", {"value": {"worker": "stranger"}, "mark": "0" * 64})
    raw.put("job/member/x", {"worker": "x"})
    with caplog.at_level(logging.WARNING):
        assert store.put("job/leader", {"worker": "w0"}, 0) is not None
        assert store.scan("job/") == {"job/leader": store.get("job/leader")}
    assert store.get("job/leader").value == {"worker": "w0"}
    assert [line.split(":")[0] for line in caplog.messages] == ["refused 'job/leader'", "refused 'job/member/x'"]
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    store.close()
    raw.close()


def test_sockets_bind_to_the_interface(server):
    rendezvous, address = serve_rendezvous()
    ports = {int(address.rpartition(":")[2]), int(server.address.rpartition(":")[2])}
    with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
        rows = [line.split() for line in [*four, *six] if line.split()[3] == "0A"]
    bound = {row[1].split(":")[0] for row in rows if int(row[1].split(":")[1], 16) in ports}
    assert bound == {"0100007F"}  # 127.0.0.1, as the kernel writes it
    del rendezvous


def test_a_server_that_ends_is_named():
    server = StoreServer("secret")
    store = TcpStore(server.address.removeprefix("tcp://"), "secret", retry_seconds=0.1)
    server.close()
    with pytest.raises(StoreError, match=r"does not answer host .* that the server runs"):
        store.get("a")
    with pytest.raises(StoreError, match="choose another"):
        StoreServer("secret", "192.0.2.1")
