"""Running the steps of a stage on a block.

Each step is made callable once per stage; running a block walks the list, keeps tensors in slots and drops each after
its last use. The operators are the model's own, called on fewer rows. Three details keep results bit for bit those of
the full forward: edges of a destination keep their order, fills are added to in place just as in the model, and matrix
products go through :mod:`gnn_eval.row_exact`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnn_eval.block import Block
from gnn_eval.conv_blocks import make_conv
from gnn_eval.errors import UnsupportedModelError
from gnn_eval.fusion import FUSED_MAKERS, fuse_stage
from gnn_eval.hoisting import StructureEvaluator, callable_of
from gnn_eval.lanes import RowExactPointwise, takes_one_tensor
from gnn_eval.lowering import Rows, StageProgram, Step
from gnn_eval.patterns import gather_of, reduction_of
from gnn_eval.program import Program, Ref, Value, resolve_operator
from gnn_eval.row_exact import PRODUCTS, RowExactProduct, depends_on_position, pick_result, positions_of_one_column
from gnn_eval.row_stores import RowStore
from gnn_eval.sizes import Size

__all__ = ["Slots", "StageRunner"]

Slots = dict[str, Any]
Action = Callable[[Slots, Block], Any]


class StageRunner:
    """A stage with its stores and constants bound.

    Args:
        program: The typed program.
        stage: The stage.
        stores: Rows of inputs and stored values by name.
        structure: Gives structural values and constants.
        fuse: Whether to use fused kernels.
    """

    def __init__(
        self,
        program: Program,
        stage: StageProgram,
        stores: dict[str, RowStore],
        structure: StructureEvaluator,
        fuse: bool = False,
    ):
        self._given_stage = stage
        self.stage = fuse_stage(program, stage) if fuse else stage
        self.is_fused = self.stage is not stage
        self.needs_groups = self.is_fused or any(step.action == "conv" for step in stage.steps)
        self.program = self._program = program
        self._stores, self._structure = stores, structure
        self.actions = [(step, self._maker(step)) for step in self.stage.steps]
        self._last_use = _last_uses(self.stage)

    def unfused(self) -> StageRunner:
        """Return a runner of the same stage without fused kernels."""
        return StageRunner(self._program, self._given_stage, self._stores, self._structure) if self.is_fused else self

    def _maker(self, step: Step) -> Action:
        if step.action in FUSED_MAKERS:
            return FUSED_MAKERS[step.action](self._program, step)
        if step.action == "conv":
            return make_conv(self._program, step, self._structure)
        makers = {"load": self._load, "apply": self._apply, "gather": self._gather, "reduce": self._reduce}
        return makers[step.action](step)

    def run(self, block: Block) -> Slots:
        """Run all steps; return the slots of the stage's results."""
        slots: Slots = {}
        with torch.inference_mode():
            for place, (step, action) in enumerate(self.actions):
                slots[step.slot] = action(slots, block)
                for done in self._last_use[place]:
                    slots.pop(done, None)
        return slots

    def run_steps(self, steps: set[str], slots: Slots, block: Block) -> None:
        """Run only the steps whose slots are given, adding to ``slots``."""
        with torch.inference_mode():
            for step, action in self.actions:
                if step.slot in steps:
                    slots[step.slot] = action(slots, block)

    # Makers: each returns the callable of one step.

    def _load(self, step: Step) -> Action:
        value = self._program[step.name]
        store = self._stores.get(step.name)
        if store is None:
            return self._load_structure(step, value)
        return _prepared_or(step.slot, self._load_rows(step, store))

    def _load_rows(self, step: Step, store: RowStore) -> Action:
        if step.rows.kind == "range":

            def load(slots: Slots, block: Block) -> Tensor:
                chosen = block.destinations
                return (
                    store.read_range(chosen.start, chosen.stop) if chosen.ids is None else store.read_rows(chosen.ids)
                )

        elif step.rows.kind == "source":

            def load(slots: Slots, block: Block) -> Tensor:
                ids = block.sources.get(step.rows.space)
                return store.read_range(0, store.num_rows) if ids is None else store.read_rows(ids)

        else:

            def load(slots: Slots, block: Block) -> Tensor:
                return _take_store(store, block.edges_at(step.rows).edge_ids)

        return load

    def _load_structure(self, step: Step, value: Value) -> Action:
        tensor, dim = self._structure[value.name], value.type.row_dim

        def load(slots: Slots, block: Block) -> Tensor:
            if step.rows.kind == "range":
                chosen = block.destinations
                where = slice(chosen.start, chosen.stop) if chosen.ids is None else chosen.ids
            elif step.rows.kind == "source":
                where = block.sources.get(step.rows.space, slice(0, tensor.size(dim)))
            else:
                where = block.edges_at(step.rows).edge_ids
            return _take(tensor, dim, where)

        return load

    def _apply(self, step: Step) -> Action:
        value = self._program[step.name]
        function = callable_of(value.op)
        fill = self._argument_filler(value, step)
        key, row_dim, factor = step.rows.key, value.type.row_dim, value.type.factor
        if value.op == "operator.getitem":
            inner, place = step.inputs[value.args[0].name], value.args[1]

            def pick(slots: Slots, block: Block) -> Tensor:
                return pick_result(slots[inner], place, row_dim, factor)

            return pick
        if value.short_op in PRODUCTS:
            return self._product(step, value, function, fill)

        if takes_one_tensor(self._program, value):
            return self._pointwise(step, value, function, fill)

        def apply(slots: Slots, block: Block) -> Any:
            args, kwargs = fill(slots, block.counts[key])
            return function(*args, **kwargs)

        return apply

    def _pointwise(self, step: Step, value: Value, function: Any, fill: Any) -> Action:
        """Return the action of a function whose last bit depends on where in the tensor an item lies."""
        (slot,), key = step.inputs.values(), step.rows.key
        num_rows = self._structure.count_of(value.type.rows)
        item_bytes = value.dtype.itemsize if value.dtype is not None else 4

        def run(slots: Slots, block: Block) -> Tensor:
            def call(items: Tensor) -> Tensor:
                args, kwargs = fill({slot: items}, block.counts[key])
                return function(*args, **kwargs)

            exact = RowExactPointwise(call, value.row_bytes() // item_bytes, num_rows, item_bytes)
            return exact(slots[slot], *self._place_of_rows(step.rows, block))

        return run

    def _product(self, step: Step, value: Value, function: Any, fill: Any) -> Action:
        """Return the action of a matrix product, whose rows must not depend on the size of the block."""
        row_dims = {
            step.inputs[name]: (kind.row_dim, kind.factor)
            for name in step.inputs
            for kind in [self._program[name].type]
            if kind.space is not None
        }

        def call(tensors: Slots, rows: int) -> Any:
            args, kwargs = fill(tensors, rows)
            return function(*args, **kwargs)

        result = (value.type.row_dim, value.type.factor) if value.is_tensor else None
        exact = RowExactProduct(
            call,
            row_dims,
            result,
            self._structure.count_of(value.type.rows),
            depends_on_position(self._program, value),
            positions_of_one_column(self._program, value),
        )
        return lambda slots, block: exact(slots, block.counts[step.rows.key], *self._place_of_rows(step.rows, block))

    def _place_of_rows(self, rows: Rows, block: Block) -> tuple[int, Tensor | None]:
        """Return the number of the first row in the full tensor, and the numbers of all if they are not consecutive."""
        if rows.kind == "edge":
            edges = block.edges_at(rows).edge_ids
            return (edges.start, None) if isinstance(edges, slice) else (0, edges)
        first, ids = 0, block.sources.get(rows.space)
        if rows.kind == "range":
            first, ids = block.destinations.start, block.destinations.ids
        given_ids = self._structure.ids_of_rows(rows.space)
        if given_ids is None:
            return first, ids
        return 0, given_ids[first : first + block.counts[rows.key]] if ids is None else given_ids[ids]

    def _gather(self, step: Step) -> Action:
        gather = gather_of(self._program, self._program[step.name])
        slot, dim = step.inputs[gather.source], gather.dim
        if step.at_range:
            return lambda slots, block: slots[slot].index_select(dim, block.edges[step.edges].rows_of_edges())
        key = (step.edges, step.index)
        return lambda slots, block: slots[slot].index_select(dim, block.local[key])

    def _reduce(self, step: Step) -> Action:
        reduction = reduction_of(self._program, self._program[step.name])
        base, source = step.inputs[reduction.base], step.inputs[reduction.source]
        keep_base = sum(base in other.inputs.values() for other in self.stage.steps) > 1
        keep_base |= not self._program[reduction.base].type.uniform
        combine = self.combiner(step)

        def run(slots: Slots, block: Block) -> Tensor:
            into = slots[base].clone() if keep_base else slots[base]
            return combine(into, slots[source], block.edges[step.edges].rows_of_edges(), reduction.include_self)

        return run

    def combiner(self, step: Step, reduce: str | None = None) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
        """Return ``combine(into, rows, local, include_self)``, which adds edge rows to destination rows in place.

        Args:
            step: The reduction.
            reduce: How to combine, instead of the reduction's own way.
        """
        value = self._program[step.name]
        reduction = reduction_of(self._program, value)
        name, reduce, dim = value.short_op, reduce or reduction.reduce, reduction.dim

        def combine(into: Tensor, rows: Tensor, local: Tensor, include_self: bool) -> Tensor:
            if name == "scatter_add":
                return into.scatter_add_(dim, _spread(local, rows, dim), rows)
            if name == "scatter_reduce":
                return into.scatter_reduce_(dim, _spread(local, rows, dim), rows, reduce, include_self=include_self)
            if name == "index_add" or (name == "index_reduce" and reduce == "sum"):
                return into.index_add_(dim, local, rows)
            if name == "index_put":
                return into.index_put_((local,), rows, accumulate=True)
            return into.index_reduce_(dim, local, rows, reduce, include_self=include_self)

        return combine

    def _argument_filler(self, value: Value, step: Step) -> Callable[[Slots, int], tuple[list, dict]]:
        """Return a function that puts tensors and the block's sizes into the operator's arguments."""
        numbers = _number_arguments(value)
        constants = {n: self._structure[n] for n in step.inputs if step.inputs[n] == n}
        space = value.type.rows

        def filler(tree: Any, is_number: bool) -> Callable[[Slots, int], Any]:
            if isinstance(tree, Ref):
                if tree.name in constants:
                    constant = constants[tree.name]
                    return lambda slots, rows: constant
                slot = step.inputs[tree.name]
                return lambda slots, rows: slots[slot]
            if isinstance(tree, Size):
                factor = tree.multiple_of(space)
                if is_number or factor is None:
                    if not is_number and not tree.is_constant:
                        raise UnsupportedModelError(
                            value.op,
                            f"its shape depends on {tree}, not on its rows",
                            "give it a fixed shape",
                            value.source,
                        )
                    count = self._structure.count_of(tree)
                    return lambda slots, rows: count
                return lambda slots, rows: factor * rows
            if isinstance(tree, (list, tuple)):
                parts = [filler(item, is_number) for item in tree]
                kind = type(tree)
                return lambda slots, rows: kind(part(slots, rows) for part in parts)
            return lambda slots, rows: tree

        positional = [filler(arg, place in numbers) for place, arg in enumerate(value.args)]
        named = {key: filler(arg, key in numbers) for key, arg in value.kwargs.items()}

        def fill(slots: Slots, rows: int) -> tuple[list, dict]:
            return [f(slots, rows) for f in positional], {key: f(slots, rows) for key, f in named.items()}

        return fill


def _last_uses(stage: StageProgram) -> list[list[str]]:
    """Return for each step the slots that no later step uses."""
    last: dict[str, int] = {}
    for place, step in enumerate(stage.steps):
        last[step.slot] = place
        for slot in step.inputs.values():
            last[slot] = place
    kept = set(stage.results.values())
    done: list[list[str]] = [[] for _ in stage.steps]
    for slot, place in last.items():
        if slot not in kept:
            done[place].append(slot)
    return done


def _number_arguments(value: Value) -> set[int | str]:
    """Return positions and names of the arguments that are numbers of the formula, not sizes of a shape."""
    if value.op.count(".") != 2:
        return set()
    found: set[int | str] = set()
    for place, argument in enumerate(resolve_operator(value.op)._schema.arguments):
        if "int" not in str(argument.type).lower():
            found |= {place, argument.name}
    return found


def _prepared_or(slot: str, load: Action) -> Action:
    """Return an action that takes rows read ahead if there are any, else loads them."""
    return lambda slots, block: block.loaded.pop(slot) if slot in block.loaded else load(slots, block)


def _spread(local: Tensor, rows: Tensor, dim: int) -> Tensor:
    shape = [1] * rows.dim()
    shape[dim] = -1
    return local.view(shape).expand_as(rows)


def _take(tensor: Tensor, dim: int, where: slice | Tensor) -> Tensor:
    if isinstance(where, slice):
        if where.start == 0 and where.stop == tensor.size(dim):
            return tensor
        return tensor.narrow(dim, where.start, where.stop - where.start)
    return tensor.index_select(dim, where)


def _take_store(store: RowStore, where: slice | Tensor) -> Tensor:
    return store.read_range(where.start, where.stop) if isinstance(where, slice) else store.read_rows(where)
