"""What a step of a mixture-of-experts layer costs under a placement of its experts.

Every expert has a *home*, the device that keeps its parameters and optimiser state, and perhaps *replicas*. A token
goes to the replica on its own device where there is one, else home. Symbols, per device d: W tokens computed there, S
and R tokens it sends away and receives, O and I expert copies it gives and takes; b bytes of a token, p bytes of an
expert, t seconds of one token forward::

    4 T(b max(S, R)) + 3 t max W + 2 T(p max(O, I))        T(n) = Interconnect.seconds("all_to_all", n)

Tokens travel four times (there and back, forward and backward), the backward pass computes twice the forward;
replicas get their parameters before and hand their gradient back after. Every term grows with every token and copy,
on which the exact search rests.

Source: the cost model of Prophet (CLUSTER 2023) and FasterMoE (PPoPP 2022), rebuilt from their abstracts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cluster import Cluster
from autopar.errors import ProblemError

__all__ = ["ExpertLayer", "Loads", "Placement", "StepCost", "plain_placement"]


@dataclass(frozen=True)
class Placement:
    """Where experts live.

    Attributes:
        homes: Device of every expert.
        replicas: Further devices that hold a copy, ascending, per expert.
    """

    homes: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]

    @property
    def num_replicas(self) -> int:
        """Number of copies besides the homes."""
        return sum(map(len, self.replicas))

    def held(self, num_devices: int) -> np.ndarray:
        """Return int64 [devices] the number of experts and replicas on each device."""
        return np.bincount([*self.homes, *(d for places in self.replicas for d in places)], minlength=num_devices)


def plain_placement(num_experts: int, num_devices: int) -> Placement:
    """Return plain expert parallelism: experts in order, as evenly as they go, no replicas.

    >>> plain_placement(4, 2).homes
    (0, 0, 1, 1)
    """
    if num_experts < 1 or num_devices < 1:
        raise ProblemError(
            f"num_experts={num_experts} and num_devices={num_devices} are not valid: expected at least 1 each; count "
            "them"
        )
    homes = tuple(expert * num_devices // num_experts for expert in range(num_experts))
    return Placement(homes, ((),) * num_experts)


@dataclass(frozen=True)
class Loads:
    """Tokens and copies per device, int64 [devices] each; they add up over experts."""

    computed: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    given: np.ndarray
    taken: np.ndarray

    def __add__(self, other: Loads) -> Loads:
        return Loads(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class StepCost:
    """Predicted costs of one layer in one step.

    Attributes:
        seconds: All of it.
        exchange_seconds: Tokens on the way.
        compute_seconds: Experts at work.
        transfer_seconds: Parameters to replicas and gradients back.
        exchange_bytes: Tokens that leave a device, all devices and all four ways.
        transfer_bytes: Copies and gradients, all devices.
        balance: Tokens on the busiest device over the mean; 1 is even.
    """

    seconds: float
    exchange_seconds: float
    compute_seconds: float
    transfer_seconds: float
    exchange_bytes: int
    transfer_bytes: int
    balance: float


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """Sizes of a layer and the machine it runs on.

    Attributes:
        cluster: The devices.
        token_bytes: Bytes of one token on the way to its expert.
        expert_bytes: Bytes of one expert's parameters; its gradient has as many.
        seconds_per_token: Forward, of one token in one expert.
        capacity: Most experts and replicas on one device; no limit when ``None``.
        state_bytes: Bytes that move when an expert changes its home: parameters and optimiser state.
    """

    cluster: Cluster
    token_bytes: int
    expert_bytes: int
    seconds_per_token: float
    capacity: int | None = None
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if self.token_bytes < 1 or self.expert_bytes < 1 or not self.seconds_per_token >= 0:
            raise ProblemError(
                f"token_bytes={self.token_bytes}, expert_bytes={self.expert_bytes} and "
                f"seconds_per_token={self.seconds_per_token} are not valid: expected at least 1 byte each and no "
                "negative time; use ExpertLayer.feed_forward"
            )

    @classmethod
    def feed_forward(
        cls, cluster: Cluster, width: int, hidden: int, element_bytes: int = 4, memory_bytes: float | None = None
    ) -> ExpertLayer:
        """Return a layer whose experts are two linear maps, ``width`` to ``hidden`` and back.

        Args:
            cluster: The devices; its rate of products gives the seconds of a token.
            width: Size of a token.
            hidden: Size between the two maps.
            element_bytes: Bytes of a number.
            memory_bytes: Memory of a device for experts: parameters, gradients and two optimiser states of each.
        """
        expert = 2 * width * hidden * element_bytes
        seconds = 4 * width * hidden / cluster.flops_per_second
        capacity = None if memory_bytes is None else int(memory_bytes // (4 * expert))
        return cls(cluster, width * element_bytes, expert, seconds, capacity, 3 * expert)

    def check(self, counts: Any) -> np.ndarray:
        """Return counts as int64 [experts, devices].

        Raises:
            ProblemError: Another shape, or negative counts.
        """
        array = np.asarray(counts)
        if array.ndim != 2 or array.shape[1] != self.cluster.num_devices or not array.size or (array < 0).any():
            raise ProblemError(
                f"counts have shape {array.shape}, least {array.min(initial=0)}; expected [experts, "
                f"{self.cluster.num_devices}], tokens per expert and device, none negative; merge statistics over "
                "all ranks"
            )
        return array.astype(np.float64) if array.dtype.kind == "f" else array.astype(np.int64)

    def loads_of(self, counts: np.ndarray, home: int, replicas: Sequence[int]) -> Loads:
        """Return what one expert adds to every device's loads; ``counts`` [devices] are its tokens per device."""
        here = np.zeros(len(counts), bool)
        here[[home, *replicas]] = True
        away = np.where(here, 0, counts)
        computed = np.where(here, counts, 0)
        received = np.zeros_like(counts)
        received[home] = away.sum()
        given, taken = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
        given[home] = len(replicas)
        taken[list(replicas)] = 1
        return Loads(computed + received, away, received, given, taken)

    def loads(self, counts: np.ndarray, placement: Placement) -> Loads:
        """Return the loads of all experts together."""
        rows = zip(counts, placement.homes, placement.replicas, strict=True)
        first, *others = (self.loads_of(*row) for row in rows)
        for other in others:
            first = first + other
        return first

    def seconds(self, loads: Loads, least_computed: float = 0.0) -> float:
        """Return the seconds of a step with these loads; ``least_computed`` tokens on the busiest device at least."""
        return sum(self._terms(loads, least_computed))

    def _terms(self, loads: Loads, least_computed: float = 0.0) -> tuple[float, float, float]:
        moved = float(max(loads.sent.max(), loads.received.max())) * self.token_bytes
        copied = float(max(loads.given.max(), loads.taken.max())) * self.expert_bytes
        computed = max(float(loads.computed.max()), least_computed)
        return 4 * self._move(moved), 3 * self.seconds_per_token * computed, 2 * self._move(copied)

    def _move(self, num_bytes: float) -> float:
        if not num_bytes or self.cluster.num_devices == 1:
            return 0.0
        shape = self.cluster.group_shape((self.cluster.num_devices,), 0)
        return self.cluster.interconnect.seconds("all_to_all", num_bytes, shape)

    def cost(self, counts: Any, placement: Placement) -> StepCost:
        """Return what a step costs.

        Args:
            counts: [experts, devices] tokens on each device for each expert.
            placement: Where experts live.
        """
        counts = self.check(counts)
        loads = self.loads(counts, placement)
        exchange, compute, transfer = self._terms(loads)
        mean = float(loads.computed.mean())
        return StepCost(
            exchange + compute + transfer, exchange, compute, transfer,
            int(4 * loads.sent.sum() * self.token_bytes), int(2 * loads.taken.sum() * self.expert_bytes),
            float(loads.computed.max()) / mean if mean else 1.0,
        )  # fmt: skip

    def moving_seconds(self, before: Placement, after: Placement) -> float:
        """Return the seconds in which experts change their homes."""
        given, taken = (np.zeros(self.cluster.num_devices) for _ in range(2))
        for old, new in zip(before.homes, after.homes, strict=True):
            given[old] += old != new
            taken[new] += old != new
        return self._move(float(max(given.max(), taken.max())) * self.state_bytes)
