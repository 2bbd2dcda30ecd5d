"""One worker's share of a checkpoint, in the format of ``torch.distributed.checkpoint``.

Tensors are cut along their first dimension into chunks of some megabytes. All workers that hold the same state share
the chunks out among them by bytes, so each copies and writes its part only. What they write together is an ordinary
checkpoint of PyTorch's: chunks are its shards, and one of the workers writes the index from what the others leave
beside their files. No process group is needed, so a lost worker blocks nobody.

Copies are taken by the writing thread while the next step computes: parameters and optimizer state do not change before
the next optimizer step, which waits for the copies. Whatever else may change sooner is copied at once.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from elastic_train.checkpoints.folder import checksum
from elastic_train.errors import StateMismatchError
from elastic_train.state import State, locals_of

__all__ = ["PLAIN", "Share", "read_state", "write_index"]

PLAIN = "plain"  # the state's structure and its values that are no tensors, pickled
_CHUNK_BYTES = 8 << 20


class _Chunk:
    """Rows of a tensor: ``source`` in the state, ``copy`` once taken, and where they stand in the whole tensor."""

    def __init__(self, name: str, whole: Tensor, source: Tensor, offsets: Sequence[int]):
        self.name, self.source = name, source
        self.copy: Tensor | None = None
        chunk = ChunkStorageMetadata(torch.Size(offsets), source.size())
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(source), torch.Size(whole.size()))
        self.item = WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class Share(DefaultSavePlanner):
    """What one worker writes.

    Args:
        state: The state; call at a committed step.
        rank: This worker's place among those that hold the same state.
        size: Their number.
        is_first: Whether they also write what is not sharded.
    """

    def __init__(self, state: State, rank: int, size: int, is_first: bool = True):
        super().__init__()
        plain, tensors = state.capture()
        content = torch.frombuffer(bytearray(pickle.dumps(plain)), dtype=torch.uint8)
        entries = [*tensors, (f".{PLAIN}", content)]
        chunks = [chunk for name, tensor in entries for chunk in _cut(name[1:], tensor, is_first)]
        total, offset = sum(chunk.source.nbytes for chunk in chunks), 0
        self._chunks: list[_Chunk] = []
        for chunk in chunks:
            if offset * size // max(total, 1) == rank:
                self._chunks.append(chunk)
            offset += chunk.source.nbytes
        self._by_index = {chunk.item.index: chunk for chunk in self._chunks}
        late = state.late_tensors()
        is_late = {name[1:]: locals_of([tensor])[0].data_ptr() in late for name, tensor in entries}
        self.is_copied = threading.Event()
        with torch.no_grad():
            for chunk in self._chunks:
                if not is_late[chunk.name]:
                    chunk.copy = chunk.source.detach().to("cpu", copy=True)

    def copy(self) -> None:
        """Take the copies that were not taken at once."""
        try:
            with torch.no_grad():
                for chunk in self._chunks:
                    if chunk.copy is None:
                        chunk.copy = chunk.source.detach().to("cpu", copy=True)
        finally:
            self.is_copied.set()

    def write(self, attempt: Path, rank: int) -> None:
        """Write the copies, and beside them what the index needs to know.

        Args:
            attempt: Folder of the checkpoint.
            rank: Number of this share among those of all workers.
        """
        writer = dcp.FileSystemWriter(attempt)
        writer.set_up_storage_writer(is_coordinator=False)
        plan = SavePlan([chunk.item for chunk in self._chunks])
        plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
        results = writer.write_data(plan, self).value() if plan.items else []
        written = sorted({result.storage_data.relative_path for result in results})
        files = {name: ((attempt / name).stat().st_size, checksum(attempt / name)) for name in written}
        (attempt / f"share-{rank}").write_bytes(pickle.dumps((SavePlan(plan.items), results, files)))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the copy of a chunk, for the writer."""
        copy = self._by_index[write_item.index].copy
        assert copy is not None
        return copy


def _cut(name: str, whole: Tensor, is_first: bool) -> list[_Chunk]:
    """Return the chunks of a tensor, or of this process's shard of it."""
    (local,) = locals_of([whole])
    if local is whole and not is_first:
        return []
    sharded: Any = whole
    begin = [0] * whole.dim() if local is whole else list(sharded.__create_chunk_list__()[0].offsets)
    if local.dim() == 0 or not local.numel():
        return [_Chunk(name, whole, local, begin)] if local is whole else []
    rows = max(_CHUNK_BYTES * len(local) // local.nbytes, 1)
    return [
        _Chunk(name, whole, local[row : row + rows], [begin[0] + row, *begin[1:]]) for row in range(0, len(local), rows)
    ]


def write_index(attempt: Path, num_shares: int) -> dict[str, tuple[int, int]]:
    """Write the index of a checkpoint whose shares are all there; returns length and checksum of each file."""
    shares = [pickle.loads((attempt / f"share-{rank}").read_bytes()) for rank in range(num_shares)]
    _, metadata = create_default_global_save_plan([plan for plan, _, _ in shares])
    writer = dcp.FileSystemWriter(attempt)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [results for _, results, _ in shares])
    files = {name: entry for _, _, written in shares for name, entry in written.items()}
    index = attempt / ".metadata"
    return {**files, index.name: (index.stat().st_size, checksum(index))}


def read_state(attempt: Path, state: State) -> None:
    """Fill a state from a checkpoint.

    Raises:
        StateMismatchError: The checkpoint has tensors of other names, shapes or types.
    """
    _, tensors = state.capture()
    reader = dcp.FileSystemReader(attempt)
    stored = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    (length,), _ = stored.pop(PLAIN)
    wanted = {name[1:]: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}
    if wanted != stored:
        mine, theirs = sorted(wanted.items() - stored.items()), sorted(stored.items() - wanted.items())
        raise StateMismatchError(
            f"the state does not fit checkpoint {attempt}: it has {mine[:3]}, expected {theirs[:3]} ({len(stored)} "
            "tensors); run the script that wrote it, or name another folder"
        )
    content = torch.empty(length, dtype=torch.uint8)
    targets: dict[str, Any] = {name[1:]: tensor for name, tensor in tensors}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is what is meant
        dcp.load({**targets, PLAIN: content}, storage_reader=reader, no_dist=True)
    state.restore(pickle.loads(content.numpy().tobytes()), [tensor for _, tensor in tensors])
