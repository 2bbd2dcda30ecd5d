"""Stands in for the input layer while a model is called: its rows were computed elsewhere.

A model is called as ``model(blocks, x)`` and never changed. During the call its input layer answers with finished rows,
its block knows only how many there are, and the input features cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gnn_parallel.errors import UnsupportedLayerError

__all__ = ["InputBlock", "InputRows", "answering"]


@dataclass(frozen=True)
class InputBlock:
    """Stands for the input layer's block in ``model(blocks, x)``: which rows come out, not how.

    Attributes:
        dst_ids: int64 ``[num_dst]``, node ids of the rows.
    """

    dst_ids: Tensor

    @property
    def num_dst(self) -> int:
        """Number of rows that come out."""
        return len(self.dst_ids)

    def edge_index(self) -> None:
        """Return nothing: the edges may be on other ranks. PyG-style calls pass it on to the input layer."""


class InputRows:
    """Stands for the input features in ``model(blocks, x)``; only the input layer may read them."""

    def __getitem__(self, key: Any) -> InputRows:
        return self

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedLayerError(
            f"the model reads .{name} of its input features before the input layer; expected the input layer to come "
            "first, since strategies spread its inputs over ranks; transform features beforehand"
        )


@contextmanager
def answering(module: nn.Module, rows: Tensor) -> Iterator[None]:
    """Let ``module`` answer calls with rows computed elsewhere."""
    own = module.__dict__.get("forward")  # set by the user or a wrapper; usually there is none
    num_calls = 0

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise UnsupportedLayerError(
                f"the model calls its input layer {type(module).__name__} {num_calls} times; expected once, since its "
                "rows come from several ranks; give the other layers modules of their own"
            )
        return rows

    module.forward = answer
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
