"""The same model on TorchRec's ``table_wise`` sharding, for comparison; needs ``torchrec`` and ``fbgemm-gpu-cpu``."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from core_kernels.comm import Group
from core_kernels.errors import MissingDependencyError
from recsys_embed.data import ClickData
from recsys_embed.data.clicks import ClickBatch
from recsys_embed.models import make_model

if TYPE_CHECKING:
    from recsys_embed.bench import BenchJob

__all__ = ["torchrec_steps"]


class _Tables(nn.Module):
    """TorchRec's collection with the names that our models read."""

    def __init__(self, data: ClickData, width: int):
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        self.tables, self.features = data.tables(width), list(data.fields)
        configs = [
            EmbeddingBagConfig(
                name=t.name,
                embedding_dim=width,
                num_embeddings=t.num_embeddings,
                feature_names=list(t.feature_names),
            )
            for t in self.tables
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, batch: Any) -> Any:
        pooled = self.bags(batch)
        return SimpleNamespace(values=lambda: pooled.values())


def torchrec_steps(
    group: Group, job: BenchJob, data: ClickData, batches: list[ClickBatch]
) -> list[tuple[float, dict[str, float]]]:
    """Train with TorchRec; returns the time after every step. Collective.

    Raises:
        MissingDependencyError: TorchRec is not installed.
    """
    try:
        from torchrec import KeyedJaggedTensor
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    except ImportError as error:
        raise MissingDependencyError(
            f"TorchRec cannot be imported ({error}); pip install --no-deps torchrec fbgemm-gpu-cpu"
        ) from None
    tables = _Tables(data, job.width)
    apply_optimizer_in_backward(torch.optim.SGD, tables.bags.parameters(), {"lr": 0.05})
    model = make_model("dlrm", tables, data.dense.shape[1], job.hidden)
    device = torch.device("cpu")
    constraints = {t.name: ParameterConstraints(sharding_types=["table_wise"]) for t in tables.tables}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=group.size, compute_device="cpu"), constraints=constraints
    )
    sharders: Any = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = [p for name, p in sharded.named_parameters() if "bags" not in name]
    optimizer, criterion = torch.optim.SGD(dense, lr=0.05), nn.BCEWithLogitsLoss()
    marks: list[tuple[float, dict[str, float]]] = [(time.perf_counter(), {})]
    for batch in batches:
        features = KeyedJaggedTensor(
            keys=batch.features.keys(), values=batch.features.values().long(), lengths=batch.features.lengths().int()
        )
        optimizer.zero_grad()
        scores = sharded(SimpleNamespace(dense=batch.dense, features=features))
        criterion(scores, batch.labels).backward()
        optimizer.step()
        marks.append((time.perf_counter(), {}))
    return marks
