"""Token statistics of mixture-of-experts layers: how many tokens of each device go to each expert, per layer and step.

Routing changes slowly from one step to the next, so the last counts say where tokens will go. :class:`TokenCounter`
counts on a rank and merges over ranks at the end of a step; :func:`expected_counts` makes of the history what the
next step will bring; :func:`similarity` says how much two steps have in common.

Source: the locality of token distributions that Prophet and Pro-Prophet build on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.errors import ProblemError
from core_kernels.comm import Group

__all__ = ["TokenCounter", "expected_counts", "load_counts", "save_counts", "similarity", "zipf_counts"]


class TokenCounter:
    """Counts of one rank, merged over all ranks when a step ends.

    Args:
        num_layers: Mixture-of-experts layers.
        num_experts: Experts of each.
        group: The ranks, a device each; one alone when left out.

    >>> counter = TokenCounter(num_layers=1, num_experts=3)
    >>> counter.add(0, torch.tensor([[0, 2], [2, 1], [2, 0]]))
    >>> counter.end_step()[0].tolist()
    [[2], [1], [3]]
    """

    def __init__(self, num_layers: int, num_experts: int, group: Group | None = None):
        if num_layers < 1 or num_experts < 1:
            raise ProblemError(
                f"num_layers={num_layers} and num_experts={num_experts} are not valid: expected at least 1 each; "
                "count them"
            )
        self.group = group or Group.single()
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self.history: list[np.ndarray] = []

    def add(self, layer: int, expert_ids: Tensor) -> None:
        """Count the experts that tokens of this rank were routed to.

        Args:
            layer: Which layer.
            expert_ids: Integers of any shape, one per token and chosen expert.

        Raises:
            ProblemError: An unknown layer or expert.
        """
        num_layers, num_experts = self.counts.shape
        ids = expert_ids.reshape(-1).to("cpu", torch.int64)
        low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if not 0 <= layer < num_layers or low < 0 or high >= num_experts:
            raise ProblemError(
                f"layer={layer} with expert ids {low} to {high} is not valid: expected a layer below {num_layers} "
                f"and ids below {num_experts}; drop padding tokens, and count the router's choices"
            )
        self.counts[layer] += torch.bincount(ids, minlength=num_experts)

    def end_step(self) -> np.ndarray:
        """Return int64 [layers, experts, devices] of the step, the same on every rank, and begin the next.

        Collective: all ranks of the group.
        """
        rows, _ = self.group.all_gather_v(self.counts.unsqueeze(0), tag="tokens", counts=[1] * self.group.size)
        merged = rows.permute(1, 2, 0).contiguous().numpy().copy()
        self.counts.zero_()
        self.history.append(merged)
        return merged


def expected_counts(history: Sequence[Any], decay: float = 0.5) -> np.ndarray:
    """Return what the next step is expected to bring: a mean in which every step back weighs ``decay`` times as much.

    Args:
        history: Arrays of counts, oldest first, at least one.
        decay: From 0, the last step alone, to 1, all alike.

    >>> expected_counts([[[0]], [[8]], [[8]]], decay=0.5).round(2).tolist()
    [[6.86]]
    """
    if not len(history) or not 0 <= decay <= 1:
        raise ProblemError(
            f"a history of {len(history)} steps and decay={decay} are not valid: expected at least one step and 0 to "
            "1; count a step first"
        )
    weights = np.array([decay ** (len(history) - 1 - step) for step in range(len(history))], dtype=np.float64)
    kept = [step for step, weight in enumerate(weights) if weight > 1e-6]
    stacked = np.stack([np.asarray(history[step], dtype=np.float64) for step in kept])
    return np.tensordot(weights[kept] / weights[kept].sum(), stacked, 1)


def similarity(one: Any, other: Any) -> float:
    """Return the share of tokens that two steps route alike, 0 to 1.

    >>> similarity([[3], [1]], [[1], [3]])
    0.5
    """
    first, second = (np.asarray(counts, dtype=np.float64) for counts in (one, other))
    if not first.sum() or not second.sum():
        return 1.0
    return float(np.minimum(first / first.sum(), second / second.sum()).sum())


def zipf_counts(
    num_steps: int,
    num_experts: int,
    num_devices: int,
    tokens_per_device: int,
    exponent: float = 1.0,
    drift: float = 0.05,
    seed: int = 0,
) -> np.ndarray:
    """Return synthetic routings: popularity by Zipf's law, that drifts from step to step.

    Args:
        num_steps: Steps.
        num_experts: Experts.
        num_devices: Devices; each prefers the same experts, a little differently.
        tokens_per_device: Tokens that a device routes in a step.
        exponent: 0 for equal popularity; the larger, the more uneven.
        drift: Standard deviation of the change of log-popularity in a step; 0 for none.
        seed: Seed; equal arguments give equal counts.

    Returns:
        int64 [steps, experts, devices].
    """
    if min(num_steps, num_experts, num_devices, tokens_per_device) < 1 or not exponent >= 0 or not drift >= 0:
        raise ProblemError(
            f"num_steps={num_steps}, num_experts={num_experts}, num_devices={num_devices}, "
            f"tokens_per_device={tokens_per_device}, exponent={exponent} and drift={drift} are not valid: expected "
            "at least 1 each, and no negative exponent or drift; leave them out for the defaults"
        )
    draw = np.random.default_rng(seed)
    ranks = draw.permutation(num_experts) + 1.0
    popular = -exponent * np.log(ranks)[:, None] + 0.2 * draw.standard_normal((num_experts, num_devices))
    steps = []
    for _ in range(num_steps):
        shares = np.exp(popular - popular.max(0))
        shares /= shares.sum(0)
        steps.append(np.stack([draw.multinomial(tokens_per_device, shares[:, d]) for d in range(num_devices)], 1))
        popular = popular + drift * draw.standard_normal((num_experts, 1))
    return np.stack(steps).astype(np.int64)


def save_counts(path: str | Path, counts: Any) -> None:
    """Write recorded counts [steps, experts, devices] as ``.npy``."""
    np.save(Path(path), np.asarray(counts, dtype=np.int64), allow_pickle=False)


def load_counts(path: str | Path) -> np.ndarray:
    """Read counts [steps, experts, devices] written by :func:`save_counts`.

    Raises:
        ProblemError: The file holds something else.
    """
    try:
        counts = np.load(Path(path), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ProblemError(
            f"{path} is no array of counts ({error}); expected what save_counts wrote; record again"
        ) from None
    if not isinstance(counts, np.ndarray) or counts.ndim != 3 or counts.dtype.kind not in "iu" or (counts < 0).any():
        shape = getattr(counts, "shape", "unknown")
        raise ProblemError(
            f"{path} holds an array of shape {shape}; expected integers [steps, experts, devices], none negative; "
            "write it with save_counts"
        )
    return counts.astype(np.int64)
