"""The workspace's own checks: they pass on this repository, and each fails on a tree that breaks its rule."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import changelog
import check_imports
import check_public_api
import check_text
import check_versions
import check_wheels
import compare_reports
import error_reference
import new_package
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def small_tree(tmp_path):
    """Two packages of this repository, enough for every check."""
    for package in ("core-kernels", "gnn-eval"):
        shutil.copytree(
            ROOT / "packages" / package,
            tmp_path / "packages" / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc"),
        )
    return tmp_path


def test_leaves_import_only_the_core():
    assert check_imports.violations(ROOT) == []


def test_an_import_between_leaves_is_found(small_tree):
    planted = small_tree / "packages/gnn-eval/src/gnn_eval/planted.py"
    planted.write_text("from gnn_comm.plan import Plan\n")
    assert check_imports.violations(small_tree) == [
        "packages/gnn-eval/src/gnn_eval/planted.py:1: gnn_eval imports gnn_comm"
    ]


def test_versions_agree():
    assert check_versions.problems(ROOT, None) == []


def test_a_tag_that_names_another_version_is_found(small_tree):
    version = check_versions.read_versions(small_tree)["gnn-eval"]
    assert check_versions.problems(small_tree, f"gnn-eval-v{version}") == []
    assert check_versions.problems(small_tree, "gnn-eval-v99.0.0") == [
        f"tag gnn-eval-v99.0.0 does not match: gnn-eval is at {version}"
    ]


def test_a_missing_changelog_heading_is_found(small_tree):
    changelog = small_tree / "packages/gnn-eval/CHANGELOG.md"
    changelog.write_text("# Changelog\n")
    assert "gnn-eval/CHANGELOG.md has no heading" in check_versions.problems(small_tree, None)[0]


def test_a_new_package_has_the_kit_and_passes_the_checks(small_tree):
    folder = new_package.lay_out(small_tree, "graph-store", "Keeps a graph and its rows in tiers.")
    kit = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src", "tests", "benchmarks"}
    assert {path.name for path in folder.iterdir()} == kit
    assert check_versions.problems(small_tree, "graph-store-v0.1.0") == []


@pytest.mark.parametrize("name", ["Graph", "graph_store", "-x", ""])
def test_a_new_package_with_a_bad_name_is_refused(small_tree, name):
    with pytest.raises(SystemExit, match="lower-case words joined by hyphens"):
        new_package.lay_out(small_tree, name, "Keeps a graph and its rows in tiers.")


# -- public names ------------------------------------------------------------------------------------------------------


def test_public_names_agree_with_the_lists():
    assert check_public_api.problems(ROOT, ROOT / "tools" / "public_api") == []


def test_names_that_come_go_or_have_no_docstring_are_found(small_tree):
    lists = small_tree / "public_api"
    assert check_public_api.problems(small_tree, lists, write=True) == []
    init = small_tree / "packages/gnn-eval/src/gnn_eval/__init__.py"
    text = init.read_text()
    init.write_text(text.replace('    "score_links",\n', '    "planted",\n') + "\ndef planted():\n    pass\n")
    check_public_api.parse.cache_clear()
    found = check_public_api.problems(small_tree, lists)
    assert [fault.split(" ")[0] for fault in found] == ["gnn_eval.planted", "gnn_eval.score_links", "gnn_eval.planted"]
    assert "has no docstring" in found[0]
    assert "not public any more" in found[1]
    assert "became public" in found[2]


# -- text --------------------------------------------------------------------------------------------------------------


def test_nothing_is_unfinished_and_every_block_is_run_or_says_why_not():
    assert [*check_text.block_problems(ROOT), *check_text.unfinished(ROOT), *check_text.bare_skips(ROOT)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```\nx\n```\n", "a block without a known language"),
        ("    frobnicate --all\n\n```bash\nfrobnicate --all\n```\n", "'frobnicate --all' is no known program"),
        ("<!-- not run: -->\n```python\nx = 1\n```\n", "marked as not run without a reason"),
    ],
)
def test_a_block_that_nobody_runs_is_found(tmp_path, text, fault):
    (tmp_path / "README.md").write_text(text)
    (found,) = check_text.block_problems(tmp_path)
    assert fault in found


def test_blocks_are_told_apart():
    text = """```{code-cell} ipython3
x = 1
```

    pip install x

Then

    x = f(1)

Then

    12 rows, 3 ms

- item

    continued item

<!-- not run: needs a cluster -->
```python
y = 2
```
"""
    blocks = list(check_text.code_blocks(text))
    kinds = [("cell", None), ("shell", None), ("python", None), ("data", None), ("python", "needs a cluster")]
    assert [(block.kind, block.reason) for block in blocks] == kinds


def test_marks_of_unfinished_work_and_bare_skips_are_found(tmp_path):
    mark = "TO" + "DO"
    (tmp_path / "a.py").write_text(f"# {mark}: later\nimport pytest\npytest.skip()\nraise NotImplementedError\n")
    (tmp_path / "b.py").write_text("@pytest.mark.skipif(x, reason='no device')\ndef f(): raise ValueError('no')\n")
    assert [fault.split(":")[0] for fault in check_text.unfinished(tmp_path)] == ["a.py"]
    assert [fault.split(":")[1] for fault in check_text.bare_skips(tmp_path)] == ["4", "3"]


# -- changes -----------------------------------------------------------------------------------------------------------


def test_fragments_are_gathered_and_wrong_ones_are_found(small_tree):
    (small_tree / "tools").mkdir()
    shutil.copy(ROOT / "tools/towncrier.toml", small_tree / "tools")
    changes = small_tree / "packages/gnn-eval/changes"
    changes.mkdir()
    (changes / "+blocks.fixed.md").write_text("Blocks without edges are evaluated.")
    assert changelog.problems(small_tree) == []
    (changes / "+wish.wanted.md").write_text("More.")
    (changes / "+silent.added.md").write_text("\n")
    faults = changelog.problems(small_tree)
    assert [fault.split(" ")[0] for fault in faults] == [f"packages/gnn-eval/changes/{n}" for n in (
        "+silent.added.md", "+wish.wanted.md")]  # fmt: skip


def test_a_release_moves_fragments_into_the_changelog(small_tree):
    if importlib.util.find_spec("towncrier") is None:
        pytest.skip("towncrier is not installed; nox -s changelog brings it")
    (small_tree / "tools").mkdir()
    shutil.copy(ROOT / "tools/towncrier.toml", small_tree / "tools")
    changes = small_tree / "packages/gnn-eval/changes"
    changes.mkdir()
    (changes / "+blocks.fixed.md").write_text("Blocks without edges are evaluated.")
    subprocess.run(["git", "init", "-q", str(small_tree)], check=True)
    subprocess.run(["git", "-C", str(small_tree), "add", "packages"], check=True)
    assert changelog.build(small_tree, "gnn-eval", is_draft=False) == 0
    text = (small_tree / "packages/gnn-eval/CHANGELOG.md").read_text()
    assert text.index("newest release below") < text.index("Blocks without edges") < text.index("(unreleased)")
    assert not (changes / "+blocks.fixed.md").exists()


# -- wheels ------------------------------------------------------------------------------------------------------------


def write_wheel(folder: Path, requires: str, content: str = "x = 1\n") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "gnn_eval-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("gnn_eval/__init__.py"), content)
        base = "gnn_eval-0.1.0.dist-info"
        archive.writestr(zipfile.ZipInfo(f"{base}/METADATA"), f"Name: gnn-eval\nRequires-Dist: {requires}\n")
        archive.writestr(zipfile.ZipInfo(f"{base}/licenses/LICENSE"), "Apache-2.0")
    return path


def test_a_wheel_that_pulls_a_sibling_is_found(tmp_path):
    assert check_wheels.problems(write_wheel(tmp_path / "a", "core-kernels>=0.1")) == []
    (fault,) = check_wheels.problems(write_wheel(tmp_path / "b", "gnn_comm>=0.1"))
    assert "requires gnn-comm, a sibling" in fault


def test_builds_that_differ_are_found(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, content in zip(folders, ("x = 1\n", "x = 1\n", "x = 2\n"), strict=True):
        write_wheel(folder, "torch", content)
    assert check_wheels.differences(folders[0], folders[1]) == []
    assert "differs between two builds" in check_wheels.differences(folders[0], folders[2])[0]


# -- reports -----------------------------------------------------------------------------------------------------------


def compare(tmp_path, before, after, *arguments, suffix="json"):
    paths = [tmp_path / f"{name}.{suffix}" for name in ("before", "after")]
    for path, content in zip(paths, (before, after), strict=True):
        path.write_text(content if suffix == "md" else json.dumps(content))
    return compare_reports.main([*map(str, paths), *arguments])


def test_a_slower_line_and_a_lower_rate_are_worse(tmp_path, capsys):
    base = {"results": [{"op": "spmm", "ours_ms": 10.0, "rows_per_second": 100.0, "num_rows": 5}]}
    slower = {"results": [{"op": "spmm", "ours_ms": 13.0, "rows_per_second": 100.0, "num_rows": 9}]}
    lower = {"results": [{"op": "spmm", "ours_ms": 10.0, "rows_per_second": 70.0, "num_rows": 5}]}
    assert compare(tmp_path, base, base) == 0
    assert compare(tmp_path, base, slower) == 1
    assert "results[spmm].ours_ms" in capsys.readouterr().out
    assert compare(tmp_path, base, slower, "--worse", "0.5") == 0
    assert compare(tmp_path, base, lower) == 1
    assert compare(tmp_path, slower, base) == 0


def test_tables_of_pages_are_compared_by_row_and_head(tmp_path, capsys):
    page = (
        "| op | ours, ms | peer | peer over ours |\n|---|---|---|---|\n| spmm | {} | torch | 4.0 |\n| | | bag | {} |\n"
    )
    assert compare(tmp_path, page.format("1,200.5", "2"), page.format("1,200.5", "2"), suffix="md") == 0
    assert compare(tmp_path, page.format("10", "2"), page.format("10", "1"), suffix="md") == 1
    assert "spmm, bag: peer over ours" in capsys.readouterr().out


def test_rows_that_only_numbers_tell_apart_are_all_compared(tmp_path, capsys):
    page = (
        "| budget | parts | seconds |\n|---|---|---|\n| 256 MB | 8 | 1.0 |\n| 256 MB | 9 | {} |\n| 512 MB | 8 | 3.0 |\n"
    )
    assert compare(tmp_path, page.format("2.0"), page.format("2.0"), suffix="md") == 0
    assert compare(tmp_path, page.format("2.0"), page.format("4.0"), suffix="md") == 1
    assert re.search(r"256 MB, 9: seconds +2\.000 +WORSE", capsys.readouterr().out)


def test_reports_without_a_common_line_are_refused(tmp_path):
    assert compare(tmp_path, {"a_seconds": 1.0}, {"b_seconds": 1.0}) == 2


# -- messages ----------------------------------------------------------------------------------------------------------


def test_at_least_sixty_wrong_calls_are_audited_and_shown():
    packages = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    counts = error_reference.count_rows(error_reference.PAGE)
    assert error_reference.problems(counts, packages) == []
    assert sum(counts.values()) >= 60


@pytest.mark.slow
def test_the_page_shows_what_the_packages_say_today():
    assert error_reference.main(["--live"]) == 0


def test_a_package_with_few_calls_is_found(tmp_path):
    page = tmp_path / "messages.md"
    page.write_text(error_reference.render({"autopar": [("E", f"`` m{i} ``") for i in range(7)]}))
    assert error_reference.count_rows(page) == {"autopar": 7}
    (fault,) = error_reference.problems(error_reference.count_rows(page), ["autopar"])
    assert "autopar shows 7 wrong calls; expected at least 8" in fault


def test_a_message_becomes_one_cell_without_places_of_this_machine():
    text = f"{ROOT}/packages/x.py: /tmp/tmpab12/jobs.csv holds\n3 | 4 at 0x7f12"
    assert error_reference.as_cell(text, ROOT) == "`` packages/x.py: FOLDER/jobs.csv holds 3 \\| 4 at 0x... ``"
