"""Every layer, with its options, on a device against the CPU, forward and all gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from core_kernels import Graph, nn
from core_kernels.testing.layer_cases import LAYER_CASES, layer_edges, layer_inputs

pytestmark = pytest.mark.gpu
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

CASES = LAYER_CASES
COMMON = [name for name, case in CASES.items() if case.is_common]
NUM_NODES = 500


def outputs_and_gradients(layer, graph, case, width):
    """Return the first output and the gradients of all inputs and parameters, on the CPU."""
    inputs = layer_inputs(case, graph, width)
    out = layer(graph, *inputs)
    out = out[0] if isinstance(out, tuple) else out
    wanted = [one for one in inputs if one.requires_grad] + list(layer.parameters())
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    grads = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)
    return [one.detach().cpu() for one in (out, *grads) if one is not None]


def check_layer(name, width, device, num_nodes=NUM_NODES, num_edges=6000):
    """Compare a layer on ``device`` with the CPU."""
    torch.manual_seed(0)
    case = CASES[name]
    layer = case.make(nn, width).double()
    there = copy.deepcopy(layer).to(device)
    graph = Graph.from_edge_index(layer_edges(num_nodes, num_edges), num_nodes)
    expected = outputs_and_gradients(layer, graph, case, width)
    found = outputs_and_gradients(there, graph.to(device), case, width)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@needs_device
@pytest.mark.parametrize("name", CASES)
def test_every_option_matches_the_cpu(name):
    check_layer(name, 7, "cuda")


@needs_device
@pytest.mark.parametrize("width", [1, 3, 32, 33, 65, 128])
@pytest.mark.parametrize("name", COMMON)
def test_every_layer_matches_the_cpu_at_many_widths(name, width):
    check_layer(name, width, "cuda")
