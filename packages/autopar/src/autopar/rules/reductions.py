"""Rules of reductions, losses and pooling."""

from __future__ import annotations

from autopar.graph import Operator
from autopar.placement import P
from autopar.rules.registry import Split, rule


def reduced_dims(operator: Operator) -> list[int]:
    """Return the dims a reduction removes or shrinks to one."""
    rank = len(operator.input_info[0].shape)
    dims = operator.argument(1, "dim", None)
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(rank))
    return sorted(dim % rank for dim in ([dims] if isinstance(dims, int) else dims))


def _kept_dims(operator: Operator) -> list[Split]:
    """Splits along the dims that a reduction keeps."""
    rank, reduced = len(operator.input_info[0].shape), reduced_dims(operator)
    keeps_rank = len(operator.output.shape) == rank
    kept = [dim for dim in range(rank) if dim not in reduced]
    return [((dim,), dim if keeps_rank else place) for place, dim in enumerate(kept)]


@rule("sum", "mean")
def _split_sum(operator: Operator) -> list[Split]:
    return [*_kept_dims(operator), *(((dim,), P) for dim in reduced_dims(operator)), ((P,), P)]


@rule("amax", "amin", "argmax", "var", "std", "logsumexp", saves=(0,))
def _split_whole(operator: Operator) -> list[Split]:
    return _kept_dims(operator)


@rule("max_pool2d", saves=(0,), saves_bytes_per_output=8)
def _split_max_pool(operator: Operator) -> list[Split]:
    return [((dim,), dim) for dim in range(len(operator.output.shape) - 2)]


@rule("avg_pool2d", "adaptive_avg_pool2d")
def _split_average_pool(operator: Operator) -> list[Split]:
    return [*(((dim,), dim) for dim in range(len(operator.output.shape) - 2)), ((P,), P)]


def is_averaged(operator: Operator) -> bool:
    """Whether a loss is the mean over its samples (else their sum); ``reduction='none'`` is neither."""
    position = {"cross_entropy_loss": 3, "nll_loss": 3, "nll_loss_nd": 3}.get(operator.kind, 2)
    return operator.argument(position, "reduction", 1) == 1


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss", saves=(1,))
def _split_classification_loss(operator: Operator) -> list[Split]:
    """Split by samples; not with class weights or ignored labels, whose counts differ between ranks.

    An ignored label must then lie outside the data: the executor checks that none occurs.
    """
    logits, targets = operator.input_info[0].shape, operator.input_info[1].shape
    if len(operator.inputs) > 2 or len(logits) < 2 or len(targets) != len(logits) - 1:
        return []
    if operator.argument(3, "reduction", 1) == 0:
        return [((0, 0), 0)]
    return [((0, 0), P)]


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", saves=(0, 1))
def _split_elementwise_loss(operator: Operator) -> list[Split]:
    shape = operator.input_info[0].shape
    if any(info.shape != shape for info in operator.input_info) or len(operator.inputs) > 2:
        return []
    reduced = operator.argument(2, "reduction", 1) != 0
    return [((dim, dim), P if reduced else dim) for dim in range(len(shape))]
