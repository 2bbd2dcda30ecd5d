"""State of the tables, table by table in row order: the same whatever the tiers, the owners and the number of ranks.

Two forms. ``collection.state_dict()`` holds whole tables on every rank, for tables that fit. :func:`save_tables`
writes one ``.npy`` file per table and state, each rank its own rows, block by block; :func:`load_tables` and
:func:`open_table` map files into memory and read just the rows they need.

Collective: everything but :func:`open_table`.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recsys_embed.errors import PlanMismatchError, input_error

if TYPE_CHECKING:
    from recsys_embed.collection import TieredEmbeddingBagCollection
    from recsys_embed.exchange import RowSpace

__all__ = ["gather_tables", "load_tables", "open_table", "save_tables", "scatter_tables"]

_BLOCK_ROWS = 1 << 18
_HEADER = "tables.json"


def _columns(space: RowSpace) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and shard of the weight and of every state."""
    yield "weight", space.weight
    yield from zip(space.optimizer.state_names, space.states, strict=True)


def gather_tables(embeddings: TieredEmbeddingBagCollection) -> dict[str, Tensor]:
    """Return whole tables and states, ``"<table>.<name>"`` [rows, ...], on every rank."""
    embeddings.finish_updates()
    embeddings._sink_hot_rows()
    group, whole = embeddings.group, {}
    for space in embeddings.spaces:
        counts = np.diff(space.layout.bounds).tolist()
        rows = space.layout.rows(torch.arange(space.layout.num_rows))
        for name, shard in _columns(space):
            by_place = group.all_gather_v(shard, tag="state", counts=counts)[0]
            by_row = torch.empty_like(by_place)
            by_row[rows] = by_place
            for table in space.layout.tables:
                first = space.layout.first_row[table.name]
                whole[f"{table.name}.{name}"] = by_row[first : first + table.num_embeddings]
    return whole


def scatter_tables(embeddings: TieredEmbeddingBagCollection, state: dict[str, Any]) -> None:
    """Take this rank's rows out of whole tables (tensors or arrays, also mapped files), then rebuild the hot tier.

    Raises:
        PlanMismatchError: A table or state is missing or has another shape.
    """
    if embeddings.lookahead is not None:
        embeddings.lookahead.refuse("loading tables")
    for space in embeddings.spaces:
        rows = space.layout.own_rows(embeddings.group.rank)
        for name, shard in _columns(space):
            for table in space.layout.tables:
                source, key = state.get(f"{table.name}.{name}"), f"{table.name}.{name}"
                shape = (table.num_embeddings, *shard.shape[1:])
                if source is None or tuple(source.shape) != shape:
                    found = "nothing" if source is None else f"shape {tuple(source.shape)}"
                    raise PlanMismatchError(
                        f"the saved state has {found} for {key!r}; expected {shape}; use the same tables and optimiser"
                    )
                first = space.layout.first_row[table.name]
                mine = ((rows >= first) & (rows < first + table.num_embeddings)).nonzero().view(-1)
                for begin in range(0, len(mine), _BLOCK_ROWS):
                    slots = mine[begin : begin + _BLOCK_ROWS]
                    wanted = rows[slots] - first
                    values = source[wanted] if isinstance(source, Tensor) else _read_rows(source, wanted)
                    shard[slots] = values.to(shard.dtype)
    embeddings._build_tiers(embeddings.plan)


def _read_rows(source: Any, wanted: Tensor) -> Tensor:
    order = wanted.argsort()  # ascending reads stay on few pages
    values = torch.from_numpy(np.ascontiguousarray(source[wanted[order].numpy()]))
    out = torch.empty_like(values)
    out[order] = values
    return out


def save_tables(embeddings: TieredEmbeddingBagCollection, folder: str | Path) -> None:
    """Write all tables to a folder that every rank reaches."""
    folder, group = Path(folder), embeddings.group
    embeddings.finish_updates()
    embeddings._sink_hot_rows()
    for space in embeddings.spaces:
        rows = space.layout.own_rows(group.rank)
        for name, shard in _columns(space):
            for table in space.layout.tables:
                path, shape = folder / f"{table.name}.{name}.npy", (table.num_embeddings, *shard.shape[1:])
                if group.rank == 0:
                    folder.mkdir(parents=True, exist_ok=True)
                    np.lib.format.open_memmap(path, mode="w+", dtype=shard.numpy().dtype, shape=shape).flush()
                group.barrier("save")
                target = np.lib.format.open_memmap(path, mode="r+")
                first = space.layout.first_row[table.name]
                mine = ((rows >= first) & (rows < first + table.num_embeddings)).nonzero().view(-1)
                for begin in range(0, len(mine), _BLOCK_ROWS):
                    slots = mine[begin : begin + _BLOCK_ROWS]
                    target[(rows[slots] - first).numpy()] = shard[slots].numpy()
                target.flush()
    if group.rank == 0:
        header = {"schema": "recsys_embed.tables", "version": 1, "step": embeddings.step}
        header["optimizer"] = embeddings.optimizer.name
        (folder / _HEADER).write_text(json.dumps(header, indent=1) + "\n")
    group.barrier("save")


def load_tables(embeddings: TieredEmbeddingBagCollection, folder: str | Path) -> None:
    """Read what :func:`save_tables` wrote, on any number of ranks, with any tiers.

    Raises:
        PlanMismatchError: Other tables or another optimiser.
        FileNotFoundError: There is no such folder.
    """
    folder = Path(folder)
    header = json.loads((folder / _HEADER).read_text())
    if header.get("optimizer") != embeddings.optimizer.name:
        raise PlanMismatchError(
            f"{folder} was saved with the optimiser {header.get('optimizer')!r}; this collection has "
            f"{embeddings.optimizer.name!r}; use the same optimiser"
        )
    state = {path.name.removesuffix(".npy"): open_table(path) for path in folder.glob("*.npy")}
    scatter_tables(embeddings, state)
    embeddings.step = int(header["step"])


def open_table(path: str | Path) -> np.ndarray:
    """Map one saved table: rows are read from disk when they are indexed.

    Raises:
        InputError: The file is no ``.npy`` file of numbers.
    """
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise input_error("path", str(path), f"a .npy file of numbers ({error})", "save the tables again") from None
    if isinstance(table.base, mmap.mmap):
        table.base.madvise(mmap.MADV_RANDOM)  # else the kernel reads far around every row
    return table
