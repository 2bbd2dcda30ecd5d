"""Emit a planned kernel as Numba source: a function over blocks of rows.

The function takes ``(start, stop, rows_per_block, num_rows, H, F1, ..., arrays)``. All arrays are flat and
C-contiguous. Rows are independent, so any division of the blocks among threads gives the same bits; sums over all rows
are kept per block, whose size does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core_kernels.vertex.fusion import Kernel, Plan
from core_kernels.vertex.loops import LoopEmitter, extent

__all__ = ["NumbaKernel", "emit_numba"]

#: Edges between the request for a source row and its use: with random sources loops wait for memory.
_PREFETCH_DISTANCE = 16
#: Bumped when what generated code imports changes its meaning.
_SUPPORT_VERSION = 4

_EXPRESSIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "{0} if {0} > {1} or {0} != {0} else {1}",
    "minimum": "{0} if {0} < {1} or {0} != {0} else {1}",
    "running_max": "{1} if {1} > {0} or {1} != {1} else {0}",
    "running_min": "{1} if {1} < {0} or {1} != {1} else {0}",
    "eq": "{one} if {0} == {1} else {zero}",
    "gt": "{one} if {0} > {1} else {zero}",
    "neg": "-{0}",
    "exp": "exp({0})",
    "log": "math.log({0})",
    "sqrt": "math.sqrt({0})",
    "tanh": "math.tanh({0})",
    "sigmoid": "{one} / ({one} + exp(-{0}))",
    "relu": "{0} if {0} > {zero} or {0} != {0} else {zero}",
    "abs": "abs({0})",
    "sign": "{one} if {0} > {zero} else (-{one} if {0} < {zero} else {zero})",
    "leaky_relu": "{0} if {0} > {zero} else {attr} * {0}",
    "leaky_step": "{one} if {0} > {zero} else {attr}",
    "elu": "{0} if {0} > {zero} else {attr} * (exp({0}) - {one})",
    "elu_step": "{one} if {0} > {zero} else {attr} * exp({0})",
}


class _NumbaEmitter(LoopEmitter):
    """Python text for Numba."""

    def __init__(self, plan: Plan, kernel: Kernel):
        super().__init__(plan, kernel)
        self.constants: dict[float, str] = {}

    @contextmanager
    def block(self, header: str) -> Iterator[None]:
        self.emit(f"{header}:")
        self.depth += 1
        yield
        self.depth -= 1

    def for_range(self, variable: str, start: str, stop: str) -> str:
        return f"for {variable} in range({stop})" if start == "0" else f"for {variable} in range({start}, {stop})"

    def for_features(self, axis: int) -> str:
        return f"for f in range(F{axis})"

    def after_feature_sum(self, name: str) -> None:
        return

    def prefetch(self, number: int, arrays: list[tuple[str, str]]) -> None:
        if not arrays:
            return
        with self.block(f"if p + {_PREFETCH_DISTANCE} < end{number}"):
            self.emit(f"soon = np.int64(get(indices{number}, p + {_PREFETCH_DISTANCE}))")
            for array, length in arrays:
                self.emit(f"prefetch({array}, soon * {length}, {length})")

    def after_loop(self) -> None:
        return

    def narrow_writes(self) -> str | None:
        return None

    def scope(self) -> str | None:
        return None

    def condition(self, *tests: str) -> str:
        return f"if {' and '.join(tests)}"

    def add_to(self, name: str, value: str) -> str:
        return f"{name} = {name} + {value}"

    def let(self, name: str, value: str) -> str:
        return f"{name} = {value}"

    def let_index(self, name: str, value: str) -> str:
        return f"{name} = np.int64({value})"

    def set(self, place: str, value: str) -> str:
        array, _, index = place[:-1].partition("[")
        return f"put({array}, {index}, {value})"

    def load(self, array: str, index: str, is_written: bool = False) -> str:
        return f"get_written({array}, {index})" if is_written else f"get({array}, {index})"

    def literal(self, value: float) -> str:
        return self.constants.setdefault(value, f"C{len(self.constants)}")

    def expression(self, op: str, args: list[str], attr: float | None) -> str:
        words = {"one": self.literal(1.0), "zero": self.literal(0.0)}
        if attr is not None:
            words["attr"] = self.literal(attr)
        return _EXPRESSIONS[op].format(*args, **words)


class NumbaKernel:
    """Generated source of one kernel and how to call it.

    Attributes:
        kernel: What it computes.
        source: The module's text, less dtype and index type.
        parameters: Names of its arrays in order.
        relations: Its edge types; each brings ``indptr``, ``indices`` and, on source rows, ``positions``.
        has_sums: Whether it writes partial sums per block.
    """

    def __init__(self, plan: Plan, kernel: Kernel):
        emitter = _NumbaEmitter(plan, kernel)
        emitter.depth = 3
        emitter.emit_row()
        self.kernel, self.relations = kernel, emitter.relations
        self.parameters = [name for name in emitter.parameters if name[0] in "aos"]
        self.has_sums = any(name.startswith("s") for name in self.parameters)
        self.source = self._module(plan, emitter)

    def _module(self, plan: Plan, emitter: _NumbaEmitter) -> str:
        nodes = plan.program.nodes
        widths = sorted({node.shape[1] for node in nodes} - {0})
        arrays = []
        for index in range(len(self.relations)):
            arrays += [f"indptr{index}", f"indices{index}"]
            arrays += [f"positions{index}"] if self.kernel.side == "S" else []
        arguments = ["start", "stop", "rows_per_block", "num_rows", "H", *(f"F{axis}" for axis in widths)]
        header = [
            f"def kernel({', '.join([*arguments, *arrays, *self.parameters])}):",
            *(f"    t{n} = np.empty({extent(nodes[n].axes)}, T)" for n in sorted(emitter.scratch - set(plan.arrays))),
        ]
        for number in self.kernel.kept:
            index = self.relations.index(nodes[number].relation)
            header += [
                f"    longest{number} = 1",
                "    for row in range(start * rows_per_block, min(stop * rows_per_block, num_rows)):",
                f"        longest{number} = max(longest{number}, indptr{index}[row + 1] - indptr{index}[row])",
                f"    k{number} = np.empty(longest{number} * {extent(nodes[number].axes)}, T)",
            ]
        header += [
            *(f"    end{index} = len(indices{index})" for index in range(len(self.relations))),
            "    for block in range(start, stop):",
            "        for row in range(block * rows_per_block, min((block + 1) * rows_per_block, num_rows)):",
            *(
                f"            lo{index}, hi{index} = get(indptr{index}, row), get(indptr{index}, row + 1)"
                for index in range(len(self.relations))
            ),
        ]
        constants = [
            f"{name} = T({value!r})" if abs(value) != float("inf") else f"{name} = T({'-' if value < 0 else ''}np.inf)"
            for value, name in emitter.constants.items()
        ]
        decorator = f"@njit(cache=True, nogil=True, error_model='numpy', fastmath={self._fastmath(plan)})"
        return "\n".join([*constants, "", "", decorator, *header, *emitter.lines, ""])

    @staticmethod
    def _fastmath(plan: Plan) -> str:
        # Finding the winners of a maximum compares recomputed values bit by bit, so nothing may be reassociated there.
        exact = any(node.op in ("eq", "max_dst", "min_dst") for node in plan.program.nodes)
        return "False" if exact else "{'reassoc', 'contract', 'nsz'}"

    def module_text(self, dtype: str, index_dtypes: str) -> str:
        """Return the text of the module for one choice of types; they are part of the text and so of its hash."""
        return "\n".join(
            [
                f"# vertex kernel, {dtype}, indices {index_dtypes}, support {_SUPPORT_VERSION}",
                "import math",
                "",
                "import numpy as np",
                "from numba import njit",
                "",
                "from core_kernels.vertex.numba_support import exp, get, get_written, prefetch, put",
                "",
                f"T = np.{dtype}",
                self.source,
            ]
        )


def emit_numba(plan: Plan, dtype: str = "float32") -> list[str]:
    """Return the source of every kernel of a plan, for reading."""
    return [NumbaKernel(plan, kernel).module_text(dtype, "int32") for kernel in plan.kernels]
