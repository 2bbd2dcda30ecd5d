"""Graphs on disk: a folder of plain ``.npy`` arrays and one ``graph.json``.

Arrays are written first and the JSON last, so a folder with a ``graph.json`` is complete. Nothing is pickled.
Memory-mapped loading maps the arrays privately (copy on write): the files never change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_kernels.errors import argument_error

__all__ = ["load_arrays", "save_arrays"]

_FORMAT = "core_kernels.graph"
_VERSION = 1


def save_arrays(folder: str | Path, arrays: dict[str, Tensor | None], header: dict[str, Any]) -> None:
    """Write the arrays that are not ``None`` and a header that lists them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph.json").unlink(missing_ok=True)  # until the new arrays are whole there is no graph here
    present = [name for name, array in arrays.items() if array is not None]
    for name in present:
        np.save(folder / f"{name}.npy", arrays[name].detach().cpu().numpy(), allow_pickle=False)
    header = {"format": _FORMAT, "version": _VERSION, **header, "arrays": present}
    partial = folder / "graph.json.partial"
    partial.write_text(json.dumps(header, indent=1) + "\n")
    partial.replace(folder / "graph.json")


def load_arrays(folder: str | Path, mmap: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the arrays and the header written by :func:`save_arrays`."""
    path = Path(folder) / "graph.json"
    if not path.is_file():
        raise argument_error("dir", str(folder), "a folder with graph.json", "write one with graph.save(dir)")
    try:
        header = json.loads(path.read_text())
    except ValueError as error:
        raise argument_error("dir", str(folder), f"JSON in graph.json ({error})", "save the graph again") from None
    found = (header.get("format"), header.get("version")) if isinstance(header, dict) else header
    if found != (_FORMAT, _VERSION):
        raise argument_error(
            "dir", str(folder), f"format {(_FORMAT, _VERSION)}, found {found}", "save it again with this version"
        )
    arrays = {}
    for name in header["arrays"]:
        array_path = path.with_name(f"{name}.npy")
        # An empty file cannot be mapped.
        mapped = mmap and array_path.stat().st_size > 1024
        try:
            found = np.load(array_path, mmap_mode="c" if mapped else None, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise argument_error("dir", str(folder), f"a whole {name}.npy ({error})", "save the graph again") from None
        arrays[name] = torch.from_numpy(found)
    return arrays, header
