"""When checkpoints are written, by whom, and when they count.

All workers begin a checkpoint after the same committed step. Each writes its share in a thread, while training goes on,
and says in the vote of every later step whether its share is on disk. When all say so, all know it, and one of them
writes index and marker. A change of membership ends an attempt, and the next begins after the change; a worker that
cannot write ends it too, with a warning: training goes on.

Source: "Capricorn" for checkpoints in chunks that overlap with computation. Where we differ: chunks are copied in the
compute part of one step instead of several, so a checkpoint is of one step without keeping two versions of the state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.checkpoints.chunks import Share, read_state, write_index
from elastic_train.checkpoints.folder import CheckpointFolder, write_marker
from elastic_train.errors import input_error
from elastic_train.parts import Part

if TYPE_CHECKING:
    from elastic_train.group import Links
    from elastic_train.job import Job
    from elastic_train.state import State

__all__ = ["Checkpoints"]

_logger = logging.getLogger(__name__)


class _Attempt:
    """This worker's share of a checkpoint; ``vote`` is its step once on disk, -1 when it cannot be written."""

    def __init__(self, share: Share, folder: Path, rank: int, step: int, progress: dict[str, Any]):
        self.share, self.folder, self.rank, self.step, self.progress = share, folder, rank, step, progress
        self.vote, self.failure = 0, ""
        self.thread = threading.Thread(target=self._run, name=f"elastic-checkpoint-{step}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.share.copy()  # the next optimizer step waits for this, but nobody for the rest
            with contextlib.suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            self.share.write(self.folder, self.rank)
            self.vote = self.step
        except Exception as error:  # a full disk, a folder that went away: told by the vote
            self.failure, self.vote = f"{type(error).__name__}: {error}", -1


class Checkpoints(Part):
    """The checkpoints of a job; :func:`elastic_train.init` makes it.

    Args:
        path: Folder that all hosts of the job see.
        every_steps: Steps between two checkpoints.
        num_kept: Checkpoints that stay.

    Attributes:
        newest: Step of the newest complete checkpoint, 0 for none.
    """

    def __init__(self, path: str | os.PathLike[str], every_steps: int = 100, num_kept: int = 2):
        if every_steps < 1:
            raise input_error("checkpoint_every", every_steps, "at least 1 step", "use for example 100")
        if num_kept < 1:
            raise input_error("checkpoint_keep", num_kept, "at least 1", "keep 2, so that a damaged one can be passed")
        self._folder, self._every, self._num_kept = CheckpointFolder(path), every_steps, num_kept
        self.newest, self._tried = 0, 0
        self._job: Job | None = None
        self._attempt: _Attempt | None = None
        self._finisher: threading.Thread | None = None

    def attach(self, job: Job) -> None:
        """Become the checkpoints of a job."""
        self._job, job.checkpoints = job, self
        job.add_part("checkpoints", self)
        job.agent.describe(can_restore=True)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._attempt is not None

    def load(self, state: State) -> dict[str, Any] | None:
        """Fill a state from the newest whole checkpoint; returns the progress that belongs to it, ``None`` for none.

        Raises:
            CheckpointError: There are checkpoints, and all of them are damaged.
            StateMismatchError: The checkpoint has another state.
        """
        found = self._folder.newest()
        if found is None:
            return None
        path, content = found
        read_state(path, state)
        _logger.info("restored step %d from %s", content["step"], path)
        progress = content["progress"]
        progress["parts"]["checkpoints"] = {"newest": content["step"], "tried": content["step"]}
        return progress

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the newest checkpoint, and of the last that failed."""
        return {"newest": self.newest, "tried": self._tried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what others know."""
        self.newest, self._tried = state["newest"], state["tried"]

    def ballot(self) -> list[int]:
        """Say whether this worker's share is on disk."""
        return [self._attempt.vote if self._attempt else 0]

    def committed(self, lowest: list[int]) -> None:
        """Let a checkpoint count that all have written; give up one that somebody cannot write."""
        attempt = self._attempt
        if attempt is None or not lowest or lowest[0] == 0:
            return
        assert self._job is not None
        self._attempt = None
        if lowest[0] == attempt.step:
            self.newest = self._tried = attempt.step
            if attempt.rank == 0:
                size = self._job.links.size if self._job.links else 1
                self._finisher = threading.Thread(target=self._finish, args=(attempt, size))
                self._finisher.start()
            return
        self._tried = attempt.step
        if attempt.failure:
            _logger.warning("checkpoint of step %d: %s", attempt.step, attempt.failure)
        self._job.events.write("checkpoint failed", step=attempt.step, error=attempt.failure or "of another worker")

    def _finish(self, attempt: _Attempt, num_shares: int) -> None:
        assert self._job is not None
        try:
            files = write_index(attempt.folder, num_shares)
            write_marker(attempt.folder, attempt.step, attempt.progress, files)
            for rank in range(num_shares):
                (attempt.folder / f"share-{rank}").unlink()
            self._folder.tidy(self._num_kept)
            self._job.events.write("checkpoint", step=attempt.step, path=str(attempt.folder))
        except Exception as error:
            _logger.warning("checkpoint of step %d has no marker and will not be used: %s", attempt.step, error)
            self._job.events.write("checkpoint failed", step=attempt.step, error=str(error))

    def entered(self, links: Links) -> None:
        """Give up what an earlier generation began."""
        self._attempt = None

    def before_update(self) -> None:
        """Wait until the state of the step before is copied."""
        if self._attempt is not None:
            self._attempt.share.is_copied.wait()

    def batch_ended(self) -> None:
        """Begin a checkpoint when it is due and none is under way."""
        job = self._job
        assert job is not None
        assert job.state is not None
        if self._attempt is not None or job.step - max(self.newest, self._tried) < self._every or job.links is None:
            return
        links, peers = job.links, job.links.peers
        share = Share(job.state, peers.rank, peers.size, links.members[0] in peers.members)
        try:
            folder = self._folder.attempt(job.step, links.number)
        except OSError as error:
            _logger.warning("checkpoint of step %d: %s", job.step, error)
            folder = self._folder.path / "gone"
        self._attempt = _Attempt(share, folder, links.rank, job.step, job.progress())

    def closing(self) -> list[int]:
        """Wait for what is under way."""
        if self._attempt is not None:
            self._attempt.thread.join()
        return self.ballot()

    def closed(self, lowest: list[int]) -> None:
        """Let the last checkpoint count, if all have written it."""
        self.committed(lowest)
        if self._finisher is not None:
            self._finisher.join()
