"""The Pareto frontier of memory and time: its points, and the ways to choose one.

No point of a frontier is better than another in both coordinates. Choosing is therefore the user's: a memory budget, a
tolerated slow-down, the knee, or the best ratio of speed to memory.

Source: the search options of TensorOpt (arXiv 2004.10856) and the memory-efficiency index of HIPPIE; the knee is the
point farthest from the line between the two ends, after scaling both axes to [0, 1].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError, ProblemError

__all__ = ["Frontier", "FrontierOfPlans", "FrontierPoint"]

_SCHEMA = "autopar.frontier"
_VERSION = 1


@dataclass(frozen=True)
class FrontierPoint:
    """One plan that no other beats in both coordinates.

    Attributes:
        memory: Memory per device, in the unit of the problem (bytes for traced modules).
        seconds: Time of one step.
        choices: The choice of each node.
    """

    memory: float
    seconds: float
    choices: tuple[int, ...]


class Frontier:
    """Points with memory ascending and seconds descending.

    Args:
        memory: float64 [points], ascending.
        seconds: float64 [points], descending.
        choices_of: Returns the choices of a point by its index; called when they are asked for.
        exact: Whether the search was exhaustive.
    """

    def __init__(
        self,
        memory: Sequence[float] | np.ndarray,
        seconds: Sequence[float] | np.ndarray,
        choices_of: Callable[[int], tuple[int, ...]],
        exact: bool = True,
    ):
        self.memory = np.asarray(memory, np.float64)
        self.seconds = np.asarray(seconds, np.float64)
        self.exact = exact
        self._choices_of = choices_of
        self._points: dict[int, FrontierPoint] = {}

    def __len__(self) -> int:
        return self.memory.shape[0]

    def __getitem__(self, index: int) -> FrontierPoint:
        index = range(len(self))[index]
        if index not in self._points:
            choices = self._choices_of(index)
            self._points[index] = FrontierPoint(float(self.memory[index]), float(self.seconds[index]), choices)
        return self._points[index]

    @property
    def points(self) -> list[FrontierPoint]:
        """All points, memory ascending."""
        return [self[index] for index in range(len(self))]

    def mini_time(self, memory: float | None = None) -> FrontierPoint:
        """Return the fastest point that fits.

        Args:
            memory: Budget per device; ``None`` for no limit.

        Raises:
            InfeasibleError: Nothing fits; the message names the least memory possible.
        """
        self._refuse_empty()
        if memory is None:
            return self[-1]
        fitting = int(np.searchsorted(self.memory, memory, side="right"))
        if fitting == 0:
            raise InfeasibleError(
                f"memory={memory:g} is not feasible: the least memory of any plan is {self.memory[0]:g}; "
                "raise the budget, use more devices or a smaller batch"
            )
        return self[fitting - 1]

    def min_memory(self, slowdown: float | None = None) -> FrontierPoint:
        """Return the point of least memory that is not too slow.

        Args:
            slowdown: Largest time allowed, as a multiple of the fastest plan's; ``None`` for no limit.

        Raises:
            ProblemError: ``slowdown`` is below 1.
        """
        self._refuse_empty()
        if slowdown is None:
            return self[0]
        if not slowdown >= 1:
            raise ProblemError(f"slowdown={slowdown} is not valid: expected at least 1; 1.2 allows 20 % more time")
        return self[int(np.argmax(self.seconds <= slowdown * self.seconds[-1]))]

    def knee(self) -> FrontierPoint:
        """Return the point farthest below the line between the two ends, both axes scaled to [0, 1]."""
        self._refuse_empty()
        if len(self) < 3:
            return self[-1]
        span_memory, span_seconds = self.memory[-1] - self.memory[0], self.seconds[0] - self.seconds[-1]
        along = (self.memory - self.memory[0]) / span_memory
        below = (self.seconds[0] - self.seconds) / span_seconds
        return self[int(np.argmax(below - along))]

    def max_memory_efficiency(self) -> FrontierPoint:
        """Return the point with the most steps per second and unit of memory (HIPPIE's index)."""
        self._refuse_empty()
        return self[int(np.argmin(self.memory * self.seconds))]

    def to_csv(self, path: str | Path) -> None:
        """Write one line ``memory,seconds`` per point, with a header."""
        lines = [f"{memory:.17g},{seconds:.17g}" for memory, seconds in zip(self.memory, self.seconds, strict=True)]
        Path(path).write_text("\n".join(["memory,seconds", *lines]) + "\n")

    def save(self, path: str | Path) -> None:
        """Write the frontier with the choices of every point as JSON."""
        document = {
            "schema": _SCHEMA,
            "version": _VERSION,
            "exact": self.exact,
            "memory": self.memory.tolist(),
            "seconds": self.seconds.tolist(),
            "choices": [list(point.choices) for point in self.points],
        }
        Path(path).write_text(json.dumps(document) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Frontier:
        """Read a frontier written by :meth:`save`.

        Raises:
            ProblemError: The file holds another document or a newer version.
        """
        document = json.loads(Path(path).read_text())
        found = (document.get("schema"), document.get("version"))
        if found != (_SCHEMA, _VERSION):
            raise ProblemError(
                f"{path} holds {found[0]} version {found[1]}; expected {_SCHEMA} version {_VERSION}; "
                "write it again with Frontier.save"
            )
        choices = [tuple(row) for row in document["choices"]]
        return cls(document["memory"], document["seconds"], choices.__getitem__, document["exact"])

    def plot(self, path: str | Path | None = None, marks: dict[str, tuple[float, float]] | None = None) -> Any:
        """Draw time over memory.

        Args:
            path: Image file to write; ``None`` writes none.
            marks: Further plans to show, name to (memory, seconds), for example the usual presets.

        Returns:
            The matplotlib figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.step(self.memory, self.seconds, where="post", marker="o", markersize=3, label="frontier")
        for name, (memory, seconds) in (marks or {}).items():
            axes.plot(memory, seconds, "x", markersize=8, label=name)
        axes.set(xlabel="memory per device", ylabel="seconds per step")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure

    def _refuse_empty(self) -> None:
        if len(self) == 0:
            raise InfeasibleError(
                "the frontier is empty: every combination of choices is forbidden; allow more choices per operator"
            )


class FrontierOfPlans(Frontier):
    """A frontier whose points are documents of their own, made when they are asked for."""

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        if index not in self._points:
            self._points[index] = self._choices_of(index)  # type: ignore[assignment]
        return self._points[index]
