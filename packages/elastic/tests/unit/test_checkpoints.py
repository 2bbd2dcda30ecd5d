"""Checkpoints on disk: what is whole, what a cut or damage does, and that PyTorch itself can read them."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from elastic_train.checkpoints import CheckpointFolder, Checkpoints, chunks
from elastic_train.checkpoints.chunks import Share, read_state, write_index
from elastic_train.checkpoints.folder import write_marker
from elastic_train.errors import CheckpointError, InputError, StateMismatchError
from elastic_train.state import State

PROGRESS = {"step": 3}


def make(seed=0, width=5, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, **more)
    state.prepare()
    return model, optimizer, scheduler, state


def train(model, optimizer, scheduler, num_steps=3):
    losses = []
    for step in range(num_steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def save(folder, state, step, num_workers=2, cut_after=None, marker_first=False):
    """Save as ``num_workers`` workers would, one after the other; stop after some of the actions."""
    attempt = folder.attempt(step, 1)
    shares = [Share(state, rank, num_workers) for rank in range(num_workers)]
    files = {}

    def write(rank):
        shares[rank].copy()
        shares[rank].write(attempt, rank)

    actions = [lambda rank=rank: write(rank) for rank in range(num_workers)]
    actions += [lambda: files.update(write_index(attempt, num_workers))]
    mark = lambda: write_marker(attempt, step, {**PROGRESS, "step": step}, files)  # noqa: E731
    actions = [mark, *actions] if marker_first else [*actions, mark]
    for action in actions[:cut_after]:
        action()
    return attempt


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_state_comes_back_whoever_wrote_it(tmp_path, monkeypatch, num_workers):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 32)  # several chunks per tensor
    model, optimizer, scheduler, state = make()
    train(model, optimizer, scheduler)
    folder = CheckpointFolder(tmp_path)
    attempt = save(folder, state, 3, num_workers)
    assert len(list(attempt.glob("*.distcp"))) == num_workers
    expected = train(model, optimizer, scheduler)
    others = make(seed=7)
    path, content = folder.newest()
    assert (path, content["progress"]) == (attempt, PROGRESS)
    read_state(path, others[3])
    assert train(*others[:3]) == expected
    assert others[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_pytorch_itself_reads_them(tmp_path):
    model, *_, state = make()
    attempt = save(CheckpointFolder(tmp_path), state, 3)
    other = make(seed=7)[0]
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load({"model": other.state_dict()}, checkpoint_id=attempt, no_dist=True)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def newest_step(folder, state):
    """Return the step that a restart begins at; it must be readable."""
    path, content = folder.newest()
    read_state(path, state)
    return content["step"]


@pytest.mark.parametrize("cut_after", range(5))
def test_a_save_that_is_cut_short_leaves_the_one_before(tmp_path, cut_after):
    state = make()[3]
    folder = CheckpointFolder(tmp_path)
    save(folder, state, 3)
    save(folder, state, 6, cut_after=cut_after)
    assert newest_step(folder, make(seed=7)[3]) == (6 if cut_after == 4 else 3)


@pytest.mark.parametrize("cut_after", range(1, 4))
def test_a_marker_that_comes_before_the_data_is_seen(tmp_path, cut_after):
    """The twin: written first, the marker vouches for files that are not there."""
    state = make()[3]
    folder = CheckpointFolder(tmp_path)
    save(folder, state, 3)
    save(folder, state, 6, cut_after=cut_after, marker_first=True)
    with pytest.raises((OSError, dcp.CheckpointException)):
        newest_step(folder, make(seed=7)[3])


def test_a_damaged_checkpoint_is_passed_over_and_said_so(tmp_path, caplog):
    state = make()[3]
    folder = CheckpointFolder(tmp_path)
    save(folder, state, 3)
    attempt = save(folder, state, 6)
    part = next(attempt.glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert newest_step(folder, make(seed=7)[3]) == 3
    assert "another checksum than when it was written" in caplog.text
    (tmp_path / "step-000000003-g1" / "complete.json").write_text("{")
    with pytest.raises(CheckpointError, match="expected one whole checkpoint among 2; repair the files"):
        folder.newest()


def test_a_checkpoint_of_another_kind_or_state_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    attempt = save(folder, make()[3], 3)
    with pytest.raises(StateMismatchError, match="run the script that wrote it"):
        read_state(attempt, make(width=6)[3])
    with pytest.raises(StateMismatchError, match="run the script that wrote it"):
        read_state(attempt, make(ema=nn.Linear(2, 2))[3])
    marker = json.loads((attempt / "complete.json").read_text())
    (attempt / "complete.json").write_text(json.dumps({**marker, "version": 2}))
    with pytest.raises(CheckpointError, match=r"elastic_train.checkpoint version 2"):
        folder.newest()


def test_old_ones_go_and_a_plain_file_is_no_folder(tmp_path):
    state, folder = make()[3], CheckpointFolder(tmp_path / "here")
    for step in (3, 6, 9):
        save(folder, state, step)
    save(folder, state, 8, cut_after=1)
    save(folder, state, 12, cut_after=1)
    folder.tidy(num_kept=2)
    assert [step for step, _ in folder.attempts()] == [12, 9, 6]
    assert CheckpointFolder(tmp_path / "empty").newest() is None
    (tmp_path / "plain").write_text("")
    with pytest.raises(InputError, match="name another folder"):
        CheckpointFolder(tmp_path / "plain")


class Links:
    """A generation of one worker."""

    number, members, rank, size = 4, ("a",), 0, 1

    @property
    def peers(self):
        return self


class Job:
    """What checkpoints need of a job."""

    def __init__(self, state):
        self.state, self.links, self.step, self.parts, self.said = state, Links(), 0, {}, []
        self.agent = SimpleNamespace(describe=lambda **_: None)
        self.events = SimpleNamespace(write=lambda event, **fields: self.said.append((event, fields["step"])))

    def add_part(self, name, part):
        self.parts[name] = part

    def progress(self):
        return {"step": self.step, "parts": {name: part.state_dict() for name, part in self.parts.items()}}


def run_steps(job, keeper, num_steps, action=lambda step: None):
    """Commit steps; each waits for what is being written, so that the vote tells it."""
    for _ in range(num_steps):
        ballot = keeper.closing()
        job.step += 1
        keeper.committed(ballot)
        keeper.before_update()
        action(job.step)
        keeper.batch_ended()


def test_a_keeper_saves_every_so_many_steps_and_goes_on_when_it_cannot(tmp_path, caplog):
    job = Job(make()[3])
    keeper = Checkpoints(tmp_path / "here", every_steps=3, num_kept=2)
    keeper.attach(job)
    keeper.entered(job.links)
    run_steps(job, keeper, 7)
    keeper.closed(keeper.closing())
    assert job.said == [("checkpoint", 3), ("checkpoint", 6)]
    run_steps(job, keeper, 2, lambda step: shutil.rmtree(tmp_path / "here", ignore_errors=True))
    run_steps(job, keeper, 1)
    assert job.said[-1] == ("checkpoint failed", 9)
    assert "checkpoint of step 9" in caplog.text
    (tmp_path / "here").mkdir()
    run_steps(job, keeper, 3)
    keeper.closed(keeper.closing())
    assert job.said[-1] == ("checkpoint", 12)
    again = Checkpoints(tmp_path / "here")
    progress = again.load(make(seed=7)[3])
    assert progress["step"] == 12
    assert progress["parts"]["checkpoints"] == {"newest": 12, "tried": 12}


def test_a_change_of_membership_gives_an_attempt_up(tmp_path):
    job = Job(make()[3])
    keeper = Checkpoints(tmp_path, every_steps=2)
    keeper.attach(job)
    run_steps(job, keeper, 2)
    keeper.closing()
    keeper.entered(job.links)
    assert keeper.ballot() == [0]
    assert keeper.load(make(seed=7)[3]) is None
    run_steps(job, keeper, 1)
    keeper.closed(keeper.closing())
    assert job.said == [("checkpoint", 3)]
