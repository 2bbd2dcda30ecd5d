"""A store served by one process over TCP, for workers of several hosts.

The server keeps a :class:`MemoryStore`; leases run by its clock. On connecting, a client is sent a random number; every
request carries its place in the conversation and a keyed hash over number, place and content, so that only holders of
the job's token are answered, and nothing can be played back. Anything else is logged and its connection closed.

Single point of failure: the process that serves. Workers that cannot reach it for ``retry_seconds`` give up; use etcd
where that must not be. torch's ``TCPStore`` is not used: it has no leases, no conditional delete, and answers anybody.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import socketserver
import threading
import time
from typing import Any

from elastic_train.errors import StoreError
from elastic_train.stores.base import Entry
from elastic_train.stores.memory import MemoryStore
from elastic_train.stores.signed import sign

__all__ = ["StoreServer", "TcpStore", "split_address"]

_logger = logging.getLogger(__name__)
_LONGEST_BYTES = 1 << 24


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``.

    Raises:
        StoreError: It has another form.

    >>> split_address("10.0.0.1:7070")
    ('10.0.0.1', 7070)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise StoreError(f"store address {address!r} is not valid: expected HOST:PORT; correct it")
    return host, int(port)


class StoreServer:
    """Serves a store until it is closed.

    Args:
        token: The job's token; requests without it are refused.
        interface: Address to bind to; loopback unless the job spans hosts.
        port: Port; 0 takes a free one.

    Attributes:
        address: ``tcp://host:port`` for :func:`elastic_train.stores.open_store`.
        num_refused: Requests refused so far.
    """

    def __init__(self, token: str, interface: str = "127.0.0.1", port: int = 0):
        self.num_refused = 0
        self._token, self._store = token, MemoryStore()
        owner = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                owner._serve(self)

        try:
            self._server = _Server((interface, port), Handler)
        except OSError as error:
            raise StoreError(
                f"cannot serve a store at {interface}:{port}: {error}; expected a free port of an address of host "
                f"{socket.gethostname()}; choose another"
            ) from error
        self.address = f"tcp://{interface}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def _serve(self, handler: socketserver.StreamRequestHandler) -> None:
        nonce, place = secrets.token_hex(16), 0
        self._server.connections.add(handler.connection)
        try:
            handler.wfile.write(nonce.encode() + b"\n")
            while line := handler.rfile.readline(_LONGEST_BYTES):
                mark, _, content = line.rstrip(b"\n").decode("utf-8", "replace").partition(" ")
                expected = sign(self._token, nonce, str(place), content)
                if not hmac.compare_digest(mark.encode(), expected.encode()):
                    self.num_refused += 1
                    _logger.warning("refused a request from %s: it lacks the token of this job", handler.client_address)
                    return
                handler.wfile.write(json.dumps(self._answer(json.loads(content))).encode() + b"\n")
                place += 1
        except OSError:
            pass  # the client is gone; its leases end by themselves
        finally:
            self._server.connections.discard(handler.connection)

    def _answer(self, request: list[Any]) -> Any:
        name, *arguments = request
        if name == "get":
            entry = self._store.get(*arguments)
            return entry and [entry.value, entry.version]
        if name == "scan":
            return {key: [entry.value, entry.version] for key, entry in self._store.scan(*arguments).items()}
        return self._store.put(*arguments) if name == "put" else self._store.delete(*arguments)

    def close(self) -> None:
        """Stop serving; the entries are lost."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            _shut(connection)
        self._thread.join(5)

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]):
        self.connections: set[socket.socket] = set()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        _logger.warning("refused a request from %s: it cannot be understood", client_address, exc_info=True)


class TcpStore:
    """A client of a :class:`StoreServer`.

    Args:
        address: ``host:port``.
        token: The job's token.
        retry_seconds: How long a request is tried when the server does not answer.
    """

    def __init__(self, address: str, token: str, retry_seconds: float = 2.0):
        self._host, self._port = split_address(address)
        self._token, self._retry_seconds = token, retry_seconds
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._file: Any = None
        self._nonce, self._place = "", 0
        self.get("")  # says at once when the address is wrong

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        found = self._ask("get", key)
        return Entry(*found) if found else None

    def scan(self, prefix: str) -> dict[str, Entry]:
        """Return all entries under a prefix."""
        return {key: Entry(*found) for key, found in self._ask("scan", prefix).items()}

    def put(
        self, key: str, value: dict[str, Any], expected: int | None = None, lease_seconds: float | None = None
    ) -> int | None:
        """Write a value if ``expected`` holds."""
        return self._ask("put", key, value, expected, lease_seconds)

    def delete(self, key: str, expected: int | None = None) -> bool:
        """Remove a key if ``expected`` holds."""
        return self._ask("delete", key, expected)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def _ask(self, *request: Any) -> Any:
        deadline = time.monotonic() + self._retry_seconds
        with self._lock:
            while True:
                try:
                    return self._exchange(json.dumps(request))
                except (OSError, ValueError) as error:
                    self._drop()
                    if time.monotonic() > deadline:
                        raise StoreError(
                            f"store tcp://{self._host}:{self._port} does not answer host {socket.gethostname()}: "
                            f"{error}; expected a store server with the same token within {self._retry_seconds:g} s; "
                            "check address and token, and that the server runs"
                        ) from error
                    time.sleep(0.05)

    def _exchange(self, content: str) -> Any:
        if self._socket is None:
            self._socket = socket.create_connection((self._host, self._port), timeout=self._retry_seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._file = self._socket.makefile("rb")
            self._nonce, self._place = self._read().decode("ascii", "replace"), 0
        mark = sign(self._token, self._nonce, str(self._place), content)
        self._socket.sendall(f"{mark} {content}\n".encode())
        self._place += 1
        return json.loads(self._read())

    def _read(self) -> bytes:
        line = self._file.readline(_LONGEST_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the server closed the connection")
        return line[:-1]

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._file = None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
