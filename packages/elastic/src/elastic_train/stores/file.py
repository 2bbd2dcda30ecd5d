"""A store in one SQLite file, for workers of one host.

SQLite brings what is hard to write well: atomic transactions between processes that a killed process cannot leave half
done. Leases run by the host's monotonic clock, which all its processes share. Single point of failure: the host. A
process that is paused inside a transaction (some ten microseconds) keeps the others waiting until it is killed.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from elastic_train.errors import StoreError
from elastic_train.stores.base import Entry

__all__ = ["FileStore"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT, version INTEGER, ends REAL);
CREATE TABLE IF NOT EXISTS counter (id INTEGER PRIMARY KEY CHECK (id = 0), version INTEGER);
INSERT OR IGNORE INTO counter VALUES (0, 0);
"""


class FileStore:
    """A store in ``folder/store.sqlite``.

    Args:
        folder: Made when it is not there; on a local disk, as locks of network file systems cannot be relied on.
        busy_seconds: Longest wait for another process's transaction.
    """

    def __init__(self, folder: str | Path, busy_seconds: float = 10.0):
        self._path = Path(folder) / "store.sqlite"
        self._lock = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                self._path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA synchronous=OFF")
            # One process at a time sets the file up: SQLite does not wait for the lock that a change of mode needs.
            with open(self._path.with_suffix(".lock"), "w") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                if self._database.execute("SELECT name FROM sqlite_master").fetchone() is None:
                    self._database.execute("PRAGMA journal_mode=WAL")
                    self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"cannot open the store {self._path}: {error}; expected a folder this process can write; "
                "name another folder"
            ) from error

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        rows = self._read("key = ?", (key,))
        return rows[0][1] if rows else None

    def scan(self, prefix: str) -> dict[str, Entry]:
        """Return all entries under a prefix."""
        return dict(self._read("key >= ? AND key < ?", (prefix, prefix + "\U0010ffff")))

    def put(
        self, key: str, value: dict[str, Any], expected: int | None = None, lease_seconds: float | None = None
    ) -> int | None:
        """Write a value if ``expected`` holds."""
        with self._transaction() as database:
            if not _holds(database, key, expected):
                return None
            database.execute("UPDATE counter SET version = version + 1")
            version = database.execute("SELECT version FROM counter").fetchone()[0]
            ends = None if lease_seconds is None else time.monotonic() + lease_seconds
            row = (key, json.dumps(value), version, ends)
            database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", row)
            return version

    def delete(self, key: str, expected: int | None = None) -> bool:
        """Remove a key if ``expected`` holds."""
        with self._transaction() as database:
            if _version(database, key) == 0 or not _holds(database, key, expected):
                return False
            database.execute("DELETE FROM entries WHERE key = ?", (key,))
            return True

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _read(self, where: str, values: tuple[str, ...]) -> list[tuple[str, Entry]]:
        query = f"SELECT key, value, version FROM entries WHERE {where} AND (ends IS NULL OR ends > ?) ORDER BY key"
        try:
            with self._lock:
                rows = self._database.execute(query, (*values, time.monotonic())).fetchall()
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot read {self._path}: {error}; expected an open store; start the job anew"
            ) from error
        return [(key, Entry(json.loads(text), version)) for key, text, version in rows]

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database, self._lock, self._path)


class _Transaction:
    """One writing transaction; other threads and processes wait for its end."""

    def __init__(self, database: sqlite3.Connection, lock: threading.Lock, path: Path):
        self._database, self._lock, self._path = database, lock, path

    def __enter__(self) -> sqlite3.Connection:
        self._lock.acquire()
        try:
            self._database.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            self._lock.release()
            raise self._failure(error) from error
        return self._database

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self._database.execute("COMMIT")
            elif self._database.in_transaction:  # a full disk has rolled it back
                self._database.execute("ROLLBACK")
        except sqlite3.Error as failure:
            raise self._failure(failure) from failure
        finally:
            self._lock.release()
        if isinstance(error, sqlite3.Error):
            raise self._failure(error) from error

    def _failure(self, error: sqlite3.Error) -> StoreError:
        return StoreError(
            f"cannot write {self._path}: {error}; expected an open store on a disk with room; start the job anew"
        )


def _version(database: sqlite3.Connection, key: str) -> int:
    query = "SELECT version FROM entries WHERE key = ? AND (ends IS NULL OR ends > ?)"
    row = database.execute(query, (key, time.monotonic())).fetchone()
    return row[0] if row else 0


def _holds(database: sqlite3.Connection, key: str, expected: int | None) -> bool:
    return expected is None or _version(database, key) == expected
