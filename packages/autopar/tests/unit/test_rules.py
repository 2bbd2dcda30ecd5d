"""Every rule against its meaning: the parts that a configuration produces make up the whole operator's result."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import trace
from autopar.local_operators import LocalContext, run_operator
from autopar.placement import P, R, shard
from autopar.rules import Configuration, configurations

X = (4, 6, 8)
CASES = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [X, (6, 8), (6,)]),
    "matmul": (lambda x, y: x @ y, [X, (4, 8, 6)]),
    "matmul_broadcast": (lambda x, y: x @ y, [X, (8, 6)]),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y), [(6,), (4, 8), (8, 6)]),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(4, 6, 8, 8), (4, 6, 3, 3), (4,)]),
    "grouped_conv": (lambda x, w: F.conv2d(x, w, groups=2), [(4, 6, 8, 8), (4, 3, 3, 3)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(4, 2, 6, 8)] * 3),
    "attention_open": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), [(4, 2, 6, 8)] * 3),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [X, (8,), (8,)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [X]),
    "softmax": (lambda x: x.softmax(1), [X]),
    "gelu": (F.gelu, [X]),
    "relu": (F.relu, [X]),
    "add_broadcast": (lambda x, y: x + y, [X, (6, 1)]),
    "multiply": (lambda x, y: x * y, [X, X]),
    "divide": (lambda x, y: x / (y * y + 1), [X, (8,)]),
    "scale": (lambda x: x * 3.0, [X]),
    "dropout": (lambda x: F.dropout(x, 0.4, True), [X]),
    "view": (lambda x: x.view(4, 6, 2, 4), [X]),
    "flatten": (lambda x: x.flatten(1), [X]),
    "permute": (lambda x: x.permute(2, 0, 1), [X]),
    "transpose": (lambda x: x.transpose(0, 2), [X]),
    "expand": (lambda x: x.unsqueeze(1).expand(4, 6, 8), [(4, 8)]),
    "cat": (lambda x, y: torch.cat([x, y], 1), [X, X]),
    "stack": (lambda x, y: torch.stack([x, y], 1), [X, X]),
    "select": (lambda x: x.select(1, 2), [X]),
    "slice": (lambda x: x[:, 1:3], [X]),
    "sum": (lambda x: x.sum(1), [X]),
    "mean": (lambda x: x.mean((0, 2)), [X]),
    "amax": (lambda x: x.amax(1), [X]),
    "max_pool": (lambda x: F.max_pool2d(x, 2), [(4, 6, 8, 8)]),
    "average_pool": (lambda x: F.adaptive_avg_pool2d(x, 2), [(4, 6, 8, 8)]),
    "mse": (F.mse_loss, [X, X]),
}


class Whole(nn.Module):
    """A function as a module whose loss is a sum, so that it can be captured."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs).sum()


def operators_of(name):
    torch.manual_seed(0)
    function, shapes = CASES[name]
    graph = trace(Whole(function), [torch.randn(shape, dtype=torch.float64) for shape in shapes])
    return [operator for operator in graph.operators if not operator.is_leaf]


def parts_of(operator, config: Configuration, inputs, size):
    """Run every rank of a one-axis mesh; partial inputs go to the first rank, zeros to the others."""
    for place in range(size):
        local = [
            value * (place == 0) if layout == (P,) else shard(value, layout, (size,), (place,))
            for value, layout in zip(inputs, config.inputs, strict=True)
        ]
        yield run_operator(operator, config, local, LocalContext((size,), (place,)))


def combine(parts, form):
    parts = list(parts)
    if form == P:
        return sum(parts)
    return parts[0] if form == R else torch.cat(parts, form)


@pytest.mark.parametrize("name", sorted(CASES))
def test_parts_make_up_the_whole(name):
    tried = 0
    for operator in operators_of(name):
        inputs = [torch.randn(info.shape, dtype=info.dtype) for info in operator.input_info]
        whole_config, *split = configurations(operator, (2,))
        whole = next(iter(parts_of(operator, whole_config, inputs, 1)))
        for config in split:
            combined = combine(parts_of(operator, config, inputs, 2), config.output[0])
            torch.testing.assert_close(combined, whole, msg=f"{operator.kind}: {config}")
            tried += 1
    assert tried


def test_a_wrong_rule_is_seen():
    """The twin: softmax split along the dim it normalises does not make up the whole."""
    operator = operators_of("softmax")[0]
    inputs = [torch.randn(operator.input_info[0].shape, dtype=torch.float64)]
    wrong = Configuration(((1,),), (1,), ((),), (0,))
    whole = next(iter(parts_of(operator, configurations(operator, (1,))[0], inputs, 1)))
    assert not torch.allclose(combine(parts_of(operator, wrong, inputs, 2), 1), whole)


def test_dropout_is_the_same_on_every_mesh():
    operator = operators_of("dropout")[0]
    x = torch.ones(operator.input_info[0].shape, dtype=torch.float64)
    results = []
    for layout in ((0, 0), (0, 1), (1, 0), (2, 2)):
        config = next(c for c in configurations(operator, (2, 2)) if c.output == layout)
        whole = torch.empty_like(x)
        for coordinate in itertools.product(range(2), repeat=2):
            local = shard(x, layout, (2, 2), coordinate)
            shard(whole, layout, (2, 2), coordinate).copy_(
                run_operator(operator, config, [local], LocalContext((2, 2), coordinate))
            )
        results.append(whole)
    assert all(torch.equal(results[0], other) for other in results)
    assert 0.2 < float((results[0] == 0).double().mean()) < 0.6
