"""The plan: messages by stage, what they cost, and what they were made for.

A plan is frozen and belongs to one graph, partition and topology; their fingerprints travel with it, and every use
checks them. It is one ``.npz`` file without pickled objects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core_kernels.topology import Topology
from gnn_comm.bounds import CutBound, cut_lower_bound
from gnn_comm.cost_model import PlanEstimate, estimate_transfers, reversed_transfers, row_bytes_of
from gnn_comm.errors import GnnCommArgumentError, PlanMismatchError
from gnn_comm.transfers import Transfers

if TYPE_CHECKING:
    from gnn_comm.partitioning import Partition

__all__ = ["Plan", "Stage"]

SCHEMA = "gnn_comm.plan"
VERSION = 1


@dataclass(frozen=True)
class Stage:
    """What happens in one stage.

    Attributes:
        messages: ``(sender, receiver, num_rows)`` of every message.
        num_rows: Rows sent by all devices together.
    """

    messages: tuple[tuple[int, int, int], ...]

    @property
    def num_rows(self) -> int:
        """Rows sent by all devices together."""
        return sum(rows for _, _, rows in self.messages)


@dataclass(frozen=True, eq=False)
class Plan:
    """An exchange for one graph, partition and topology.

    Args:
        planner: Name of the planner that made it.
        topology: The machine it was made for.
        offsets: int64 ``[P + 1]``; device ``p`` owns the rows ``offsets[p] : offsets[p + 1]``.
        transfers: The messages.
        need_indptr: int64 ``[P + 1]``.
        need_rows: int64; rows that device ``p`` needs from others, ascending.
        graph_fingerprint: Of the user's graph.
        partition_fingerprint: Of graph and ownership.
        row_bytes: Bytes of a row for which stages and latency were traded.
        resident_rows: Only with ``"replication"``: rows each device holds besides its own, so that nothing travels.
        num_layers: Only with ``"replication"``: layers the copies suffice for.
        considered: Seconds of every planner looked at, at ``row_bytes``.
        planning_seconds: Time spent planning.
        partition: The partition, while it is at hand; not saved.
    """

    planner: str
    topology: Topology
    offsets: np.ndarray
    transfers: Transfers
    need_indptr: np.ndarray
    need_rows: np.ndarray
    graph_fingerprint: str
    partition_fingerprint: str
    row_bytes: int
    resident_rows: tuple[np.ndarray, ...] = ()
    num_layers: int = 0
    considered: dict[str, float] = field(default_factory=dict)
    planning_seconds: float = 0.0
    partition: Partition | None = field(default=None, repr=False)

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.offsets) - 1

    @property
    def stages(self) -> list[Stage]:
        """Messages of every stage, for reading."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(self.transfers.num_stages)]
        table = (self.transfers.stage, self.transfers.sender, self.transfers.receiver, self.transfers.num_rows)
        for stage, sender, receiver, rows in zip(*(column.tolist() for column in table), strict=True):
            found[stage].append((sender, receiver, rows))
        return [Stage(tuple(messages)) for messages in found]

    def needed_rows(self, device: int) -> np.ndarray:
        """Return the remote rows a device needs, ascending."""
        return self.need_rows[self.need_indptr[device] : self.need_indptr[device + 1]]

    def estimate(
        self, width: int | None = None, dtype: torch.dtype | str = torch.float32, direction: str = "forward"
    ) -> PlanEstimate:
        """Predict the cost of one exchange.

        Args:
            width: Values per row; the width the plan was made for when left out.
            dtype: Type of the values.
            direction: ``"forward"`` or ``"backward"`` (the same messages reversed).

        Returns:
            Seconds per stage, bottlenecks and bytes.

        Raises:
            GnnCommArgumentError: The direction is unknown.
        """
        if direction not in ("forward", "backward"):
            raise GnnCommArgumentError(f"direction={direction!r}: expected 'forward' or 'backward'; choose one of them")
        row_bytes = self.row_bytes if width is None else row_bytes_of(width, dtype)
        transfers = self.transfers if direction == "forward" else reversed_transfers(self.transfers)
        return estimate_transfers(transfers, self.topology, row_bytes)

    def lower_bound(self, width: int | None = None, dtype: torch.dtype | str = torch.float32) -> CutBound:
        """Return the seconds no plan of this graph and partition can beat, latency left out.

        Args:
            width: Values per row; the width the plan was made for when left out.
            dtype: Type of the values.
        """
        row_bytes = self.row_bytes if width is None else row_bytes_of(width, dtype)
        return cut_lower_bound(self._attached("the bound").requests, self.topology, row_bytes)

    def bound_ratio(self) -> float:
        """Return bandwidth seconds over the lower bound, the quality for long rows; 1 where nothing moves."""
        bound = float(self.lower_bound())
        estimate = self.estimate()
        return (estimate.seconds - estimate.latency_seconds) / bound if bound > 0 else 1.0

    def validate(self, partition: Partition | None = None, topology: Topology | None = None) -> None:
        """Prove the plan right for a graph, independently of the planner; see :func:`gnn_comm.checker.check_plan`.

        Args:
            partition: The graph and partition to be used with; the one at hand when left out.
            topology: The machine to be used on; the plan's own when left out.

        Raises:
            PlanMismatchError: The plan was made for another graph, partition or topology.
            PlanCheckError: Some row would be lost, doubled, sent before it is there, or summed wrongly.
        """
        from gnn_comm.checker import check_plan

        check_plan(self, partition or self.partition, topology)

    def explain(self) -> str:
        """Say in words what the plan does and why; see :func:`gnn_comm.explain.explain_plan`."""
        from gnn_comm.explain import explain_plan

        return explain_plan(self)

    def _attached(self, purpose: str) -> Partition:
        if self.partition is None:
            raise GnnCommArgumentError(
                f"{purpose} needs the graph, but this plan was loaded without its partition; expected one at hand; "
                "call plan.attach(partition) or Plan.load(path, partition)"
            )
        return self.partition

    def attach(self, partition: Partition) -> Plan:
        """Return this plan with its partition at hand.

        Raises:
            PlanMismatchError: The plan was made for another graph or partition.
        """
        if partition.fingerprint != self.partition_fingerprint:
            part = "graph" if partition.graph_fingerprint != self.graph_fingerprint else "partition"
            raise PlanMismatchError(
                f"the plan was made for {part} {getattr(self, f'{part}_fingerprint')}, but "
                f"{getattr(partition, 'graph_fingerprint' if part == 'graph' else 'fingerprint')} was given; "
                "expected the same; plan again for this graph and partition"
            )
        return replace(self, partition=partition)

    # ---- files -------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of everything a rank must agree on with its peers."""
        digest = blake2b(self.partition_fingerprint.encode(), digest_size=8)
        digest.update(self.topology.fingerprint().encode())
        for _, array in sorted(self._arrays().items()):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _arrays(self) -> dict[str, np.ndarray]:
        t = self.transfers
        arrays = {"stage": t.stage, "sender": t.sender, "receiver": t.receiver, "row_indptr": t.row_indptr}
        arrays |= {"rows": t.rows, "offsets": self.offsets}
        arrays |= {"need_indptr": self.need_indptr, "need_rows": self.need_rows}
        return arrays | {f"resident{k}": rows for k, rows in enumerate(self.resident_rows)}

    def save(self, path: str | Path) -> None:
        """Write the plan as one ``.npz`` file, readable with ``numpy.load(path, allow_pickle=False)``."""
        header = {
            "schema": SCHEMA,
            "version": VERSION,
            "planner": self.planner,
            "topology": self.topology.to_dict(),
            "graph_fingerprint": self.graph_fingerprint,
            "partition_fingerprint": self.partition_fingerprint,
            "row_bytes": self.row_bytes,
            "num_layers": self.num_layers,
            "considered": self.considered,
            "planning_seconds": self.planning_seconds,
            "fingerprint": self.fingerprint(),
        }
        document = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, document=document, **self._arrays())

    @classmethod
    def load(cls, path: str | Path, partition: Partition | None = None) -> Plan:
        """Read a plan written by :meth:`save`.

        Args:
            path: The file.
            partition: Its partition, when the plan is to be used and not only read.

        Raises:
            PlanMismatchError: The file is no plan of this version, was changed, or belongs to another partition.
        """
        from gnn_comm.checker import find_misshapen

        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            header = json.loads(arrays.pop("document", np.zeros(0, np.uint8)).tobytes() or b"{}")
            schema, version = header.get("schema"), header.get("version")
        except Exception as error:  # a damaged archive fails in as many ways as there are readers in it
            raise PlanMismatchError(
                f"path={str(path)!r} cannot be read ({error}); expected a whole file written by Plan.save; plan again"
            ) from error
        if schema != SCHEMA or version != VERSION:
            raise PlanMismatchError(
                f"{path} is {schema!r} version {version!r}; expected {SCHEMA!r} version {VERSION}; plan again"
            )
        try:
            plan = cls._from_parts(header, arrays)
            faults = find_misshapen(plan)
            is_unchanged = bool(faults) or plan.fingerprint() == header["fingerprint"]
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            faults, is_unchanged = [f"a field is missing or of another kind: {error!r}"], True
        if faults:
            raise PlanMismatchError(f"{path} is damaged ({faults[0]}); expected what Plan.save wrote; plan again")
        if not is_unchanged:
            raise PlanMismatchError(
                f"{path} does not have the fingerprint it was saved with; expected an unchanged file; plan again"
            )
        return plan if partition is None else plan.attach(partition)

    @classmethod
    def _from_parts(cls, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Plan:
        """Build a plan from the parts of its file; a missing field is a ``KeyError``, a wrong one a ``ValueError``."""
        residents = sorted((name for name in arrays if name.startswith("resident")), key=lambda name: int(name[8:]))
        columns = (arrays[name] for name in ("stage", "sender", "receiver", "row_indptr", "rows"))
        plan = cls(
            planner=str(header["planner"]),
            topology=Topology.from_dict(header["topology"]),
            offsets=arrays["offsets"],
            transfers=Transfers(len(arrays["offsets"]) - 1, *columns),
            need_indptr=arrays["need_indptr"],
            need_rows=arrays["need_rows"],
            graph_fingerprint=str(header["graph_fingerprint"]),
            partition_fingerprint=str(header["partition_fingerprint"]),
            row_bytes=int(header["row_bytes"]),
            resident_rows=tuple(arrays[name] for name in residents),
            num_layers=int(header["num_layers"]),
            considered={name: float(seconds) for name, seconds in dict(header["considered"]).items()},
            planning_seconds=float(header["planning_seconds"]),
        )
        if plan.row_bytes < 0 or plan.num_layers < 0:
            raise ValueError(f"row_bytes={plan.row_bytes}, num_layers={plan.num_layers}: expected at least 0")
        return plan

    def summary(self) -> dict[str, Any]:
        """Return the JSON-able facts shown by the command line."""
        estimate = self.estimate()
        facts = {
            "planner": self.planner,
            "topology": self.topology.name,
            "num_devices": self.num_devices,
            "num_stages": self.transfers.num_stages,
            "num_messages": len(self.transfers),
            "rows_sent": int(self.transfers.num_rows.sum()),
            "rows_needed": len(self.need_rows),
            "row_bytes": self.row_bytes,
            "seconds": estimate.seconds,
            "latency_seconds": estimate.latency_seconds,
            "considered": self.considered,
            "planning_seconds": self.planning_seconds,
            "fingerprint": self.fingerprint(),
        }
        if self.partition is not None:
            facts |= {"lower_bound_seconds": float(self.lower_bound()), "bound_ratio": self.bound_ratio()}
        return facts
