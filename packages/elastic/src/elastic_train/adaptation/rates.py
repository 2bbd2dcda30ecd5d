r"""How the learning rate follows the batch size.

A rule gives the factor on the learning rates that the script set for the first batch size. It is applied for the
optimizer's step alone, so schedulers go on as if there were none.

========  ==========================================================  =====================
rule      factor at :math:`k` times the first batch size              source
========  ==========================================================  =====================
linear    :math:`k`                                                   arXiv 1706.02677
sqrt      :math:`\sqrt{k}`                                            arXiv 1404.5997
AdaScale  :math:`(v+s)/(v/k+s)`, from 1 to :math:`k`, with noise      arXiv 2007.05105
          :math:`v` and signal :math:`s` of the first size
Legw      :math:`\sqrt{k}`, after a warm-up :math:`k` times as long   arXiv 1901.08256
========  ==========================================================  =====================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from elastic_train.adaptation.noise import NoiseScale
from elastic_train.errors import input_error

__all__ = ["RULES", "AdaScale", "LearningRateRule", "Legw", "RateFacts", "linear_rule", "sqrt_rule"]


@dataclass(frozen=True)
class RateFacts:
    """What a rule may look at; the same on every worker.

    Attributes:
        batch_size: Samples of the next step.
        first_batch_size: Samples of a step at the begin of training.
        num_samples: Samples of all steps so far.
        noise: Estimates of noise and signal.
    """

    batch_size: int
    first_batch_size: int
    num_samples: int
    noise: NoiseScale

    @property
    def ratio(self) -> float:
        """Times the first batch size."""
        return self.batch_size / self.first_batch_size


LearningRateRule = Callable[[RateFacts], float]


def linear_rule(facts: RateFacts) -> float:
    """Scale the learning rate like the batch size."""
    return facts.ratio


def sqrt_rule(facts: RateFacts) -> float:
    """Scale the learning rate like the square root of the batch size."""
    return math.sqrt(facts.ratio)


class AdaScale:
    """Scale the learning rate by what a step of the larger batch is worth, measured in steps of the first size.

    Args:
        power: 1 for SGD; 0.5 for Adam and its kin, whose steps do not grow with the gradient.

    The factor is 1 until noise is measured, which takes two workers.
    """

    needs_noise = True

    def __init__(self, power: float = 1.0):
        if not 0 < power <= 1:
            raise input_error("power", power, "above 0, at most 1", "use 1 for SGD, 0.5 for Adam")
        self._power = power

    def __call__(self, facts: RateFacts) -> float:
        """Return the factor."""
        signal, noise = max(facts.noise.square, 0.0), max(facts.noise.variance, 0.0) / facts.first_batch_size
        if signal + noise == 0:
            return 1.0
        return ((noise + signal) / (noise / facts.ratio + signal)) ** self._power


class Legw:
    """Scale like the square root, with a linear warm-up over a number of samples that grows with the batch size.

    Args:
        warm_up_samples: Samples of the warm-up at the first batch size.
    """

    def __init__(self, warm_up_samples: int):
        if warm_up_samples < 1:
            raise input_error("warm_up_samples", warm_up_samples, "at least 1", "use some per cent of an epoch")
        self._warm_up_samples = warm_up_samples

    def __call__(self, facts: RateFacts) -> float:
        """Return the factor."""
        length = self._warm_up_samples * facts.ratio
        return math.sqrt(facts.ratio) * min((facts.num_samples + facts.batch_size) / length, 1.0)


RULES: dict[str, LearningRateRule] = {"linear": linear_rule, "sqrt": sqrt_rule}
