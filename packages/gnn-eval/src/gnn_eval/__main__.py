"""Lets ``python -m gnn_eval`` be the ``gnn-eval`` command."""

from gnn_eval.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
