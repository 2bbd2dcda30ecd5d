"""Every layer on a device against the CPU, forward and all gradients."""

from __future__ import annotations

import pytest
import torch

from core_kernels import Graph, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LAYERS = {
    "gcn": lambda width: nn.GCNConv(width, width),
    "sage": lambda width: nn.SAGEConv(width, width),
    "sage-max": lambda width: nn.SAGEConv(width, width, aggr="max"),
    "gin": lambda width: nn.GINConv(torch.nn.Linear(width, width)),
    "gat": lambda width: nn.GATConv(width, width, heads=2),
    "gatv2": lambda width: nn.GATv2Conv(width, width, heads=2),
    "appnp": lambda width: nn.APPNP(2, 0.1),
}


@pytest.mark.parametrize("width", [1, 3, 7, 32, 33, 65, 128])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_the_cpu(name, width):
    torch.manual_seed(0)
    edges = torch.randint(0, 500, (2, 6000))
    layer, x = LAYERS[name](width).double(), torch.randn(500, width, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        graph = Graph.from_edge_index(edges, 500).to(device)
        layer = layer.to(device)
        inputs = x.to(device).requires_grad_()
        out = layer(graph, inputs)
        grads = torch.autograd.grad(out.square().sum(), [inputs, *layer.parameters()])
        results.append([out.detach().cpu(), *(grad.cpu() for grad in grads)])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
