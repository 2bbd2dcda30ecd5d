"""Plots of a training report; matplotlib is imported only here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from core_kernels.errors import MissingDependencyError
from gnn_parallel.clock import TERMS

__all__ = ["plot_training"]


def plot_training(report: dict[str, Any], path: Path) -> None:
    """Draw loss and accuracy per epoch, and predicted beside measured seconds by term.

    Args:
        report: From :func:`gnn_parallel.training.train_on_rank`.
        path: Where to write the picture; the suffix decides the format.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            '--plot needs matplotlib, which is not installed; run pip install "gnn-parallel[plot]"'
        ) from None
    figure = Figure(figsize=(11, 4), layout="constrained")
    learning, time = figure.subplots(1, 2)
    epochs = range(1, len(report["epochs"]) + 1)
    learning.plot(epochs, [epoch["loss"] for epoch in report["epochs"]], color="tab:red", label="loss")
    learning.set(xlabel="epoch", ylabel="training loss", title=f"{report['strategy']}, {report['world_size']} ranks")
    accuracy, shares = learning.twinx(), [epoch["val_accuracy"] for epoch in report["epochs"]]
    accuracy.plot(epochs, [math.nan if share is None else share for share in shares], color="tab:blue")
    accuracy.set(ylabel="validation accuracy", ylim=(0, 1))
    candidates = {name: c["seconds"] for name, c in report["candidates"].items() if c["predicted_seconds"] is not None}
    bars = {f"{name}\npredicted": seconds for name, seconds in candidates.items()}
    bars[f"{report['strategy']}\nmeasured"] = report["measured"]
    bottom = [0.0] * len(bars)
    for term in TERMS:
        heights = [seconds[term] for seconds in bars.values()]
        time.bar(range(len(bars)), heights, bottom=bottom, label=term)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    time.set_xticks(range(len(bars)), list(bars))
    time.set(ylabel="seconds per epoch", title="where an epoch goes")
    time.legend()
    figure.savefig(path, dpi=120)
