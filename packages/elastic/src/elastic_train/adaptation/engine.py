"""What turns the wishes of policies into changes that all workers make after the same step.

    step s     gradients measured | vote: smallest wishes | optimizer step | batch size and learning rate change
    step s+1   runs with them; policies look at it and wish anew

Batch size, learning-rate factor and noise estimates are the same on every worker, and travel to newcomers and into
checkpoints. The batch size changes between two steps, so the loader's place in the data stays exact. Wishes for workers
go to the job's controller, from the worker that leads.

Callers may not assume that a wish is granted: others may wish less, and workers come only where a launcher starts them.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from elastic_train import session
from elastic_train.adaptation.noise import NoiseScale, estimate_noise
from elastic_train.adaptation.policies import Policy, StepReport
from elastic_train.adaptation.rates import RULES, LearningRateRule, RateFacts
from elastic_train.controller import Controller
from elastic_train.errors import JobStateError, StateMismatchError, input_error
from elastic_train.gradients import GradientSum
from elastic_train.group import Links
from elastic_train.job import Job
from elastic_train.parts import Part

__all__ = ["Adaptation", "adapt"]

_logger = logging.getLogger(__name__)


def adapt(*policies: Policy, learning_rate: str | LearningRateRule | None = None, job: Job | None = None) -> Adaptation:
    """Let policies adapt the job; call it on every worker, after the loader is made and before the first batch.

    Args:
        *policies: What decides; where two wish, the later one counts.
        learning_rate: How the learning rate follows the batch size: ``"linear"``, ``"sqrt"``, a rule such as
            :class:`AdaScale`, or ``None`` to leave it.
        job: The job; ``None`` takes the one of this process.

    Returns:
        The adaptation, which knows the noise scale.

    Raises:
        InputError: Something is no policy or rule, or the job has an adaptation or lacks a loader.
    """
    return Adaptation(policies, learning_rate, job or session.current_job())


class Adaptation(Part):
    """The policies of a job at work; made by :func:`adapt`.

    Attributes:
        noise: The estimates behind the noise scale; empty unless a policy or rule needs them.
    """

    def __init__(self, policies: tuple[Policy, ...], learning_rate: str | LearningRateRule | None, job: Job):
        for policy in policies:
            if not (hasattr(policy, "before_step") and hasattr(policy, "after_step")):
                raise input_error("policies", policy, "objects with before_step and after_step", "derive from Policy")
        rule = RULES.get(learning_rate) if isinstance(learning_rate, str) else learning_rate
        if learning_rate is not None and not callable(rule):
            expected = f"one of {sorted(RULES)}, a rule or None"
            raise input_error("learning_rate", learning_rate, expected, "choose one of them")
        if not job.global_batch_size:
            raise input_error("global_batch_size", 0, "that of an ElasticDataLoader", "make the loader before")
        self._policies, self._rule, self._job = policies, rule, job
        self.noise = NoiseScale()
        self._needs_noise = any(getattr(user, "needs_noise", False) for user in (*policies, rule))
        self._first_batch_size, self._num_samples = job.global_batch_size, 0
        self._wish = (0, 0)  # batch size and workers, 0 for none
        self._agreed, self._asked = (0, 0), 0
        self._last, self._report = time.monotonic(), self._look(0.0)
        job.add_part("adaptation", self)

    def state_dict(self) -> dict[str, Any]:
        """Return the facts that policies and rules build on."""
        return {
            "first_batch_size": self._first_batch_size, "num_samples": self._num_samples,
            "noise": self.noise.state_dict(), "wish": list(self._wish),
            "policies": [policy.state_dict() for policy in self._policies],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the facts of another worker."""
        if len(state["policies"]) != len(self._policies):
            raise StateMismatchError(
                f"this worker has {len(self._policies)} policies: expected {len(state['policies'])}, as the job has; "
                "pass the same policies on every worker"
            )
        self._first_batch_size, self._num_samples = state["first_batch_size"], state["num_samples"]
        self.noise.load_state_dict(state["noise"])
        self._wish = (state["wish"][0], state["wish"][1])  # so that who joins does not hold a change up
        for policy, known in zip(self._policies, state["policies"], strict=True):
            policy.load_state_dict(known)

    def entered(self, links: Links) -> None:
        """Measure noise if it is needed."""
        self._asked, self._last = 0, time.monotonic()
        if self._needs_noise:
            gradients = self._job.gradients
            if not isinstance(gradients, GradientSum):
                expected = "whole copies of a module summed by wrap, not bitwise mode or shards"
                raise input_error("policies", "one that needs the noise scale", expected, "leave logical_workers out")
            gradients.measures_squares = True
        self._set_rate()

    def batch_begun(self) -> None:
        """Show policies the step before."""
        for policy in self._policies:
            policy.before_step(self._report)

    def ballot(self) -> list[int]:
        """Say which batch size, the present one by default, and how many workers are wished."""
        return [self._wish[0] or self._job.global_batch_size, self._wish[1]]

    def committed(self, lowest: list[int]) -> None:
        """Note what was agreed; the step that is committed still has the old size and rate."""
        if lowest:
            self._agreed = (lowest[0], lowest[1])

    def updated(self) -> None:
        """Make what was agreed hold from the next step on, and let policies look at this one."""
        job = self._job
        self._num_samples += job.batch_size
        if isinstance(job.gradients, GradientSum) and job.gradients.squares is not None:
            self.noise.update(*estimate_noise(*job.gradients.squares, job.batch_size))
        size, num_workers = self._agreed
        if size and size != job.global_batch_size:
            job.events.write("batch size", step=job.step, before=job.global_batch_size, now=size)
            job.global_batch_size = size
        if num_workers:
            self._ask_for_workers(num_workers)
        self._set_rate()
        now = time.monotonic()
        self._report, self._last = self._look(now - self._last), now
        wishes = [wish for policy in self._policies if (wish := policy.after_step(self._report)) is not None]
        sizes = [wish.global_batch_size for wish in wishes if wish.global_batch_size is not None]
        counts = [wish.num_workers for wish in wishes if wish.num_workers is not None]
        self._wish = (sizes[-1] if sizes else 0, counts[-1] if counts else 0)
        if min(self._wish) < 0:
            raise input_error("wish", self._wish, "sizes and numbers of at least 1", "correct the policy")

    def _look(self, seconds: float) -> StepReport:
        job = self._job
        size = job.links.size if job.links else 0
        scale = self.noise.value
        return StepReport(job.step, job.epoch, self._num_samples, size, job.global_batch_size, seconds, scale)

    def _set_rate(self) -> None:
        if self._rule is not None:
            facts = RateFacts(self._job.global_batch_size, self._first_batch_size, self._num_samples, self.noise)
            self._job.rate_factor = self._rule(facts)

    def _ask_for_workers(self, wanted: int) -> None:
        """Order or let go workers, once, from the worker that leads."""
        job = self._job
        present = job.links.size if job.links else 0
        limits = job.agent.limits
        wanted = min(max(wanted, limits.min_workers), limits.max_workers)
        if wanted in (present, self._asked) or not present:
            return
        self._asked = wanted
        if not job.agent.is_leader:
            return
        controller = Controller(job.agent.store, job.agent.job_id)
        try:
            if wanted > present:
                controller.scale_out(wanted - present)
            else:
                controller.scale_in(present - wanted)
            job.events.write("wished workers", step=job.step, before=present, now=wanted)
        except JobStateError as error:
            _logger.warning("a policy wishes %d workers: %s", wanted, error)
