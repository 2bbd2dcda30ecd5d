"""Optimisers of embedding rows, with one meaning in every tier.

A step changes exactly the rows that some rank touched in the batch, with the row's gradient summed over features, bags
and ranks *before* anything nonlinear. Weight decay, momentum and moments of untouched rows stand still (what PyTorch
calls lazy or sparse semantics), wherever the row lives. Adam's bias correction counts steps of the collection, so that
splitting one step into several updates of disjoint rows does not count twice.

``lr`` may be changed between steps (schedulers set it); an update that was put off uses the rate of its own step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from core_kernels.ops import fused_optimizers as fused
from recsys_embed.errors import input_error

__all__ = ["OPTIMIZERS", "SGD", "Adagrad", "Adam", "Momentum", "RowOptimizer", "RowWiseAdagrad", "make_optimizer"]


@dataclass
class RowOptimizer:
    """Base of all row optimisers.

    Attributes:
        lr: Learning rate.
        weight_decay: L2 penalty, added to the gradient of touched rows.
    """

    name: ClassVar[str] = ""
    state_names: ClassVar[tuple[str, ...]] = ()
    #: Whether a zero gradient changes nothing, so that a dense update of a tier needs no mask of touched rows.
    zero_is_noop: ClassVar[bool] = False
    lr: float = 0.01
    weight_decay: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.lr >= 0 or not self.weight_decay >= 0:
            raise input_error("lr, weight_decay", (self.lr, self.weight_decay), "numbers of at least 0", "correct them")

    def make_states(self, weight: Tensor) -> list[Tensor]:
        """Return zero states for the rows of ``weight``."""
        return [torch.zeros_like(weight) for _ in self.state_names]

    def state_columns(self, width: int) -> int:
        """Return how many numbers of state a row of ``width`` numbers has."""
        return width * len(self.state_names)

    def update(self, weight: Tensor, states: list[Tensor], bags: tuple, grad: Tensor, step: int, lr: float) -> None:
        """Apply one step to the rows that the bags name.

        Args:
            weight: Rows, changed in place.
            states: What :meth:`make_states` made, changed in place.
            bags: ``(ids, offsets or None, weights or None, mode)``.
            grad: Gradient of the bags.
            step: Number of the step, from 1.
            lr: Rate of this step.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it updates rows")

    def describe(self) -> dict[str, Any]:
        """Return name and settings as plain values."""
        return {"name": self.name, **asdict(self)}

    @property
    def needs_mask(self) -> bool:
        """Whether an update must know which rows were touched."""
        return not self.zero_is_noop or self.weight_decay != 0


def _rest(bags: tuple) -> dict[str, Any]:
    return {"per_sample_weights": bags[2], "mode": bags[3], "bounds": "unchecked"}


@dataclass
class SGD(RowOptimizer):
    """``w -= lr * g``."""

    name = "sgd"
    zero_is_noop = True

    def update(self, weight, states, bags, grad, step, lr):
        """Apply one step; see the base class."""
        fused.fused_sgd_(weight, bags[0], bags[1], grad, lr, weight_decay=self.weight_decay, **_rest(bags))


@dataclass
class Momentum(RowOptimizer):
    """``v = momentum * v + g``; ``w -= lr * v``, both for touched rows."""

    name = "momentum"
    state_names = ("momentum_buffer",)
    momentum: float = 0.9

    def update(self, weight, states, bags, grad, step, lr):
        """Apply one step; see the base class."""
        decay = self.weight_decay
        fused.fused_sgd_(weight, bags[0], bags[1], grad, lr, states[0], self.momentum, decay, **_rest(bags))


@dataclass
class Adagrad(RowOptimizer):
    """``s += g * g``; ``w -= lr * g / (sqrt(s) + eps)``."""

    name = "adagrad"
    state_names = ("sum",)
    zero_is_noop = True
    eps: float = 1e-10

    def update(self, weight, states, bags, grad, step, lr):
        """Apply one step; see the base class."""
        decay = self.weight_decay
        fused.fused_adagrad_(weight, states[0], bags[0], bags[1], grad, lr, self.eps, decay, **_rest(bags))


@dataclass
class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one state per row: ``s += mean(g * g)``; ``w -= lr * g / (sqrt(s) + eps)``."""

    name = "rowwise_adagrad"
    state_names = ("sum",)
    zero_is_noop = True
    eps: float = 1e-8

    def make_states(self, weight):
        """Return one zero per row."""
        return [weight.new_zeros(weight.shape[0])]

    def state_columns(self, width):
        """Return 1."""
        return 1

    def update(self, weight, states, bags, grad, step, lr):
        """Apply one step; see the base class."""
        decay = self.weight_decay
        fused.fused_rowwise_adagrad_(weight, states[0], bags[0], bags[1], grad, lr, self.eps, decay, **_rest(bags))


@dataclass
class Adam(RowOptimizer):
    """Adam for touched rows, bias-corrected by the number of steps of the whole collection."""

    name = "adam"
    state_names = ("exp_avg", "exp_avg_sq")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def update(self, weight, states, bags, grad, step, lr):
        """Apply one step; see the base class."""
        rest = {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay, **_rest(bags)}
        fused.fused_adam_(weight, states[0], states[1], bags[0], bags[1], grad, lr, step, **rest)


OPTIMIZERS: dict[str, type[RowOptimizer]] = {c.name: c for c in (SGD, Momentum, Adagrad, RowWiseAdagrad, Adam)}


def make_optimizer(name: str, lr: float = 0.01, **settings: Any) -> RowOptimizer:
    """Return an optimiser by its name.

    >>> make_optimizer("adam", 0.1)
    Adam(lr=0.1, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-08)
    """
    if name not in OPTIMIZERS:
        raise input_error("optimizer", name, f"one of {', '.join(OPTIMIZERS)}", "choose one of them")
    return OPTIMIZERS[name](lr, **settings)
