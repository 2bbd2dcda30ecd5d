"""The meeting place of torchft, ``_lighthouse.py PORT``: a process of its own, as it prints a line per step."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Serve until killed."""
    # torchft is an optional peer: pyright cannot find it everywhere.
    from torchft.coordination import LighthouseServer  # pyright: ignore

    place = f"127.0.0.1:{sys.argv[1]}"
    server = LighthouseServer(bind=place, min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000)
    signal.pause()
    server.shutdown()


if __name__ == "__main__":
    main()
