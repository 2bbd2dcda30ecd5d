"""From a planned kernel to a nest of loops, shared by the emitters that generate code.

Inside a row and, in loops, inside an edge, values are computed head by head. A value has a phase: the number of dot
products over features that must be finished before it. Each phase computes its narrow values first and then runs one
loop over features per width, in which wide values are computed afresh from what they depend on; nothing wide is kept.

An emitter subclasses :class:`LoopEmitter` and says how a loop, an assignment and an expression are written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from core_kernels.vertex.fusion import Kernel, Loop, Plan, Root
from core_kernels.vertex.ir import Shape, ancestors

__all__ = ["LoopEmitter", "extent"]

_ALIASES = frozenset({"on_edge", "expand"})


def extent(shape: Shape) -> str:
    """Return the numbers per entity of a shape as an expression."""
    return {(0, 0): "1", (1, 0): "H"}.get(shape) or (f"(H * F{shape[1]})" if shape[0] else f"F{shape[1]}")


class LoopEmitter(ABC):
    """Writes the body of one kernel.

    Attributes:
        plan: The plan the kernel belongs to.
        kernel: The kernel.
        lines: Text so far.
        parameters: Names of the arrays the text uses: ``a3`` input 3, ``o7`` stored value 7, ``s9`` partial sums.
    """

    #: Whether loops may leave edge values in scratch memory of the row.
    keeps_edge_values = True

    def __init__(self, plan: Plan, kernel: Kernel):
        self.plan, self.kernel, self.nodes = plan, kernel, plan.program.nodes
        self.lines: list[str] = []
        self.depth = 1
        self.parameters: list[str] = []
        self.own = kernel.aggregates()
        self.scratch = self.own | {
            root.target
            for step in kernel.steps
            if step.relation is None
            for root in step.roots
            if root.action == "keep"
        }
        self.relations = list(dict.fromkeys(step.relation for step in kernel.steps if step.relation is not None))
        self._available: set[int] = set()
        self._edge: str | None = None

    # What a language has to say.

    @abstractmethod
    def block(self, header: str) -> AbstractContextManager[None]:
        """Open a nested block."""

    @abstractmethod
    def scope(self) -> str | None:
        """Return the header of a block that only limits the life of names, None if the language needs none."""

    @abstractmethod
    def for_range(self, variable: str, start: str, stop: str) -> str:
        """Return the header of a counting loop."""

    @abstractmethod
    def for_features(self, axis: int) -> str:
        """Return the header of the loop over a feature axis."""

    @abstractmethod
    def condition(self, *tests: str) -> str:
        """Return the header of a block that runs when all tests hold."""

    @abstractmethod
    def let(self, name: str, value: str) -> str:
        """Return the definition of a local value."""

    @abstractmethod
    def add_to(self, name: str, value: str) -> str:
        """Return the addition of something to a local value."""

    @abstractmethod
    def set(self, place: str, value: str) -> str:
        """Return an assignment to an element of an array."""

    @abstractmethod
    def load(self, array: str, index: str, is_written: bool = False) -> str:
        """Return an expression that reads an element; ``is_written``: of an array this kernel writes."""

    @abstractmethod
    def expression(self, op: str, args: list[str], attr: float | None) -> str:
        """Return an element-wise operation."""

    @abstractmethod
    def literal(self, value: float) -> str:
        """Return a number of the kernel's dtype."""

    @abstractmethod
    def after_feature_sum(self, name: str) -> None:
        """Finish a sum over features, for languages whose feature loop runs on several lanes."""

    @abstractmethod
    def prefetch(self, number: int, arrays: list[tuple[str, str]]) -> None:
        """Ask for rows of the far ends of edges that come soon, where the language can."""

    @abstractmethod
    def after_loop(self) -> None:
        """Make what a loop accumulated visible to what follows."""

    @abstractmethod
    def narrow_writes(self) -> str | None:
        """Return a condition under which narrow results are written, None for always."""

    # The walk, the same for all.

    def emit(self, line: str) -> None:
        """Add one line at the current depth."""
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def nested(self, header: str | None) -> Iterator[None]:
        """Open a block if there is a header."""
        if header is None:
            yield
            return
        with self.block(header):
            yield

    def array(self, prefix: str, number: int) -> str:
        """Return the name of an array, noting that it is a parameter."""
        name = f"{prefix}{number}"
        if prefix in "aos" and name not in self.parameters:
            self.parameters.append(name)
        return name

    def emit_row(self) -> None:
        """Write the work of one row."""
        for position, step in enumerate(self.kernel.steps):
            if step.relation is None:
                self._edge = None
                self.emit_body([root for root in step.roots if not self._is_accumulator_store(root)])
                self._available |= {root.value for root in step.roots if root.action == "keep"}
            else:
                self.emit_loop(step, position)
            self.after_loop()

    def _is_accumulator_store(self, root: Root) -> bool:
        return root.action == "store" and root.value in self.own

    def emit_loop(self, loop: Loop, position: int) -> None:
        """Write a loop over the edges of the row, with its accumulators."""
        assert loop.relation is not None  # else it is a row stage
        number = self.relations.index(loop.relation)
        reductions = [root for root in loop.roots if root.action in ("sum", "max", "min")]
        for root in reductions:
            start = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}[root.action]
            self._fill_accumulator(root.target, start)
        with self.block(self.for_range("p", f"lo{number}", f"hi{number}")):
            self.emit_ends(number)
            self.prefetch(number, self._wide_far_arrays(loop))
            self._edge = f"(p - lo{number})"
            self.emit_body([root for root in loop.roots if root.action != "keep" or self.keeps_edge_values])
        self.after_loop()
        for root in reductions:
            empty = self.nodes[root.target].number
            if root.action != "sum" or empty != 0.0:
                with self.block(self.condition(f"lo{number} == hi{number}")):
                    self._fill_accumulator(root.target, empty)
        if self.keeps_edge_values:
            self._available |= {root.value for root in loop.roots if root.action == "keep"}

    def _wide_far_arrays(self, loop: Loop) -> list[tuple[str, str]]:
        """Return name and row length of the arrays of which an edge reads a whole row at its far end."""
        stops = {number for number in range(len(self.nodes)) if self._leaf_quietly(number)}
        far = "S" if self.kernel.side == "D" else "D"
        read = ancestors(self.nodes, [root.value for root in loop.roots], stops) & stops
        wide = sorted(n for n in read if self.nodes[n].is_wide and self.nodes[n].kind == far)
        return [(self.array("a" if self.nodes[n].op == "input" else "o", n), extent(self.nodes[n].axes)) for n in wide]

    def emit_ends(self, number: int) -> None:
        """Write which entity is at the far end of an edge, and the edge's position in the graph."""
        self.emit(self.let_index("far", self.load(f"indices{number}", "p")))
        at = self.load(f"positions{number}", "p") if self.kernel.side == "S" else "p"
        self.emit(self.let_index("pos", at))

    @abstractmethod
    def let_index(self, name: str, value: str) -> str:
        """Return the definition of a 64-bit index."""

    def _fill_accumulator(self, number: int, value: float) -> None:
        shape = self.nodes[number].shape
        place = lambda: self.set(self._place(number), self.literal(value))  # noqa: E731
        with self.nested(self.for_range("h", "0", "H") if shape[0] else None):
            if shape[1]:
                with self.block(self.for_features(shape[1])):
                    self.emit(place())
            else:
                narrow = self.narrow_writes()
                with self.nested(narrow and self.condition(narrow)):
                    self.emit(place())

    def _index(self, shape: Shape, entity: str) -> str:
        width = f"F{shape[1]}"
        if shape == (0, 0):
            return entity
        if shape == (1, 0):
            return "h" if entity == "0" else f"{entity} * H + h"
        if shape[0]:
            return f"h * {width} + f" if entity == "0" else f"({entity} * H + h) * {width} + f"
        return "f" if entity == "0" else f"{entity} * {width} + f"

    def _entity(self, kind: str) -> str:
        if kind == "P":
            return "0"
        return "pos" if kind == "E" else "row" if kind == self.kernel.side else "far"

    def _place(self, number: int) -> str:
        """Return array and index of a value of the row that this kernel holds, as ``array[index]``."""
        node = self.nodes[number]
        if number in self.plan.arrays:
            return f"{self.array('o', number)}[{self._index(node.axes, 'row')}]"
        return f"{self.array('t', number)}[{self._index(node.axes, '0')}]"

    def _leaf(self, number: int) -> str | None:
        """Return how a value is read if it is in memory, else None."""
        node = self.nodes[number]
        if node.op == "const":
            return self.literal(node.number)
        if node.op in ("input", "degree"):
            return self.load(self.array("a", number), self._index(node.axes, self._entity(node.kind)))
        if number in self.own or (number in self.scratch and number in self._available):
            array, _, index = self._place(number)[:-1].partition("[")
            return self.load(array, index, is_written=True)
        if number in self._available and self._edge is not None:
            return self.load(self.array("k", number), self._index(node.axes, self._edge), is_written=True)
        if number in self.plan.arrays and number not in self.kernel.writes():
            return self.load(self.array("o", number), self._index(node.axes, self._entity(node.kind)))
        return None

    def emit_body(self, roots: list[Root]) -> None:
        """Write what is computed for one row or one edge."""
        if not roots:
            return
        stops = {number for number in range(len(self.nodes)) if self._leaf_quietly(number)}
        needed = sorted(ancestors(self.nodes, [root.value for root in roots], stops))
        phase: dict[int, int] = {}
        for number in needed:
            args = () if number in stops else self.nodes[number].args
            phase[number] = max((phase[arg] for arg in args), default=0)
            phase[number] += number not in stops and self.nodes[number].op == "feature_sum"
        has_heads = any(self.nodes[number].shape[0] for number in needed)
        header = self.for_range("h", "0", "H") if has_heads else self.scope()
        with self.nested(header):
            for current in range(max(phase.values()) + 1):
                self._emit_phase(current, needed, phase, roots, stops, has_heads)

    def _leaf_quietly(self, number: int) -> bool:
        before = list(self.parameters)
        found = self._leaf(number) is not None
        self.parameters = before
        return found

    def _emit_phase(
        self, current: int, needed: list[int], phase: dict[int, int], roots: list[Root], stops: set[int], heads: bool
    ) -> None:
        nodes = self.nodes
        for number in needed:
            is_sum = number not in stops and nodes[number].op == "feature_sum"
            if phase[number] == current and not nodes[number].is_wide and not is_sum:
                self._emit_value(number, number in stops)
        here = [root for root in roots if phase[root.value] == current]
        self._emit_roots([root for root in here if not nodes[root.value].is_wide], heads)
        sums = [
            number
            for number in needed
            if number not in stops and nodes[number].op == "feature_sum" and phase[number] == current + 1
        ]
        for number in sums:
            self.emit(self.let(f"v{number}", self.literal(0.0)))
        for axis in sorted(
            {nodes[n].shape[1] for n in [nodes[n].args[0] for n in sums] + [r.value for r in here]} - {0}
        ):
            of_axis = [number for number in sums if nodes[nodes[number].args[0]].shape[1] == axis]
            wide_roots = [root for root in here if nodes[root.value].shape[1] == axis]
            values = [nodes[number].args[0] for number in of_axis] + [root.value for root in wide_roots]
            narrow = {number for number in needed if not nodes[number].is_wide}
            with self.block(self.for_features(axis)):
                for number in sorted(ancestors(nodes, values, stops | narrow) - narrow):
                    self._emit_value(number, number in stops)
                for number in of_axis:
                    self.emit(self.add_to(f"v{number}", f"v{nodes[number].args[0]}"))
                self._emit_roots(wide_roots, heads)
        for number in sums:
            self.after_feature_sum(f"v{number}")

    def _emit_value(self, number: int, is_leaf: bool) -> None:
        node = self.nodes[number]
        if is_leaf:
            value = self._leaf(number)
            assert value is not None  # leaves are what this reads
        elif node.op in _ALIASES:
            value = f"v{node.args[0]}"
        else:
            value = self.expression(node.op, [f"v{arg}" for arg in node.args], node.slope)
        self.emit(self.let(f"v{number}", value))

    def _emit_roots(self, roots: Iterable[Root], heads: bool) -> None:
        for root in roots:
            shape, narrow = self.nodes[root.value].axes, self.narrow_writes()
            tests = ["h == 0"] if heads and not shape[0] else []
            if not shape[1] and narrow:
                tests.append(narrow)
            with self.nested(self.condition(*tests) if tests else None):
                self._emit_root(root, shape)

    def _emit_root(self, root: Root, shape: Shape) -> None:
        value = f"v{root.value}"
        if root.action == "all":
            place = f"{self.array('s', root.target)}[{self._index(shape, 'block')}]"
        elif root.action == "store":
            node = self.nodes[root.value]
            place = f"{self.array('o', root.value)}[{self._index(shape, self._entity(node.kind))}]"
        elif root.action == "keep" and self._edge is not None:
            place = f"{self.array('k', root.value)}[{self._index(shape, self._edge)}]"
        else:
            place = self._place(root.target)
        array, _, index = place[:-1].partition("[")
        old = self.load(array, index, is_written=True)
        if root.action in ("sum", "all"):
            value = f"{old} + {value}"
        elif root.action in ("max", "min"):
            value = self.expression(f"running_{root.action}", [old, value], None)
        self.emit(self.set(place, value))
