"""Embedding bags and fused optimisers against torch in float64."""

from __future__ import annotations

import pytest
import torch

from core_kernels import backend, ops

NUM_ROWS, NUM_BAGS, NUM_IDS = 50, 40, 300


def batch(width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, NUM_IDS + 1, (NUM_BAGS - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([NUM_IDS])])
    ids = torch.randint(0, NUM_ROWS - 3, (NUM_IDS,), generator=generator)
    weight = torch.randn(NUM_ROWS, width, generator=generator).to(dtype)
    factors = torch.rand(NUM_IDS, generator=generator).to(dtype)
    grad = torch.randn(NUM_BAGS, width, generator=generator).to(dtype)
    return weight, ids, offsets, factors, grad


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 7, 64, 130])
def test_bags_equal_float64(width, weighted, mode):
    weight, ids, offsets, factors, grad = batch(width, torch.float32)

    def run(dtype):
        leaves = [weight.to(dtype).requires_grad_()] + ([factors.to(dtype).requires_grad_()] if weighted else [])
        out = ops.embedding_bag(leaves[0], ids, offsets, leaves[1] if weighted else None, mode)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    with backend("torch"):
        expected = run(torch.float64)
    for ours, oracle in zip(run(torch.float32), expected, strict=True):
        assert torch.allclose(ours.double(), oracle, atol=1e-4)
    for ours, oracle in zip(run(torch.float64), expected, strict=True):
        assert torch.allclose(ours, oracle, atol=1e-12)


def test_bags_equal_torch():
    weight, ids, offsets, _, _ = batch(16, torch.float64)
    expected = torch.nn.functional.embedding_bag(ids, weight, offsets, mode="mean", include_last_offset=True)
    assert torch.allclose(ops.embedding_bag(weight, ids, offsets, mode="mean"), expected)
    matrix = ids.view(30, 10)
    expected = torch.nn.functional.embedding_bag(matrix, weight, mode="sum")
    assert torch.allclose(ops.embedding_bag(weight, matrix), expected)


UPDATES = {
    "sgd": lambda w, s, b: ops.fused_sgd_(w, *b, lr=0.1, weight_decay=0.01),
    "momentum": lambda w, s, b: ops.fused_sgd_(w, *b, lr=0.1, momentum_buffer=s[0], momentum=0.9),
    "adagrad": lambda w, s, b: ops.fused_adagrad_(w, s[0], *b, lr=0.1, eps=1e-8),
    "rowwise_adagrad": lambda w, s, b: ops.fused_rowwise_adagrad_(w, s[2], *b, lr=0.1, weight_decay=0.01),
    "adam": lambda w, s, b: ops.fused_adam_(w, s[0], s[1], *b, lr=0.1, step=3),
}


@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_updates_equal_the_reference(optimizer, dtype, tolerance):
    weight, ids, offsets, _, grad = batch(33, dtype)

    def run(as_dtype):
        table = weight.to(as_dtype, copy=True)
        states = [torch.full_like(table, 0.5), torch.full_like(table, 0.25)]
        states.append(states[0][:, 0].clone())
        UPDATES[optimizer](table, states, (ids, offsets, grad.to(as_dtype)))
        return [table, *states]

    ours = run(dtype)
    with backend("torch"):
        expected = run(torch.float64)
    for found, oracle in zip(ours, expected, strict=True):
        assert ((found.double() - oracle).abs() <= tolerance * (1 + oracle.abs())).all()
    unnamed = torch.ones(NUM_ROWS, dtype=torch.bool).index_fill(0, ids, False)
    assert torch.equal(ours[0][unnamed], weight[unnamed])


@pytest.mark.parametrize(
    ("make", "update"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), lambda w, s, *b: ops.fused_sgd_(w, *b, lr=0.1)),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), lambda w, s, *b: ops.fused_adagrad_(w, s, *b, lr=0.1)),
    ],
    ids=["sgd", "adagrad"],
)
def test_three_steps_equal_torch_optim(make, update):
    weight, _, _, _, _ = batch(8, torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer, table, state = make([parameter]), weight.clone(), torch.zeros_like(weight)
    for seed in range(3):
        _, ids, offsets, _, grad = batch(8, torch.float64, seed)
        bags = torch.nn.functional.embedding_bag(ids, parameter, offsets, mode="sum", include_last_offset=True)
        optimizer.zero_grad()
        bags.backward(grad)
        optimizer.step()
        update(table, state, ids, offsets, grad)
    assert torch.allclose(table, parameter.detach(), atol=1e-12)


def test_an_update_per_occurrence_would_differ():
    """Adagrad is not linear: the exact step needs the summed gradient."""
    ids, grad = torch.tensor([1, 1]), torch.tensor([[1.0], [1.0]])
    exact, exact_state = torch.zeros(2, 1), torch.zeros(2, 1)
    ops.fused_adagrad_(exact, exact_state, ids, None, grad, lr=1.0)
    naive, naive_state = torch.zeros(2, 1), torch.zeros(2, 1)
    for occurrence in range(2):
        ops.fused_adagrad_(naive, naive_state, ids[:1], None, grad[occurrence : occurrence + 1], lr=1.0)
    assert exact_state[1].item() == 4.0
    assert naive_state[1].item() == 2.0


@pytest.mark.parametrize("bad", [-1, NUM_ROWS, NUM_ROWS + 1])
def test_ids_outside_are_refused_forward_and_in_the_update(bad):
    weight, ids, offsets, _, grad = batch(4, torch.float32)
    ids[17] = bad
    for call in (
        lambda: ops.embedding_bag(weight, ids, offsets),
        lambda: ops.fused_sgd_(weight, ids, offsets, grad, lr=1.0),
        lambda: ops.fused_rowwise_adagrad_(weight, torch.zeros(NUM_ROWS), ids, offsets, grad, lr=1.0),
    ):
        with pytest.raises(ValueError, match=rf"holds {bad}, outside \[0, {NUM_ROWS}\)"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, i, o, g: ops.embedding_bag(w, i, o[:-1]), "offsets"),
        (lambda w, i, o, g: ops.embedding_bag(w, i, o, mode="max"), "mode='max'"),
        (lambda w, i, o, g: ops.fused_sgd_(w, i, o, g[1:], lr=1.0), "a row per bag"),
        (lambda w, i, o, g: ops.fused_sgd_(w, i, o, g, lr=1.0, momentum=0.9), "momentum_buffer"),
        (lambda w, i, o, g: ops.fused_adagrad_(w, w[:3], i, o, g, lr=1.0), "state"),
        (lambda w, i, o, g: ops.fused_adam_(w, w, w, i, o, g, lr=1.0, step=0), "step=0"),
    ],
)
def test_bad_arguments_are_named(call, message):
    weight, ids, offsets, _, grad = batch(4, torch.float32)
    with pytest.raises((ValueError, TypeError), match=message):
        call(weight, ids, offsets, grad)
