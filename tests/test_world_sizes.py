"""Every package proves itself on one number of ranks: `nox -s "distributed(world_size=4)"`.

Each test is the package's own proof, on data small enough for eight ranks on two cores. Numbers of ranks come from
``SEXTET_WORLD_SIZES`` (all of 1, 2, 4, 8 without it).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from core_kernels import datasets, partition_graph
from core_kernels.testing import RankPool

ROOT = Path(__file__).resolve().parents[1]
SIZES = [int(size) for size in os.environ.get("SEXTET_WORLD_SIZES", "1,2,4,8").split(",")]
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=SIZES)
def pool(request):
    with RankPool(request.param, timeout_seconds=120.0) as ranks:
        yield ranks, request.param


def exchange_uneven(group):
    """Send every rank as many rows as its number, and sum over all ranks."""
    rows = torch.full((sum(range(group.size)), 2), float(group.rank), dtype=torch.float64)
    received, counts = group.all_to_all_v(rows, list(range(group.size)))
    total = group.all_reduce(torch.arange(3, dtype=torch.float64) * (group.rank + 1))
    return received[:, 0].tolist(), list(map(int, counts)), total.tolist()


def test_core_kernels_exchanges_and_sums(pool):
    ranks, size = pool
    for rank, (received, counts, total) in enumerate(ranks.run(exchange_uneven)):
        assert counts == [rank] * size
        assert received == [float(source) for source in range(size) for _ in range(rank)]
        assert total == [0.0, size * (size + 1) / 2, size * (size + 1)]


def compare_strategies(group):
    import gnn_parallel

    data = datasets.sbm(400, num_classes=3, num_features=8)
    features = data.features.double()
    found = gnn_parallel.verify_strategies(
        group,
        data.graph,
        lambda: gnn_parallel.make_model("sage", 8, 8, 3, 2, dtype=torch.float64),
        features,
        data.labels,
        partition_graph(data.graph, group.size, "random"),
        data.train_mask.nonzero().view(-1),
        (4, 4),
        64,
        2,
    )
    return {name: difference.largest for name, difference in found.items() if not isinstance(difference, str)}


def test_gnn_parallel_strategies_agree_with_one_process(pool):
    differences = pool[0].run(compare_strategies)[0]
    assert len(differences) == 4
    assert max(differences.values()) < 1e-10


def test_gnn_comm_exchanges_exactly(pool):
    import gnn_comm
    from core_kernels.topology import cluster
    from gnn_comm.verify import verify_plan

    size = pool[1]
    hosts = [size // 2, size - size // 2] if size > 2 else [size]
    topology = cluster(hosts, local_bytes_per_second=2e9, link_bytes_per_second=2e8)
    parts = gnn_comm.partition(datasets.rmat(2**9, 2**12).graph, topology, method="random")
    checks = verify_plan(gnn_comm.plan(parts, topology), parts, timeout_seconds=120.0)
    assert all(value for value in checks.values() if isinstance(value, bool))


class Sums(torch.nn.Module):
    def forward(self, x, edge_index):
        for _ in range(2):
            x = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]).tanh()
        return x


def evaluate_together(group):
    import gnn_eval

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(301, 4, generator=generator), torch.randint(301, (2, 2000), generator=generator)
    out = gnn_eval.evaluate(Sums(), inputs, group=group, batch_rows=17, fuse=False)
    return torch.equal(out, Sums()(*inputs))


def test_gnn_eval_equals_the_full_forward_bit_by_bit(pool):
    assert all(pool[0].run(evaluate_together))


def train_tables(group, tables, batches, case):
    from recsys_embed.verify import run_case

    return run_case(group, tables, batches, case)


def test_recsys_embed_equals_embedding_bags_bit_by_bit(pool):
    from recsys_embed.data import FieldSpec, make_clicks
    from recsys_embed.verify import Case, compare, reference_tables

    data = make_clicks(256, [FieldSpec("user", 200), FieldSpec("film", 50)])
    tables = data.tables(8)
    batches = [batch.features for batch in data.batches(64)]
    case = Case(20, True, "rowwise_adagrad")
    expected = reference_tables(tables, batches, case)
    assert all(compare(found, expected).is_bitwise_equal for found in pool[0].run(train_tables, tables, batches, case))


def test_autopar_plans_train_as_one_device(pool):
    import autopar
    from autopar import models

    graph = autopar.trace(*models.mlp())
    frontier = autopar.search(graph, autopar.Cluster.preset("loopback-cpu", num_devices=pool[1]), [(pool[1],)])
    for plan in (frontier.mini_time(), frontier.min_memory()):
        found = autopar.verify("autopar.models:mlp", plan, num_steps=2)
        assert found.largest_error < 1e-10
        assert found.collectives_match


def test_elastic_train_gives_the_losses_of_one_worker(pool, tmp_path):
    from elastic_train.launchers import LocalJob

    script = str(ROOT / "packages" / "elastic" / "tests" / "distributed" / "training_script.py")
    found = []
    for workers in (1, pool[1]):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        arguments = ["--samples", "200", "--epochs", "1", "--step-seconds", "0"]
        environment = {"OMP_NUM_THREADS": "1", "ELASTIC_TRAIN_LEASE_SECONDS": "20"}
        with LocalJob([script, str(folder), *arguments], folder, min_workers=workers, environment=environment) as job:
            job.scale_out(workers)
            assert set(job.wait(200).values()) == {0}
        lines = [json.loads(line) for path in sorted(folder.glob("w*.jsonl")) for line in path.read_text().splitlines()]
        steps = [line for line in lines if "ids" in line]
        assert sorted(i for step in steps for i in step["ids"]) == list(range(200))
        found.append([sum(s["loss"] for s in steps if s["step"] == step) for step in range(7)])
    assert found[1] == pytest.approx(found[0], rel=1e-9)
