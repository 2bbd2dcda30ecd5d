from __future__ import annotations

import pytest
import torch
from torch import nn

from core_kernels.testing import RankPool
from core_kernels.topology import cluster
from gnn_comm import Communicator, partition, plan
from gnn_comm.gradients import GradientReducer
from gnn_comm.layers import MODELS, EdgeIndexConv, FullGraphModel, build_model
from gnn_comm.sources import load_graph_data
from gnn_comm.training import TrainSettings, global_loss, reduce_gradients, train, train_alone
from gnn_comm.verify import TOLERANCE, relative_difference, verify_model

pytestmark = pytest.mark.distributed
DATA = "sbm:300"


def made_plan(num_ranks, planner, num_layers=2, spec=DATA):
    data = load_graph_data(spec, num_features=20)
    topology = cluster([2, num_ranks - 2] if num_ranks > 2 else [num_ranks], 8e9, 1e9)
    return data, plan(partition(data.graph, topology, "random"), topology, planner, num_layers=num_layers)


def compare_all(group, made, data, num_layers):
    if group.rank >= made.num_devices:
        return {}
    communicator = Communicator(made, group.subgroup(range(made.num_devices)))
    found = {}
    for model in MODELS:
        for dtype in TOLERANCE:
            settings = TrainSettings(model, hidden=16, num_layers=num_layers, dtype=dtype)
            found[(model, dtype)] = verify_model(communicator, data.graph, data, settings)
    communicator.close()
    return found


def check_exact(pool, num_ranks, planner, num_layers=2):
    data, made = made_plan(num_ranks, planner, num_layers)
    found = pool.run(compare_all, made, data, num_layers)[0]
    assert len(found) == 2 * len(MODELS)
    for case, result in found.items():
        assert result["within_tolerance"], (case, result)
        assert result["loss_difference"] <= TOLERANCE[case[1]], (case, result)


@pytest.mark.parametrize(("num_ranks", "planner"), [(1, "auto"), (2, "spst"), (3, "ring"), (4, "spst"), (4, "p2p")])
def test_gradients_equal_one_process(ranks, num_ranks, planner):
    check_exact(ranks, num_ranks, planner)


def test_replication_equals_one_process(ranks):
    check_exact(ranks, 4, "replication", num_layers=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_equal_one_process_up_to_eight_ranks():
    with RankPool(8, timeout_seconds=120.0) as pool:
        for num_ranks in (5, 6, 7, 8):
            for planner in ("auto", "spst", "hierarchical", "swap"):
                check_exact(pool, num_ranks, planner)


def trained(group, made, data, settings):
    communicator = Communicator(made, group)
    result = train(communicator, data, settings)
    communicator.close()
    return result


def test_training_learns_and_follows_one_process(ranks):
    data, made = made_plan(4, "spst")
    settings = TrainSettings("gcn", hidden=16, num_epochs=8, learning_rate=0.05, dtype="float64")
    results = ranks.run(trained, made, data, settings)
    assert all(result.losses == results[0].losses for result in results)
    alone, _ = train_alone(data.graph, data, settings)
    assert results[0].losses == pytest.approx(alone, rel=1e-9)
    assert results[0].losses[-1] < results[0].losses[0]
    assert results[0].sent_bytes > 0
    assert 0 <= results[0].accuracy <= 1


def test_compressed_gradients_are_off_unless_asked_for(ranks):
    data, made = made_plan(4, "spst")
    exact = ranks.run(trained, made, data, TrainSettings("gcn", hidden=64, num_epochs=6))[0]
    same = ranks.run(trained, made, data, TrainSettings("gcn", hidden=64, num_epochs=6, compress_gradients=None))[0]
    assert same.losses == exact.losses
    for name, fewer in (("casq", 1.3), ("s2", 3.0)):
        settings = TrainSettings("gcn", hidden=64, num_epochs=6, compress_gradients=name)
        results = ranks.run(trained, made, data, settings)
        assert all(result.losses == results[0].losses for result in results)
        assert results[0].losses[0] == exact.losses[0]
        assert results[0].losses[2:] != exact.losses[2:]
        assert results[0].losses[-1] < exact.losses[0]
        assert results[0].parameter_bytes * fewer < exact.parameter_bytes


SIZE, STEPS = 2000, 6


def gradient_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * rank + step)) ** 3


def summed(group, compress):
    reducer = GradientReducer(group, compress)
    results = [reducer.sum(gradient_of(group.rank, step)) for step in range(STEPS)]
    return results, reducer.carried()


@pytest.mark.parametrize("compress", ["s2", "casq"])
def test_what_compression_loses_is_carried(ranks, compress):
    answers = ranks.run(summed, compress)
    exact = sum(gradient_of(rank, step).double() for rank in range(4) for step in range(STEPS))
    handed_over = torch.stack(answers[0][0]).double().sum(0)
    carried = sum(answer[1].double() for answer in answers)
    torch.testing.assert_close(handed_over + carried, exact, rtol=0, atol=1e-3)
    assert (handed_over - exact).norm() > 1e-2 * exact.norm()  # without what is carried the sums would be wrong


def test_casq_error_is_within_its_bound(ranks):
    first = ranks.run(summed, "casq")[0][0][0]
    inputs = [gradient_of(rank, 0) for rank in range(4)]
    bound = sum(SIZE**0.5 * float(x.max() - x.min()) / 15 / 2 for x in inputs)
    error = float((first - sum(inputs)).norm())
    assert 0 < error <= bound


def test_unknown_compression_is_refused():
    with pytest.raises(ValueError, match="compress='zip'"):
        GradientReducer(None, "zip")


def forgetful(group, made, data):
    """The same comparison, but one rank keeps its gradients to itself: it must be noticed."""
    communicator = Communicator(made, group)
    settings = TrainSettings("gcn", hidden=16, dtype="float64")
    model = settings.build(data)
    x, labels = communicator.dispatch(data.features).double(), communicator.dispatch(data.labels, own_only=True)
    mask = communicator.dispatch(data.train_mask, own_only=True)
    rows = communicator.graph_all_gather(x).detach()
    hidden = model.convs[0](communicator.local_graph, rows).relu()
    cut = communicator.graph_all_gather(hidden)
    cut = torch.cat([cut[: communicator.num_local], cut[communicator.num_local :].detach()])
    out = model.convs[1](communicator.local_graph, cut)
    global_loss(out, labels, mask, int(data.train_mask.sum())).backward()
    reduce_gradients(model, communicator.group)
    _, expected = train_alone(data.graph, data, TrainSettings("gcn", hidden=16, num_epochs=1, dtype="float64"))
    communicator.close()
    return max(relative_difference(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_lost_remote_gradients_are_noticed(ranks):
    data, made = made_plan(4, "spst")
    assert min(ranks.run(forgetful, made, data)) > 1e-3


def pyg_difference(group, made, data):
    from torch_geometric.nn import SAGEConv

    torch.manual_seed(0)
    model = FullGraphModel([EdgeIndexConv(SAGEConv(20, 16)), EdgeIndexConv(SAGEConv(16, 4))]).double()
    communicator = Communicator(made, group)
    mine = model(communicator, communicator.dispatch(data.features).double())
    whole = model(data.graph, data.features.double())
    communicator.close()
    return (mine - whole[communicator.local_ids]).abs().max().item()


def test_pyg_convolutions_run_unchanged(ranks):
    pytest.importorskip("torch_geometric")
    data, made = made_plan(4, "spst")
    assert max(ranks.run(pyg_difference, made, data)) < 1e-12


def test_models_are_checked():
    with pytest.raises(ValueError, match="model='cnn'"):
        build_model("cnn", 4, 8, 2)
    with pytest.raises(ValueError, match="pass 12"):
        build_model("gat", 4, 10, 2)
    assert isinstance(build_model("gin", 4, 8, 2, num_layers=3).convs, nn.ModuleList)
