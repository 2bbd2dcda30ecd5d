"""``python -m recsys_embed`` is the command ``recsys-embed``."""

from __future__ import annotations

from recsys_embed.cli import main

raise SystemExit(main())
