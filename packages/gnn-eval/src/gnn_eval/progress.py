"""Progress of a run, with the time left, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from core_kernels.console import progress as progress_bar

if TYPE_CHECKING:
    from gnn_eval.hoisting import StructureEvaluator
    from gnn_eval.plan import Compiled

__all__ = ["show_progress"]


@contextmanager
def show_progress(
    wanted: bool, compiled: Compiled, structure: StructureEvaluator
) -> Iterator[Callable[[int, float, str], None] | None]:
    """Yield a function of (stage, part of it that is done, note) that moves a bar over the rows of all stages."""
    if not wanted:
        yield None
        return
    rows = [structure.count_of(stage.space) for stage in compiled.stages]
    shown = 0
    with progress_bar("evaluating", sum(rows)) as advance:

        def on_progress(place: int, done: float, note: str) -> None:
            nonlocal shown
            total = sum(rows[:place]) + int(rows[place] * done)
            advance(total - shown, note)
            shown = total

        yield on_progress
