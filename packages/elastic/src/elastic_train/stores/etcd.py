"""A store in etcd: replicated, so no single host is needed; leases are etcd's own.

Requests go through the maintained client ``etcd3gw`` (extra ``etcd``), each a transaction: a version here is etcd's
revision of the last change, which grows over the whole store. etcd counts leases in whole seconds and grants no less
than about two, so shorter leases last longer here.
"""

from __future__ import annotations

import base64
import json
import math
import threading
from typing import Any

from elastic_train.errors import StoreError
from elastic_train.stores.base import Entry
from elastic_train.stores.tcp import split_address

__all__ = ["EtcdStore"]


class EtcdStore:
    """A store in an etcd cluster.

    Args:
        address: ``host:port`` of one of its members.
        timeout_seconds: Longest wait for an answer.
    """

    def __init__(self, address: str, timeout_seconds: float = 5.0):
        try:
            import etcd3gw
        except ImportError as error:
            raise StoreError(
                "the etcd client is not installed: expected etcd3gw; pip install 'elastic-train[etcd]'"
            ) from error
        host, port = split_address(address)
        self._address, self._lock, self._leases = address, threading.Lock(), {}
        try:
            self._client = etcd3gw.client(host=host, port=port, timeout=timeout_seconds, api_path="/v3/")
        except Exception as error:
            raise self._failed(error) from error
        self.get("")

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        found = self._post("/kv/range", {"key": _encode(key)}).get("kvs", []) if key else self._ping()
        return _entry(found[0]) if found else None

    def scan(self, prefix: str) -> dict[str, Entry]:
        """Return all entries under a prefix."""
        if prefix:
            last = _encode(prefix + "\U0010ffff")
            begin = _encode(prefix)
        else:
            begin = last = _encode("\0")
        found = self._post("/kv/range", {"key": begin, "range_end": last}).get("kvs", [])
        return {base64.b64decode(item["key"]).decode(): _entry(item) for item in found}

    def put(
        self, key: str, value: dict[str, Any], expected: int | None = None, lease_seconds: float | None = None
    ) -> int | None:
        """Write a value if ``expected`` holds."""
        request: dict[str, Any] = {"key": _encode(key), "value": _encode(json.dumps(value))}
        if lease_seconds is not None:
            request["lease"] = self._lease(key, lease_seconds)
        done = self._transact(key, expected, {"request_put": request})
        return int(done["header"]["revision"]) if done.get("succeeded") else None

    def delete(self, key: str, expected: int | None = None) -> bool:
        """Remove a key if ``expected`` holds."""
        done = self._transact(key, expected, {"request_delete_range": {"key": _encode(key)}})
        if not done.get("succeeded"):
            return False
        return int(done["responses"][0]["response_delete_range"].get("deleted", 0)) > 0

    def close(self) -> None:
        """Close the connection; leases end by themselves."""
        self._client.session.close()

    def _ping(self) -> list[Any]:
        self._post("/maintenance/status", {})
        return []

    def _transact(self, key: str, expected: int | None, change: dict[str, Any]) -> dict[str, Any]:
        compare = [] if expected is None else [
            {"key": _encode(key), "result": "EQUAL", "target": "MOD", "mod_revision": expected}
        ]  # fmt: skip
        return self._post("/kv/txn", {"compare": compare, "success": [change]})

    def _lease(self, key: str, seconds: float) -> str:
        """Return this client's lease of a key, renewed; a new one when it has run out."""
        known = self._leases.get(key)
        if known is not None:
            alive = self._post("/lease/keepalive", {"ID": known}).get("result", {})
            if int(alive.get("TTL", 0)) > 0:
                return known
        granted = self._post("/lease/grant", {"TTL": max(math.ceil(seconds), 1), "ID": 0})
        self._leases[key] = granted["ID"]
        return granted["ID"]

    def _post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._lock:
                return self._client.post(self._client.get_url(path), json=request)
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StoreError:
        return StoreError(
            f"store etcd://{self._address} does not answer: {error}; expected an etcd of version 3.4 or later; check "
            "the address and that it runs"
        )


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _entry(item: dict[str, Any]) -> Entry:
    return Entry(json.loads(base64.b64decode(item["value"])), int(item["mod_revision"]))
