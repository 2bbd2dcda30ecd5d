"""Rules of normalisations and softmax."""

from __future__ import annotations

from autopar.graph import Operator
from autopar.placement import R
from autopar.rules.registry import Split, rule


@rule("layer_norm", "rms_norm", saves=(0, 1, 2))
def _split_layer_norm(operator: Operator) -> list[Split]:
    kept = len(operator.output.shape) - len(operator.node.args[1])
    rest = (R,) * (len(operator.inputs) - 1)
    return [((dim, *rest), dim) for dim in range(kept)]


@rule("batch_norm", saves=(0, 1))
def _split_batch_norm(operator: Operator) -> list[Split]:
    """Split by samples (the executor then adds statistics over the ranks) or by channels."""
    count = len(operator.inputs) - 1
    return [((0, *(R,) * count), 0), ((1, *(0,) * count), 1)]


@rule("group_norm", saves=(0,))
def _split_group_norm(operator: Operator) -> list[Split]:
    return [((0, *(R,) * (len(operator.inputs) - 1)), 0)]


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", saves_output=True)
def _split_softmax(operator: Operator) -> list[Split]:
    rank = len(operator.output.shape)
    along = operator.argument(1, "dim", -1) % rank
    return [((dim,), dim) for dim in range(rank) if dim != along]
