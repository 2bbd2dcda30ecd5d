"""Lossy all-reduce for gradients, opt-in: a count sketch for sparse ones, clustered quantisation for dense ones.

Both carry what they lose: the error of a call is added to the next one (error feedback), so that over a run nothing
is dropped. The sum over ranks of results and of errors carried always equals the sum of the inputs, up to rounding.

:class:`SketchAllReduce` sends a bitmap of the non-zeros and a small table of signed sums, which ranks add up; values
are then read back where any rank has a non-zero. For d elements, R rows, C columns and P ranks each rank sends about
2 (P-1)/P (d/8 + 4 R C) bytes instead of 2 (P-1)/P 4 d. One row's estimate has variance at most ||g||^2 / C, with g the
summed gradient; the result is the median of R rows.

:class:`ClusterAllReduce` replaces values by 2^b cluster centres and sends b bits a value. Centres start on a uniform
grid and are moved by Lloyd's iteration, so the squared error is never above that of rounding to the grid,
((max - min) / (2^b - 1))^2 / 4 a value.

Source: K. Ge et al., "S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep Learning"
(arXiv 2110.02140), for the bitmap and sketch; "CASQ: Accelerate Distributed Deep Learning with Sketch-Based Gradient
Quantization" (CLUSTER 2021), for clusters of gradient values. Where we differ: errors are fed back row by row, so that
they add up exactly; clusters carry their own centres instead of hash buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_kernels.comm.group import Group
from core_kernels.errors import ArgumentTypeError, argument_error

__all__ = ["ClusterAllReduce", "SketchAllReduce", "fit_clusters", "pack_bits", "unpack_bits"]

_LLOYD_ITERATIONS = 8


class SketchAllReduce:
    """Sums sparse tensors over ranks through a count sketch.

    Args:
        group: The ranks.
        num_columns: C, columns of the sketch; several times the expected number of non-zeros in the sum is accurate.
        num_rows: R, odd, so that the median is one row's estimate.
        seed: Key of the hashes, the same on all ranks; every call hashes differently.
        error_feedback: Whether errors are carried to the next call of the same name.

    >>> reducer = SketchAllReduce(Group.single(), num_columns=64)
    >>> reducer.all_reduce(torch.tensor([0.0, 2.0, 0.0, -1.0]), name="w").tolist()
    [0.0, 2.0, 0.0, -1.0]
    """

    def __init__(self, group: Group, num_columns: int, num_rows: int = 5, seed: int = 0, error_feedback: bool = True):
        if num_rows < 1 or num_rows % 2 == 0:
            raise argument_error("num_rows", num_rows, "an odd number of at least 1", "pass 3 or 5")
        if num_columns < 1:
            raise argument_error("num_columns", num_columns, "at least 1", "pass a few per expected non-zero")
        self.group, self.num_columns, self.num_rows, self.seed = group, num_columns, num_rows, seed
        self.carried: dict[str, Tensor] | None = {} if error_feedback else None
        self._num_calls: dict[str, int] = {}

    def all_reduce(self, x: Tensor, name: str = "", tag: str = "sketch") -> Tensor:
        """Return the approximate sum of ``x`` over ranks.

        Args:
            x: Floating point, any shape; computed in float32.
            name: Which tensor this is, for error feedback.
            tag: Label in the group's counters; the bitmap is counted under ``"<tag>.bitmap"``.

        Collective: all ranks, with equal shapes and names in the same order.
        """
        from core_kernels.ops import CountSketch

        flat = _with_carried(x, self.carried, name)
        step = self._num_calls.get(name, 0)
        self._num_calls[name] = step + 1
        keys = flat.nonzero().view(-1)
        union = self._union_of(flat, f"{tag}.bitmap")
        # One sketch a row: the median's row must be known to split the error among ranks.
        rows = []
        for row in range(self.num_rows):
            rows.append(CountSketch(1, self.num_columns, self.seed + step * self.num_rows + row, flat.device))
            rows[row].insert(keys, flat[keys])
        own = torch.stack([row.estimate(union) for row in rows])
        summed = self.group.all_reduce(torch.cat([row.table for row in rows]), tag=tag, ordered=True)
        for row, table in zip(rows, summed, strict=True):
            row.table = table.view(1, -1)
        estimate = torch.stack([row.estimate(union) for row in rows]).median(0)
        result = torch.zeros_like(flat)
        result[union] = estimate.values
        if self.carried is not None:
            # The chosen row is linear, so this rank's share of the estimate is its own sketch read in that row.
            flat[union] -= own.gather(0, estimate.indices.unsqueeze(0))[0]
            self.carried[name] = flat
        return result.view(x.shape).to(x.dtype)

    def _union_of(self, flat: Tensor, tag: str) -> Tensor:
        """Return the positions where any rank has a non-zero."""
        mine = pack_bits((flat != 0).to(torch.uint8), 1)
        counts = [len(block) for block in mine.tensor_split(self.group.size)]
        share = [counts[self.group.rank]] * self.group.size
        blocks = self.group.all_to_all_v(mine, counts, share, tag)[0].view(self.group.size, -1)
        merged = blocks[0].clone()
        for block in blocks[1:]:
            merged |= block
        everywhere = self.group.all_gather_v(merged, tag, counts=counts)[0]
        return unpack_bits(everywhere, 1, len(flat)).nonzero().view(-1)


class ClusterAllReduce:
    """Sums tensors over ranks with every value rounded to one of a few cluster centres.

    Args:
        group: The ranks.
        bits: b, bits a value: 1, 2, 4 or 8.
        error_feedback: Whether errors are carried to the next call of the same name.

    Each rank sends its codes to all others, (P-1) (b d / 8 + 4 2^b) bytes: for few ranks or few bits.

    >>> reducer = ClusterAllReduce(Group.single(), bits=1)
    >>> reducer.all_reduce(torch.tensor([1.0, 1.0, -3.0]), name="w").tolist()
    [1.0, 1.0, -3.0]
    """

    def __init__(self, group: Group, bits: int = 2, error_feedback: bool = True):
        if bits not in (1, 2, 4, 8):
            raise argument_error("bits", bits, "1, 2, 4 or 8", "choose one of them")
        self.group, self.bits = group, bits
        self.carried: dict[str, Tensor] | None = {} if error_feedback else None

    def all_reduce(self, x: Tensor, name: str = "", tag: str = "clusters") -> Tensor:
        """Return the approximate sum of ``x`` over ranks, added up in rank order.

        Args:
            x: Floating point, any shape; computed in float32.
            name: Which tensor this is, for error feedback.
            tag: Label in the group's counters.

        Collective: all ranks, with equal shapes and names in the same order.
        """
        flat = _with_carried(x, self.carried, name)
        centres, codes = fit_clusters(flat, 2**self.bits)
        message = torch.cat([centres.view(torch.uint8), pack_bits(codes.to(torch.uint8), self.bits)])
        counts = [len(message)] * self.group.size
        messages = self.group.all_gather_v(message, tag, counts=counts)[0].view(self.group.size, -1)
        result = torch.zeros_like(flat)
        for received in messages:
            table = received[: 4 * 2**self.bits].clone().view(torch.float32)
            result += table[unpack_bits(received[4 * 2**self.bits :], self.bits, len(flat)).long()]
        if self.carried is not None:
            self.carried[name] = flat - centres[codes]
        return result.view(x.shape).to(x.dtype)


def fit_clusters(values: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Cluster numbers by Lloyd's iteration from a uniform grid.

    Args:
        values: float32 ``[n]``.
        num_clusters: How many centres.

    Returns:
        ``(centres float32 [num_clusters] ascending, codes int64 [n])``; a code is that of the nearest centre.

    >>> centres, codes = fit_clusters(torch.tensor([0.0, 0.1, 5.0, 5.2]), 2)
    >>> [round(centre, 2) for centre in centres.tolist()], codes.tolist()
    ([0.05, 5.1], [0, 0, 1, 1])
    """
    if values.numel() == 0:
        return values.new_zeros(num_clusters), torch.zeros(0, dtype=torch.int64, device=values.device)
    low, high = values.min(), values.max()
    # In float64, or the means of large clusters drift and the error may rise.
    exact = values.double()
    centres = torch.linspace(0, 1, num_clusters, dtype=torch.float64, device=values.device) * (high - low) + low
    for _ in range(_LLOYD_ITERATIONS):
        codes = _nearest(exact, centres)
        sizes = torch.bincount(codes, minlength=num_clusters)
        sums = torch.bincount(codes, weights=exact, minlength=num_clusters)
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    centres = centres.float()
    return centres, _nearest(values, centres)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes below ``2**bits`` into bytes, the first code in the lowest bits.

    >>> pack_bits(torch.tensor([1, 0, 1, 1], dtype=torch.uint8), 1).tolist()
    [13]
    """
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % per_byte)).view(-1, per_byte)
    packed = torch.zeros(len(padded), dtype=torch.uint8, device=codes.device)
    for place in range(per_byte):
        packed |= padded[:, place] << (place * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int, num_codes: int) -> Tensor:
    """Return the uint8 codes that :func:`pack_bits` packed.

    >>> unpack_bits(torch.tensor([13], dtype=torch.uint8), 1, 4).tolist()
    [1, 0, 1, 1]
    """
    places = [(packed >> (place * bits)) & (2**bits - 1) for place in range(8 // bits)]
    return torch.stack(places, dim=1).view(-1)[:num_codes]


def _nearest(values: Tensor, centres: Tensor) -> Tensor:
    return torch.bucketize(values, (centres[1:] + centres[:-1]) / 2)


def _with_carried(x: Tensor, carried: dict[str, Tensor] | None, name: str) -> Tensor:
    """Return ``x`` as a fresh float32 vector plus the error carried under ``name``."""
    if not x.dtype.is_floating_point:
        raise ArgumentTypeError(f"x has dtype {x.dtype}; expected a floating point gradient; use Group.all_reduce")
    flat = x.detach().to(torch.float32, copy=True).reshape(-1)
    if carried is not None and name in carried:
        if len(carried[name]) != len(flat):
            expected = f"{len(carried[name])} elements, as in the last call named {name!r}"
            raise argument_error("x", tuple(x.shape), expected, "give every tensor its own name")
        flat += carried[name]
    return flat
