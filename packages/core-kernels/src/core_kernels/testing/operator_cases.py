"""Inputs for every raw operator, and the comparison of one implementation with the float64 reference.

One list serves the parity tests of all implementations: Numba kernels, emulated and real CUDA kernels, and the runs
under AddressSanitizer. The graph has duplicate edges, self-loops, rows without edges and one hub; ids cover the first
and last row; widths are rarely powers of two.

The oracle is the torch reference in float64. A result of floats may differ from it by a few rounding errors of the sum
of absolute values (the reference of the absolute inputs) where the operator is linear, of the value itself elsewhere.
Integers must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Case", "compare", "graph_arrays", "operator_cases", "run_case"]

_ULPS = 12.0


@dataclass(frozen=True)
class Case:
    """One call of a raw operator's implementation.

    Attributes:
        op: The operator.
        label: What is special about this case.
        args: The implementation's arguments before its outputs.
        outputs: Allocated outputs, poisoned; empty when the implementation returns its results.
        mutated: Positions of arguments written in place; they count as results.
        linear: Whether errors scale with the same operator on absolute values.
        oracle64: Whether the oracle computes in float64; off where bits of fp32 arithmetic are part of the contract.
    """

    op: str
    label: str
    args: tuple
    outputs: tuple[Tensor, ...] = ()
    mutated: tuple[int, ...] = ()
    linear: bool = False
    oracle64: bool = True

    def __str__(self) -> str:
        return f"{self.op}: {self.label}"


def _clone(value, dtype=None, absolute=False, device=None):
    if not isinstance(value, Tensor):
        return value
    value = value.clone() if device is None else value.to(device, copy=True)
    if value.dtype.is_floating_point:
        value = value.abs() if absolute else value
        value = value if dtype is None else value.to(dtype)
    return value


def run_case(
    case: Case,
    backend: str,
    dtype: torch.dtype | None = None,
    absolute: bool = False,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Run an implementation on copies of the case's tensors.

    Args:
        case: What to run.
        backend: ``torch``, ``numba``, ``emulate`` or ``cuda``.
        dtype: Convert floating-point tensors to this first.
        absolute: Take absolute values of floating-point inputs first.
        device: Move tensors there first.

    Returns:
        Outputs or returned tensors, then the mutated arguments.
    """
    from core_kernels.ops._library import implementation

    args = [_clone(arg, dtype, absolute, device) for arg in case.args]
    outputs = [_clone(out, dtype, device=device) for out in case.outputs]
    returned = implementation(case.op, backend)(*args, *outputs)
    results = outputs if outputs else list(returned or ())
    return results + [args[position] for position in case.mutated if args[position] is not None]


def compare(case: Case, results: list[Tensor]) -> None:
    """Raise ``AssertionError`` when results differ from the oracle by more than rounding allows."""
    exact = run_case(case, "torch", torch.float64 if case.oracle64 else None)
    bounds = run_case(case, "torch", torch.float64, absolute=True) if case.linear else exact
    assert len(results) == len(exact), f"{case}: {len(results)} results, expected {len(exact)}"
    for number, (result, wanted, bound) in enumerate(zip(results, exact, bounds, strict=True)):
        result = result.cpu()
        assert result.shape == wanted.shape, (
            f"{case}: result {number} is {tuple(result.shape)}, not {tuple(wanted.shape)}"
        )
        if not result.dtype.is_floating_point or not case.oracle64:
            assert torch.equal(result, wanted), f"{case}: result {number} differs: {_first_difference(result, wanted)}"
            continue
        allowed = _ULPS * torch.finfo(result.dtype).eps * (bound.abs() + (0.0 if case.linear else 1.0))
        wrong = (result.double() - wanted).abs() > allowed + torch.finfo(result.dtype).tiny
        wrong |= result.isnan() != wanted.isnan()
        assert not wrong.any(), f"{case}: result {number} differs: {_first_difference(result, wanted, wrong)}"


def _first_difference(result: Tensor, wanted: Tensor, wrong: Tensor | None = None) -> str:
    places = (result != wanted if wrong is None else wrong).nonzero()
    at = tuple(places[0].tolist())
    return f"{places.shape[0]} values, the first at {at}: {result[at].item()} instead of {wanted[at].item()}"


@dataclass(frozen=True)
class GraphArrays:
    """A small graph as raw operators take it; ``t_`` is the transposed graph."""

    num_src: int
    num_dst: int
    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor
    t_indptr: Tensor
    t_indices: Tensor
    t_positions: Tensor

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.indices.numel()


def graph_arrays(
    index: torch.dtype, num_src: int = 23, num_dst: int = 31, num_edges: int = 150, hub: int = 40, seed: int = 5
) -> GraphArrays:
    """Make a graph with duplicate edges, rows without edges and one row of at least ``hub`` edges.

    Args:
        index: Dtype of ``indices``.
        num_src: Number of sources.
        num_dst: Number of destinations; the last two have no edge.
        num_edges: Edges besides the hub's.
        hub: Further edges into destination 3.
        seed: Seed of the edges.
    """
    generator = torch.Generator().manual_seed(seed)
    dst = torch.randint(0, max(1, num_dst - 2), (num_edges,), generator=generator)
    dst = torch.cat((dst, torch.full((hub,), min(3, num_dst - 1)))).sort().values
    src = torch.randint(0, num_src, (dst.numel(),), generator=generator)
    positions = torch.argsort(src, stable=True)
    return GraphArrays(
        num_src,
        num_dst,
        _row_pointers(dst, num_dst),
        src.to(index),
        torch.randperm(dst.numel(), generator=generator),
        _row_pointers(src, num_src),
        dst[positions].to(index),
        positions,
    )


def _row_pointers(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), torch.bincount(rows, minlength=num_rows).cumsum(0)))


def operator_cases(
    dtype: torch.dtype, index: torch.dtype, width: int = 7, heads: int = 1, hub: int = 40, seed: int = 5
) -> Iterator[Case]:
    """Yield cases of every operator.

    Args:
        dtype: Element type.
        index: Index type.
        width: Columns; ``heads`` must divide it.
        heads: Heads of edge weights and softmax.
        hub: Edges of the largest row, besides a few.
        seed: Seed of all values.
    """
    maker = _CaseMaker(dtype, index, width, heads, graph_arrays(index, hub=hub, seed=seed), seed)
    yield from maker.aggregation()
    yield from maker.extrema()
    yield from maker.edges()
    yield from maker.sampling()
    yield from maker.rows()
    yield from maker.embedding()
    yield from maker.compression()


class _CaseMaker:
    """Draws the tensors of all cases from one generator."""

    def __init__(self, dtype: torch.dtype, index: torch.dtype, width: int, heads: int, graph: GraphArrays, seed: int):
        self.dtype, self.index, self.width, self.heads, self.graph = dtype, index, width, heads, graph
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def steps(self, *shape: int) -> Tensor:
        """Small whole numbers: many equal values."""
        return torch.randint(-3, 4, shape, generator=self.generator).to(self.dtype)

    def ids(self, count: int, bound: int) -> Tensor:
        """Ids with duplicates, the first and the last row among them."""
        ids = torch.randint(0, bound, (count,), generator=self.generator)
        ids[:2] = torch.tensor([bound - 1, 0])
        return ids.to(self.index)

    def poison(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An output full of a value that no operator leaves behind."""
        return torch.full(shape, -77, dtype=self.dtype if dtype is None else dtype)

    def aggregation(self) -> Iterator[Case]:
        g, (w, h) = self.graph, (self.width, self.heads)
        x, weight = self.randn(g.num_src, w), self.randn(g.num_edges, h)
        src_scale, dst_scale = self.randn(g.num_src).abs(), self.randn(g.num_dst).abs()
        for label, *options in (
            ("plain", None, None, None, None),
            ("weights by position", weight, None, None, None),
            ("weights by edge id, both scales", weight, g.edge_ids, src_scale, dst_scale),
        ):
            args = (g.indptr, g.indices, x, *options)
            yield Case("spmm_sum", label, args, (self.poison(g.num_dst, w),), linear=True)
        rows = self.randn(g.num_edges, w)
        for label, ids, scale in (("plain", None, None), ("edge ids, scale", g.edge_ids, dst_scale)):
            yield Case("segment_sum", label, (rows, g.indptr, ids, scale), (self.poison(g.num_dst, w),), linear=True)
            args = (self.randn(g.num_dst, w), g.indptr, ids, scale, g.num_edges)
            yield Case("segment_expand", label, args, (self.poison(g.num_edges, w),), linear=True)

    def extrema(self) -> Iterator[Case]:
        g, (w, h) = self.graph, (self.width, self.heads)
        weight, grad = self.randn(g.num_edges, h), self.randn(g.num_dst, w)
        numbers = self.randn(g.num_src, w)
        numbers[1, 0] = float("nan")
        outputs = (self.poison(g.num_dst, w), self.poison(g.num_dst, w, dtype=torch.int32))
        for label, largest, *operands in (
            ("equal values, maximum", True, self.steps(g.num_src, w), None, None),
            ("equal values, minimum", False, self.steps(g.num_src, w), None, None),
            ("a NaN", True, numbers, None, None),
            ("weights by edge id", True, self.randn(g.num_src, w), weight, g.edge_ids),
        ):
            yield Case("spmm_extremum", label, (g.indptr, g.indices, *operands, largest), outputs)
        for label, ids in (("plain", None), ("edge ids", g.edge_ids)):
            yield Case("segment_extremum", label, (self.steps(g.num_edges, w), g.indptr, ids, True), outputs)
        degree = g.indptr.diff().unsqueeze(1)
        draw = torch.randint(0, 1 << 30, (g.num_dst, w), generator=self.generator)
        arg = torch.where(degree > 0, draw % degree.clamp_min(1), -1).int()
        for label, factors, ids in (("plain", None, None), ("weights by edge id", weight, g.edge_ids)):
            args = (g.indptr, g.indices, grad, arg, factors, ids, g.t_indptr, g.t_indices, g.t_positions)
            yield Case("spmm_extremum_backward", label, args, (self.poison(g.num_src, w),), linear=True)
            args = (g.indptr, g.indices, self.randn(g.num_src, w), grad, arg, ids, h)
            yield Case("spmm_extremum_weight_backward", label, args, (self.poison(g.num_edges, h),), linear=True)
            args = (grad, arg, g.indptr, ids, g.num_edges)
            yield Case("segment_extremum_backward", label, args, (self.poison(g.num_edges, w),), linear=True)

    def edges(self) -> Iterator[Case]:
        g, (w, h) = self.graph, (self.width, self.heads)
        a, b = self.randn(g.num_src, w), self.randn(g.num_dst, w)
        for op, columns in (("dot", h), ("add", w), ("mul", w)):
            for label, ids in ((op, None), (f"{op}, edge ids", g.edge_ids)):
                args = (g.indptr, g.indices, a, b, ids, op, h if op == "dot" else w)
                yield Case("sddmm", label, args, (self.poison(g.num_edges, columns),), linear=True)
        logits, grad = 3 * self.randn(g.num_edges, h), self.randn(g.num_edges, h)
        logits[: int(g.indptr[1])] = float("-inf")
        out = torch.rand(g.num_edges, h, generator=self.generator).to(self.dtype)
        for label, ids in (("plain", None), ("edge ids", g.edge_ids)):
            target = (self.poison(g.num_edges, h),)
            yield Case("segment_softmax", label, (logits, g.indptr, ids), target)
            scale = int(g.indptr.diff().max())
            yield Case("segment_softmax_backward", label, (grad / scale, out, g.indptr, ids), target)

    def sampling(self) -> Iterator[Case]:
        g = self.graph
        seeds = torch.cat((torch.tensor([3, g.num_dst - 1, 0]), torch.arange(4, g.num_dst - 1)))
        keys = torch.randint(-(1 << 40), 1 << 40, (seeds.numel(),), generator=self.generator)
        for label, ids, key, fanout, replace in (
            ("all", g.edge_ids, None, -1, False),
            ("three of each", None, None, 3, False),
            ("33 without replacement", g.edge_ids, keys, 33, False),
            ("5 with replacement", g.edge_ids, keys, 5, True),
            ("all, replacement asked", None, None, -1, True),
        ):
            args = (g.indptr, g.indices, ids, seeds, key, fanout, replace, 12345, 2, 1)
            yield Case("sample_neighbors", label, args)
            # Sources and destinations of a block share their ids.
            yield Case("sample_block", label, (*args, max(g.num_src, g.num_dst)))
        for label, ids in (
            ("duplicates", self.ids(300, 50)),
            ("all equal", torch.full((130,), 7, dtype=self.index)),
            ("negative and large", (self.ids(200, 90) - 45) * 40_000_000),
            ("none", torch.empty(0, dtype=self.index)),
        ):
            yield Case("unique_relabel", label, (ids,))

    def rows(self) -> Iterator[Case]:
        w = self.width
        x = self.randn(41, w)
        yield Case("gather", "floats", (x, self.ids(60, 41)), (self.poison(60, w),), oracle64=False)
        small = torch.randint(0, 100, (41, w), generator=self.generator).to(torch.int8)
        target = (self.poison(60, w, dtype=torch.int8),)
        yield Case("gather", "bytes", (small, self.ids(60, 41)), target, oracle64=False)
        yield Case("gather", "no ids", (x, torch.empty(0, dtype=self.index)), (self.poison(0, w),), oracle64=False)
        yield Case("scatter_add", "duplicates", (x, self.ids(41, 50), 50), (self.poison(50, w),), linear=True)
        rows, base = self.randn(60, w), self.randn(41, w)
        args = (base, self.ids(60, 41), rows, False)
        yield Case("unpack_rows_", "last stays", args, mutated=(0,), oracle64=False)
        yield Case("unpack_rows_", "accumulate", (*args[:3], True), mutated=(0,), linear=True)
        offsets = torch.tensor([0, 10, 10, 25, 26, 50])
        target = (self.poison(200, dtype=torch.int64), self.poison(5, dtype=torch.int64))
        yield Case("bucket_by_owner", "an empty part", (self.ids(200, 50), offsets), target)

    def embedding(self) -> Iterator[Case]:
        w, num_rows = self.width, 19
        ids = self.ids(64, num_rows)
        offsets = torch.tensor([0, 0, 5, 6, 6, 30, 64, 64])
        table, factors, grad = self.randn(num_rows, w), self.randn(64), self.randn(7, w)
        for mean in (False, True):
            for label, factor in (("plain", None), ("weighted", factors)):
                label += ", mean" if mean else ""
                args = (table, ids, offsets, factor, mean)
                yield Case("embedding_bag", label, args, (self.poison(7, w),), linear=True)
                args = (grad, ids, offsets, factor, mean, num_rows)
                yield Case("embedding_bag_backward", label, args, (self.poison(num_rows, w),), linear=True)
            args = (grad, table, ids, offsets, mean)
            yield Case("embedding_bag_sample_weight_backward", label, args, (self.poison(64),), linear=True)
        for optimizer in ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam"):
            yield self._update(optimizer, table, ids, offsets, grad, factors)

    def _update(
        self, optimizer: str, table: Tensor, ids: Tensor, offsets: Tensor, grad: Tensor, factors: Tensor
    ) -> Case:
        rows = table.shape[0]
        first = (
            None if optimizer == "sgd" else self.randn(*((rows,) if optimizer == "rowwise_adagrad" else table.shape))
        )
        first = first.abs() + 0.5 if first is not None else None
        second = self.randn(*table.shape).abs() + 0.5 if optimizer == "adam" else None
        numbers = (0.1, 1e-3, 0.9, 0.99, 0.01, 3)
        mean = optimizer in ("adagrad", "adam")
        args = (table, first, second, ids, offsets, grad, None if mean else factors, optimizer, mean, *numbers)
        return Case("embedding_update_", optimizer, args, mutated=(0, 1, 2))

    def compression(self) -> Iterator[Case]:
        x = self.randn(33, self.width)
        x[4] = 2.5
        for bits in (8, 4):
            num_bytes = self.width if bits == 8 else (self.width + 1) // 2
            codes = torch.randint(0, 256, (33, num_bytes), generator=self.generator).to(torch.uint8)
            scale, offset = torch.rand(33, generator=self.generator), torch.randn(33, generator=self.generator)
            vectors = [self.poison(33, dtype=torch.float32) for _ in range(2)]
            target = (self.poison(33, num_bytes, dtype=torch.int16).to(torch.uint8), *vectors)
            yield Case("quantize_rows", f"{bits} bits", (x, bits), target, oracle64=False)
            args = (codes, scale, offset, bits, self.width)
            target = (self.poison(33, self.width, dtype=torch.float32),)
            yield Case("dequantize_rows", f"{bits} bits", args, target, oracle64=False)
        keys = torch.randint(0, 1 << 40, (90,), generator=self.generator)
        keys[50:] = keys[:40].clone()
        values = torch.randn(90, generator=self.generator)
        for num_rows in (5, 4):
            table = torch.randn(num_rows, 17, generator=self.generator)
            yield Case("sketch_insert_", f"{num_rows} rows", (table, keys, values, 9), mutated=(0,))
            args = (table, keys, 9)
            yield Case(
                "sketch_estimate", f"{num_rows} rows", args, (self.poison(90, dtype=torch.float32),), oracle64=False
            )
