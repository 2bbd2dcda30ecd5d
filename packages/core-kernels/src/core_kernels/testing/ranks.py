"""Reusable ranks: start the processes once, run many functions on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from core_kernels._ranks import RankSet, RankSettings

__all__ = ["RankPool"]


class RankPool:
    """Local ranks that stay up between runs, so that a test module pays their start once.

    After a failure that leaves ranks out of step (one died, or a collective failed) the next run starts new ones.

    Args:
        world_size: Number of ranks.
        threads: Threads of each rank.
        timeout_seconds: Longest wait for one collective.
        backend: ``"gloo"`` or ``"nccl"``.
        env: Environment variables to add.

    Use it as a context manager, for example in a module-scoped fixture::

        @pytest.fixture(scope="module")
        def pool():
            with RankPool(4) as pool:
                yield pool
    """

    def __init__(
        self,
        world_size: int,
        threads: int = 1,
        timeout_seconds: float = 30.0,
        backend: str = "gloo",
        env: dict[str, str] | None = None,
    ):
        self._settings = RankSettings(world_size, threads, timeout_seconds, backend, env)
        self._ranks: RankSet | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._settings.world_size

    def run(self, fn: Callable[..., Any], *args: Any, deadline_seconds: float | None = 90.0) -> list[Any]:
        """Run ``fn(group, *args)`` on every rank; see :func:`core_kernels.launch.run_ranks`.

        The group is the same object in every run, so its counters keep counting; ``fn`` must be defined at the top of
        a module, which may be a test file.
        """
        if self._ranks is None or not self._ranks.is_usable:
            self._ranks = RankSet(self._settings)
        try:
            return self._ranks.run(fn, args, deadline_seconds)
        except (KeyboardInterrupt, SystemExit):
            self._ranks.kill()
            raise

    def pids(self) -> list[int]:
        """Return the process id of every running rank."""
        return self._ranks.pids() if self._ranks is not None and self._ranks.is_usable else []

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None and self._ranks.is_usable:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
