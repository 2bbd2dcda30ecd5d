"""The model and the log that all programs of the benchmark share."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import torch
from torch import nn

__all__ = ["StepLog", "make_model"]


def make_model(megabytes: float) -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose weights and two moments of AdamW have the bytes asked for, and an input."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = max(int(math.sqrt(megabytes * 1e6 / 3 / 4 / 4)), 1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    return model, torch.zeros(1, width)


class StepLog:
    """One line per step: when it ended, and over how many workers it ran."""

    def __init__(self, folder: Path, name: str):
        self._file = (folder / f"{name}.jsonl").open("a")

    def write(self, size: int, step: int, **fields: float) -> None:
        """Write a line."""
        self._file.write(json.dumps({"at": time.monotonic(), "size": size, "step": step, **fields}) + "\n")
        self._file.flush()
