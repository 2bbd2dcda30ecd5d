"""The tour behind `nox -s demo`: one story through all packages on two ranks, a closing table, and a report with plots.

    python examples/demo.py                    # all packages
    python examples/demo.py gnn-eval           # one of them
    python examples/demo.py --epochs 20        # train longer

The story: real film ratings. A layer is written and measured, trained over two ranks under a plan, its rows exchanged,
its weights evaluated on every film; the ratings train a click model; a classifier is planned for less memory; and a job
takes a second worker while it runs. Each chapter is an example of its own in this folder.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from pathlib import Path

from chapter import Chapter, finish, parser

from core_kernels.console import CheckFailedError, format_seconds, say, table

# Package to the example that tells about it, in the order of the story.
CHAPTERS = {
    "core-kernels": "own_layer",
    "gnn-parallel": "parallel_training",
    "gnn-comm": "full_graph_exchange",
    "gnn-eval": "evaluate_every_node",
    "recsys-embed": "click_model",
    "autopar": "plan_frontier",
    "elastic-train": "grow_while_training",
}

NEXT = """
Where to go next
  examples/                     one script per chapter, and four packages together
  packages/<name>/README.md     the smallest program of each package
  docs/                         tutorials, how-to, reference, explanation: nox -s docs
"""


def tell_chapter(package: str, epochs: int, weights: Path) -> Chapter:
    """Run one example and return its chapter; the GNN trained by gnn-parallel is the one gnn-eval evaluates."""
    settings: dict[str, object] = {}
    if package == "gnn-parallel":
        settings = {"epochs": epochs, "weights": weights}
    elif package == "gnn-eval" and weights.exists():
        settings = {"weights": weights}
    begin = time.perf_counter()
    chapter = importlib.import_module(CHAPTERS[package]).run(**settings)
    chapter.seconds = time.perf_counter() - begin
    return chapter


def tour(packages: list[str], epochs: int) -> list[Chapter]:
    """Tell the chapters of some packages."""
    chapters = []
    with tempfile.TemporaryDirectory() as folder:
        for number, package in enumerate(packages, 1):
            say(f"\n{number} of {len(packages)}: {package}")
            chapters.append(tell_chapter(package, epochs, Path(folder) / "weights.pt"))
            if chapters[-1].text:
                say(chapters[-1].text)
            say(f"{chapters[-1].question}: {format_seconds(chapters[-1].seconds)}")
    return chapters


def main() -> None:
    """Run the tour."""
    options: argparse.ArgumentParser = parser(__doc__ or "")
    options.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"some of {', '.join(CHAPTERS)}; all if none")
    options.add_argument("--epochs", type=int, default=5, help="of the training under a plan")
    options.set_defaults(report=Path(".sextet/demo.html"))
    args = options.parse_args()
    args.packages = ["elastic-train" if package == "elastic" else package for package in args.packages]
    unknown = [package for package in args.packages if package not in CHAPTERS]
    if unknown or args.epochs < 1:
        what = f"packages={unknown}" if unknown else f"epochs={args.epochs}"
        expected = f"some of {', '.join(CHAPTERS)}" if unknown else "at least 1"
        options.error(f"{what} is not valid: expected {expected}; correct the spelling or leave it out")
    begin = time.perf_counter()
    chapters = tour(args.packages or list(CHAPTERS), args.epochs)
    rows = [(chapter.package, *row) for chapter in chapters for row in chapter.rows]
    seconds = format_seconds(time.perf_counter() - begin)
    say("")
    table(f"what was measured here, in {seconds}", ("package", "measured", "value"), rows)
    finish(chapters, args.report, is_told=False)
    say(NEXT)
    wrong = [row for row in rows if row[2] in ("DIFFER", "False")]
    if wrong:
        raise CheckFailedError(f"these results are wrong: {wrong}")


if __name__ == "__main__":
    main()
