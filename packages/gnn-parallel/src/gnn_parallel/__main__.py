"""Lets ``python -m gnn_parallel`` be the ``gnn-parallel`` command."""

from gnn_parallel.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
