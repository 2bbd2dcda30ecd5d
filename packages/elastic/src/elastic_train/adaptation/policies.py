"""Policies: what they see of each step, and what they may wish.

A policy runs on every worker. Wishes for a batch size or a number of workers are put into the vote of the next step;
the smallest of all workers counts, and one worker without a wish for workers is enough for none. So policies that look
at what differs between workers, such as times, still change the same thing at the same step everywhere.

Source: policies with hooks before and after a step are those of "KungFu" (OSDI 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_train.errors import input_error

__all__ = ["BatchSchedule", "FollowThroughput", "GrowWithNoise", "Policy", "StepReport", "ThroughputMonitor", "Wish"]


@dataclass(frozen=True)
class StepReport:
    """A step as policies see it.

    Attributes:
        step: Steps committed.
        epoch: Present epoch.
        num_samples: Samples of all steps so far.
        num_workers: Workers of the job.
        global_batch_size: Samples of the next step.
        seconds: Time since the step before; differs between workers.
        noise_scale: The gradient noise scale in samples, ``None`` while it is not known.
    """

    step: int
    epoch: int
    num_samples: int
    num_workers: int
    global_batch_size: int
    seconds: float
    noise_scale: float | None


@dataclass(frozen=True)
class Wish:
    """What a policy would like from the next step on; ``None`` leaves it as it is.

    Attributes:
        global_batch_size: Samples of a step.
        num_workers: Workers of the job; a launcher starts those that lack.
    """

    global_batch_size: int | None = None
    num_workers: int | None = None


class Policy:
    """A policy that wishes nothing; override what you need.

    Attributes:
        needs_noise: Whether the noise scale is to be measured for it.
    """

    needs_noise = False

    def before_step(self, report: StepReport) -> None:
        """Look at the step before, when the next begins."""

    def after_step(self, report: StepReport) -> Wish | None:
        """Look at a step that was committed; returns what is wished."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a newcomer must know, as JSON-able values; the same on every worker."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another worker knows."""


class BatchSchedule(Policy):
    """Batch sizes by step.

    Args:
        sizes: From which step on which size; steps count from 0. A wish takes a step to be agreed, so the first two
            steps have the loader's size.

    >>> schedule = BatchSchedule({10: 64, 20: 128})
    >>> [schedule.size_at(step) for step in (0, 10, 19, 20)]
    [None, 64, 64, 128]
    """

    def __init__(self, sizes: dict[int, int]):
        if not sizes or min(sizes) < 0 or min(sizes.values()) < 1:
            raise input_error("sizes", sizes, "steps from 0 on with sizes of at least 1", "write {step: size}")
        self._sizes = dict(sorted(sizes.items()))

    def size_at(self, step: int) -> int | None:
        """Return the size of a step, ``None`` before the first."""
        begun = [size for first, size in self._sizes.items() if first <= step]
        return begun[-1] if begun else None

    def after_step(self, report: StepReport) -> Wish | None:
        """Wish the size of the step after the one whose vote carries the wish."""
        return Wish(self.size_at(report.step + 1))


class GrowWithNoise(Policy):
    """Let the batch follow the noise scale, upwards only and at most doubling at a time.

    Args:
        max_batch_size: Largest batch.
        every_steps: Steps between two changes, in which the estimate settles.
        multiple: Batch sizes are multiples of this.
    """

    needs_noise = True

    def __init__(self, max_batch_size: int, every_steps: int = 100, multiple: int = 1):
        if max_batch_size < 1 or every_steps < 1 or not 1 <= multiple <= max_batch_size:
            found, expected = (max_batch_size, every_steps, multiple), "numbers from 1 on, multiple <= max_batch_size"
            raise input_error("max_batch_size, every_steps, multiple", found, expected, "correct them")
        self._max_batch_size, self._every_steps, self._multiple = max_batch_size, every_steps, multiple

    def after_step(self, report: StepReport) -> Wish | None:
        """Wish the noise scale as batch size, once every so many steps."""
        if report.noise_scale is None or (report.step + 1) % self._every_steps:
            return None
        now = report.global_batch_size
        size = min(report.noise_scale, 2 * now, self._max_batch_size)
        size = int(size) // self._multiple * self._multiple
        return Wish(size) if size > now else None


class ThroughputMonitor:
    """Samples per second at each number of workers, as running means.

    Args:
        weight: Weight of the newest step.
    """

    def __init__(self, weight: float = 0.1):
        if not 0 < weight <= 1:
            raise input_error("weight", weight, "above 0, at most 1", "use 0.1")
        self._weight = weight
        self.samples_per_second: dict[int, float] = {}
        self.num_steps: dict[int, int] = {}

    def add(self, num_workers: int, num_samples: int, seconds: float) -> None:
        """Add a step; the first at a number of workers is left out, as it holds the change."""
        count = self.num_steps[num_workers] = self.num_steps.get(num_workers, -1) + 1
        if count == 0 or seconds <= 0:
            return
        rate, known = num_samples / seconds, self.samples_per_second.get(num_workers, 0.0)
        self.samples_per_second[num_workers] = known + max(self._weight, 1 / count) * (rate - known)


class FollowThroughput(Policy):
    """Ask for one more worker as long as the last one was worth it, and give it back when it was not.

    A worker is worth it when it adds at least ``min_efficiency`` of what the others do on average.

    Args:
        max_workers: Most workers to ask for.
        min_efficiency: Smallest worth, in ``(0, 1]``.
        settle_steps: Steps at a number of workers before it is judged.
    """

    def __init__(self, max_workers: int, min_efficiency: float = 0.5, settle_steps: int = 20):
        if max_workers < 1 or not 0 < min_efficiency <= 1 or settle_steps < 1:
            found = (max_workers, min_efficiency, settle_steps)
            raise input_error(
                "max_workers, min_efficiency, settle_steps", found, "from 1, in (0, 1], from 1", "correct them"
            )
        self._max_workers, self._min_efficiency, self._settle_steps = max_workers, min_efficiency, settle_steps
        self._refused = max_workers + 1  # fewest workers that were not worth it
        self.monitor = ThroughputMonitor()

    def after_step(self, report: StepReport) -> Wish | None:
        """Wish one worker more or less once the present number has settled."""
        size = report.num_workers
        self.monitor.add(size, report.global_batch_size, report.seconds)
        if self.monitor.num_steps[size] < self._settle_steps:
            return None
        rates = self.monitor.samples_per_second
        if size > 1 and size - 1 in rates:
            gain = (rates[size] - rates[size - 1]) / (rates[size - 1] / (size - 1))
            if gain < self._min_efficiency:
                self._refused = size
                return Wish(num_workers=size - 1)
        return Wish(num_workers=size + 1) if size + 1 < min(self._refused, self._max_workers + 1) else None
