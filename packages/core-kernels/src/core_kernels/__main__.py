"""Lets ``python -m core_kernels`` be the ``core-kernels`` command."""

from core_kernels.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
