"""Prove a plan right by replaying it, without using anything a planner computed but its messages.

Forward: every device starts with its own rows. Stage by stage, a message may hold only rows its sender has had since
before the stage; nothing may arrive twice; at the end every device must have exactly the rows its vertices read.
Backward: every copy starts with an integer that names its device, messages run in reverse, and each owner must end
with the sum of the integers of all devices that read the row. Layout: the index lists of both ends name the same
rows, and no relay slot is overwritten while its row still has to be sent.

What the vertices read is collected anew from the edges of the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from core_kernels.topology import Topology
from gnn_comm.errors import PlanCheckError, PlanMismatchError
from gnn_comm.layout import DeviceLayout
from gnn_comm.plan import Plan

if TYPE_CHECKING:
    from gnn_comm.partitioning import Partition

__all__ = ["check_layouts", "check_plan", "find_faults", "find_misshapen"]

_SHOWN = 3


def check_plan(plan: Plan, partition: Partition | None = None, topology: Topology | None = None) -> None:
    """Check a plan against the graph and machine it is to be used with.

    Args:
        plan: The plan.
        partition: Graph and ownership; needed to prove that the right rows travel.
        topology: The machine it is to run on; the plan's own when left out.

    Raises:
        PlanMismatchError: The plan was made for another graph, partition or topology.
        PlanCheckError: The plan is wrong.
    """
    if topology is not None and topology.fingerprint() != plan.topology.fingerprint():
        raise PlanMismatchError(
            f"the plan was made for topology {plan.topology.name!r} ({plan.topology.fingerprint()}) but "
            f"{topology.name!r} ({topology.fingerprint()}) was given; expected the same; plan again for this topology"
        )
    if partition is not None:
        plan.attach(partition)
    faults = find_faults(plan, partition)
    if not faults:
        faults = check_layouts(plan, [DeviceLayout(plan, device) for device in range(plan.num_devices)])
    if faults:
        raise PlanCheckError(faults)


def find_faults(plan: Plan, partition: Partition | None = None) -> list[str]:
    """Replay the messages and return one sentence per fault."""
    faults = _malformed(plan)
    if faults:
        return faults
    needed = _rows_read(partition) if partition is not None else [plan.needed_rows(d) for d in range(plan.num_devices)]
    for device in range(plan.num_devices):
        if not np.array_equal(needed[device], plan.needed_rows(device)):
            faults.append(
                f"device {device} is said to need {len(plan.needed_rows(device))} rows, it reads {len(needed[device])}"
            )
    if faults or plan.resident_rows:
        return faults or _replication_faults(plan, partition)
    return _replay_forward(plan, needed) or _replay_backward(plan, needed)


def find_misshapen(plan: Plan) -> list[str]:
    """Return one sentence per array that cannot be read as what it stands for; the rest of a check relies on them."""
    arrays = plan._arrays()
    faults = [
        f"{name} is {array.dtype} of shape {array.shape}, not a list of integers"
        for name, array in arrays.items()
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu"
    ]
    if faults:
        return faults
    t, num_devices = plan.transfers, plan.num_devices
    if len(plan.offsets) < 2 or plan.offsets[0] != 0 or (np.diff(plan.offsets) < 0).any():
        return ["the offsets of the parts do not start at 0 and ascend"]
    if plan.topology.num_devices != num_devices:
        faults.append(f"the topology has {plan.topology.num_devices} devices for {num_devices} parts")
    if not len(t.stage) == len(t.sender) == len(t.receiver):
        faults.append(f"{len(t.stage)} stages, {len(t.sender)} senders and {len(t.receiver)} receivers are listed")
    if not _tiles(t.row_indptr, len(t), len(t.rows)):
        faults.append("the row lists of the messages do not tile the rows")
    if not _tiles(plan.need_indptr, num_devices, len(plan.need_rows)):
        faults.append("the row lists of the devices do not tile the rows they need")
    if len(plan.resident_rows) not in (0, num_devices):
        faults.append(f"copies are listed for {len(plan.resident_rows)} of {num_devices} devices")
    lists = {name: (rows, np.zeros(1, np.int64)) for name, rows in arrays.items() if name.startswith("resident")}
    if not faults:
        lists["need_rows"] = (plan.need_rows, plan.need_indptr)
    for name, (rows, indptr) in lists.items():
        if not _are_distinct(rows, indptr, int(plan.offsets[-1])):
            faults.append(f"{name} names rows twice or outside [0, {plan.offsets[-1]})")
    # Stages are counted by every loop over a plan: a stray large number would keep it busy for ever.
    if len(t.stage) and not np.array_equal(np.unique(t.stage), np.arange(int(np.unique(t.stage).size))):
        faults.append(f"stages run from {t.stage.min()} to {t.stage.max()} with gaps; expected 0, 1, 2, and so on")
    return faults


def _tiles(indptr: np.ndarray, num_lists: int, num_items: int) -> bool:
    """Say whether the lists of a CSR lie side by side over all items."""
    return (
        len(indptr) == num_lists + 1
        and indptr[0] == 0
        and indptr[-1] == num_items
        and bool((np.diff(indptr) >= 0).all())
    )


def _are_distinct(rows: np.ndarray, indptr: np.ndarray, num_rows: int) -> bool:
    """Say whether ascending lists that lie side by side name rows below a limit, none of them twice in one list."""
    if len(rows) == 0:
        return True
    repeats = np.diff(rows) == 0
    starts = indptr[(indptr > 0) & (indptr < len(rows))]
    repeats[starts - 1] = False  # the last row of one list may be the first of the next
    return bool(rows.min() >= 0 and rows.max() < num_rows and not repeats.any())


def _malformed(plan: Plan) -> list[str]:
    faults = find_misshapen(plan)
    if faults:
        return faults
    t, num_devices, num_nodes = plan.transfers, plan.num_devices, int(plan.offsets[-1])
    if len(t.rows) and not (t.rows.min() >= 0 and t.rows.max() < num_nodes):
        faults.append(f"a message names row {int(t.rows.max())} outside [0, {num_nodes})")
    for name in ("sender", "receiver"):
        column = getattr(t, name)
        if len(column) and not (column.min() >= 0 and column.max() < num_devices):
            faults.append(f"a message has a {name} outside [0, {num_devices})")
    if not faults:
        key = (t.stage * num_devices + t.sender) * num_devices + t.receiver
        if (np.diff(key) <= 0).any():
            faults.append("messages are not in order of stage, sender and receiver, or two share all three")
        for i, j in {(int(i), int(j)) for i, j in zip(t.sender, t.receiver, strict=True)}:
            if i == j or not plan.topology.is_reachable(i, j):
                faults.append(f"device {i} sends to {j}, which it cannot reach")
    return faults


def _rows_read(partition: Partition) -> list[np.ndarray]:
    """Collect from the edges which remote rows each part reads."""
    indptr, indices = partition.graph.indptr.cpu().numpy(), partition.graph.indices.cpu().numpy()
    found = []
    for part in range(partition.num_parts):
        begin, end = partition.offsets[part], partition.offsets[part + 1]
        sources = np.unique(indices[indptr[begin] : indptr[end]]).astype(np.int64)
        found.append(sources[(sources < begin) | (sources >= end)])
    return found


def _replay_forward(plan: Plan, needed: list[np.ndarray]) -> list[str]:
    """Walk the stages; ``arrived[device, row]`` is the stage after which the device has the row, or -1."""
    t = plan.transfers
    faults: list[str] = []
    for device in range(plan.num_devices):
        # One device at a time keeps memory at one array of rows, whatever the number of devices.
        has_since = _first_had(plan, device)
        for m in np.flatnonzero(t.sender == device):
            rows = t.rows_of(m)
            missing = rows[has_since[rows] > t.stage[m]]
            if len(missing):
                faults.append(
                    f"stage {t.stage[m]}: device {device} sends row {missing[0]} to {t.receiver[m]} before it has it"
                )
        inbound = [t.rows_of(m) for m in np.flatnonzero(t.receiver == device)]
        received = np.sort(np.concatenate(inbound)) if inbound else np.zeros(0, np.int64)
        twice = received[1:][received[1:] == received[:-1]]
        faults += [f"device {device} receives row {row} twice" for row in twice[:_SHOWN]]
        own = received[(received >= plan.offsets[device]) & (received < plan.offsets[device + 1])]
        faults += [f"device {device} receives row {row}, which it owns" for row in own[:_SHOWN]]
        lost = np.setdiff1d(needed[device], received, assume_unique=False)
        faults += [f"device {device} needs row {row} but never receives it" for row in lost[:_SHOWN]]
        passing = np.setdiff1d(received, needed[device])
        sent = [t.rows_of(m) for m in np.flatnonzero(t.sender == device)]
        useless = np.setdiff1d(passing, np.concatenate(sent) if sent else np.zeros(0, np.int64))
        faults += [f"device {device} receives row {row}, neither needs it nor passes it on" for row in useless[:_SHOWN]]
    return faults


def _first_had(plan: Plan, device: int) -> np.ndarray:
    """Return for every row the first stage in which the device may send it."""
    t = plan.transfers
    never = t.num_stages + 1
    has_since = np.full(int(plan.offsets[-1]), never, np.int64)
    has_since[plan.offsets[device] : plan.offsets[device + 1]] = 0
    for m in np.flatnonzero(t.receiver == device)[::-1]:
        has_since[t.rows_of(m)] = np.minimum(has_since[t.rows_of(m)], t.stage[m] + 1)
    return has_since


def _replay_backward(plan: Plan, needed: list[np.ndarray]) -> list[str]:
    """Send the integer ``device + 1`` of every reader home along the reversed messages and compare the sums."""
    t, num_nodes = plan.transfers, int(plan.offsets[-1])
    expected = np.zeros(num_nodes, np.int64)
    travelling = np.unique(t.rows)
    place = np.full(num_nodes, -1, np.int64)
    place[travelling] = np.arange(len(travelling))
    sums = np.zeros((plan.num_devices, len(travelling)), np.int64)
    for device, rows in enumerate(needed):
        expected[rows] += device + 1
        known = place[rows]
        sums[device, known[known >= 0]] += device + 1
    for m in range(len(t) - 1, -1, -1):
        spots = place[t.rows_of(m)]
        sums[t.sender[m], spots] += sums[t.receiver[m], spots]
        sums[t.receiver[m], spots] = 0
    owner = np.searchsorted(plan.offsets[1:], travelling, side="right")
    wrong = travelling[sums[owner, np.arange(len(travelling))] != expected[travelling]]
    return [f"backward: the gradients of row {row} do not add up at its owner" for row in wrong[:_SHOWN]]


def check_layouts(plan: Plan, layouts: list[DeviceLayout]) -> list[str]:
    """Run the index lists of all devices on row names, relay slots included, and return faults.

    Unpacking happens after packing within a stage, as in the runtime; a value that is overwritten too early therefore
    shows up as a wrong name at a receiver.
    """
    tensors = []
    for layout in layouts:
        tensor = np.full(layout.num_rows + layout.num_relay, -1, np.int64)
        tensor[: layout.num_local] = np.arange(layout.begin, layout.end)
        tensors.append(tensor)
    faults: list[str] = []
    for stage in range(plan.transfers.num_stages):
        packed = {}
        for layout in layouts:
            for message in layout.sends:
                if message.stage == stage:
                    packed[(layout.device, message.peer)] = tensors[layout.device][message.index.cpu().numpy()]
        for layout in layouts:
            for message in layout.receives:
                if message.stage == stage:
                    rows = packed.pop((message.peer, layout.device), None)
                    if rows is None or len(rows) != len(message.index):
                        faults.append(f"stage {stage}: lists of {message.peer} and {layout.device} do not match")
                        continue
                    tensors[layout.device][message.index.cpu().numpy()] = rows
        faults += [f"stage {stage}: device {i} sends to {j}, which expects nothing" for i, j in packed]
    for layout, tensor in zip(layouts, tensors, strict=True):
        wrong = np.flatnonzero(tensor[: layout.num_rows] != layout.global_rows)
        if len(wrong) and not layout.is_replicated:
            row = int(layout.global_rows[wrong[0]])
            faults.append(f"device {layout.device} ends with row {int(tensor[wrong[0]])} in the place of row {row}")
    return faults


def _replication_faults(plan: Plan, partition: Partition | None) -> list[str]:
    """Grow the neighbourhood from the edges and compare it with the copies held."""
    if partition is None:
        return []
    sources, destinations = (ids.cpu().numpy() for ids in partition.graph.coo())
    faults = []
    for device in range(plan.num_devices):
        inside = np.zeros(int(plan.offsets[-1]), bool)
        inside[plan.offsets[device] : plan.offsets[device + 1]] = True
        for _ in range(plan.num_layers):
            inside[sources[inside[destinations]]] = True
        inside[plan.offsets[device] : plan.offsets[device + 1]] = False
        if not np.array_equal(np.flatnonzero(inside), plan.resident_rows[device]):
            faults.append(f"device {device} does not hold the {plan.num_layers}-layer neighbourhood of its rows")
    return faults
