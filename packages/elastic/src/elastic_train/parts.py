"""What goes along with the committed steps of a job: its data, its checkpoints, its adaptation.

A part keeps facts that are the same on every worker. It changes them only when a step is committed, or right after the
update that follows, so they agree wherever workers agree on the step, and travel with it to newcomers and into
checkpoints. It may put whole numbers into the vote that commits a step, and learns the smallest of each over all
workers: so the workers agree on whatever they know apart, without another message.

Callers may not assume that what a part does between two commits lasts: a step that fails is done again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_train.errors import StateMismatchError

if TYPE_CHECKING:
    from elastic_train.group import Links

__all__ = ["Part", "capture_parts", "restore_parts"]


class Part:
    """A part that does nothing; others override what they need."""

    def state_dict(self) -> dict[str, Any]:
        """Return the facts as JSON-able values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the facts of a worker that is further."""

    def ballot(self) -> list[int]:
        """Return numbers for the vote; always as many."""
        return []

    def committed(self, lowest: list[int]) -> None:
        """Act on a commit; ``lowest`` holds the smallest of each number of the ballots."""

    def entered(self, links: Links) -> None:
        """Act on the begin of a generation, once the state is there."""

    def batch_begun(self) -> None:
        """Act on the begin of a step, when its batch is there."""

    def updated(self) -> None:
        """Act on the optimizer's step, before membership changes; facts may change here."""

    def batch_ended(self) -> None:
        """Act on the end of a step: the optimizer has stepped and membership has changed if it was to."""

    def before_update(self) -> None:
        """Act before the optimizer changes parameters."""

    def closing(self) -> list[int]:
        """Finish what is under way at the end of training; returns the numbers of a last vote, as many as before."""
        return self.ballot()

    def closed(self, lowest: list[int]) -> None:
        """Act on the last vote; ``lowest`` is empty when it failed."""


def capture_parts(parts: dict[str, Part]) -> dict[str, dict[str, Any]]:
    """Return the facts of all parts."""
    return {name: part.state_dict() for name, part in parts.items()}


def restore_parts(parts: dict[str, Part], states: dict[str, dict[str, Any]]) -> None:
    """Give every part its facts.

    Raises:
        StateMismatchError: The job has other parts than this worker.
    """
    if sorted(parts) != sorted(states):
        raise StateMismatchError(
            f"this worker has the parts {sorted(parts)}: expected those of the job, {sorted(states)}; run the same "
            "script with the same arguments on every worker"
        )
    for name, part in parts.items():
        part.load_state_dict(states[name])
