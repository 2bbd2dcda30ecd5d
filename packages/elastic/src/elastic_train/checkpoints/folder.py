"""The folder of a job's checkpoints: what is whole, what is the newest, what can go.

Each attempt has a folder of its own, ``step-000000120-g4`` for step 120 in generation 4. It counts only when it
holds a marker, ``complete.json``, which is written last, names every other file with its length and checksum, and
appears whole or not at all. An attempt without a marker was cut short and is passed over. A marker that does not fit
the files is damage: then the checkpoint before it is taken, and when there is none the job does not start, as
starting from nothing is not what was asked for.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from elastic_train.errors import CheckpointError, input_error

__all__ = ["CheckpointFolder", "checksum", "write_marker"]

_logger = logging.getLogger(__name__)
_MARKER, _SCHEMA, _VERSION = "complete.json", "elastic_train.checkpoint", 1
_NAME = re.compile(r"step-(\d{9,})-g(\d+)$")


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def write_marker(attempt: Path, step: int, progress: dict[str, Any], files: dict[str, tuple[int, int]]) -> None:
    """Declare an attempt complete.

    Args:
        attempt: Its folder.
        step: Its step.
        progress: Counters and the facts of parts, JSON-able.
        files: Length and checksum of each file.
    """
    content = {"schema": _SCHEMA, "version": _VERSION, "step": step, "progress": progress, "files": files}
    scratch = attempt / (_MARKER + ".tmp")
    with scratch.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, attempt / _MARKER)
    _sync_folder(attempt)
    _sync_folder(attempt.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointFolder:
    """The checkpoints in a folder.

    Args:
        path: The folder, which all hosts of the job see; made when it is not there.

    Raises:
        InputError: The path is no folder that can be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            expected = f"a folder, but {error.strerror or error}"
            raise input_error("checkpoint", str(path), expected, "name another folder") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise input_error("checkpoint", str(path), "a folder that this user can write", "name another folder")

    def attempt(self, step: int, generation: int) -> Path:
        """Return the folder of an attempt, made when it is not there."""
        folder = self.path / f"step-{step:09}-g{generation}"
        folder.mkdir(exist_ok=True)
        return folder

    def attempts(self) -> list[tuple[int, Path]]:
        """Return steps and folders of all attempts, newest first."""
        found = [(match, path) for path in self.path.iterdir() if (match := _NAME.match(path.name))]
        order = sorted(found, key=lambda entry: (int(entry[0][1]), int(entry[0][2])), reverse=True)
        return [(int(match[1]), path) for match, path in order]

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest whole checkpoint with the content of its marker; ``None`` when there never was one.

        Raises:
            CheckpointError: There are checkpoints, and all of them are damaged.
        """
        damages = []
        for _, path in self.attempts():
            if not (path / _MARKER).exists():
                continue
            try:
                return path, self._read(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                damages.append(f"{path.name}: {error}")
                _logger.warning("checkpoint %s is damaged, taking the one before it: %s", path, error)
        if damages:
            raise CheckpointError(
                f"no checkpoint in {self.path} can be used ({'; '.join(damages)}): expected one whole checkpoint among "
                f"{len(damages)}; repair the files, or name an empty folder to begin anew"
            )
        return None

    def _read(self, path: Path) -> dict[str, Any]:
        """Return the content of a marker whose files are all there and whole."""
        content = json.loads((path / _MARKER).read_text())
        if (content["schema"], content["version"]) != (_SCHEMA, _VERSION):
            raise ValueError(f"it is {content['schema']} version {content['version']}, not {_SCHEMA} {_VERSION}")
        for name, (length, expected) in content["files"].items():
            found = (path / name).stat().st_size
            if found != length:
                raise ValueError(f"{name} has {found} bytes instead of {length}")
            if checksum(path / name) != expected:
                raise ValueError(f"{name} has another checksum than when it was written")
        return content

    def tidy(self, num_kept: int) -> None:
        """Remove checkpoints but the newest, and attempts that were cut short before the newest."""
        kept = 0
        for _, path in self.attempts():
            if (path / _MARKER).exists():
                kept += 1
                if kept > num_kept:
                    shutil.rmtree(path, ignore_errors=True)
            elif kept:
                shutil.rmtree(path, ignore_errors=True)
