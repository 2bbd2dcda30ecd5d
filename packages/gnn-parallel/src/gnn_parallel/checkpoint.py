"""Checkpoints that do not know under which strategy, and by how many ranks, they were made.

One ``.npz`` file without pickle: every tensor of model and optimizer, whole, and a JSON document with the optimizer's
settings and the number of epochs done. Rank 0 writes it beside its final name and renames it, so that a reader never
sees half a file.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnn_parallel.engine import Engine
from gnn_parallel.errors import input_error

__all__ = ["load_checkpoint", "save_checkpoint"]

_SCHEMA = "gnn_parallel.checkpoint"


def save_checkpoint(path: str | Path, engine: Engine, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write model, optimizer and the number of epochs done.

    Args:
        path: The file.
        engine: The engine.
        optimizer: Its optimizer.
        epoch: Epochs done.

    Collective: all ranks; when it returns, the file is there.
    """
    weights, document = engine.state_dict(), engine.optimizer_state_dict(optimizer)
    if engine.group.rank == 0:
        arrays: dict[str, Any] = {f"model/{name}": _to_array(value) for name, value in weights.items()}
        settings: dict[str, Any] = {"schema": _SCHEMA, "epoch": epoch, "dtypes": {}, "state": {}}
        settings["param_groups"] = document["param_groups"]
        for name, value in weights.items():
            settings["dtypes"][f"model/{name}"] = str(value.dtype).removeprefix("torch.")
        for index, entries in document["state"].items():
            settings["state"][str(index)] = {k: v for k, v in entries.items() if not isinstance(v, Tensor)}
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    arrays[f"optimizer/{index}/{key}"] = _to_array(value)
                    settings["dtypes"][f"optimizer/{index}/{key}"] = str(value.dtype).removeprefix("torch.")
        arrays["settings"] = np.frombuffer(json.dumps(settings).encode(), dtype=np.uint8)
        unfinished = Path(f"{path}.{os.getpid()}.tmp")
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes any array for allow_pickle
        unfinished.replace(path)
    engine.group.barrier()


def load_checkpoint(path: str | Path, engine: Engine, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Read a checkpoint into a model and its optimizer, under any strategy and number of ranks.

    Args:
        path: The file.
        engine: The engine whose model is overwritten.
        optimizer: Overwritten too, when given.

    Returns:
        The number of epochs done.

    Raises:
        InputError: The file is no checkpoint, or is one of another model.
    """
    path = Path(path)
    try:
        with path.open("rb") as source, np.load(source, allow_pickle=False) as file:
            settings = json.loads(bytes(file["settings"]))
            tensors = {name: _to_tensor(file[name], settings["dtypes"][name]) for name in settings["dtypes"]}
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise input_error("checkpoint", str(path), f"a file of save_checkpoint ({error})", "check the path") from error
    weights = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    own = {name: tuple(value.shape) for name, value in engine.model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if own != found:
        name = next(n for n in (own | found) if own.get(n) != found.get(n))
        expected = f"{name} of shape {own.get(name)}, as in the model; it has {found.get(name)}"
        raise input_error("checkpoint", str(path), expected, "make the model with the settings it was saved under")
    engine.model.load_state_dict(weights)
    if optimizer is not None:
        state: dict[int, dict[str, Any]] = {int(index): dict(v) for index, v in settings["state"].items()}
        for name, value in tensors.items():
            if name.startswith("optimizer/"):
                _, index, key = name.split("/")
                state[int(index)][key] = value
        optimizer.load_state_dict({"state": state, "param_groups": settings["param_groups"]})
    return settings["epoch"]


def _to_array(value: Tensor) -> np.ndarray:
    """Return a tensor as an array; 16-bit floats, which numpy lacks, as their bits."""
    value = value.detach().cpu().contiguous()
    return (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()


def _to_tensor(array: np.ndarray, dtype: str) -> Tensor:
    value = torch.from_numpy(np.array(array))
    return value.view(torch.bfloat16) if dtype == "bfloat16" else value
