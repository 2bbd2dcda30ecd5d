"""Rules of operators that multiply and add: linear layers, matrix products, convolutions, attention, embeddings."""

from __future__ import annotations

import math

from autopar.graph import Operator
from autopar.placement import P, R
from autopar.rules.registry import ONCE, Split, rule


def _linear_flops(operator: Operator) -> float:
    return 2.0 * operator.output.num_elements * operator.input_info[0].shape[-1]


def _with_bias(operator: Operator, position: int, forms: tuple[int, ...], bias: int) -> tuple[int, ...]:
    return (*forms, bias) if operator.input_at(position) is not None else forms


@rule("linear", saves=(0, 1), flops=_linear_flops)
def _split_linear(operator: Operator) -> list[Split]:
    last = len(operator.output.shape) - 1
    splits = [(_with_bias(operator, 2, (dim, R), R), dim) for dim in range(last)]
    splits.append((_with_bias(operator, 2, (R, 0), 0), last))
    splits.append((_with_bias(operator, 2, (last, 1), ONCE), P))
    return splits


@rule("mm", "bmm", "matmul", saves=(0, 1), flops=_linear_flops)
def _split_matmul(operator: Operator) -> list[Split]:
    left, right = (len(info.shape) for info in operator.input_info)
    out = operator.output.shape
    if left < 2 or right < 2:
        return []
    splits: list[Split] = [((left - 2, R), len(out) - 2), ((R, right - 1), len(out) - 1), ((left - 1, right - 2), P)]
    for dim in range(len(out) - 2):
        forms = []
        for info in operator.input_info:
            own = dim - (len(out) - len(info.shape))
            forms.append(own if own >= 0 and info.shape[own] == out[dim] else R)
        splits.append(((forms[0], forms[1]), dim))
    return [*splits, ((P, R), P), ((R, P), P)]


def _addmm_flops(operator: Operator) -> float:
    return 2.0 * operator.output.num_elements * operator.input_info[1].shape[1]


@rule("addmm", saves=(1, 2), flops=_addmm_flops)
def _split_addmm(operator: Operator) -> list[Split]:
    bias = operator.input_info[0].shape
    by_row = 0 if len(bias) == 2 and bias[0] > 1 else R
    return [((by_row, 0, R), 0), ((len(bias) - 1, R, 1), 1), ((ONCE, 1, 0), P)]


def _convolution_flops(operator: Operator) -> float:
    return 2.0 * operator.output.num_elements * math.prod(operator.input_info[1].shape[1:])


@rule("conv1d", "conv2d", "conv3d", saves=(0, 1), flops=_convolution_flops)
def _split_convolution(operator: Operator) -> list[Split]:
    """Split a convolution by samples, by output channels or by input channels; grouped ones by groups."""
    samples = (_with_bias(operator, 2, (0, R), R), 0)
    if operator.argument(6, "groups", 1) > 1:
        by_group = (_with_bias(operator, 2, (1, 0), 0), 1)
        return [samples, by_group]
    by_output = (_with_bias(operator, 2, (R, 0), 0), 1)
    by_input = (_with_bias(operator, 2, (1, 1), ONCE), P)
    return [samples, by_output, by_input]


def _attention_flops(operator: Operator) -> float:
    keys = operator.input_info[1].shape[-2]
    share = 0.5 if operator.argument(5, "is_causal", False) else 1.0
    return 4.0 * share * operator.output.num_elements * keys


@rule("scaled_dot_product_attention", saves=(0, 1, 2), saves_output=True, flops=_attention_flops)
def _split_attention(operator: Operator) -> list[Split]:
    """Split attention by the leading dims (samples, heads); without a causal mask also by queries."""
    rank = len(operator.output.shape)
    mask = operator.input_info[3].shape if len(operator.inputs) > 3 else None

    def with_mask(forms: tuple[int, ...], dim: int) -> tuple[int, ...]:
        if mask is None:
            return forms
        own = dim - (rank - len(mask))
        return (*forms, own if own >= 0 and mask[own] == operator.output.shape[dim] else R)

    splits = [(with_mask((dim, dim, dim), dim), dim) for dim in range(rank - 2)]
    if not operator.argument(5, "is_causal", False):
        splits.append((with_mask((rank - 2, R, R), rank - 2), rank - 2))
    return splits


@rule("embedding", saves=(1,))
def _split_embedding(operator: Operator) -> list[Split]:
    """Split a lookup by indices, by columns, or by rows of the table, which leaves a partial sum."""
    out = len(operator.output.shape)
    return [*((((R, dim)), dim) for dim in range(out - 1)), ((1, R), out - 1), ((0, R), P)]
