"""The tour behind `nox -s demo`: train a GNN on real ratings over two ranks, with the strategy chosen by a plan.

Run it alone with ``python examples/demo.py``; arguments are passed on to ``gnn-parallel train``.
"""

from __future__ import annotations

import sys

from gnn_parallel.cli import main

DEFAULTS = ["--dataset", "movielens", "--ranks", "2", "--model", "sage", "--hidden", "64", "--fanouts", "10,10"]

NEXT = """
Where to go next
  gnn-parallel verify --dataset movielens --ranks 3      prove that the strategies agree with one process
  gnn-parallel train --help                              your own graph, model and cluster
  packages/gnn-parallel/README.md                        the same from Python, in six lines
  docs/index.md                                          tutorials, reference, explanation
"""

if __name__ == "__main__":
    code = main(["train", *DEFAULTS, "--epochs", "5", *sys.argv[1:]])
    if code == 0:
        print(NEXT)
    sys.exit(code)
