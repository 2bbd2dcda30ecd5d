"""Sizes of tensors as linear expressions over named counts such as the number of nodes or edges.

A captured program knows its shapes as ``2 * n + u0``. All the planner asks is whether one size is a whole multiple of
another, and what a size is once the counts are known; a linear form answers both and is written to JSON as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Size"]


@dataclass(frozen=True)
class Size:
    """A constant plus whole multiples of named counts.

    Args:
        terms: Pairs (name of a count, coefficient), sorted by name, no zero coefficient.
        constant: What is added to the terms.

    >>> nodes = Size.of("n")
    >>> (nodes + nodes).multiple_of(nodes), (nodes + Size.of("u0")).multiple_of(nodes)
    (2, None)
    >>> (nodes + 3).value({"n": 10})
    13
    """

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    @classmethod
    def of(cls, name: str) -> Size:
        """Return the size that equals the count ``name``."""
        return cls(((name, 1),))

    @property
    def is_constant(self) -> bool:
        """Whether no count occurs in this size."""
        return not self.terms

    def __add__(self, other: Size | int) -> Size:
        if isinstance(other, int):
            return Size(self.terms, self.constant + other)
        total = dict(self.terms)
        for name, coefficient in other.terms:
            total[name] = total.get(name, 0) + coefficient
        return Size(tuple(sorted((n, c) for n, c in total.items() if c)), self.constant + other.constant)

    def __mul__(self, factor: int) -> Size:
        return Size(tuple((n, c * factor) for n, c in self.terms if factor), self.constant * factor)

    def multiple_of(self, other: Size) -> int | None:
        """Return the whole ``k`` with ``self == k * other``, or ``None``; constants are multiples of no count."""
        if not other.terms or len(self.terms) != len(other.terms):
            return None
        factor = self.terms[0][1] // other.terms[0][1]
        return factor if factor and other * factor == self else None

    def rename(self, names: Mapping[str, str]) -> Size:
        """Return this size with counts replaced by the names given."""
        if not any(name in names for name, _ in self.terms):
            return self
        total = Size((), self.constant)
        for name, coefficient in self.terms:
            total = total + Size(((names.get(name, name), coefficient),))
        return total

    def value(self, counts: Mapping[str, int]) -> int:
        """Return the number this size has under the counts given."""
        return self.constant + sum(coefficient * counts[name] for name, coefficient in self.terms)

    def __str__(self) -> str:
        parts = [name if c == 1 else f"{c}*{name}" for name, c in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)

    def to_json(self) -> int | dict[str, int]:
        """Return a JSON-able form: the number itself, or counts to coefficients with ``""`` for the constant."""
        return self.constant if self.is_constant else {**dict(self.terms), "": self.constant}

    @classmethod
    def from_json(cls, data: int | Mapping[str, int]) -> Size:
        """Read what :meth:`to_json` wrote."""
        if isinstance(data, int):
            return cls((), data)
        return cls(tuple(sorted((n, c) for n, c in data.items() if n)), data.get("", 0))
