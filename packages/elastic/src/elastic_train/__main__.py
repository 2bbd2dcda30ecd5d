"""``python -m elastic_train``: the same as ``elastic-train``."""

from __future__ import annotations

import sys

from elastic_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
