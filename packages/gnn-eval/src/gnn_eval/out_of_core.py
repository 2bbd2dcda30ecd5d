"""What stages hand to each other on disk, and how far a run got, so that a killed one goes on.

A :class:`Workspace` is a directory. Values are files in it until no later stage loads them. After each block the
progress of its stage is recorded, so a run that was killed goes on with the next block; nothing that was finished is
computed again. A run is taken up only if model, parameters, graph, request and settings are the same.

Ranks of one run share the directory: each writes its own rows, so it must be on a disk that all of them see.

Callers may not assume that the record survives a crash of the machine: data may still be on its way to the disk then.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gnn_eval.conversion import copy_rows
from gnn_eval.disk_rows import DiskRows
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.hoisting import StructureEvaluator
from gnn_eval.row_stores import RamRows, RowStore

if TYPE_CHECKING:
    from gnn_eval.plan import Compiled

__all__ = ["Workspace", "deliver", "open_output", "run_fingerprint"]

_SAMPLED_BYTES = 1 << 20
_DELIVERED_BYTES = 256 << 20


class Workspace:
    """A directory for values between stages and for the progress of a run.

    Args:
        directory: Made if it does not exist.
        fingerprint: What a resumed run must share, from :func:`run_fingerprint`.
        resume: Go on with what the directory holds.
        group: Ranks that share the run, or ``None``.
    """

    def __init__(self, directory: Path, fingerprint: str, resume: bool, group: Any = None):
        self.directory, self._fingerprint = directory, fingerprint
        self._group = None if group is None or group.size == 1 else group
        directory.mkdir(parents=True, exist_ok=True)
        rank = "" if self._group is None else f"-{group.rank}-of-{group.size}"
        self._progress_file = directory / f"progress{rank}.json"
        self._done: dict[str, int] = {}
        self.resumed = resume and self._all_ranks(self._progress_file.exists())
        if self.resumed:
            found = json.loads(self._progress_file.read_text())
            if found["fingerprint"] != fingerprint:
                raise EvaluationArgumentError(
                    f"{directory} holds a run of another model, graph, request or set of parameters "
                    f"({found['fingerprint']}, now {fingerprint}); pass resume=False to start over, or a new directory"
                )
            self._done = found["done"]
        self._save()

    def new_rows(self, path: Path, place: int, shape: list[int], dtype: torch.dtype) -> DiskRows:
        """Return the file of a value made by stage ``place``: kept if the stage was begun, else new."""
        if not (self.resumed and self._all_ranks(path.exists()) and self._any_rank(self.done_rows(place) > 0)):
            if self._group is None or self._group.rank == 0:
                DiskRows.create(path, shape, dtype)
            self.wait_for_ranks()
        return DiskRows(path, dtype)

    def path_of(self, name: str) -> Path:
        """Return the file of a value."""
        return self.directory / f"{name}.npy"

    def discard(self, store: RowStore) -> None:
        """Delete a value that is not needed any more."""
        if isinstance(store, DiskRows) and store.path.parent == self.directory:
            store.close()
            self.wait_for_ranks()
            store.path.unlink(missing_ok=True)

    def done_rows(self, place: int) -> int:
        """Return up to which row this rank has computed a stage."""
        return self._done.get(str(place), 0)

    def mark_done(self, place: int, rows: int) -> None:
        """Record that a stage's rows up to ``rows`` are written."""
        self._done[str(place)] = rows
        self._save()

    def wait_for_ranks(self) -> None:
        """Wait until all ranks are here."""
        if self._group is not None:
            self._group.barrier()

    def finish(self, results: list[RowStore]) -> None:
        """Remove what a finished run leaves here: its record, and results that have been read."""
        for store in results:
            self.discard(store)
        self._progress_file.unlink(missing_ok=True)

    def _all_ranks(self, claim: bool) -> bool:
        return claim if self._group is None else not self._any_rank(not claim)

    def _any_rank(self, claim: bool) -> bool:
        if self._group is None:
            return claim
        return bool(self._group.all_reduce(torch.tensor([int(claim)]), op="max")[0])

    def _save(self) -> None:
        fresh = self._progress_file.with_suffix(".new")
        fresh.write_text(json.dumps({"fingerprint": self._fingerprint, "done": self._done}))
        os.replace(fresh, self._progress_file)


def run_fingerprint(
    compiled: Compiled, model: nn.Module, graph: str, asked: Mapping[str, Tensor | None], settings: list[Any]
) -> str:
    """Return 16 hexadecimal digits that differ for runs that must not be taken up for one another.

    Args:
        compiled: The plan.
        model: The model, with its parameters as they are now.
        graph: Text that identifies the graph and its inputs.
        asked: Rows asked for of each output.
        settings: What else decides which rows are computed, in which sequence and by which kernels.
    """
    digest = hashlib.sha256()
    for value in compiled.program.values.values():
        digest.update(f"{value.name} {value.op} {value.args} {value.kwargs}".encode())
    digest.update(json.dumps([sorted(compiled.stored), graph, settings]).encode())
    constants = compiled.program.constants.items()
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *constants):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for name, ids in asked.items():
        digest.update(name.encode() + (b"all" if ids is None else ids.numpy().tobytes()))
    return digest.hexdigest()[:16]


def sample_identity(tensors: Mapping[str, Tensor]) -> str:
    """Return text that identifies tensors by shape, dtype and a sample of their bytes, in bounded time."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() * max(tensor.element_size(), 1) // _SAMPLED_BYTES)
        digest.update(flat[::step].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def open_output(
    out: Tensor | str | Path,
    compiled: Compiled,
    structure: StructureEvaluator,
    asked: Mapping[str, Tensor | None],
) -> dict[str, RowStore | Path]:
    """Return where the only output goes: a store over a tensor of the caller, or the path of a file to be made."""
    names = compiled.program.outputs
    if len(names) != 1:
        raise EvaluationArgumentError(f"out= was given, but the model returns {len(names)} tensors; leave out= away")
    value = compiled.program[names[0]]
    if not isinstance(out, Tensor):
        if value.type.row_dim != 0:
            raise EvaluationArgumentError("the result does not have its rows first; pass out=None")
        return {names[0]: Path(out)}
    shape, ids = [structure.count_of(size) for size in value.dims], asked[names[0]]
    if ids is not None:
        shape[value.type.row_dim] = ids.numel()
    if list(out.shape) != shape or out.dtype != value.dtype:
        raise EvaluationArgumentError(
            f"out has shape {list(out.shape)} and {out.dtype}; expected {shape} and {value.dtype}; allocate it so"
        )
    return {names[0]: RamRows(out, value.type.row_dim)}


def deliver(
    rows: RowStore, ids: Tensor | None, out: Tensor | str | Path | None, memory_bytes: int | None, group: Any = None
) -> Tensor:
    """Return the rows ``ids`` of a result (all if ``None``): in memory, in the caller's tensor, or mapped from a file.

    Args:
        rows: The result.
        ids: Rows in the order wanted.
        out: ``None``, a tensor, or the path of a ``.npy`` file.
        memory_bytes: Budget for copying rows to a file.
        group: Ranks of the run; the first writes the file.
    """
    if out is None or isinstance(out, Tensor):
        whole = rows.whole() if ids is None else rows.read_rows(ids)
        whole = rows.read_range(0, rows.num_rows) if whole is None else whole
        return whole if out is None or whole is out else out.copy_(whole)
    path = Path(out)
    is_there = isinstance(rows, DiskRows) and path.exists() and path.samefile(rows.path)
    if not is_there and (group is None or group.rank == 0):
        copy_rows(rows, path, ids, (memory_bytes or _DELIVERED_BYTES) // 4).close()
    if group is not None:
        group.barrier()
    mapped = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    return mapped.view(rows.read_range(0, 0).dtype)
