"""Lets ``python -m gnn_comm`` be the ``gnn-comm`` command."""

from gnn_comm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
