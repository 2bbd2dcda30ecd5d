"""Starts kernels: on a GPU through CuPy, on CPU tensors through the emulator.

A launcher gives an instance, a grid and the kernel's arguments: tensors (their address), ``None`` (a null pointer),
integers (64 bits) and floats (double). On a GPU the launch goes to torch's current stream of the tensors' device, and
every output or workspace is a torch tensor, so torch's allocator and stream rules hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core_kernels.errors import argument_error
from core_kernels.kernels.cuda._instances import Instance

__all__ = ["BLOCK_THREADS", "launch", "launch_threads"]

BLOCK_THREADS = 128
_MAX_GRID_X, _MAX_GRID_Y = 2**31 - 1, 65535

Argument = Tensor | int | float | None


def launch_threads(
    instance: Instance, num_threads: int, args: Sequence[Argument], device: torch.device, tiles: int = 1
) -> None:
    """Start ``num_threads`` threads in blocks of 128, times ``tiles`` along y; nothing is started for no threads.

    Args:
        instance: What to run.
        num_threads: At least this many threads along x.
        args: The kernel's arguments.
        device: Device of every tensor among them.
        tiles: Blocks along y; kernels loop when there are more tiles than a grid can have.
    """
    if num_threads > 0 and tiles > 0:
        launch(instance, (-(-num_threads // BLOCK_THREADS), min(tiles, _MAX_GRID_Y)), BLOCK_THREADS, args, device)


def launch(
    instance: Instance, grid: tuple[int, int], block: int, args: Sequence[Argument], device: torch.device
) -> None:
    """Start one kernel.

    Args:
        instance: What to run.
        grid: Blocks along x and y.
        block: Threads of a block.
        args: The kernel's arguments, in order.
        device: Device of every tensor among them.

    Raises:
        ArgumentError: More blocks than a grid can have.
    """
    if grid[0] > _MAX_GRID_X:
        raise argument_error("grid", grid, f"at most {_MAX_GRID_X} blocks along x", "split the rows into several calls")
    if device.type == "cuda":
        from core_kernels.kernels.cuda import _device

        _device.launch(instance, grid, block, args, device)
    else:
        from core_kernels.testing.emulator import runner

        runner.launch(instance, grid, block, args)
