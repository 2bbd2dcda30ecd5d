"""An optimizer that steps only when all workers agree that the step is whole."""

from __future__ import annotations

from typing import Any

import torch

from elastic_train import session
from elastic_train.job import Job

__all__ = ["Optimizer"]


class Optimizer:
    """Wraps an optimizer; ``step`` finishes the gradients and votes first.

    Args:
        inner: The optimizer.
        job: The job; ``None`` takes the one of this process.
    """

    def __init__(self, inner: torch.optim.Optimizer, job: Job | None = None):
        self._job, self.inner = job or session.current_job(), inner

    def step(self) -> bool:
        """Step if the workers agree; otherwise drop the gradients, and the loader repeats the batch.

        Returns:
            Whether the step was made.

        Collective: all workers of the generation.
        """
        if not self._job.commit():
            self.inner.zero_grad(set_to_none=True)
            return False
        for part in self._job.parts.values():
            part.before_update()
        self._update(self._job.rate_factor)
        return True

    def _update(self, rate_factor: float) -> None:
        """Step with the learning rates times a factor; schedulers see the rates without it."""
        if rate_factor == 1.0:
            self.inner.step()
            return
        rates = [group["lr"] for group in self.inner.param_groups]
        for group, rate in zip(self.inner.param_groups, rates, strict=True):
            group["lr"] = rate * rate_factor
        try:
            self.inner.step()
        finally:
            for group, rate in zip(self.inner.param_groups, rates, strict=True):
                group["lr"] = rate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self.inner.load_state_dict(state)
