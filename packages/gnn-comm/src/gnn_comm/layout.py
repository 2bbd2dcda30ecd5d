"""What one device does in each stage, in row numbers of its own tensor.

A device's tensor holds its own rows first (ascending), then the remote rows it needs (ascending), then relay slots for
rows that only pass through. A relay slot is given to another row only in a stage after its last row was sent on, so
receiving can never overwrite a row that still has to go.

Backward runs the stages in reverse: what was received is sent back, what was sent comes back once per receiver and is
summed in the order of receivers, fixed by the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from core_kernels.graph import Graph
from gnn_comm.plan import Plan

__all__ = ["DeviceLayout", "Message", "SumBack"]


@dataclass(frozen=True)
class Message:
    """Rows exchanged with one peer in one stage.

    Attributes:
        stage: The stage, forward.
        peer: The other device.
        index: int64 rows of this device's tensor, in message order.
        waits_for: For a sent message: positions in ``receives`` that bring rows it passes on.
    """

    stage: int
    peer: int
    index: Tensor
    waits_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class SumBack:
    """How gradients that come back in one stage are summed.

    Attributes:
        rows: int64, distinct rows that receive a sum.
        slots: Graph from staging rows to ``rows``; its in-edges list the staging rows of each sum in fixed order.
        num_staging: Number of staging rows.
    """

    rows: Tensor
    slots: Graph
    num_staging: int


class DeviceLayout:
    """The part of a plan that one device carries out.

    Args:
        plan: The plan.
        device: Number of the device.

    Attributes:
        num_local: Rows the device owns.
        num_remote: Rows it needs from others, or holds copies of.
        num_relay: Relay slots.
        remote_rows: int64 ids after partitioning of the remote rows, ascending.
        sends: Messages it sends, by stage.
        receives: Messages it receives, by stage.
    """

    def __init__(self, plan: Plan, device: int):
        self.device, self.num_stages = device, plan.transfers.num_stages
        self.begin, self.end = int(plan.offsets[device]), int(plan.offsets[device + 1])
        self.num_local = self.end - self.begin
        self.is_replicated = bool(plan.resident_rows)
        self.remote_rows = plan.resident_rows[device] if self.is_replicated else plan.needed_rows(device)
        self.num_remote = len(self.remote_rows)
        transfers = plan.transfers
        sent = np.flatnonzero(transfers.sender == device)
        received = np.flatnonzero(transfers.receiver == device)
        relay = self._assign_relay_slots(transfers, sent, received)
        self.receives = [
            Message(int(transfers.stage[m]), int(transfers.sender[m]), self._index(transfers.rows_of(m), relay[k]))
            for k, m in enumerate(received)
        ]
        self.sends = self._sent_messages(transfers, sent, received)

    @property
    def num_rows(self) -> int:
        """Rows of the result: own and remote."""
        return self.num_local + self.num_remote

    @cached_property
    def global_rows(self) -> np.ndarray:
        """int64 ``[num_rows]``: id after partitioning of every row of the result."""
        return np.concatenate([np.arange(self.begin, self.end), self.remote_rows])

    def _place(self, rows: np.ndarray) -> np.ndarray:
        """Return the place of own and needed rows; -1 for others."""
        place = np.where((rows >= self.begin) & (rows < self.end), rows - self.begin, -1)
        if len(self.remote_rows):
            position = np.minimum(np.searchsorted(self.remote_rows, rows), len(self.remote_rows) - 1)
            place = np.where(self.remote_rows[position] == rows, self.num_local + position, place)
        return place

    def _index(self, rows: np.ndarray, relay_places: np.ndarray) -> Tensor:
        place = self._place(rows)
        place[place < 0] = relay_places
        return torch.from_numpy(place)

    def _assign_relay_slots(self, transfers, sent: np.ndarray, received: np.ndarray) -> list[np.ndarray]:
        """Give each passing row a slot for as long as it is needed; return the places per received message."""
        sent_rows = [transfers.rows_of(m) for m in sent]
        rows = np.concatenate(sent_rows) if sent_rows else np.zeros(0, np.int64)
        stages = np.repeat(transfers.stage[sent], [len(r) for r in sent_rows])
        passing = self._place(rows) < 0
        rows, stages = rows[passing], stages[passing]
        order = np.lexsort((stages, rows))
        rows, stages = rows[order], stages[order]
        is_last = np.append(rows[1:] != rows[:-1], True)[: len(rows)]
        row_passing, last_sent = rows[is_last], stages[is_last]
        free_after = np.zeros(0, np.int64)  # per slot: the stage after which it may be used again
        found: list[np.ndarray] = []
        self._relay_rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for m in received:
            stage = int(transfers.stage[m])
            arriving = transfers.rows_of(m)
            arriving = arriving[self._place(arriving) < 0]
            until = np.full(len(arriving), stage, np.int64)
            if len(row_passing):
                position = np.minimum(np.searchsorted(row_passing, arriving), len(row_passing) - 1)
                until = np.where(row_passing[position] == arriving, last_sent[position], stage)
            slots = np.flatnonzero(free_after < stage)[: len(arriving)]
            missing = len(arriving) - len(slots)
            slots = np.append(slots, len(free_after) + np.arange(missing))
            free_after = np.append(free_after, np.zeros(missing, np.int64))
            free_after[slots] = until
            found.append(self.num_rows + slots)
            self._relay_rows[int(m)] = (arriving, self.num_rows + slots)
        self.num_relay = len(free_after)
        return found

    def _sent_messages(self, transfers, sent: np.ndarray, received: np.ndarray) -> list[Message]:
        """Find where each sent row lies at its stage, and which received messages must be in before."""
        messages = []
        for m in sent:
            stage, rows = int(transfers.stage[m]), transfers.rows_of(m)
            place = self._place(rows)
            waits_for = []
            foreign = (rows < self.begin) | (rows >= self.end)
            for position, n in enumerate(received):
                if transfers.stage[n] >= stage or not foreign.any():
                    continue
                if np.isin(rows[foreign], transfers.rows_of(n)).any():
                    waits_for.append(position)
                    arriving, slots = self._relay_rows[int(n)]
                    if len(arriving):
                        order = np.argsort(arriving)
                        spot = np.minimum(np.searchsorted(arriving, rows, sorter=order), len(arriving) - 1)
                        hit = (arriving[order[spot]] == rows) & (place < 0)
                        place[hit] = slots[order[spot]][hit]
            messages.append(Message(stage, int(transfers.receiver[m]), torch.from_numpy(place), tuple(waits_for)))
        return messages

    @cached_property
    def first_passed_on(self) -> list[int]:
        """Per received message, the first stage in which a row of it is sent on; ``num_stages`` if none is."""
        first = [self.num_stages] * len(self.receives)
        for message in self.sends:
            for position in message.waits_for:
                first[position] = min(first[position], message.stage)
        return first

    @cached_property
    def sums_back(self) -> dict[int, SumBack]:
        """Per forward stage, how the gradients of its sent rows are summed."""
        found = {}
        for stage in {message.stage for message in self.sends}:
            index = np.concatenate([message.index.numpy() for message in self.sends if message.stage == stage])
            # Stable: the staging rows of one sum stay in the order of receivers.
            order = np.argsort(index, kind="stable")
            rows, first = np.unique(index[order], return_index=True)
            indptr = torch.from_numpy(np.append(first, len(index)).astype(np.int64))
            slots = Graph(indptr, torch.from_numpy(order), len(index), validate=False)
            found[stage] = SumBack(torch.from_numpy(rows), slots, len(index))
        return found

    def to(self, device: torch.device) -> DeviceLayout:
        """Move the index tensors to where the rows live."""
        if device.type != "cpu":
            self.sends, self.receives = (
                [Message(m.stage, m.peer, m.index.to(device), m.waits_for) for m in messages]
                for messages in (self.sends, self.receives)
            )
            self.sums_back = {
                stage: SumBack(s.rows.to(device), s.slots.to(device), s.num_staging)
                for stage, s in self.sums_back.items()
            }
        return self
