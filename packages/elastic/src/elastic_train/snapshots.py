"""State that each worker has of its own, with a copy in the memory of a peer.

Parameters are the same on every worker, so any survivor has them all. Not so random numbers, batch-norm statistics or
whatever a script keeps per worker. After every committed step each worker sends such state to the next one in a ring,
which keeps it. So it survives its worker: it goes to the worker that comes in its place, by migration, in good order or
after a kill, without a disk. A survivor puts its own back to the last committed step before it does a failed one again.

Callers may not assume that the copy is of the very last step: a worker that is killed between the vote and its message
leaves the one before. Without a newcomer the state waits with its keeper, and is lost with it.

Source: copies in the memory of peers are those of "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints" (SOSP 2023). Where we differ: only what is not replicated anyway is copied.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

from elastic_train import session
from elastic_train.errors import input_error
from elastic_train.group import Links
from elastic_train.job import Job
from elastic_train.parts import Part
from elastic_train.state import receive_bytes, send_bytes

__all__ = ["LocalState", "RandomState"]

_HAS_OWN, _HAS_ORPHAN = 1, 2


class LocalState(Part):
    """Objects whose state is this worker's own.

    Args:
        job: The job; ``None`` takes the one of this process.
        **objects: Anything with ``state_dict()`` and ``load_state_dict(state)``.

    Attributes:
        inherited: Worker whose state this one took over, and the step it is of; ``None`` for none.
    """

    def __init__(self, job: Job | None = None, **objects: Any):
        if not objects:
            raise input_error("objects", {}, "at least one object", "name what is kept, such as rng=RandomState()")
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise input_error(name, value, "an object with state_dict and load_state_dict", "leave it out")
        self._objects, self._job = objects, job or session.current_job()
        self._own: bytes | None = None
        self._kept: dict[str, tuple[int, bytes]] = {}
        self.inherited: tuple[str, int] | None = None
        self._job.add_part("local state", self)

    def updated(self) -> None:
        """Keep the state of this step, here and with the next worker."""
        self._own = self._capture()
        links = self._job.links
        if links is None or links.size == 1:
            return
        before, after = (links.rank - 1) % links.size, (links.rank + 1) % links.size
        sent = send_bytes(links, self._own, [after], is_async=True)
        self._kept[links.members[before]] = (self._job.step, receive_bytes(links, before))
        for work in sent:
            work.wait()
        # Others' copies are with their own keepers, unless nobody runs them any more.
        present = set(links.members) - {links.members[before]}
        self._kept = {worker: kept for worker, kept in self._kept.items() if worker not in present}

    def entered(self, links: Links) -> None:
        """Go back to the last committed step, and take over the state of a worker that is gone."""
        if self._own is not None:
            self._restore(self._own)
        if links.size == 1:
            return
        orphans = sorted(set(self._kept) - set(links.members))
        mine = _HAS_OWN * (self._own is not None) + _HAS_ORPHAN * bool(orphans)
        told = links.gather(mine)
        keepers = [rank for rank, value in enumerate(told) if value & _HAS_ORPHAN]
        heirs = [rank for rank, value in enumerate(told) if not value & _HAS_OWN]
        for keeper, heir in zip(keepers, heirs, strict=False):
            if keeper == links.rank:
                worker = orphans[0]
                send_bytes(links, pickle.dumps((worker, *self._kept[worker])), [heir])
                del self._kept[worker]
            elif heir == links.rank:
                worker, step, content = pickle.loads(receive_bytes(links, keeper))
                self._restore(content)
                self.inherited = (worker, step)
                self._job.events.write("inherited", of=worker, step=step)
        if self._own is None:
            self._own = self._capture()

    def _capture(self) -> bytes:
        return pickle.dumps({name: value.state_dict() for name, value in self._objects.items()})

    def _restore(self, content: bytes) -> None:
        for name, state in pickle.loads(content).items():
            self._objects[name].load_state_dict(state)


class RandomState:
    """The random numbers of this process: those of PyTorch on the CPU, of NumPy and of Python."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the generators stand."""
        shared = np.random.get_state()  # noqa: NPY002 - what scripts draw from without a generator of their own
        return {"torch": torch.get_rng_state(), "numpy": shared, "python": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the generators there."""
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        random.setstate(state["python"])
