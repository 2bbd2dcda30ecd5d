"""The two Python bindings of NCCL behind one small interface; each is imported only when it is asked for.

nccl4py can split, shrink and grow; CuPy can split. Neither has an uneven all-to-all, hence grouped sends and receives.
A fake with the same methods stands in for them in tests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError, CoreKernelsError, MissingDependencyError

__all__ = ["CupyNccl", "Nccl4py", "NcclLibrary", "NcclUnsupportedError", "load_library"]


class NcclUnsupportedError(CoreKernelsError, RuntimeError):
    """The chosen binding lacks this operation."""


class NcclLibrary(Protocol):
    """What a binding has to offer; handles are its own communicator objects, streams are raw pointers."""

    name: str

    def unique_id(self) -> Any:
        """Return a fresh id that can be pickled."""

    def init(self, size: int, rank: int, unique_id: Any) -> Any:
        """Join a new communicator and return its handle."""

    def grouped(self) -> Any:
        """Return a context in which sends and receives are collected and run as one."""

    def send(self, handle: Any, tensor: Tensor, peer: int, stream: int) -> None:
        """Send a contiguous tensor."""

    def recv(self, handle: Any, tensor: Tensor, peer: int, stream: int) -> None:
        """Receive into a contiguous tensor."""

    def all_reduce(self, handle: Any, tensor: Tensor, op: str, stream: int) -> None:
        """Reduce in place."""

    def broadcast(self, handle: Any, tensor: Tensor, root: int, stream: int) -> None:
        """Broadcast in place."""

    def split(self, handle: Any, color: int, key: int) -> Any:
        """Return the handle of this rank's part, ``None`` for a negative colour."""

    def shrink(self, handle: Any, excluded: list[int], abort: bool) -> Any:
        """Return a handle without the excluded ranks."""

    def grow_id(self, handle: Any) -> Any:
        """Return the id that new ranks join with."""

    def grow(self, handle: Any | None, size: int, unique_id: Any | None, rank: int | None) -> Any:
        """Return a handle with more ranks; a new rank passes no handle and its number."""

    def abort(self, handle: Any) -> None:
        """Stop everything in flight and free the communicator."""

    def destroy(self, handle: Any) -> None:
        """Free an intact communicator."""


class Nccl4py:
    """NVIDIA's nccl4py (extras ``cuda12`` and ``cuda13``)."""

    name = "nccl4py"

    def __init__(self) -> None:
        import nccl.core

        self._nccl = nccl.core

    def unique_id(self) -> bytes:
        """Return a fresh id."""
        return bytes(self._nccl.get_unique_id().as_bytes)

    def init(self, size: int, rank: int, unique_id: bytes) -> Any:
        """Join a new communicator."""
        return self._nccl.Communicator.init(size, rank, self._nccl.UniqueId.from_bytes(unique_id))

    def grouped(self) -> AbstractContextManager[None]:
        """Collect sends and receives."""
        return self._nccl.group()

    def send(self, handle: Any, tensor: Tensor, peer: int, stream: int) -> None:
        """Send a contiguous tensor."""
        handle.send(tensor, peer, stream=stream)

    def recv(self, handle: Any, tensor: Tensor, peer: int, stream: int) -> None:
        """Receive into a contiguous tensor."""
        handle.recv(tensor, peer, stream=stream)

    def all_reduce(self, handle: Any, tensor: Tensor, op: str, stream: int) -> None:
        """Reduce in place."""
        handle.allreduce(tensor, tensor, getattr(self._nccl, op.upper()), stream=stream)

    def broadcast(self, handle: Any, tensor: Tensor, root: int, stream: int) -> None:
        """Broadcast in place."""
        handle.broadcast(tensor, tensor, root, stream=stream)

    def split(self, handle: Any, color: int, key: int) -> Any:
        """Return this rank's part."""
        part = handle.split(None if color < 0 else color, key)
        return None if color < 0 else part

    def shrink(self, handle: Any, excluded: list[int], abort: bool) -> Any:
        """Return a communicator without the excluded ranks."""
        flags = self._nccl.CommShrinkFlag
        return handle.shrink(excluded, flag=flags.ABORT if abort else flags.DEFAULT)

    def grow_id(self, handle: Any) -> bytes:
        """Return the id that new ranks join with."""
        return bytes(handle.get_unique_id().as_bytes)

    def grow(self, handle: Any | None, size: int, unique_id: bytes | None, rank: int | None) -> Any:
        """Return a communicator with more ranks."""
        key = None if unique_id is None else self._nccl.UniqueId.from_bytes(unique_id)
        return (self._nccl.Communicator() if handle is None else handle).grow(size, key, rank=rank)

    def abort(self, handle: Any) -> None:
        """Stop everything in flight."""
        handle.abort()

    def destroy(self, handle: Any) -> None:
        """Free an intact communicator."""
        handle.destroy()


class CupyNccl:
    """CuPy's NCCL module, for machines without nccl4py."""

    name = "cupy"

    def __init__(self) -> None:
        from cupy.cuda import nccl

        if not nccl.available:
            raise ImportError("CuPy found no NCCL library")
        self._nccl = nccl
        self._ops = {"sum": nccl.NCCL_SUM, "max": nccl.NCCL_MAX, "min": nccl.NCCL_MIN}
        self._dtypes = {
            torch.uint8: nccl.NCCL_UINT8,
            torch.int8: nccl.NCCL_INT8,
            torch.int32: nccl.NCCL_INT32,
            torch.int64: nccl.NCCL_INT64,
            torch.float16: nccl.NCCL_FLOAT16,
            torch.float32: nccl.NCCL_FLOAT32,
            torch.float64: nccl.NCCL_FLOAT64,
        }
        if hasattr(nccl, "NCCL_BFLOAT16"):
            self._dtypes[torch.bfloat16] = nccl.NCCL_BFLOAT16

    def unique_id(self) -> Any:
        """Return a fresh id."""
        return self._nccl.get_unique_id()

    def init(self, size: int, rank: int, unique_id: Any) -> Any:
        """Join a new communicator."""
        return self._nccl.NcclCommunicator(size, unique_id, rank)

    @contextmanager
    def grouped(self) -> Any:
        """Collect sends and receives."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def send(self, handle: Any, tensor: Tensor, peer: int, stream: int) -> None:
        """Send a contiguous tensor."""
        handle.send(tensor.data_ptr(), tensor.numel(), self._dtype(tensor), peer, stream)

    def recv(self, handle: Any, tensor: Tensor, peer: int, stream: int) -> None:
        """Receive into a contiguous tensor."""
        handle.recv(tensor.data_ptr(), tensor.numel(), self._dtype(tensor), peer, stream)

    def all_reduce(self, handle: Any, tensor: Tensor, op: str, stream: int) -> None:
        """Reduce in place."""
        pointer = tensor.data_ptr()
        handle.allReduce(pointer, pointer, tensor.numel(), self._dtype(tensor), self._ops[op], stream)

    def broadcast(self, handle: Any, tensor: Tensor, root: int, stream: int) -> None:
        """Broadcast in place."""
        handle.bcast(tensor.data_ptr(), tensor.numel(), self._dtype(tensor), root, stream)

    def split(self, handle: Any, color: int, key: int) -> Any:
        """Return this rank's part."""
        part = handle.commSplit(color, key)
        return None if color < 0 else part

    def shrink(self, handle: Any, excluded: list[int], abort: bool) -> Any:
        """Raise: CuPy's binding has no shrink."""
        raise self._unsupported("shrink")

    def grow_id(self, handle: Any) -> Any:
        """Raise: CuPy's binding has no grow."""
        raise self._unsupported("grow")

    def grow(self, handle: Any | None, size: int, unique_id: Any | None, rank: int | None) -> Any:
        """Raise: CuPy's binding has no grow."""
        raise self._unsupported("grow")

    def abort(self, handle: Any) -> None:
        """Stop everything in flight."""
        handle.abort()

    def destroy(self, handle: Any) -> None:
        """Free an intact communicator."""
        handle.destroy()

    def _dtype(self, tensor: Tensor) -> int:
        if tensor.dtype not in self._dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
            raise ArgumentTypeError(f"{tensor.dtype} is not known to CuPy's NCCL; expected {known}; view as uint8")
        return self._dtypes[tensor.dtype]

    def _unsupported(self, operation: str) -> NcclUnsupportedError:
        return NcclUnsupportedError(
            f"{operation} is not offered by CuPy's NCCL binding; expected nccl4py; install core-kernels[cuda13]"
        )


def load_library(choice: str | NcclLibrary) -> NcclLibrary:
    """Return the binding named, the first that imports for ``"auto"``, or the object passed.

    Raises:
        MissingDependencyError: The binding is not installed.
    """
    if not isinstance(choice, str):
        return choice
    candidates = {"nccl4py": Nccl4py, "cupy": CupyNccl}
    wanted = list(candidates) if choice == "auto" else [choice]
    problems = []
    for name in wanted:
        if name not in candidates:
            raise MissingDependencyError(f"library={name!r} is unknown; expected auto, nccl4py or cupy; choose one")
        try:
            return candidates[name]()
        except ImportError as error:
            problems.append(f"{name}: {error}")
    raise MissingDependencyError(
        f"no Python binding of NCCL found ({'; '.join(problems)}); expected nccl4py or CuPy; "
        "install core-kernels[cuda12] or core-kernels[cuda13]"
    )
