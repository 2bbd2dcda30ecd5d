"""Bytes that cross between ranks, counted per tag, and the formulas that predict them.

Every collective adds to a :class:`ByteCounters` what leaves and what enters this rank as payload; the part a rank keeps
for itself counts nothing, nor do headers. For the collectives whose route is chosen inside the transport, the count
follows the algorithm gloo and NCCL use on large messages: a ring for ``all_reduce``, a binomial tree for ``broadcast``.
The same functions are public, so that a cost model and the counters cannot drift apart.

Row counts that ranks tell each other before an uneven exchange are counted under ``"<tag>.counts"``, apart from
payload.
"""

from __future__ import annotations

from collections import defaultdict

__all__ = ["ByteCounters", "broadcast_bytes", "ring_all_reduce_bytes"]


class ByteCounters:
    """Payload bytes sent and received by one rank, per tag.

    >>> counters = ByteCounters()
    >>> counters.add("grads", sent_bytes=8, received_bytes=4)
    >>> counters.sent("grads"), counters.received(), counters.sent("other")
    (8, 4, 0)
    """

    def __init__(self) -> None:
        self._sent: dict[str, int] = defaultdict(int)
        self._received: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)

    def add(self, tag: str, sent_bytes: int, received_bytes: int) -> None:
        """Count one operation."""
        self._sent[tag] += sent_bytes
        self._received[tag] += received_bytes
        self._calls[tag] += 1

    def sent(self, tag: str | None = None) -> int:
        """Return the bytes that left this rank under ``tag``, or under all tags."""
        return sum(self._sent.values()) if tag is None else self._sent.get(tag, 0)

    def received(self, tag: str | None = None) -> int:
        """Return the bytes that entered this rank under ``tag``, or under all tags."""
        return sum(self._received.values()) if tag is None else self._received.get(tag, 0)

    def calls(self, tag: str | None = None) -> int:
        """Return how many operations ran under ``tag``, or under all tags."""
        return sum(self._calls.values()) if tag is None else self._calls.get(tag, 0)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return ``{tag: {"sent_bytes", "received_bytes", "calls"}}``, sorted by tag and JSON-able."""
        return {
            tag: {"sent_bytes": self._sent[tag], "received_bytes": self._received[tag], "calls": self._calls[tag]}
            for tag in sorted(self._calls)
        }

    def reset(self) -> None:
        """Forget everything counted so far."""
        self._sent.clear()
        self._received.clear()
        self._calls.clear()


def ring_all_reduce_bytes(num_elements: int, element_bytes: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the bytes one rank sends and receives in a ring all-reduce.

    The ring cuts ``n`` elements into ``P`` blocks, the first ``n mod P`` of them one element longer. A rank sends all
    blocks but one while reducing and all but one while gathering, hence about ``2 (P-1)/P n`` elements each way.

    >>> ring_all_reduce_bytes(10, 4, rank=0, world_size=1)
    (0, 0)
    >>> ring_all_reduce_bytes(10, 4, rank=0, world_size=2)
    (40, 40)
    """

    def sent_by(r: int) -> int:
        blocks_kept = _block(num_elements, r + 1, world_size) + _block(num_elements, r + 2, world_size)
        return (2 * num_elements - blocks_kept) * element_bytes

    if world_size == 1:
        return 0, 0
    return sent_by(rank), sent_by(rank - 1)


def broadcast_bytes(num_bytes: int, rank: int, root: int, world_size: int) -> tuple[int, int]:
    """Return the bytes one rank sends and receives when ``num_bytes`` go from ``root`` down a binomial tree.

    >>> [broadcast_bytes(8, rank, 0, 4) for rank in range(4)]
    [(16, 0), (0, 8), (8, 8), (0, 8)]
    """
    place = (rank - root) % world_size
    num_children, reach = 0, 1
    while reach < world_size and not place & reach:
        num_children += place + reach < world_size
        reach *= 2
    return num_children * num_bytes, num_bytes if place else 0


def _block(num_elements: int, block: int, num_blocks: int) -> int:
    return num_elements // num_blocks + (block % num_blocks < num_elements % num_blocks)
