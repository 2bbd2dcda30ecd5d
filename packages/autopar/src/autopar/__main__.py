"""Lets ``python -m autopar`` be the ``autopar`` command."""

from autopar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
