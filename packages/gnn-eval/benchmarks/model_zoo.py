"""Models of the generality table, all built from PyTorch Geometric layers and examples.

Every entry is a function that returns ``(model, inputs)`` for a small random graph with self-loops, duplicate edges and
isolated nodes. ``SUPPORTED`` must evaluate like the full forward, ``REFUSED`` must be refused by name of an operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from gnn_eval import Blocks

NODES, EDGES, WIDTH, CLASSES = 300, 1800, 16, 5


def graph(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NODES, WIDTH, generator=generator)
    edges = torch.randint(NODES - 6, (2, EDGES), generator=generator)
    edges[0, :20] = edges[1, :20]
    edges[:, 20:40] = edges[:, 40:60]
    return x, edges[:, edges[1].argsort(stable=True)]


def edge_values(width: int = 0, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(EDGES, width, generator=generator) if width else torch.rand(EDGES, generator=generator)


class Stack(nn.Module):
    """Convolutions with ReLU between them; ``extra`` names what each also gets."""

    def __init__(self, *convs: nn.Module, act: Callable = F.relu):
        super().__init__()
        self.convs, self.act = nn.ModuleList(convs), act

    def forward(self, x, edge_index, edge_weight=None, edge_attr=None):
        for place, conv in enumerate(self.convs):
            extra = [value for value in (edge_weight, edge_attr) if value is not None]
            x = conv(x, edge_index, *extra)
            if place + 1 < len(self.convs):
                x = F.dropout(self.act(x), 0.5, self.training)
        return F.log_softmax(x, dim=-1)


class InitialResidual(nn.Module):
    """Convolutions that also get the first hidden layer, as GCN2 and FAConv."""

    def __init__(self, make: Callable[[int], nn.Module], layers: int = 4, first_only: bool = False):
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.convs = nn.ModuleList(make(layer) for layer in range(layers))

    def forward(self, x, edge_index):
        x = x0 = self.inp(x).relu()
        for conv in self.convs:
            x = conv(x, x0, edge_index).relu()
        return self.out(x).log_softmax(-1)


class GCN2PPI(nn.Module):
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)])
        self.convs = nn.ModuleList(
            gnn.GCN2Conv(8, 0.5, 1.0, layer + 1, shared_weights=False, normalize=False) for layer in range(4)
        )

    def forward(self, x, edge_index):
        x = x0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = (conv(x, x0, edge_index) + x).relu()
        return self.lins[1](x)


class SkipGAT(nn.Module):
    """The PPI example: attention layers with linear skips."""

    def __init__(self):
        super().__init__()
        self.conv1, self.lin1 = gnn.GATConv(WIDTH, 8, heads=4), nn.Linear(WIDTH, 32)
        self.conv2, self.lin2 = gnn.GATConv(32, 8, heads=4), nn.Linear(32, 32)
        self.conv3 = gnn.GATConv(32, CLASSES, heads=6, concat=False)
        self.lin3 = nn.Linear(32, CLASSES)

    def forward(self, x, edge_index):
        x = F.elu(self.conv1(x, edge_index) + self.lin1(x))
        x = F.elu(self.conv2(x, edge_index) + self.lin2(x))
        return self.conv3(x, edge_index) + self.lin3(x)


class SampledSAGE(nn.Module):
    """The ogbn training form: one block per layer, destinations a prefix of the sources."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([gnn.SAGEConv(WIDTH, 8), gnn.SAGEConv(8, CLASSES)])

    def forward(self, x, adjs):
        for place, (edge_index, _, size) in enumerate(adjs):
            x = self.convs[place]((x, x[: size[1]]), edge_index)
            if place == 0:
                x = x.relu()
        return x.log_softmax(-1)


class UniMP(nn.Module):
    def __init__(self):
        super().__init__()
        self.label = nn.Embedding(CLASSES, WIDTH)
        self.convs = nn.ModuleList(
            [
                gnn.TransformerConv(WIDTH, 8, heads=2, concat=False, beta=True),
                gnn.TransformerConv(8, CLASSES, beta=True),
            ]
        )
        self.norm = nn.LayerNorm(8)

    def forward(self, x, y, edge_index):
        x = x + self.label(y)
        x = self.norm(self.convs[0](x, edge_index)).relu()
        return self.convs[1](x, edge_index)


class GeniePath(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.breadth = nn.ModuleList(gnn.GATConv(8, 8) for _ in range(3))
        self.depth = nn.ModuleList(nn.LSTM(8, 8, 1, bias=False) for _ in range(3))

    def forward(self, x, edge_index):
        x = self.lin1(x)
        h = torch.zeros(1, x.size(0), 8)
        c = torch.zeros(1, x.size(0), 8)
        for breadth, depth in zip(self.breadth, self.depth, strict=True):
            x = torch.tanh(breadth(x, edge_index))
            x, (h, c) = depth(x.unsqueeze(0), (h, c))
            x = x[0]
        return self.lin2(x)


class DNA(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.convs = nn.ModuleList(gnn.DNAConv(8, heads=2, groups=2) for _ in range(3))

    def forward(self, x, edge_index):
        every = self.lin1(x).relu().unsqueeze(1)
        for conv in self.convs:
            every = torch.cat([every, conv(every, edge_index).relu().unsqueeze(1)], 1)
        return self.lin2(every[:, -1])


class DeepGCN(nn.Module):
    def __init__(self, block: str, edge_width: int = 0):
        super().__init__()
        self.encode = nn.Linear(WIDTH, 8)
        self.edges = nn.Linear(edge_width, 8) if edge_width else None
        self.layers = nn.ModuleList(
            gnn.DeepGCNLayer(
                gnn.GENConv(8, 8, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer"),
                nn.LayerNorm(8),
                nn.ReLU(),
                block=block,
                dropout=0.1,
            )
            for _ in range(3)
        )
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x, edge_index, edge_attr=None):
        x = self.encode(x)
        edge_attr = self.edges(edge_attr) if self.edges is not None else None
        for layer in self.layers:
            x = layer(x, edge_index, edge_attr)
        return self.out(x)


class RevGNN(nn.Module):
    def __init__(self):
        super().__init__()

        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.conv = nn.LayerNorm(4), gnn.SAGEConv(4, 4)

            def forward(self, x, edge_index):
                return self.conv(self.norm(x).relu(), edge_index)

        self.inp, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.convs = nn.ModuleList(gnn.GroupAddRev(Part(), num_groups=2) for _ in range(2))

    def forward(self, x, edge_index):
        x = self.inp(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.out(x)


class Relational(nn.Module):
    def __init__(self, conv: type, **kwargs: Any):
        super().__init__()
        self.conv1 = conv(WIDTH, 8, num_relations=4, **kwargs)
        self.conv2 = conv(8, CLASSES, num_relations=4, **kwargs)

    def forward(self, x, edge_index, edge_type):
        return self.conv2(self.conv1(x, edge_index, edge_type).relu(), edge_index, edge_type)


class ClusterGCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([gnn.ClusterGCNConv(WIDTH, 8, diag_lambda=0.5), gnn.ClusterGCNConv(8, CLASSES)])

    def forward(self, x, edge_index):
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


class GraphSAINT(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([gnn.GraphConv(WIDTH, 8), gnn.GraphConv(8, 8), gnn.GraphConv(8, 8)])
        self.lin = nn.Linear(24, CLASSES)

    def forward(self, x0, edge_index, edge_weight=None):
        x1 = self.convs[0](x0, edge_index, edge_weight).relu()
        x2 = self.convs[1](x1, edge_index, edge_weight).relu()
        x3 = self.convs[2](x2, edge_index, edge_weight).relu()
        return self.lin(torch.cat([x1, x2, x3], -1)).log_softmax(-1)


class SIGN(nn.Module):
    """Pre-computed hops as inputs, then layers over nodes only."""

    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3))
        self.out = nn.Linear(24, CLASSES)

    def forward(self, x, edge_index):
        hops = [x]
        for _ in range(2):
            sums = torch.zeros_like(x).index_add(0, edge_index[1], hops[-1][edge_index[0]])
            hops.append(sums)
        return self.out(torch.cat([lin(h).relu() for lin, h in zip(self.lins, hops, strict=True)], -1))


class InfomaxEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.prelu = gnn.GCNConv(WIDTH, 8), nn.PReLU(8)

    def forward(self, x, edge_index):
        return self.prelu(self.conv(x, edge_index))


class GatedGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = gnn.GatedGraphConv(WIDTH, 3), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, edge_index):
        return self.out(self.conv(x, edge_index))


class Propagated(nn.Module):
    def __init__(self, conv: nn.Module):
        super().__init__()
        self.lin1, self.lin2, self.prop = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES), conv

    def forward(self, x, edge_index):
        return self.prop(self.lin2(self.lin1(x).relu()), edge_index).log_softmax(-1)


class LinkDecoder(nn.Module):
    """An encoder, then the dot product of both ends of given links."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = gnn.GCNConv(WIDTH, 8), gnn.GCNConv(8, 8)

    def forward(self, x, edge_index, edge_label_index):
        z = self.conv2(self.conv1(x, edge_index).relu(), edge_index)
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(-1)


class BipartiteSAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = gnn.SAGEConv((WIDTH, 12), 8), gnn.SAGEConv((WIDTH, 8), 8)
        self.lin = nn.Linear(8, CLASSES)

    def forward(self, x_dict, edge_index_dict):
        edges = edge_index_dict["user", "rates", "item"]
        x = self.conv1((x_dict["user"], x_dict["item"]), edges).relu()
        x = self.conv2((x_dict["user"], x), edges).relu()
        return self.lin(x)


def hetero_data() -> HeteroData:
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    for name, count, width in (("paper", 200, WIDTH), ("author", 120, 12), ("term", 40, 10)):
        data[name].x = torch.randn(count, width, generator=generator)
    sizes = {"paper": 200, "author": 120, "term": 40}
    relations = [
        ("author", "writes", "paper"),
        ("paper", "rev_writes", "author"),
        ("paper", "cites", "paper"),
        ("paper", "has", "term"),
        ("term", "rev_has", "paper"),
    ]
    for source, relation, destination in relations:
        ends = [torch.randint(sizes[t] - 3, (500,), generator=generator) for t in (source, destination)]
        data[source, relation, destination].edge_index = torch.stack(ends)
    return data


class HeteroConvNet(nn.Module):
    def __init__(self, data: HeteroData, kind: str):
        super().__init__()
        make = {
            "sage": lambda: gnn.SAGEConv((-1, -1), 8),
            "gat": lambda: gnn.GATConv((-1, -1), 8, add_self_loops=False),
            "mixed": lambda: gnn.SAGEConv((-1, -1), 8, aggr="max"),
        }[kind]
        self.convs = nn.ModuleList(gnn.HeteroConv({t: make() for t in data.edge_types}, aggr="sum") for _ in range(2))
        self.lin = gnn.Linear(-1, CLASSES)

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = {key: x.relu() for key, x in conv(x_dict, edge_index_dict).items()}
        return self.lin(x_dict["paper"])


class HGT(nn.Module):
    def __init__(self, data: HeteroData):
        super().__init__()
        self.lins = nn.ModuleDict({t: gnn.Linear(-1, 8) for t in data.node_types})
        self.convs = nn.ModuleList(gnn.HGTConv(8, 8, data.metadata(), heads=2) for _ in range(2))
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {t: self.lins[t](x).relu() for t, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return self.out(x_dict["author"])


class HAN(nn.Module):
    def __init__(self, data: HeteroData):
        super().__init__()
        self.conv = gnn.HANConv({"paper": WIDTH, "author": 12, "term": 10}, 8, data.metadata(), heads=2)
        self.lin = nn.Linear(8, CLASSES)

    def forward(self, x_dict, edge_index_dict):
        return self.lin(self.conv(x_dict, edge_index_dict)["paper"])


def to_hetero(data: HeteroData) -> nn.Module:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = gnn.SAGEConv((-1, -1), 8), gnn.SAGEConv((-1, -1), CLASSES)

        def forward(self, x, edge_index):
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    return gnn.to_hetero(Net(), data.metadata(), aggr="sum")


class RDL(nn.Module):
    """The relational example: encoders per type, hetero GraphSAGE with layer norms, a head."""

    def __init__(self, data: HeteroData):
        super().__init__()
        self.encode = nn.ModuleDict({t: gnn.Linear(-1, 8) for t in data.node_types})
        self.convs = nn.ModuleList(
            gnn.HeteroConv({t: gnn.SAGEConv((8, 8), 8, aggr="sum") for t in data.edge_types}, aggr="sum")
            for _ in range(2)
        )
        self.norms = nn.ModuleList(
            nn.ModuleDict({t: gnn.LayerNorm(8, mode="node") for t in data.node_types}) for _ in range(2)
        )
        self.head = gnn.MLP([8, 8, CLASSES], norm="batch_norm")

    def forward(self, x_dict, edge_index_dict):
        x_dict = {t: self.encode[t](x) for t, x in x_dict.items()}
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x_dict = {t: norm[t](x).relu() for t, x in conv(x_dict, edge_index_dict).items()}
        return self.head(x_dict["author"])


def _plain(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, graph()


def _hetero(make: Callable[[HeteroData], nn.Module]) -> tuple[nn.Module, Any]:
    data = hetero_data()
    model = make(data)
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    return model, {"x_dict": data.x_dict, "edge_index_dict": data.edge_index_dict}


def _basic_gnns() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    degrees = torch.bincount(graph()[1][1], minlength=NODES)
    extra = {
        "GAT": {"heads": 2},
        "PNA": {
            "aggregators": ["mean", "max", "std"],
            "scalers": ["identity", "amplification"],
            "deg": torch.bincount(degrees),
        },
    }
    found: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}
    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"):
        for jk in (None, "last", "cat", "max", "lstm"):
            for norm in (None, "batch_norm", "layer_norm"):
                kwargs = dict(extra.get(name, {}), jk=jk, norm=norm)
                if norm == "layer_norm":
                    kwargs["norm_kwargs"] = {"mode": "node"}
                make = lambda name=name, kwargs=kwargs: _plain(  # noqa: E731
                    getattr(gnn, name)(WIDTH, 8, 3, out_channels=CLASSES, **copy.deepcopy(kwargs))
                )
                found[f"{name} jk={jk} norm={norm}"] = make
    for jk in (None, "cat"):
        found[f"GATv2 jk={jk}"] = lambda jk=jk: _plain(
            gnn.GAT(WIDTH, 8, 3, out_channels=CLASSES, v2=True, heads=2, jk=jk)
        )
    return found


def _stack(conv: Callable[[int, int], nn.Module]) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: _plain(Stack(conv(WIDTH, 8), conv(8, CLASSES)))


def _mlp(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, 8), nn.ReLU(), nn.Linear(8, b))


SUPPORTED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **_basic_gnns(),
    "LightGCN": lambda: (gnn.LightGCN(NODES, 8, 3), (graph()[1], graph(1)[1][:, :400])),
    "LINKX": lambda: _plain(gnn.LINKX(NODES, WIDTH, 8, CLASSES, 2)),
    "PMLP": lambda: _plain(gnn.PMLP(WIDTH, 8, CLASSES, 3, norm=False)),
    "RECT_L": lambda: (gnn.RECT_L(WIDTH, 8), (*graph(), edge_values())),
    "SignedGCN": lambda: (
        gnn.SignedGCN(WIDTH, 8, 2),
        {"x": graph()[0], "pos_edge_index": graph()[1], "neg_edge_index": graph(1)[1][:, :900]},
    ),
    "DeepGCNLayer res+": lambda: _plain(DeepGCN("res+")),
    "DeepGCNLayer dense": lambda: _plain(DeepGCN("res")),
    "GroupAddRev (rev_gnn)": lambda: _plain(RevGNN()),
    "MaskLabel / unimp_arxiv": lambda: (UniMP(), (graph()[0], torch.randint(CLASSES, (NODES,)), graph()[1])),
    "gcn example": _stack(lambda a, b: gnn.GCNConv(a, b)),
    "gcn example, cached": _stack(lambda a, b: gnn.GCNConv(a, b, cached=True)),
    "gcn example, edge weights": lambda: (
        Stack(gnn.GCNConv(WIDTH, 8), gnn.GCNConv(8, CLASSES)),
        (*graph(), edge_values()),
    ),
    "gat example": lambda: _plain(
        Stack(gnn.GATConv(WIDTH, 8, 4), gnn.GATConv(32, CLASSES, 1, concat=False), act=F.elu)
    ),
    "agnn": lambda: _plain(Propagated(gnn.AGNNConv())),
    "arma": _stack(lambda a, b: gnn.ARMAConv(a, b, num_stacks=3, num_layers=2, shared_weights=True)),
    "tagcn": _stack(lambda a, b: gnn.TAGConv(a, b)),
    "sgc": lambda: _plain(gnn.SGConv(WIDTH, CLASSES, K=3)),
    "ssg": lambda: _plain(gnn.SSGConv(WIDTH, CLASSES, alpha=0.1, K=4)),
    "gcn2_cora": lambda: _plain(InitialResidual(lambda k: gnn.GCN2Conv(8, 0.1, 0.5, k + 1))),
    "gcn2_ppi": lambda: _plain(GCN2PPI()),
    "FAConv": lambda: _plain(InitialResidual(lambda k: gnn.FAConv(8, eps=0.2))),
    "egc": _stack(
        lambda a, b: gnn.EGConv(a, 8, aggregators=["sum", "mean", "max", "symnorm"], num_heads=4, num_bases=2)
    ),
    "LGConv": lambda: _plain(Propagated(gnn.LGConv())),
    "appnp (citation)": lambda: _plain(Propagated(gnn.APPNP(10, 0.1))),
    "chebyshev": _stack(lambda a, b: gnn.ChebConv(a, b, K=3)),
    "mixhop": lambda: _plain(Stack(gnn.MixHopConv(WIDTH, 8, [0, 1, 2]), gnn.MixHopConv(24, CLASSES, [0, 1, 2]))),
    "GatedGraphConv": lambda: _plain(GatedGraph()),
    "dir_gnn (GCN)": lambda: _plain(
        Stack(
            gnn.DirGNNConv(gnn.GCNConv(WIDTH, 8, add_self_loops=False)),
            gnn.DirGNNConv(gnn.GCNConv(8, CLASSES, add_self_loops=False)),
        )
    ),
    "dir_gnn (SAGE)": lambda: _plain(
        Stack(gnn.DirGNNConv(gnn.SAGEConv(WIDTH, 8)), gnn.DirGNNConv(gnn.SAGEConv(8, CLASSES)))
    ),
    "PDNConv": lambda: (
        Stack(gnn.PDNConv(WIDTH, 8, 4, 8), gnn.PDNConv(8, CLASSES, 4, 8)),
        {"x": graph()[0], "edge_index": graph()[1], "edge_attr": edge_values(4)},
    ),
    "AntiSymmetricConv": lambda: _plain(Stack(gnn.AntiSymmetricConv(WIDTH, num_iters=2), gnn.GCNConv(WIDTH, CLASSES))),
    "ppi": lambda: _plain(SkipGAT()),
    "reddit / ogbn_train (adjs)": lambda: (SampledSAGE(), (graph()[0], Blocks(graph()[1], 2))),
    "ogbn_proteins_deepgcn": lambda: (DeepGCN("res+", 8), (*graph(), edge_values(8))),
    "super_gat": _stack(lambda a, b: gnn.SuperGATConv(a, b, heads=1, attention_type="MX")),
    "film": _stack(lambda a, b: gnn.FiLMConv(a, b)),
    "geniepath": lambda: _plain(GeniePath()),
    "dna": lambda: _plain(DNA()),
    "rgcn": lambda: (Relational(gnn.RGCNConv, num_bases=3), (*graph(), torch.randint(4, (EDGES,)))),
    "rgcn fast": lambda: (Relational(gnn.FastRGCNConv, num_bases=3), (*graph(), torch.randint(4, (EDGES,)))),
    "rgat": lambda: (Relational(gnn.RGATConv), (*graph(), torch.randint(4, (EDGES,)))),
    "cluster_gcn_reddit": lambda: _plain(ClusterGCN()),
    "graph_saint": lambda: (GraphSAINT(), (*graph(), edge_values())),
    "sign": lambda: _plain(SIGN()),
    "infomax encoder": lambda: _plain(InfomaxEncoder()),
    "link prediction, GCN + dot": lambda: (LinkDecoder(), (*graph(), graph(2)[1][:, :700])),
    "GINE": lambda: (
        Stack(gnn.GINEConv(_mlp(WIDTH, WIDTH), edge_dim=4), gnn.GINEConv(_mlp(WIDTH, CLASSES), edge_dim=4)),
        {"x": graph()[0], "edge_index": graph()[1], "edge_attr": edge_values(4)},
    ),
    "NNConv": lambda: (
        Stack(gnn.NNConv(WIDTH, 8, nn.Linear(4, WIDTH * 8)), gnn.NNConv(8, CLASSES, nn.Linear(4, 40))),
        {"x": graph()[0], "edge_index": graph()[1], "edge_attr": edge_values(4)},
    ),
    "TransformerConv, edges": lambda: (
        Stack(gnn.TransformerConv(WIDTH, 8, edge_dim=4), gnn.TransformerConv(8, CLASSES, edge_dim=4)),
        {"x": graph()[0], "edge_index": graph()[1], "edge_attr": edge_values(4)},
    ),
    "GraphSAGE aggr=median": lambda: _plain(
        Stack(gnn.SAGEConv(WIDTH, 8, aggr="median"), gnn.SAGEConv(8, CLASSES, aggr="median"))
    ),
    "to_hetero_mag": lambda: (_hetero(to_hetero)[0], (hetero_data().x_dict, hetero_data().edge_index_dict)),
    "hetero_conv_dblp (SAGE)": lambda: _hetero(lambda d: HeteroConvNet(d, "sage")),
    "hetero_conv (GAT)": lambda: _hetero(lambda d: HeteroConvNet(d, "gat")),
    "hierarchical_sage (max)": lambda: _hetero(lambda d: HeteroConvNet(d, "mixed")),
    "hgt_dblp": lambda: _hetero(HGT),
    "han_imdb": lambda: _hetero(HAN),
    "bipartite_sage": lambda: (
        BipartiteSAGE(),
        {
            "x_dict": {"user": torch.randn(90, WIDTH), "item": torch.randn(60, 12)},
            "edge_index_dict": {
                ("user", "rates", "item"): torch.stack([torch.randint(90, (400,)), torch.randint(57, (400,))])
            },
        },
    ),
    "rdl": lambda: _hetero(RDL),
    "Polynormer, local phase": lambda: polynormer(False),
}


def polynormer(global_attention: bool) -> tuple[nn.Module, Any]:
    model = gnn.Polynormer(WIDTH, 8, CLASSES)
    model._global = global_attention
    return model, (*graph(), torch.zeros(NODES, dtype=torch.int64))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.lin = gnn.GCNConv(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x, edge_index, batch):
        return self.lin(gnn.global_mean_pool(self.conv(x, edge_index), batch, size=4))


class TopK(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool = gnn.GCNConv(WIDTH, 8), gnn.TopKPooling(8, 0.5)

    def forward(self, x, edge_index):
        return self.pool(self.conv(x, edge_index), edge_index)[0]


class DynamicGraph(nn.Module):
    """Edges from the nearest neighbours in feature space, as DGCNN."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.SAGEConv(WIDTH, CLASSES)

    def forward(self, x, edge_index):
        nearest = torch.cdist(x, x).topk(4, largest=False).indices
        targets = torch.arange(x.size(0)).repeat_interleave(4)
        return self.conv(x, torch.stack([nearest.flatten(), targets]))


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = gnn.PointNetConv(_mlp(WIDTH + 3, 8))

    def forward(self, x, pos, edge_index):
        return self.conv(x, pos, edge_index).amax(0, keepdim=True)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module, train: bool = False):
        super().__init__()
        self.conv1, self.norm, self.conv2 = gnn.SAGEConv(WIDTH, 8), norm, gnn.SAGEConv(8, CLASSES)

    def forward(self, x, edge_index):
        return self.conv2(self.norm(self.conv1(x, edge_index)).relu(), edge_index)


class MemoryTGN(nn.Module):
    """A memory that the forward updates, as TGN: rows are written by ids computed from time."""

    def __init__(self):
        super().__init__()
        self.conv = gnn.TransformerConv(WIDTH, CLASSES)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        newest = edge_attr.argsort()[:32]
        rows = edge_index[1][newest]
        memory = x.index_put((rows,), self.cell(x[rows], x[rows]))
        return self.conv(memory, edge_index)


REFUSED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "GraphUNet": lambda: _plain(gnn.GraphUNet(WIDTH, 8, CLASSES, 2)),
    "global pooling": lambda: (Pooled(), (*graph(), torch.arange(NODES) % 4)),
    "TopKPooling": lambda: _plain(TopK()),
    "DGCNN (dynamic graph)": lambda: _plain(DynamicGraph()),
    "PointNet (global maximum)": lambda: (PointNet(), (graph()[0], torch.randn(NODES, 3), graph()[1])),
    "TGN (memory)": lambda: (MemoryTGN(), {"x": graph()[0], "edge_index": graph()[1], "edge_attr": edge_values()}),
    "GPSConv": lambda: _plain(gnn.GPSConv(WIDTH, gnn.SAGEConv(WIDTH, WIDTH), heads=2)),
    "SGFormer": lambda: (gnn.SGFormer(WIDTH, 8, CLASSES), (*graph(), torch.zeros(NODES, dtype=torch.int64))),
    "Polynormer, global attention": lambda: polynormer(True),
    "GraphNorm": lambda: _plain(Normed(gnn.GraphNorm(8))),
    "PairNorm": lambda: _plain(Normed(gnn.PairNorm())),
    "AttentiveFP": lambda: (
        gnn.AttentiveFP(WIDTH, 8, CLASSES, 4, 2, 2),
        {"x": graph()[0], "edge_index": graph()[1], "edge_attr": edge_values(4), "batch": torch.arange(NODES) % 4},
    ),
    "GraphSAGE aggr=lstm": lambda: _plain(
        Stack(gnn.SAGEConv(WIDTH, 8, aggr="lstm"), gnn.SAGEConv(8, CLASSES, aggr="lstm"))
    ),
    "batch norm in training mode": lambda: _plain(Normed(gnn.BatchNorm(8))),
    "batch norm without running statistics": lambda: _plain(Normed(nn.BatchNorm1d(8, track_running_stats=False))),
    "dropout in training mode": lambda: _plain(Stack(gnn.GCNConv(WIDTH, 8), gnn.GCNConv(8, CLASSES))),
}
