"""The table of rules: what a rule states about an operator, and how one is added.

A rule is a function from an operator to ways of splitting it over *one* mesh axis, each the form of every tensor input
and of the output. It never lists the way in which every rank does everything; that one is always there. It writes
``R`` for a value that all ranks need whole; where ranks then do different work with it, its gradient is a partial sum,
which is put in afterwards (``Q``). ``ONCE`` marks a value that is added to a partial sum and must therefore enter once.

A rule says nothing of divisibility, costs or other axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import ProblemError
from autopar.graph import Operator

__all__ = ["ONCE", "OperatorRule", "Split", "is_supported", "rule", "rule_of", "supported_operators"]

ONCE = -4
Split = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class OperatorRule:
    """What the planner knows of one kind of operator.

    Attributes:
        splits: Ways of splitting it over one axis.
        saves: Tensor inputs kept for the backward pass.
        saves_output: Whether the output is kept.
        saves_bytes_per_output: Bytes kept besides, per element of the output (masks, indices); -1 means one element.
        flops: Multiply-adds times two of the forward pass, whole tensor; ``None`` counts bytes only.
        is_view: Whether the output shares the input's memory.
    """

    splits: Callable[[Operator], list[Split]]
    saves: tuple[int, ...] = ()
    saves_output: bool = False
    saves_bytes_per_output: float = 0.0
    flops: Callable[[Operator], float] | None = None
    is_view: bool = False


_RULES: dict[str, OperatorRule] = {}


def rule(
    *kinds: str,
    saves: tuple[int, ...] = (),
    saves_output: bool = False,
    saves_bytes_per_output: float = 0.0,
    flops: Callable[[Operator], float] | None = None,
    is_view: bool = False,
) -> Callable[[Callable[[Operator], list[Split]]], Callable[[Operator], list[Split]]]:
    """Register a function as the rule of some kinds of operators; see :class:`OperatorRule` for the arguments.

    >>> @rule("a_new_activation", saves=(0,))
    ... def split_a_new_activation(operator):
    ...     return [((dim,), dim) for dim in range(len(operator.output.shape))]
    >>> is_supported("a_new_activation")
    True
    """

    def register(splits: Callable[[Operator], list[Split]]) -> Callable[[Operator], list[Split]]:
        for kind in kinds:
            _RULES[kind] = OperatorRule(splits, saves, saves_output, saves_bytes_per_output, flops, is_view)
        return splits

    return register


def is_supported(kind: str) -> bool:
    """Whether there is a rule for a kind of operator."""
    return kind in _RULES


def rule_of(kind: str) -> OperatorRule:
    """Return the rule of a kind of operator.

    Raises:
        ProblemError: There is none.
    """
    if kind not in _RULES:
        raise ProblemError(
            f"there is no rule for {kind!r}; expected one of {len(_RULES)} kinds; add one with rules.rule"
        )
    return _RULES[kind]


def supported_operators() -> list[str]:
    """Return all kinds with a rule, sorted."""
    return sorted(_RULES)
