"""Key-value stores that hold the state of a job: versions for compare-and-swap, leases for liveness.

Every store offers the same five operations, see :class:`Store`. A version is a number that grows with every write to
the store, so the version of an election is a fencing token. ``open_store("file:///tmp/job")`` makes one by address.

===========  =======================================================  =============================================
store        for                                                      lost when
===========  =======================================================  =============================================
``memory:``  tests with a clock of their own                          the process ends
``file:``    workers of one host: one SQLite file, survives kill -9    the host is lost
===========  =======================================================  =============================================
"""

from __future__ import annotations

from elastic_train.errors import input_error
from elastic_train.stores.base import Entry, Store
from elastic_train.stores.file import FileStore
from elastic_train.stores.memory import MemoryStore

__all__ = ["Entry", "FileStore", "MemoryStore", "Store", "open_store"]


def open_store(address: str) -> Store:
    """Open the store at an address.

    Args:
        address: ``file:///folder`` or ``memory:``.

    Raises:
        InputError: The address has another form.

    >>> open_store("memory:").get("job/leader") is None
    True
    """
    if address == "memory:":
        return MemoryStore()
    if address.startswith("file://") and len(address) > len("file://"):
        return FileStore(address.removeprefix("file://"))
    raise input_error("store", address, "file:///FOLDER or memory:", "correct the address")
