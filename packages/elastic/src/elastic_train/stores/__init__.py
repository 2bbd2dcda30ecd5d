"""Key-value stores that hold the state of a job: versions for compare-and-swap, leases for liveness.

Every store offers the same five operations, see :class:`Store`. A version is a number that grows with every write to
the store, so the version of an election is a fencing token. ``open_store("file:///tmp/job")`` makes one by address.
Only holders of the job's token can write what others will read, see :mod:`elastic_train.stores.signed`.

==================  ===================================================  =========================================
store               for                                                  lost when
==================  ===================================================  =========================================
``memory:``         tests with a clock of their own                      the process ends
``file:///F``       workers of one host: one SQLite file in folder F,    the host is lost
                    survives kill -9
``tcp://H:P``       workers of several hosts, served by one process      that process is lost
``etcd://H:P``      the same, replicated                                 most of the etcd cluster is lost
==================  ===================================================  =========================================
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from elastic_train.errors import StoreError, input_error
from elastic_train.stores.base import Entry, Store
from elastic_train.stores.etcd import EtcdStore
from elastic_train.stores.file import FileStore
from elastic_train.stores.memory import MemoryStore
from elastic_train.stores.signed import SignedStore, sign
from elastic_train.stores.tcp import StoreServer, TcpStore

__all__ = [
    "Entry",
    "EtcdStore",
    "FileStore",
    "MemoryStore",
    "SignedStore",
    "Store",
    "StoreServer",
    "TcpStore",
    "find_token",
    "open_store",
    "sign",
]


def find_token(address: str, token: str | None = None) -> str:
    """Return the token of the job whose store is at an address.

    Args:
        address: Address of the store.
        token: The token, when the caller has it; otherwise that of ``ELASTIC_TRAIN_TOKEN``. A folder's own token, which
            only its owner can read, is made at the first call.

    Raises:
        InputError: The store is open to other hosts and there is no token.
    """
    found = token or os.environ.get("ELASTIC_TRAIN_TOKEN")
    if found:
        return found
    if address == "memory:":
        return "memory"
    if address.startswith("file://") and len(address) > len("file://"):
        return _token_of_folder(Path(address.removeprefix("file://")))
    raise input_error(
        "token", None, "the job's secret", "set ELASTIC_TRAIN_TOKEN to the one that the launcher printed or was given"
    )


def _token_of_folder(folder: Path) -> str:
    path = folder / "token"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".token-{os.getpid()}-{secrets.token_hex(4)}"
        if not path.exists():
            with open(os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(16))
            try:
                os.link(scratch, path)  # whole and only once, whoever comes first
            except FileExistsError:
                pass
            finally:
                scratch.unlink()
        return path.read_text()
    except OSError as error:
        raise StoreError(
            f"cannot read or make the token {path}: {error}; expected a folder of this user; name another folder"
        ) from error


def open_store(address: str, token: str | None = None) -> Store:
    """Open the store at an address.

    Args:
        address: ``file:///folder``, ``tcp://host:port``, ``etcd://host:port`` or ``memory:``.
        token: The job's token, see :func:`find_token`.

    Raises:
        InputError: The address has another form, or no token is known.
        StoreError: The store cannot be reached.

    >>> open_store("memory:").get("job/leader") is None
    True
    """
    kind, _, place = address.partition("://")
    if address != "memory:" and (kind not in ("file", "tcp", "etcd") or not place):
        expected = "file:///FOLDER, tcp://HOST:PORT, etcd://HOST:PORT or memory:"
        raise input_error("store", address, expected, "correct the address")
    if address == "memory:":
        return MemoryStore()
    secret = find_token(address, token)
    if kind == "tcp":
        return TcpStore(place, secret)
    return SignedStore(FileStore(place) if kind == "file" else EtcdStore(place), secret)
