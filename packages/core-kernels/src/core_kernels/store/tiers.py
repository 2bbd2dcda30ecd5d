"""Counters of a store: how many rows and bytes each tier gave."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["TIERS", "TierCounters"]

TIERS = ("reused", "device", "host", "disk")
"""From fast to slow: rows of the batch before, device memory, host memory, disk."""


@dataclass
class TierCounters:
    """Rows and bytes given by each tier since the last reset.

    >>> counters = TierCounters(row_bytes=8)
    >>> counters.add("device", 3)
    >>> counters.add("disk", 1)
    >>> counters.rows["device"], counters.bytes["disk"], counters.hit_rate("device")
    (3, 8, 0.75)
    """

    row_bytes: int
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes given by each tier."""
        return {tier: count * self.row_bytes for tier, count in self.rows.items()}

    def add(self, tier: str, num_rows: int) -> None:
        """Count rows given by a tier."""
        self.rows[tier] += num_rows

    def hit_rate(self, *tiers: str) -> float:
        """Return the share of rows that came from these tiers; 0 before the first row."""
        total = sum(self.rows.values())
        return sum(self.rows[tier] for tier in tiers) / total if total else 0.0

    def reset(self) -> None:
        """Set all counts to 0."""
        self.rows = dict.fromkeys(TIERS, 0)
