"""Lets ``python -m recsys_embed`` be the ``recsys-embed`` command."""

from recsys_embed.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
