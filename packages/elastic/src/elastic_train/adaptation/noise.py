r"""The gradient noise scale: how large a batch is before more samples stop helping.

With :math:`G` the gradient over all data and :math:`\Sigma` the covariance of one sample's gradient, a batch of
:math:`B` samples has :math:`E|g_B|^2 = |G|^2 + \mathrm{tr}\,\Sigma / B`. The gradients of workers, each over
:math:`b_i` samples, give a second such equation, :math:`E\,\overline{|g_i|^2} = |G|^2 + \mathrm{tr}\,\Sigma\,
\overline{1/b_i}`. Solved for the two unknowns, both estimates are unbiased; the scale
:math:`\mathrm{tr}\,\Sigma/|G|^2` is the ratio of their running means.

Source: "An Empirical Model of Large-Batch Training" (arXiv 1812.06162), appendix A; measured inside the training as in
"KungFu: Making Training in Distributed Machine Learning Adaptive" (OSDI 2020). Where we differ: workers with different
numbers of samples, which need the mean of :math:`1/b_i`.
"""

from __future__ import annotations

from typing import Any

from elastic_train.errors import input_error

__all__ = ["NoiseScale", "estimate_noise"]


def estimate_noise(
    local_square: float, global_square: float, mean_inverse_share: float, batch_size: int
) -> tuple[float, float]:
    r"""Estimate :math:`|G|^2` and :math:`\mathrm{tr}\,\Sigma` from one step.

    Args:
        local_square: Mean over workers of the squared norm of their own gradients, each a mean over its samples.
        global_square: Squared norm of the gradient over the global batch.
        mean_inverse_share: Mean over workers of the batch size over their samples, above 1.
        batch_size: Samples of the global batch.

    Returns:
        The two estimates; single ones may be negative.

    >>> estimate_noise(local_square=3.0, global_square=2.0, mean_inverse_share=2.0, batch_size=8)
    (1.0, 8.0)
    """
    small = batch_size / mean_inverse_share
    square = (batch_size * global_square - small * local_square) / (batch_size - small)
    variance = (local_square - global_square) / (1 / small - 1 / batch_size)
    return square, variance


class NoiseScale:
    """Running means of the two estimates, and their ratio.

    Args:
        weight: Weight of the newest step, in ``(0, 1]``.

    Attributes:
        square: Running mean of the squared norm of the gradient.
        variance: Running mean of the trace of the covariance.
        num_steps: Steps seen.
    """

    def __init__(self, weight: float = 0.1):
        if not 0 < weight <= 1:
            raise input_error("weight", weight, "above 0, at most 1", "use 0.1")
        self._weight = weight
        self.square, self.variance, self.num_steps = 0.0, 0.0, 0

    def update(self, square: float, variance: float) -> None:
        """Add the estimates of one step."""
        self.num_steps += 1
        weight = max(self._weight, 1 / self.num_steps)  # a plain mean at first
        self.square += weight * (square - self.square)
        self.variance += weight * (variance - self.variance)

    @property
    def value(self) -> float | None:
        """The noise scale in samples; ``None`` while the estimates make no sense."""
        return self.variance / self.square if self.square > 0 and self.variance > 0 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the running means."""
        return {"square": self.square, "variance": self.variance, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over running means."""
        self.square, self.variance, self.num_steps = state["square"], state["variance"], state["num_steps"]
