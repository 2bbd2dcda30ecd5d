"""A store whose entries carry the mark of the job's token, so that a stranger's entry is refused.

Each value is kept with a keyed hash over key and value. An entry without the right one was not written by a worker of
the job: it is logged, removed, and never shown. Who has no token can still destroy entries where the store lets him,
but not steer the job.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from typing import Any

from elastic_train.stores.base import Entry, Store

__all__ = ["SignedStore", "sign"]

_logger = logging.getLogger(__name__)


def sign(token: str, *parts: str) -> str:
    """Return the keyed hash of some texts, 64 hexadecimal digits.

    >>> sign("t", "a") == sign("t", "a"), sign("t", "a") == sign("other", "a")
    (True, False)
    """
    return hmac.new(token.encode(), "\0".join(parts).encode(), hashlib.sha256).hexdigest()


class SignedStore:
    """A store that only shows what was written with the same token.

    Args:
        inner: Where entries are kept.
        token: The job's token.

    >>> from elastic_train.stores import MemoryStore
    >>> inner = MemoryStore()
    >>> store = SignedStore(inner, "secret")
    >>> _ = store.put("a", {"x": 1}), inner.put("b", {"value": {"x": 2}, "mark": "?"})
    >>> store.get("a").value, store.get("b")
    ({'x': 1}, None)
    """

    def __init__(self, inner: Store, token: str):
        self._inner, self._token = inner, token
        self._known: dict[str, Entry] = {}  # what was checked already, which most reads find again

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        entry = self._inner.get(key)
        if entry is None:
            self._known.pop(key, None)
            return None
        return self._checked(key, entry)

    def scan(self, prefix: str) -> dict[str, Entry]:
        """Return all entries under a prefix."""
        entries = self._inner.scan(prefix)
        for key in [key for key in tuple(self._known) if key.startswith(prefix) and key not in entries]:
            self._known.pop(key, None)
        found = {key: self._checked(key, entry) for key, entry in entries.items()}
        return {key: entry for key, entry in found.items() if entry is not None}

    def put(
        self, key: str, value: dict[str, Any], expected: int | None = None, lease_seconds: float | None = None
    ) -> int | None:
        """Write a value if ``expected`` holds."""
        if expected == 0:
            self.get(key)  # a stranger's entry must not keep the place
        marked = {"value": value, "mark": self._mark(key, value)}
        return self._inner.put(key, marked, expected, lease_seconds)

    def delete(self, key: str, expected: int | None = None) -> bool:
        """Remove a key if ``expected`` holds."""
        return self._inner.delete(key, expected)

    def close(self) -> None:
        """Close the store inside."""
        self._inner.close()

    def _mark(self, key: str, value: dict[str, Any]) -> str:
        return sign(self._token, key, json.dumps(value, sort_keys=True))

    def _checked(self, key: str, entry: Entry) -> Entry | None:
        known = self._known.get(key)
        if known is not None and known.version == entry.version:
            return known
        value, mark = entry.value.get("value"), entry.value.get("mark")
        if isinstance(value, dict) and isinstance(mark, str) and hmac.compare_digest(mark, self._mark(key, value)):
            self._known[key] = Entry(value, entry.version)
            return self._known[key]
        _logger.warning("refused %r: it was not written with the token of this job; removed", key)
        self._inner.delete(key, entry.version)
        return None
