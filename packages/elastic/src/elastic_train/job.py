"""A training job that workers join and leave while it runs.

The training thread meets the others once per step, in a vote: each worker says which generation it could switch to.
When all say the same, all switch after this very step, so nobody needs to be told when. The vote is also the commit of
the step: it comes after the gradients are summed and before the optimizer steps. A worker that loses a peer before the
vote is through drops its gradients, waits for a generation of the survivors, takes the state of those that got further
(at most one step), and the same global batch is done again.

    backward ... sum of gradients | vote | optimizer step, cursor += batch | switch when voted | next batch

Source: "Elastic Deep Learning in Multi-Tenant GPU Clusters", stop-free scaling; the commit vote before the optimizer's
step is torchft's. Where we differ: the vote carries the switch, the paper's leader names a step a fixed time ahead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic_train.agent import Agent
from elastic_train.errors import ElasticError, FencedError, InputError, WorkerLostError, located
from elastic_train.events import EventLog
from elastic_train.gradients import GradientSum
from elastic_train.group import Links
from elastic_train.logical import LogicalGradients
from elastic_train.parts import Part, capture_parts, restore_parts
from elastic_train.sharding import ShardedGradients, gradients_of
from elastic_train.state import State

if TYPE_CHECKING:
    from elastic_train.checkpoints import Checkpoints

__all__ = ["Job", "StepInfo"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInfo:
    """What happened at the end of a batch.

    Attributes:
        step: Steps committed so far.
        generation: Generation of the next step.
        num_workers: Its workers.
        is_resized: Whether membership changed after this step.
        pause_seconds: How long the change held this worker up.
    """

    step: int
    generation: int
    num_workers: int
    is_resized: bool = False
    pause_seconds: float = 0.0


class Job:
    """This worker's place in a job; made by :func:`elastic_train.init`.

    Args:
        agent: The agent.
        events: Where events go.
        recover_seconds: Longest wait for the survivors of a failure, or for the first generation.
        logical_workers: Shares of the global batch whose gradients are kept apart, so that weights do not depend on the
            number of workers; 0 for none, see :mod:`elastic_train.logical`.

    Attributes:
        step: Steps committed.
        epoch: Present epoch of the data.
        cursor: Samples of the epoch that are done.
        logical_workers: Shares whose gradients are kept apart, 0 for none.
        global_batch_size: Samples of the next step over all workers, 0 before there is a loader.
        parts: What goes along with the committed steps, by name, see :mod:`elastic_train.parts`.
        rate_factor: What the optimizer's learning rates are multiplied with.
        is_leaving: Whether this worker has left and its loop should end.
    """

    def __init__(self, agent: Agent, events: EventLog, recover_seconds: float = 60.0, logical_workers: int = 0):
        self.agent, self.events, self._recover_seconds = agent, events, recover_seconds
        self.step, self.epoch, self.cursor, self.global_batch_size = 0, 0, 0, 0
        self.parts: dict[str, Part] = {}
        self.checkpoints: Checkpoints | None = None
        self.rate_factor = 1.0
        self.is_leaving = False
        self.links: Links | None = None
        self.gradients: GradientSum | LogicalGradients | ShardedGradients | None = None
        self._module, self.logical_workers = torch.nn.Module(), logical_workers
        self.state: State | None = None
        self.batch_size = 0
        self._switch_to, self._is_open, self._is_begun = 0, False, False
        self._has_run, self._has_state = False, False
        self._batch_begun, self._step_ended = time.monotonic(), time.monotonic()
        self._callbacks: list[Callable[[StepInfo], None]] = []

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Sum the module's gradients over the workers; returns the module."""
        if self.gradients is not None:
            raise InputError("wrap was called twice: expected one module; wrap a module that holds both")
        self._module, count = module, self.logical_workers
        self.gradients = gradients_of(module, count)
        self.agent.device = str(next((p.device for p in module.parameters()), "cpu"))
        return module

    def add_part(self, name: str, part: Part) -> None:
        """Let something go along with the committed steps; on every worker the same, before the first batch."""
        if name in self.parts:
            raise InputError(f"the job has a part {name!r} already: expected one of a kind; make it once per process")
        self.parts = dict(sorted({**self.parts, name: part}.items()))

    def on_resize(self, callback: Callable[[StepInfo], None]) -> None:
        """Call ``callback`` whenever membership has changed."""
        self._callbacks.append(callback)

    @property
    def max_shares(self) -> int:
        """Most shares that a batch is split into."""
        return self.logical_workers or self.agent.limits.max_workers

    def warm_up(self, work: Callable[[Any], object], batch: Any) -> None:
        """Do a pass whose gradients, random numbers and buffers are forgotten; for a worker that has not joined."""
        if self.gradients is None:
            raise InputError("the job lacks wrap(module): expected it before the first batch; call it after init")
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        with torch.random.fork_rng():
            work(batch)
        self.gradients.reset()
        for buffer, value in buffers:
            buffer.detach().copy_(value)
        for parameter in self._module.parameters():
            parameter.grad = None

    def join(self) -> None:
        """Wait to be taken in and get the state; returns at once in a worker that has joined."""
        if self.links is not None or self.is_leaving:
            return
        if self.gradients is None or self.state is None:
            missing = "wrap(module)" if self.gradients is None else "State(...)"
            raise InputError(f"the job lacks {missing}: expected both before the first batch; call it after init")
        self.state.prepare()
        if not self.agent.sees_workers():
            self._restore()
        self.agent.start()
        self.events.write("ready")
        self._enter_next(after=0)

    def next_share(self) -> tuple[int, int, bool]:
        """Return which share of how many this worker computes now, and whether it is its first of the step."""
        assert self.links is not None
        if isinstance(self.gradients, LogicalGradients):
            return self.gradients.next_share, self.gradients.num_shares, self.gradients.is_first
        return self.links.rank, self.links.size, True

    def set_share(self, num_samples: int, num_global: int) -> None:
        """Say how many of the global batch's samples this worker computes in the pass that begins."""
        assert self.gradients is not None
        if self.next_share()[2]:
            for part in self.parts.values():
                part.batch_begun()
        if isinstance(self.gradients, LogicalGradients):
            self.gradients.begin(self.step)
        self.gradients.share, self.batch_size = num_samples / num_global, num_global
        self._batch_begun, self._is_begun = time.monotonic(), True

    def check_voted(self) -> None:
        """Refuse a new batch while the last one was not voted on.

        Raises:
            ElasticError: The script did not step the wrapped optimizer.
        """
        if self._is_begun:
            with located("taking a batch", self.agent.worker, self.links.rank if self.links else None):
                raise ElasticError(
                    f"the batch of step {self.step} was not voted on: expected step() of elastic_train.Optimizer "
                    "before the next batch; wrap the optimizer and call it for every batch"
                )

    def commit(self) -> bool:
        """Finish the gradients and vote; returns whether the step counts, or is only a pass of several."""
        if self.links is None:
            raise InputError("step() was called outside of a batch: expected it in a loop over an ElasticDataLoader; "
                             "take batches from one")  # fmt: skip
        self._is_begun = False
        if self._is_open:
            with located("committing a step", self.agent.worker, self.links.rank):
                raise ElasticError(
                    f"step {self.step} was not ended: expected notify_batch_end() after each optimizer step; "
                    "add the call"
                )
        assert self.gradients is not None
        if isinstance(self.gradients, LogicalGradients) and not self.gradients.keep():
            return False
        compute_seconds = time.monotonic() - self._batch_begun
        try:
            self.gradients.finish()
            number = self.agent.offered()[0]
            ballot = [number, -number]
            for part in self.parts.values():
                ballot += part.ballot()
            lowest = self.links.minimum(ballot) if self.links.size > 1 else ballot
        except RuntimeError as error:
            self.recover(error)
            return False
        self._switch_to = lowest[0] if lowest[0] == -lowest[1] else 0
        self.step += 1
        self.cursor += self.batch_size
        self._is_open = True
        for part, numbers in self._split(lowest[2:]):
            part.committed(numbers)
        begun, self._step_ended = self._step_ended, time.monotonic()
        self.agent.report_step(self.step, compute_seconds, self.batch_size / max(self._step_ended - begun, 1e-9))
        return True

    def _split(self, numbers: list[int]) -> list[tuple[Part, list[int]]]:
        """Return each part with its numbers of a vote, none when there are none."""
        found = []
        for part in self.parts.values():
            count = len(part.ballot())
            found.append((part, numbers[:count]))
            numbers = numbers[count:]
        return found

    def notify_batch_end(self) -> StepInfo:
        """End the step; the only place where membership changes in good order."""
        is_committed, self._is_open = self._is_open, False
        if self.agent.failure is not None:
            with located("ending a step", self.agent.worker, self.links.rank if self.links else None):
                raise WorkerLostError(f"the agent of this worker ended: {self.agent.failure}; restart it as a newcomer")
        try:
            for part in self.parts.values() if is_committed else ():
                part.updated()
        except RuntimeError as error:
            if isinstance(error, ElasticError):
                raise
            self.recover(error)
        info = self._switch() if self._switch_to else self._info()
        if is_committed and self.links is not None:
            for part in self.parts.values():
                part.batch_ended()
        return info

    def _switch(self) -> StepInfo:
        """Change to the generation that was voted for."""
        number, self._switch_to = self._switch_to, 0
        begin = time.monotonic()
        old, self.links = self.links, self.agent.take()
        if self.links is None:
            self._go()
            return self._info(True, time.monotonic() - begin)
        try:
            self._enter(self.links)
        except RuntimeError as error:
            self.recover(error, number)
        if old is not None:
            old.retire()
        info = self._info(True, time.monotonic() - begin)
        self.events.write("switched", generation=number, step=self.step, seconds=info.pause_seconds)
        return info

    def finish(self) -> None:
        """Wait for the others at the end of training, then give up the place."""
        last = [0]
        for part in self.parts.values():
            last += part.closing()
        if self.links is not None and self.links.size > 1:
            try:
                last = self.links.minimum(last)
            except RuntimeError as error:
                _logger.info("a peer ended before the last barrier: %s", error)
                last = []
        for part, lowest in self._split(last[1:]):
            part.closed(lowest)
        self._go()

    def _go(self) -> None:
        """Give up the place in the job."""
        self.is_leaving = True
        self.events.write("left", step=self.step)
        self.agent.close()
        if self.links is not None:
            self.links.drop()
            self.links = None

    def _info(self, is_resized: bool = False, pause_seconds: float = 0.0) -> StepInfo:
        links = self.links
        info = StepInfo(self.step, links.number if links else 0, links.size if links else 0, is_resized, pause_seconds)
        if is_resized:
            for callback in self._callbacks:
                callback(info)
        return info

    def recover(self, error: Exception, number: int | None = None) -> None:
        """Drop the step and go on with the survivors; for whoever met a lost peer on the way to the vote."""
        begin = time.monotonic()
        assert self.gradients is not None
        self._is_begun, self._switch_to = False, 0
        failed = number or (self.links.number if self.links else 0)
        self.events.write("failed", generation=failed, step=self.step, error=str(error)[:200])
        self.gradients.reset()
        self.gradients.links = None
        if self.links is not None:
            self.links.drop()
            self.links = None
        self._enter_next(after=self.agent.report_failed(failed))
        self.events.write(
            "recovered", generation=self._info().generation, step=self.step, seconds=time.monotonic() - begin
        )
        self._info(is_resized=True, pause_seconds=time.monotonic() - begin)

    def _enter_next(self, after: int) -> None:
        """Wait for a generation newer than ``after`` and enter it; on failure, for the one after that."""
        deadline = time.monotonic() + self._recover_seconds
        while True:
            number, links = self.agent.offered()
            if self.agent.failure is not None:
                raise WorkerLostError(f"the agent of this worker ended: {self.agent.failure}; restart it")
            if number > after and links is not None:
                self.links = self.agent.take()
                assert self.links is not None
                try:
                    self._enter(self.links)
                    return
                except RuntimeError as error:
                    if isinstance(error, ElasticError):
                        raise
                    self.links.drop()
                    self.links, after = None, self.agent.report_failed(number)
            newest = self.agent.newest
            if self._has_run and newest and newest.number > after and not self.agent.is_member_of(newest):
                raise FencedError(
                    f"generation {newest.number} goes on without this worker: expected it among {newest.members}; "
                    "start it anew as a newcomer"
                )
            if time.monotonic() > deadline:
                raise WorkerLostError(
                    f"no generation after {after} within {self._recover_seconds:.0f} s: expected enough workers "
                    "to be ready; start more, or lower min_workers"
                )
            time.sleep(0.002)

    def _enter(self, links: Links) -> None:
        """Begin to work in a generation: bring the state to those who lack it."""
        assert self.gradients is not None
        assert self.state is not None
        steps = self._gather_steps(links)
        if not max(steps) and self.checkpoints is not None:  # nobody has a state, as all who had one are gone
            self._restore()
            steps = self._gather_steps(links)
        sources = links.newest_peers(steps)
        with located("taking the state", self.agent.worker, links.rank):
            received = self.state.share(links.peers, sources, self.progress())
            if links.peers.rank not in sources:
                self._adopt(received)
        self.links = self.gradients.links = links
        self._has_run = self._has_state = True
        for part in self.parts.values():
            part.entered(links)
        self.agent.report_running(links.number)

    def progress(self) -> dict[str, Any]:
        """Return counters and the facts of parts, JSON-able: all that goes with the state of a step."""
        return {
            "step": self.step, "epoch": self.epoch, "cursor": self.cursor,
            "global_batch_size": self.global_batch_size, "parts": capture_parts(self.parts),
        }  # fmt: skip

    def _gather_steps(self, links: Links) -> list[int]:
        mine = self.step + 1 if self._has_state else 0
        return links.gather(mine) if links.size > 1 else [mine]

    def _adopt(self, progress: dict[str, Any]) -> None:
        """Take over counters and the facts of parts."""
        self.step, self.epoch, self.cursor = progress["step"], progress["epoch"], progress["cursor"]
        self.global_batch_size = progress["global_batch_size"]
        restore_parts(self.parts, progress["parts"])

    def _restore(self) -> None:
        """Begin at the newest checkpoint, if there is one."""
        assert self.state is not None
        with located("restoring a checkpoint", self.agent.worker):
            progress = self.checkpoints.load(self.state) if self.checkpoints is not None else None
            if progress is not None:
                self._adopt(progress)
                self._has_state = True
                self.events.write("restored", step=self.step)
