"""A table of feature rows that may be larger than device or host memory.

All rows lie in one base: a tensor in host memory, or a ``.npy`` file. Copies of the hottest rows lie in device memory
and, over a file, in host memory. One table of positions says where a row is read: positions below ``D`` are slots of
the device tier, the next ``H`` slots of the host tier, and ``D + H + row`` is the row in the base.

Rows that a batch took from slow tiers are kept for the next batch, which often needs many of them again. With
``refresh_every``, counts that fade by half at each refresh decide anew which rows are cached.

Callers may not use one store from several threads, nor change the base while a store reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core_kernels.errors import ArgumentTypeError, argument_error
from core_kernels.graph.transform import check_ids
from core_kernels.store.disk import NpyRows
from core_kernels.store.placement import Placement, place_by_hotness, plan_replacement
from core_kernels.store.tiers import TierCounters

__all__ = ["FeatureStore"]


@dataclass
class _LookAhead:
    """Rows being read from disk for a later gather: those of ``needed`` that will not be at hand anyway."""

    needed: Tensor
    rows: Tensor
    values: Tensor
    futures: list

    def wait(self) -> None:
        for future in self.futures:
            future.result()


class FeatureStore:
    """Feature rows in device, host and disk tiers.

    Args:
        source: All rows: a tensor [num_rows, num_features] in host memory, or the path of a ``.npy`` file.
        device: Where batches are wanted; the device tier lies there.
        num_device_rows: Rows cached in device memory.
        num_host_rows: Rows cached in host memory (pinned for a CUDA device); only over a file.
        hotness: [num_rows], expected reads per row; the hottest are cached. Without it, the lowest ids.
        reuse: Keep the rows that a batch took from slow tiers for the next one. Left out: where it pays, over a file or
            for a CUDA device.
        refresh_every: Gathers between two refreshes of the caches; ``None`` keeps the static placement.
        num_threads: Reads from disk under way at a time.

    Raises:
        ArgumentError: A shape or a capacity does not fit the source.
        ArgumentTypeError: The source is neither a tensor nor a path.

    Determinism: :meth:`gather` returns the rows of the source, whatever the tiers.

    >>> store = FeatureStore(torch.arange(12.0).view(6, 2), num_device_rows=2, hotness=torch.tensor([0, 0, 0, 9, 0, 8]))
    >>> store.gather(torch.tensor([5, 0, 5])).tolist()
    [[10.0, 11.0], [0.0, 1.0], [10.0, 11.0]]
    >>> store.counters.rows
    {'reused': 0, 'device': 2, 'host': 1, 'disk': 0}
    """

    def __init__(
        self,
        source: Tensor | str | Path,
        *,
        device: torch.device | str = "cpu",
        num_device_rows: int = 0,
        num_host_rows: int = 0,
        hotness: Tensor | None = None,
        reuse: bool | None = None,
        refresh_every: int | None = None,
        num_threads: int = 4,
    ):
        self.device = torch.device(device)
        self._disk = self._base = None
        if isinstance(source, Tensor):
            self._base = _check_source(source)
            self.num_rows, self.num_features, self.dtype = *source.shape, source.dtype
        elif isinstance(source, str | Path):
            self._disk = NpyRows(source, num_threads)
            self.num_rows, self.num_features, self.dtype = (
                self._disk.num_rows,
                self._disk.num_columns,
                self._disk.dtype,
            )
        else:
            raise ArgumentTypeError(f"source is a {type(source).__name__}; expected a tensor or a path; convert it")
        self._check_capacities(num_device_rows, num_host_rows, refresh_every)
        if hotness is None:
            hotness = torch.zeros(self.num_rows)
        elif hotness.shape != (self.num_rows,):
            raise argument_error("hotness", tuple(hotness.shape), f"({self.num_rows},)", "pass one number per row")
        self.counters = TierCounters(self.num_features * self.dtype.itemsize)
        self._num_device, self._num_host = num_device_rows, num_host_rows
        self._refresh_every, self._num_gathers = refresh_every, 0
        self._heat = hotness.float().cpu().clone() if refresh_every else None
        self._reuse = reuse if reuse is not None else self._disk is not None or self.device.type == "cuda"
        self._recent_of_row = torch.full((self.num_rows if self._reuse else 0,), -1, dtype=torch.int64)
        self._recent_rows = torch.empty(0, dtype=torch.int64)
        self._recent_values = torch.empty(0, self.num_features, dtype=self.dtype, device=self.device)
        self._ahead: deque[_LookAhead] = deque()
        self._place(place_by_hotness(hotness, num_device_rows, num_host_rows))

    def gather(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the rows of ``ids`` on the device.

        Args:
            ids: int32 or int64 [num], repeated ids allowed.
            out: [num, num_features] on the device, written and returned; a new tensor when left out.

        Raises:
            ArgumentError: An id is outside [0, num_rows), or ``out`` does not fit.

        Cost: one read and one write of every row, and the transfer of those not in device memory.
        """
        ids = check_ids("ids", ids, self.num_rows).cpu()
        out = self._check_out(out, ids.shape[0])
        self._follow_heat(ids)
        position = self._position_of_row[ids]
        slow = position >= self._num_device
        self._fill(out, ~slow, self._device_values, position, "device")
        rest = slow
        if self._reuse:
            recent = self._recent_of_row[ids]
            again = rest & (recent >= 0)
            self._fill(out, again, self._recent_values, recent, "reused")
            rest = rest & ~again
        if self._num_host:
            cached = rest & (position < self._num_device + self._num_host)
            self._fill(out, cached, self._host_values, position - self._num_device, "host")
            rest = rest & ~cached
        if self._base is not None:
            self._fill(out, rest, self._base, ids, "host")
        else:
            self._fill_from_disk(out, rest, ids)
        if self._reuse:
            self._keep(ids, slow, out)
        return out

    def prefetch(self, ids: Tensor) -> None:
        """Begin to read from disk what a later :meth:`gather` of ``ids`` will need; gathers come in the same order.

        Args:
            ids: int32 or int64 [num].

        Raises:
            ArgumentError: An id is outside [0, num_rows).
        """
        ids = check_ids("ids", ids, self.num_rows).cpu()
        if self._disk is None:
            return
        needed = rows = ids[self._position_of_row[ids] >= self._num_device + self._num_host].unique()
        if self._reuse:  # what the batch before needs will still be at hand
            is_recent = torch.isin(rows, self._ahead[-1].needed) if self._ahead else self._recent_of_row[rows] >= 0
            rows = rows[~is_recent]
        self._ahead.append(_LookAhead(needed, rows, *self._disk.start(rows)))

    def iterate(self, batches: Iterable[Tensor], look_ahead: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(ids, rows)`` for every batch of ids, reading from disk ``look_ahead`` batches ahead.

        Raises:
            ArgumentError: ``look_ahead`` is negative, or an id outside [0, num_rows).
        """
        if look_ahead < 0:
            raise argument_error("look_ahead", look_ahead, "at least 0", "pass the number of batches to read ahead")
        waiting: deque[Tensor] = deque()
        for ids in batches:
            if look_ahead:
                self.prefetch(ids)
            waiting.append(ids)
            if len(waiting) > look_ahead:
                yield waiting[0], self.gather(waiting.popleft())
        while waiting:
            yield waiting[0], self.gather(waiting.popleft())

    def refresh(self) -> int:
        """Cache the rows that were hottest of late and let older counts fade by half; returns the rows moved."""
        if self._heat is None:
            raise argument_error("refresh_every", None, "a store that counts reads", "pass refresh_every=100")
        wanted = place_by_hotness(self._heat, self._num_device, self._num_host)
        self._heat *= 0.5
        moved = 0
        for rows_of_slots, rows, values, start in (
            (self._rows_on_device, wanted.device_rows, self._device_values, 0),
            (self._rows_on_host, wanted.host_rows, self._host_values, self._num_device),
        ):
            slots, newcomers = plan_replacement(rows_of_slots, rows, self.num_rows)
            leaving = rows_of_slots[slots]
            # A row that left for the other tier already has its new position.
            stays = (self._position_of_row[leaving] - start - slots) == 0
            self._position_of_row[leaving[stays]] = leaving[stays] + self._num_device + self._num_host
            values[slots.to(values.device)] = self._read_base(newcomers).to(values.device)
            rows_of_slots[slots] = newcomers
            self._position_of_row[newcomers] = start + slots
            moved += slots.shape[0]
        return moved

    def close(self) -> None:
        """Drop look-ahead reads and close the file, if there is one."""
        while self._ahead:
            self._ahead.popleft().wait()
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> FeatureStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, placement: Placement) -> None:
        rows = torch.arange(self.num_rows)
        self._position_of_row = rows + self._num_device + self._num_host
        self._rows_on_device, self._rows_on_host = placement.device_rows.clone(), placement.host_rows.clone()
        self._position_of_row[self._rows_on_device] = torch.arange(self._num_device)
        self._position_of_row[self._rows_on_host] = self._num_device + torch.arange(self._num_host)
        self._device_values = self._read_base(self._rows_on_device).to(self.device)
        self._host_values = self._read_base(self._rows_on_host)
        if self.device.type == "cuda":
            self._host_values = self._host_values.pin_memory()

    def _read_base(self, rows: Tensor) -> Tensor:
        if self._base is not None:
            return self._base[rows]
        distinct, inverse = rows.unique(return_inverse=True)
        return self._disk.read(distinct)[inverse]

    def _fill(self, out: Tensor, mask: Tensor, values: Tensor, slots: Tensor, tier: str) -> None:
        """Write ``values[slots]`` to the rows of ``out`` under ``mask``."""
        count = int(mask.sum())
        if count == 0:
            return
        self.counters.add(tier, count)
        if count == mask.shape[0] and values.device == out.device and out.is_contiguous():
            torch.index_select(values, 0, slots.to(values.device), out=out)
            return
        places = mask.nonzero().squeeze(1)
        to_cuda = out.is_cuda and not values.is_cuda
        chosen = torch.empty(count, self.num_features, dtype=self.dtype, device=values.device, pin_memory=to_cuda)
        torch.index_select(values, 0, slots[places].to(values.device), out=chosen)
        out.index_copy_(0, places.to(out.device), chosen.to(out.device, non_blocking=True))

    def _fill_from_disk(self, out: Tensor, missing: Tensor, ids: Tensor) -> None:
        rows, inverse = ids[missing].unique(return_inverse=True)
        ahead = self._ahead.popleft() if self._ahead else None
        if rows.shape[0] == 0:
            if ahead:
                ahead.wait()
            return
        if ahead is None or not ahead.rows.shape[0]:
            values = self._disk.read(rows)
        else:
            found = torch.searchsorted(ahead.rows, rows).clamp(max=ahead.rows.shape[0] - 1)
            is_ahead = ahead.rows[found] == rows
            late = self._disk.read(rows[~is_ahead])
            ahead.wait()
            values = ahead.values[found]
            values[~is_ahead] = late
        self.counters.add("disk", inverse.shape[0])
        places = missing.nonzero().squeeze(1)
        out.index_copy_(0, places.to(out.device), values[inverse].to(out.device))

    def _keep(self, ids: Tensor, slow: Tensor, out: Tensor) -> None:
        """Remember the rows of this batch that do not lie in device memory; a copy, as callers may change theirs."""
        places = slow.nonzero().squeeze(1)
        self._recent_of_row[self._recent_rows] = -1
        self._recent_rows = ids[places]
        self._recent_values = out.index_select(0, places.to(out.device))
        self._recent_of_row[self._recent_rows] = torch.arange(places.shape[0])

    def _follow_heat(self, ids: Tensor) -> None:
        if self._heat is None:
            return
        assert self._refresh_every is not None  # heat is kept only where it is asked for
        if self._num_gathers and self._num_gathers % self._refresh_every == 0:
            self.refresh()
        self._num_gathers += 1
        self._heat.index_add_(0, ids, torch.ones(ids.shape[0]))

    def _check_out(self, out: Tensor | None, count: int) -> Tensor:
        shape = (count, self.num_features)
        if out is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        same_device = out.device.type == self.device.type and self.device.index in (None, out.device.index)
        if out.shape != shape or out.dtype != self.dtype or not same_device:
            raise argument_error(
                "out",
                (tuple(out.shape), out.dtype, str(out.device)),
                f"shape {shape}, {self.dtype} on {self.device}",
                "leave it out, or take a slice of a larger buffer",
            )
        return out

    def _check_capacities(self, num_device_rows: int, num_host_rows: int, refresh_every: int | None) -> None:
        if num_device_rows < 0 or num_host_rows < 0 or num_device_rows + num_host_rows > self.num_rows:
            raise argument_error(
                "num_device_rows + num_host_rows",
                (num_device_rows, num_host_rows),
                f"capacities of at least 0 that sum to at most num_rows={self.num_rows}",
                "cache fewer rows",
            )
        if num_host_rows and self._base is not None:
            raise argument_error(
                "num_host_rows", num_host_rows, "0 over a tensor, which lies in host memory", "pass a path, or 0"
            )
        if refresh_every is not None and refresh_every < 1:
            raise argument_error("refresh_every", refresh_every, "at least 1, or None", "pass 100")


def _check_source(source: Tensor) -> Tensor:
    if source.dim() != 2 or source.device.type != "cpu":
        shown = (tuple(source.shape), str(source.device))
        raise argument_error("source", shown, "a CPU tensor [num_rows, num_features]", "flatten or move it")
    return source.detach()
