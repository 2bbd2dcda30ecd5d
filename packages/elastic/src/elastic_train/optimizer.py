"""An optimizer that steps only when all workers agree that the step is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elastic_train import session
from elastic_train.errors import InputError
from elastic_train.job import Job

__all__ = ["Optimizer"]


class Optimizer:
    """Wraps an optimizer; ``step`` finishes the gradients and votes first.

    Args:
        inner: The optimizer.
        job: The job; ``None`` takes the one of this process.
        update: What to do once the gradients are summed, in place of ``inner.step``; the place to clip or unscale them:
            ``lambda: (clip_grad_norm_(model.parameters(), 1.0), inner.step())`` or
            ``lambda: (scaler.step(inner), scaler.update())``.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, job: Job | None = None, update: Callable[[], object] | None = None
    ):
        self._job, self.inner, self._step_inner = job or session.current_job(), inner, update or inner.step

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
            self._step_inner()
            return
        rates = [group["lr"] for group in self.inner.param_groups]
        for group, rate in zip(self.inner.param_groups, rates, strict=True):
            group["lr"] = rate * rate_factor
        try:
            self._step_inner()
        finally:
            for group, rate in zip(self.inner.param_groups, rates, strict=True):
                group["lr"] = rate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by ``GradScaler.step``, which would change gradients that are not summed yet."""
        raise InputError(
            "a GradScaler was given elastic_train.Optimizer: expected the optimizer in it, after the gradients are "
            "summed; write Optimizer(inner, update=lambda: (scaler.step(inner), scaler.update())) and call its step"
        )

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
