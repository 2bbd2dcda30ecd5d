"""What every store offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Entry", "Store"]


@dataclass(frozen=True)
class Entry:
    """A stored value.

    Attributes:
        value: JSON-able dict.
        version: Number of the write that stored it, over the whole store.
    """

    value: dict[str, Any]
    version: int


class Store(Protocol):
    """A linearizable map from keys to small JSON values.

    Writes are conditional on ``expected``: ``None`` writes in any case, 0 only when the key is absent, another number
    only when it is the present version. An entry with a lease vanishes when it is not written again in time.
    """

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key, ``None`` when there is none or its lease has run out."""
        ...

    def scan(self, prefix: str) -> dict[str, Entry]:
        """Return all entries whose key begins with ``prefix``."""
        ...

    def put(
        self, key: str, value: dict[str, Any], expected: int | None = None, lease_seconds: float | None = None
    ) -> int | None:
        """Write a value; returns its version, ``None`` when ``expected`` does not hold."""
        ...

    def delete(self, key: str, expected: int | None = None) -> bool:
        """Remove a key; returns whether it was there and ``expected`` held."""
        ...

    def close(self) -> None:
        """Give back what the store holds in this process."""
        ...
