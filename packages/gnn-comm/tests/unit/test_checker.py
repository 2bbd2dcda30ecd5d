"""The checker must reject every plan that was tampered with: each case breaks one rule on purpose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from core_kernels import Graph, datasets
from core_kernels.topology import Topology, cluster
from gnn_comm import PlanCheckError, PlanMismatchError, partition, plan
from gnn_comm.checker import check_layouts, find_faults
from gnn_comm.layout import DeviceLayout, Message
from gnn_comm.plan import Plan
from gnn_comm.transfers import Transfers


@pytest.fixture(scope="module")
def good():
    topology = Topology.preset("dgx1")
    split = partition(datasets.rmat(2**9, 2**12).graph, topology, "random")
    return plan(split, topology, "spst", 1 << 16)


def messages(made: Plan) -> list[list]:
    t = made.transfers
    return [[int(t.stage[m]), int(t.sender[m]), int(t.receiver[m]), t.rows_of(m)] for m in range(len(t))]


def rebuilt(made: Plan, found: list[list]) -> Plan:
    found = sorted(found, key=lambda m: tuple(m[:3]))
    columns = [np.array([m[k] for m in found], np.int64) for k in range(3)]
    ends = np.cumsum([0, *(len(m[3]) for m in found)]).astype(np.int64)
    transfers = Transfers(made.num_devices, *columns, ends, np.concatenate([m[3] for m in found]).astype(np.int64))
    return replace(made, transfers=transfers)


def relayed(made: Plan) -> tuple[int, int]:
    """Find a message that passes on rows of another owner, and the message that brought one of them."""
    found = messages(made)
    for m, (stage, sender, _, rows) in enumerate(found):
        foreign = rows[(rows < made.offsets[sender]) | (rows >= made.offsets[sender + 1])]
        for n, (before, _, receiver, brought) in enumerate(found):
            if len(foreign) and receiver == sender and before < stage and np.isin(foreign, brought).any():
                return m, n
    raise AssertionError("the plan has no relayed row")


def test_the_untouched_plan_passes(good):
    good.validate()
    assert rebuilt(good, messages(good)).fingerprint() == good.fingerprint()


def drop_row(made, found):
    found[0][3] = found[0][3][1:]


def drop_message(made, found):
    del found[-1]


def send_twice(made, found):
    _, sender, receiver, rows = found[0]
    found.append([made.transfers.num_stages, sender, receiver, rows[:1]])


def double_in_one_message(made, found):
    found[0][3] = np.append(found[0][3], found[0][3][0])


def exchange_rows(made, found):
    # Two rows of one owner with different readers change places.
    for k, (_, sender, receiver, rows) in enumerate(found):
        other = np.setdiff1d(np.arange(made.offsets[sender], made.offsets[sender + 1]), made.needed_rows(receiver))
        own = (rows >= made.offsets[sender]) & (rows < made.offsets[sender + 1])
        if own.any() and len(other):
            changed = rows.copy()
            changed[np.flatnonzero(own)[0]] = other[0]
            found[k][3] = changed
            return


def pass_on_too_early(made, found):
    m, n = relayed(made)
    found[m][0] = found[n][0]


def send_to_owner(made, found):
    _, sender, receiver, rows = found[0]
    found.append([made.transfers.num_stages, receiver, sender, rows[:1]])


def useless_relay(made, found):
    device = next(d for d in range(8) if found[0][3][0] not in made.needed_rows(d) and d != found[0][1])
    if made.offsets[device] <= found[0][3][0] < made.offsets[device + 1]:
        device = (device + 1) % 8
    found.append([made.transfers.num_stages, found[0][1], device, found[0][3][:1]])


def leave_out_stages(made, found):
    # Loops over stages would run for hours before anything looks wrong.
    found[-1][0] = 10**9


CORRUPTIONS = [
    leave_out_stages,
    drop_row,
    drop_message,
    send_twice,
    double_in_one_message,
    exchange_rows,
    pass_on_too_early,
    send_to_owner,
    useless_relay,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_corrupted_plans_are_rejected(good, corrupt):
    found = messages(good)
    corrupt(good, found)
    with pytest.raises(PlanCheckError) as caught:
        rebuilt(good, found).validate()
    assert caught.value.faults


def test_self_message_and_unknown_rows_are_rejected(good):
    found = messages(good)
    found[0][2] = found[0][1]
    assert any("cannot reach" in fault for fault in find_faults(rebuilt(good, found), good.partition))
    found = messages(good)
    found[0][3] = found[0][3] + 10**6
    assert any("outside" in fault for fault in find_faults(rebuilt(good, found), good.partition))


def test_lists_that_hide_a_need_are_rejected(good):
    shorter = good.need_indptr.copy()
    shorter[-1] -= 1
    hidden = replace(good, need_indptr=shorter, need_rows=good.need_rows[:-1])
    with pytest.raises(PlanCheckError, match="is said to need"):
        hidden.validate()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda t: {"stage": t.stage - 1}, "stages run from -1"),
        (lambda t: {"stage": t.stage + 0.5}, "not a list of integers"),
        (lambda t: {"sender": t.sender[:-1]}, "senders"),
        (lambda t: {"row_indptr": t.row_indptr[1:]}, "do not tile"),
    ],
)
def test_arrays_that_cannot_be_read_are_rejected(good, changed, said):
    with pytest.raises(PlanCheckError, match=said):
        replace(good, transfers=replace(good.transfers, **changed(good.transfers))).validate()
    for field, value in (("offsets", good.offsets[::-1]), ("need_rows", good.need_rows - 10**6)):
        with pytest.raises(PlanCheckError):
            replace(good, **{field: value}).validate()
    twice = good.need_rows.copy()
    twice[1] = twice[0]
    with pytest.raises(PlanCheckError, match="need_rows names rows twice"):
        replace(good, need_rows=twice).validate()


def test_backward_that_forgets_a_copy_is_rejected(good, monkeypatch):
    # The forward replay alone would pass: the sums are compared with the number of readers, device by device.
    from gnn_comm import checker

    monkeypatch.setattr(checker, "_replay_forward", lambda *_: [])
    found = messages(good)
    drop_row(good, found)
    assert any("backward" in fault for fault in find_faults(rebuilt(good, found), good.partition))


def test_relay_slot_reused_too_early_is_rejected():
    topology = Topology.preset("dgx1")
    split = partition(datasets.rmat(2**10, 2**12).graph, topology, "random")
    made = plan(split, topology, "ring")
    layouts = [DeviceLayout(made, device) for device in range(8)]
    assert check_layouts(made, layouts) == []
    device = next(layout for layout in layouts if layout.num_relay > 1)
    # Give every passing row the same slot, as a planner without lifetimes would.
    first = device.num_rows
    squeeze = lambda index: torch.where(index >= first, first, index)  # noqa: E731
    for name in ("sends", "receives"):
        squeezed = [Message(m.stage, m.peer, squeeze(m.index), m.waits_for) for m in getattr(device, name)]
        setattr(device, name, squeezed)
    assert any("in the place of row" in fault for fault in check_layouts(made, layouts))


def test_slots_are_reused_only_after_their_row_left():
    topology = Topology.preset("dgx1")
    split = partition(datasets.rmat(2**10, 2**13).graph, topology, "random")
    made = plan(split, topology, "ring")
    passing = 0
    for device in range(8):
        layout = DeviceLayout(made, device)
        slots = np.concatenate([m.index[m.index >= layout.num_rows].numpy() for m in layout.receives])
        passing += len(slots)
        assert layout.num_relay <= len(slots)
    reused = passing - sum(DeviceLayout(made, d).num_relay for d in range(8))
    assert reused > 0


def test_plans_of_other_graphs_and_machines_are_rejected(good, tmp_path):
    other = partition(datasets.rmat(2**9, 2**12, seed=5).graph, good.topology, "random")
    with pytest.raises(PlanMismatchError, match="made for graph"):
        good.validate(other)
    moved = partition(datasets.rmat(2**9, 2**12).graph, good.topology, "random", seed=9)
    with pytest.raises(PlanMismatchError, match="made for partition"):
        good.attach(moved)
    with pytest.raises(PlanMismatchError, match="'pcie8'"):
        good.validate(topology=Topology.preset("pcie8"))
    good.save(tmp_path / "p.npz")
    with pytest.raises(PlanMismatchError, match="made for graph"):
        Plan.load(tmp_path / "p.npz", other)


def test_files_keep_the_plan_and_tell_changes(good, tmp_path):
    path = tmp_path / "p.npz"
    good.save(path)
    loaded = Plan.load(path, good.partition)
    assert loaded.fingerprint() == good.fingerprint()
    assert loaded.stages == good.stages
    assert loaded.considered == good.considered
    loaded.validate()
    with np.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    arrays["rows"] = arrays["rows"][::-1]
    np.savez(path, **arrays)
    with pytest.raises(PlanMismatchError, match="fingerprint"):
        Plan.load(path)
    for name in ("rows", "need_indptr"):
        np.savez(path, **{other: array for other, array in arrays.items() if other != name})
        with pytest.raises(PlanMismatchError, match=f"damaged.*{name}.*plan again"):
            Plan.load(path)
    good.save(path)
    whole = path.read_bytes()
    for end in range(0, len(whole), len(whole) // 7):
        path.write_bytes(whole[:end])
        with pytest.raises(PlanMismatchError, match="plan again"):
            Plan.load(path)
    np.savez(path, offsets=np.zeros(2, np.int64))
    with pytest.raises(PlanMismatchError, match=r"expected 'gnn_comm\.plan'"):
        Plan.load(path)


def test_replication_that_holds_too_little_is_rejected():
    topology = cluster([3], 1e9, 1e9)
    path = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]), 6)
    split = partition(path, topology, "given", parts=[0, 0, 1, 1, 2, 2])
    made = plan(split, topology, "replication", num_layers=3)
    made.validate()
    lacking = replace(made, resident_rows=(*made.resident_rows[:2], made.resident_rows[2][1:]))
    with pytest.raises(PlanCheckError, match="neighbourhood"):
        lacking.validate()
