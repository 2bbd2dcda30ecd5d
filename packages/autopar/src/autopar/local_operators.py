"""One operator on local parts: what must change so that the parts make up the single device's result.

Most operators run as they stand. The others need this rank's place in the whole:

- reshapes and expansions take local sizes;
- a bias that meets a partial sum is added by one rank only, its gradient is whole on every rank;
- means over split samples are divided by the number of parts, grouped convolutions have fewer groups;
- a table split by rows looks up what it has, zero elsewhere;
- batch normalisation adds statistics over the ranks that split its samples;
- dropout draws by global element, from ``core_kernels.random`` keyed (seed, step, operator, element): the same elements
  drop on any mesh. A single device gets the same numbers from a mesh of one. Attention with dropout is computed
  in the open for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from autopar.collectives import MeshGroups
from autopar.errors import ProblemError
from autopar.graph import Operator
from autopar.placement import P, local_shape
from autopar.rules import Configuration
from autopar.rules.reductions import is_averaged, reduced_dims
from core_kernels.random import random_bits, uniform

__all__ = ["LocalContext", "run_operator"]


@dataclass
class LocalContext:
    """Where this rank stands, and the keys of random draws."""

    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: MeshGroups | None = None
    seed: int = 0
    step: int = 0
    operator_number: dict[str, int] = field(default_factory=dict)

    @classmethod
    def alone(cls, mesh: Sequence[int]) -> LocalContext:
        """Return the first place of a mesh, without ranks to talk to."""
        return cls(tuple(mesh), (0,) * len(mesh))

    def size(self, axes: Sequence[int]) -> int:
        """Return the number of ranks over some axes."""
        return math.prod(self.mesh[axis] for axis in axes)


def run_operator(operator: Operator, config: Configuration, inputs: Sequence[Tensor], context: LocalContext) -> Any:
    """Run one operator on this rank's parts.

    Args:
        operator: What to run.
        config: Its configuration; ``inputs`` lie as it says.
        inputs: Local tensor inputs.
        context: This rank's place.

    Returns:
        This rank's part of the result; a tuple for operators with several.
    """
    inputs = list(inputs)
    for slot, axes in enumerate(config.once):
        if axes:
            is_first = all(context.coordinate[axis] == 0 for axis in axes)
            inputs[slot] = _Once.apply(inputs[slot], is_first)
    special = _SPECIAL.get(operator.kind)
    if special is not None:
        return special(operator, config, inputs, context)
    return _call(operator, inputs)


def _call(operator: Operator, inputs: Sequence[Tensor], **changed: Any) -> Any:
    """Call the operator with its captured arguments and these tensors; ``changed`` replaces positional arguments."""
    left = iter(inputs)
    args, kwargs = map_arg((operator.node.args, operator.node.kwargs), lambda _: next(left))
    replaced = {int(name.removeprefix("arg")): value for name, value in changed.items()}
    args = [replaced.get(position, argument) for position, argument in enumerate(args)]
    target: Any = operator.node.target
    return target(*args, **kwargs)


class _Once(torch.autograd.Function):
    """A value that one rank contributes to a partial sum; its gradient is whole on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_first: bool) -> Tensor:
        return x.clone() if is_first else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _run_reshape(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    return inputs[0].reshape(local_shape(operator.output.shape, config.output, context.mesh))


def _run_expand(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    return inputs[0].expand(local_shape(operator.output.shape, config.output, context.mesh))


def _run_mean(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    """Divide a mean over split dims by the number of parts; one over whole parts of a partial sum is one already."""
    reduced = reduced_dims(operator)
    axes = [axis for axis, form in enumerate(config.inputs[0]) if form in reduced]
    return _call(operator, inputs) / context.size(axes)


def _run_loss(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    axes = [axis for axis, form in enumerate(config.output) if form == P]
    if (axes and "cross_entropy" in operator.kind) or operator.kind.startswith("nll_loss"):
        ignored = operator.argument(4, "ignore_index", -100)
        if axes and bool((inputs[1] == ignored).any()):
            raise ProblemError(
                f"{operator.kind} met the ignored label {ignored}; expected none, because a mean split over ranks "
                "would weigh its parts wrongly; drop those samples, or keep the loss whole with a constraint"
            )
    loss = _call(operator, inputs)
    return loss / context.size(axes) if is_averaged(operator) and axes else loss


def _run_convolution(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    groups = operator.argument(6, "groups", 1)
    axes = [axis for axis, form in enumerate(config.inputs[1]) if form == 0]
    if groups > 1 and axes:
        return _call(operator, inputs, arg6=groups // context.size(axes))
    return _call(operator, inputs)


def _run_embedding(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    table, ids = inputs
    first = 0
    for form, size, place in zip(config.inputs[0], context.mesh, context.coordinate, strict=True):
        if form == 0:
            first = first * size + place
    if all(form != 0 for form in config.inputs[0]):
        return _call(operator, inputs)
    ids = ids - first * table.shape[0]
    is_here = (ids >= 0) & (ids < table.shape[0])
    rows = torch.nn.functional.embedding(ids.clamp(0, table.shape[0] - 1), table)
    return rows * is_here.unsqueeze(-1)


def _keep_mask(operator: Operator, shape: Sequence[int], config: Configuration, like: Tensor, p: float, context: LocalContext) -> Tensor:  # fmt: skip  # noqa: E501
    """Draw which elements of this rank's part stay, by their place in a whole tensor of ``shape``."""
    sizes, starts = list(shape), [0] * len(shape)
    for form, size, place in zip(config.output, context.mesh, context.coordinate, strict=True):
        if form >= 0:
            sizes[form] //= size
            starts[form] += place * sizes[form]
    element = torch.zeros((), dtype=torch.int64, device=like.device)
    for dim, (length, start) in enumerate(zip(sizes, starts, strict=True)):
        along = torch.arange(start, start + length, device=like.device)
        element = element.unsqueeze(-1) * shape[dim] + along
    number = context.operator_number.get(operator.name, 0)
    return uniform(random_bits(context.seed, context.step, number, element, 0)) >= p


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return x * keep * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return grad * keep * ctx.scale, None, None


def _run_dropout(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    p, training = operator.argument(1, "p", 0.5), operator.argument(2, "train", True)
    if not training or p == 0:
        return inputs[0]
    if p == 1:
        return inputs[0] * 0
    keep = _keep_mask(operator, operator.output.shape, config, inputs[0], p, context)
    return _Dropout.apply(inputs[0], keep, 1 / (1 - p))


def _run_attention(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    p = operator.argument(4, "dropout_p", 0.0)
    if p == 0:
        return _call(operator, inputs)
    query, key, value, *mask = inputs
    scale = operator.node.kwargs.get("scale") or query.shape[-1] ** -0.5
    scores = query @ key.transpose(-1, -2) * scale
    if operator.argument(5, "is_causal", False):
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    elif mask:
        hides = mask[0].dtype == torch.bool
        scores = scores.masked_fill(~mask[0], -math.inf) if hides else scores + mask[0]
    shape = (*operator.output.shape[:-1], operator.input_info[1].shape[-2])
    keep = _keep_mask(operator, shape, config, scores, p, context)
    return _Dropout.apply(scores.softmax(-1), keep, 1 / (1 - p)) @ value


def _run_batch_norm(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    training = operator.argument(5, "training", False)
    axes = [axis for axis, form in enumerate(config.output) if form == 0 and context.mesh[axis] > 1]
    if not training or not axes or context.groups is None:
        return _call(operator, inputs)
    named = [operator.input_at(position) for position in range(5)]
    x, weight, bias, mean, variance = (None if slot is None else inputs[slot] for slot in named)
    momentum, eps = operator.argument(6, "momentum", 0.1), operator.argument(7, "eps", 1e-5)
    result, batch_mean, batch_variance, count = _SharedNorm.apply(x, weight, bias, eps, axes, context.groups)
    with torch.no_grad():
        if mean is not None and variance is not None:
            mean.mul_(1 - momentum).add_(batch_mean, alpha=momentum)
            variance.mul_(1 - momentum).add_(batch_variance, alpha=momentum * count / (count - 1))
    return result


class _SharedNorm(torch.autograd.Function):
    """Normalise by mean and variance over all ranks that split the samples; as the usual one, keep only the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axes: list[int], groups: MeshGroups
    ) -> Any:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        here = x.numel() // x.shape[1]
        count = here * math.prod(groups.mesh[axis] for axis in axes)
        own_variance, own_mean = torch.var_mean(x, dims, correction=0)
        mean = _sum_over(own_mean * here, axes, groups, "forward") / count
        squares = (own_variance + (own_mean - mean).square()) * here
        variance = _sum_over(squares, axes, groups, "forward") / count
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.axes, ctx.groups, ctx.count = eps, axes, groups, count
        ctx.mark_non_differentiable(mean, variance)
        return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, eps=eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        scale = (variance + ctx.eps).rsqrt()
        sizes = [1, -1] + [1] * (x.dim() - 2)
        wanted = [False, True, True]
        _, along, total = torch.ops.aten.native_batch_norm_backward(
            grad, x, torch.ones_like(mean), mean, variance, mean, scale, False, ctx.eps, wanted
        )
        sums = _sum_over(torch.cat([total, along]), ctx.axes, ctx.groups, "backward") / ctx.count
        mean_total, mean_along = sums.chunk(2)
        outer = scale if weight is None else scale * weight
        slope = -outer * scale * mean_along
        # In three passes over one tensor: outer * (grad - mean_total - normal * mean_along).
        result = grad * outer.view(sizes)
        result.addcmul_(x, slope.view(sizes)).sub_((outer * mean_total + slope * mean).view(sizes))
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        return result, along if wants_weight else None, total if wants_bias else None, None, None, None


def _sum_over(x: Tensor, axes: Sequence[int], groups: MeshGroups, phase: str) -> Tensor:
    for axis in axes:
        x = groups.axes[axis].all_reduce(x, tag=f"all_reduce.{phase}")
    return x


def _run_update(operator: Operator, config: Configuration, inputs: list[Tensor], context: LocalContext) -> Tensor:
    if operator.node.target is torch.ops.aten.add_.Tensor and not operator.output.has_gradient:
        return _call(operator, inputs)  # a buffer such as the number of batches seen
    return inputs[0] + operator.argument(1, "other") if len(inputs) == 1 else inputs[0] + inputs[1]


def _run_in_place(operator: Operator, config: Configuration, inputs: list[Tensor], _: LocalContext) -> Tensor:
    return getattr(torch.nn.functional, operator.kind.rstrip("_"))(*inputs)


_SPECIAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze"), _run_reshape),
    **dict.fromkeys(("expand", "expand_as"), _run_expand),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _run_convolution),
    **dict.fromkeys(("relu_", "silu_"), _run_in_place),
    **dict.fromkeys(("dropout", "dropout_"), _run_dropout),
    **dict.fromkeys(
        (
            "cross_entropy_loss",
            "nll_loss_nd",
            "nll_loss",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "binary_cross_entropy_with_logits",
        ),
        _run_loss,
    ),
    "mean": _run_mean,
    "embedding": _run_embedding,
    "scaled_dot_product_attention": _run_attention,
    "batch_norm": _run_batch_norm,
    "add_": _run_update,
}
