"""Collectives in flight: handles that wait, and the items of a point-to-point batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from core_kernels.comm.membership import Membership

__all__ = ["Handle", "Recv", "Send"]


@dataclass(frozen=True, eq=False)
class Send:
    """One message to another rank.

    Attributes:
        tensor: The value, any shape and dtype.
        peer: Rank that receives it.
    """

    tensor: Tensor
    peer: int


@dataclass(frozen=True, eq=False)
class Recv:
    """One message from another rank.

    Attributes:
        tensor: Contiguous tensor that is overwritten; its size must equal the message's.
        peer: Rank that sends it.
    """

    tensor: Tensor
    peer: int


class Handle:
    """A collective that has been started.

    Args:
        group: The group it runs on.
        collective: Its name, for errors.
        tag: Its label, for errors.
        works: What the transport returned.
        finish: Turns the received bytes into the result once they are here.
    """

    def __init__(self, group: Membership, collective: str, tag: str, works: list[Any], finish: Callable[[], Any]):
        self._group, self.collective, self.tag = group, collective, tag
        self._works, self._finish = works, finish
        self._is_done, self._result = False, None

    def is_done(self) -> bool:
        """Whether :meth:`wait` is known to return at once; gloo knows that of a single message only after the wait."""
        return self._is_done or all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """Wait and return what the synchronous form returns; further calls return the same.

        Raises:
            CollectiveError: A peer failed, or the group's time-out passed while waiting here.
        """
        if not self._is_done:
            begin = time.monotonic()
            with self._group._entered(self.collective, self.tag, begin):
                for work in self._works:
                    left = self._group.timeout_seconds - (time.monotonic() - begin)
                    self._group._wire.wait(work, left)
            self._result = self._finish()
            self._is_done, self._works = True, []
        return self._result
