"""Micro-batches of a captured step: the batch axis of a mesh, played in time instead of over ranks.

Cutting a batch into m micro-batches is data parallelism over an axis of m places that one device visits one after
another. So the rules of :mod:`autopar.rules` serve for both: each operator gets its configuration on a mesh ``(m,)``
under which no re-scheduling is needed, inputs are cut along dim 0, parameters stay whole, and the loss of a micro-
batch is its share of the mean over the whole batch, so that losses and gradients add up. Dropout is drawn by global
element, as everywhere in autopar: it drops the same elements for any m.

What needs all samples at once, such as batch normalisation in training, cannot be cut and is refused.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from autopar.cost_model import internal_messages
from autopar.errors import ProblemError
from autopar.graph import Graph, Operator
from autopar.placement import P, Q, R
from autopar.rules import Configuration, configurations

__all__ = ["MicroBatches", "cut_batch"]

# More inputs than this of the batch's size are all taken as samples.
_MAX_DOUBTFUL = 6


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """How a step runs in micro-batches.

    Attributes:
        count: Number of micro-batches.
        forms: Per operator how its result lies over them: cut along a dim, whole (``R``), or a sum due (``P``).
        configs: Per operator its configuration on the mesh ``(count,)``; ``None`` for leaves.
    """

    count: int
    forms: tuple[int, ...]
    configs: tuple[Configuration | None, ...]


def cut_batch(graph: Graph, count: int) -> MicroBatches:
    """Cut a captured step into micro-batches of equal size.

    Args:
        graph: The step of the whole batch.
        count: Number of micro-batches, a divisor of the batch.

    Returns:
        Form and configuration of every operator. Inputs whose first dim is that of the first input are cut along it;
        where some only happen to have that size, the largest set is cut with which every operator can run.

    Raises:
        ProblemError: The count does not divide the batch, or an operator needs the whole batch.

    >>> from autopar import models, trace
    >>> graph = trace(*models.mlp(batch=8))
    >>> cut_batch(graph, 4).forms[graph.result] == P
    True
    """
    inputs = [position for position, operator in enumerate(graph.operators) if operator.kind == "input"]
    sizes = [graph.operators[position].output.shape[:1] for position in inputs]
    if count < 1 or not sizes or not sizes[0] or sizes[0][0] % count:
        batch = sizes[0][0] if sizes and sizes[0] else 0
        raise ProblemError(
            f"num_micro_batches={count} does not divide the batch of {batch} samples, the first dim of the first "
            "input; expected a divisor; choose one, or trace another batch"
        )
    candidates = [position for position, size in zip(inputs, sizes, strict=True) if size == sizes[0]]
    largest = len(candidates) if count > 1 and len(candidates) <= _MAX_DOUBTFUL else 0
    problem = ""
    for number in range(len(candidates), len(candidates) - max(largest, 1), -1):
        for others in itertools.combinations(candidates[1:], number - 1):
            chosen = (candidates[0], *others)
            found = _propagate(graph, count, set(chosen) if count > 1 else set())
            if isinstance(found, MicroBatches):
                if count == 1 or found.forms[graph.result] == P:
                    return found
                found = f"the loss does not depend on inputs {[inputs.index(position) for position in chosen]}"
            problem = problem or found
    raise ProblemError(
        f"the step cannot run in num_micro_batches={count}: {problem}; expected operators that treat samples apart "
        "and a loss that is a mean or sum over them; use 1 micro-batch, or change that operator"
    )


def _propagate(graph: Graph, count: int, cut: set[int]) -> MicroBatches | str:
    """Carry forms from the inputs on; return what is in the way where that ends."""
    forms: list[int] = []
    configs: list[Configuration | None] = []
    for position, operator in enumerate(graph.operators):
        if operator.is_leaf:
            forms.append(0 if position in cut else R)
            configs.append(None)
            continue
        config = _choose(operator, [forms[source] for source in operator.inputs], count)
        if config is None:
            return f"{operator.kind} at {operator.line or operator.name} needs all samples at once"
        if internal_messages(operator, config, (count,)):
            return f"{operator.kind} at {operator.line or operator.name} takes statistics of the whole batch"
        forms.append(config.output[0])
        configs.append(config)
    return MicroBatches(count, tuple(forms), tuple(configs))


def _choose(operator: Operator, forms: list[int], count: int) -> Configuration | None:
    """Return the configuration that takes the inputs as they lie, whole ones sliced where it must be."""
    best, fewest = None, len(forms) + 1
    for config in configurations(operator, (count,)):
        slices = 0
        for form, (wanted,) in zip(forms, config.inputs, strict=True):
            if form == R and wanted >= 0:
                slices += 1
            elif form != wanted and not (form == R and wanted == Q):
                break
        else:
            if slices < fewest:
                best, fewest = config, slices
    return best
