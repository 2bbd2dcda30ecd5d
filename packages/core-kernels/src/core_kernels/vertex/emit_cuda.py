"""Emit a planned kernel as CUDA C++.

A group of ``group`` lanes, a power of two up to a warp, works on one row: lane ``l`` owns the features ``l``,
``l + group``, ... (the stride is the group, so every width is covered), narrow values are computed by all lanes and
written by the first. Sums over features are finished by shuffles inside the group. Nothing is written by two lanes, so
there are no atomics and results repeat bit by bit. Kernels with sums over all rows give a group a fixed run of rows.

What a row accumulates lies in global memory, in the result where the aggregation is one, else in an array of its own
(``t``): a row's part stays in the cache while the row is worked on.
Source: Seastar (EuroSys 2021), section 6.3, feature-adaptive groups; we differ by the stride.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core_kernels.vertex.fusion import Kernel, Plan
from core_kernels.vertex.loops import LoopEmitter

__all__ = ["KERNEL_NAME", "CudaKernel", "emit_cuda"]

KERNEL_NAME = "vertex_kernel"

_EXPRESSIONS = {
    "add": "add({0}, {1})",
    "sub": "add({0}, -{1})",
    "mul": "mul({0}, {1})",
    "div": "{0} / {1}",
    "maximum": "({0} > {1} || {0} != {0}) ? {0} : {1}",
    "minimum": "({0} < {1} || {0} != {0}) ? {0} : {1}",
    "running_max": "({1} > {0} || {1} != {1}) ? {1} : {0}",
    "running_min": "({1} < {0} || {1} != {1}) ? {1} : {0}",
    "eq": "{0} == {1} ? T(1) : T(0)",
    "gt": "{0} > {1} ? T(1) : T(0)",
    "neg": "-{0}",
    "sigmoid": "T(1) / (T(1) + exp(-{0}))",
    "relu": "({0} > T(0) || {0} != {0}) ? {0} : T(0)",
    "abs": "{0} < T(0) ? -{0} : {0}",
    "sign": "{0} > T(0) ? T(1) : ({0} < T(0) ? T(-1) : T(0))",
    "leaky_relu": "{0} > T(0) ? {0} : mul(T({attr!r}), {0})",
    "leaky_step": "{0} > T(0) ? T(1) : T({attr!r})",
    "elu": "{0} > T(0) ? {0} : mul(T({attr!r}), exp({0}) - T(1))",
    "elu_step": "{0} > T(0) ? T(1) : mul(T({attr!r}), exp({0}))",
}

# Finding the winners of a maximum compares recomputed values, so multiply and add must not be contracted there.
_EXACT = """
#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float add(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double add(double x, double y) { return __dadd_rn(x, y); }
__device__ __forceinline__ float mul(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double mul(double x, double y) { return __dmul_rn(x, y); }
#else
__device__ __forceinline__ T add(T x, T y) { return x + y; }
__device__ __forceinline__ T mul(T x, T y) { return x * y; }
#endif
"""
_FAST = """
__device__ __forceinline__ T add(T x, T y) { return x + y; }
__device__ __forceinline__ T mul(T x, T y) { return x * y; }
"""


class _CudaEmitter(LoopEmitter):
    """C++ text for one group of lanes."""

    keeps_edge_values = False

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        self.emit(f"{header} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.emit("}")

    def scope(self) -> str | None:
        return ""

    def for_range(self, variable: str, start: str, stop: str) -> str:
        return f"for (i64 {variable} = {start}; {variable} < {stop}; ++{variable})"

    def for_features(self, axis: int) -> str:
        return f"for (i64 f = lane; f < F{axis}; f += group)"

    def condition(self, *tests: str) -> str:
        return f"if ({' && '.join(tests)})"

    def let(self, name: str, value: str) -> str:
        return f"T {name} = {value};"

    def let_index(self, name: str, value: str) -> str:
        return f"i64 {name} = i64({value});"

    def add_to(self, name: str, value: str) -> str:
        return f"{name} = add({name}, {value});"

    def set(self, place: str, value: str) -> str:
        return f"{place} = {value};"

    def load(self, array: str, index: str, is_written: bool = False) -> str:
        return f"{array}[{index}]"

    def literal(self, value: float) -> str:
        if abs(value) == float("inf"):
            return f"{'-' if value < 0 else ''}core::infinity<T>()"
        return f"T({value!r})"

    def expression(self, op: str, args: list[str], attr: float | None) -> str:
        return _EXPRESSIONS.get(op, f"{op}({{0}})").format(*args, attr=attr)

    def after_feature_sum(self, name: str) -> None:
        self.emit(f"{name} = sum_over_group({name}, mask, group);")

    def prefetch(self, number: int, arrays: list[tuple[str, str]]) -> None:
        return

    def after_loop(self) -> None:
        self.emit("if (group > 1) __syncwarp(mask);")

    def narrow_writes(self) -> str | None:
        return "lane == 0"

    def _place(self, number: int) -> str:
        if number in self.plan.arrays:
            return super()._place(number)
        name = f"t{number}"
        if name not in self.parameters:
            self.parameters.append(name)
        return f"{name}[{self._index(self.nodes[number].axes, 'row')}]"


class CudaKernel:
    """Generated text of one kernel and its parameters.

    Attributes:
        kernel: What it computes.
        parameters: Names of its arrays in order: inputs ``a``, stored values ``o``, scratch ``t``, partial sums ``s``.
        relations: Its edge types; each brings ``indptr``, ``indices`` and, on source rows, ``positions``.
        has_sums: Whether it writes partial sums.
    """

    def __init__(self, plan: Plan, kernel: Kernel):
        emitter = _CudaEmitter(plan, kernel)
        emitter.depth = 2
        emitter.emit_row()
        self.kernel, self.relations, self.parameters = kernel, emitter.relations, emitter.parameters
        self.has_sums = any(name.startswith("s") for name in self.parameters)
        self.widths = sorted({node.shape[1] for node in plan.program.nodes} - {0})
        self._lines = emitter.lines
        self._is_exact = any(node.op in ("eq", "max_dst", "min_dst") for node in plan.program.nodes)

    def text(self, dtype: str, index: str) -> str:
        """Return the CUDA C++ text.

        Args:
            dtype: ``float`` or ``double``.
            index: ``int`` or ``long long``, type of source ids.
        """
        graph = []
        for number in range(len(self.relations)):
            graph += [f"const i64* indptr{number}", f"const Index* indices{number}"]
            graph += [f"const i64* positions{number}"] if self.kernel.side == "S" else []
        arrays = [f"{'const ' if name[0] == 'a' else ''}T* {name}" for name in self.parameters]
        sizes = ["num_blocks", "rows_per_block", "num_rows", "group", "H", *(f"F{axis}" for axis in self.widths)]
        arguments = ", ".join([*(f"i64 {name}" for name in sizes), *graph, *arrays])
        bounds = [
            f"        i64 lo{number} = indptr{number}[row], hi{number} = indptr{number}[row + 1];"
            for number in range(len(self.relations))
        ]
        return "\n".join(
            [
                '#include "common.cuh"',
                "using core::i64;",
                f"typedef {dtype} T;",
                f"typedef {index} Index;",
                _EXACT if self._is_exact else _FAST,
                "__device__ __forceinline__ T sum_over_group(T value, unsigned mask, i64 group) {",
                "    for (int step = int(group) / 2; step > 0; step /= 2)",
                "        value += __shfl_xor_sync(mask, value, step, int(group));",
                "    return value;",
                "}",
                "",
                f"__global__ void {KERNEL_NAME}({arguments}) {{",
                "    i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x;",
                "    i64 lane = thread % group, block = thread / group;",
                "    if (block >= num_blocks) return;",
                "    unsigned first = threadIdx.x % 32 / unsigned(group) * unsigned(group);",
                "    unsigned mask = (group == 32 ? 0xffffffffu : (1u << group) - 1u) << first;",
                "    i64 stop = (block + 1) * rows_per_block < num_rows ? (block + 1) * rows_per_block : num_rows;",
                "    for (i64 row = block * rows_per_block; row < stop; ++row) {",
                *bounds,
                *self._lines,
                "    }",
                "}",
                "",
            ]
        )


def emit_cuda(plan: Plan, dtype: str = "float", index: str = "int") -> list[str]:
    """Return the text of every kernel of a plan."""
    return [CudaKernel(plan, kernel).text(dtype, index) for kernel in plan.kernels]
