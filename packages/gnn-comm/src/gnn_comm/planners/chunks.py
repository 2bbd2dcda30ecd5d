"""Cut classes of interchangeable rows into chunks, the units that planners route.

A class travels by one tree per chunk, so a large class can spread over several trees. Chunks have about equal size;
small classes are one chunk each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnn_comm.requests import RequestClasses

__all__ = ["Chunks", "ragged_arange", "split_classes"]


@dataclass(frozen=True)
class Chunks:
    """Runs of rows with equal owner and equal set of needing devices.

    Args:
        num_devices: Number P of devices.
        source: int64 ``[num_chunks]``; owner.
        need_indptr: int64 ``[num_chunks + 1]``.
        need: int64; needing devices of each chunk.
        row_start: int64 ``[num_chunks]``; first row of the chunk in ``rows``.
        num_rows: int64 ``[num_chunks]``.
        rows: int64; the row array of the classes.
    """

    num_devices: int
    source: np.ndarray
    need_indptr: np.ndarray
    need: np.ndarray
    row_start: np.ndarray
    num_rows: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.source)


def split_classes(requests: RequestClasses, num_chunks: int) -> Chunks:
    """Cut classes so that there are about ``num_chunks`` chunks beyond one per class.

    Args:
        requests: The classes.
        num_chunks: Chunks wanted; 0 keeps every class whole.
    """
    total = int(requests.row_indptr[-1])
    size = max(1, -(-total // num_chunks)) if num_chunks else max(total, 1)
    pieces = -(-requests.num_rows // size)
    of_class = np.repeat(np.arange(requests.num_classes), pieces)
    number = ragged_arange(pieces)
    sizes, count = requests.num_rows[of_class], pieces[of_class]
    begin, end = sizes * number // np.maximum(count, 1), sizes * (number + 1) // np.maximum(count, 1)
    num_needs = np.diff(requests.need_indptr)[of_class]
    need = requests.need[np.repeat(requests.need_indptr[of_class], num_needs) + ragged_arange(num_needs)]
    return Chunks(
        requests.num_devices,
        requests.source[of_class],
        np.concatenate([[0], np.cumsum(num_needs)]).astype(np.int64),
        need,
        requests.row_indptr[of_class] + begin,
        end - begin,
        requests.rows,
    )


def ragged_arange(lengths: np.ndarray) -> np.ndarray:
    """Concatenate ``arange(n)`` for every length.

    >>> ragged_arange(np.array([2, 0, 3]))
    array([0, 1, 0, 1, 2])
    """
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - lengths, lengths)
