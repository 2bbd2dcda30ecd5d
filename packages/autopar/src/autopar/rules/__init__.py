"""How each ATen operator may be split: a table of rules on one mesh axis, and their product over a mesh."""

from __future__ import annotations

from autopar.rules import normalization, pointwise, products, reductions, views
from autopar.rules.configurations import Configuration, configurations
from autopar.rules.registry import ONCE, OperatorRule, is_supported, rule, rule_of, supported_operators

__all__ = [
    "ONCE",
    "Configuration",
    "OperatorRule",
    "configurations",
    "is_supported",
    "normalization",
    "pointwise",
    "products",
    "reductions",
    "rule",
    "rule_of",
    "supported_operators",
    "views",
]
