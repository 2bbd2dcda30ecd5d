"""Lets ``python -m elastic_train`` be the ``elastic-train`` command."""

from elastic_train.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
