"""Builds kernel sources with g++ and calls them on CPU tensors.

One shared library holds all instances of one ``.cuh`` file, compiled behind a header that emulates a thread block
(``fibers.h``, ``device.h``, ``launch.h``). Libraries are cached per user under the hash of all that went into them;
several processes may build the same one at once, the last to finish wins with equal content.

Environment: ``SEXTET_CACHE`` moves the cache; ``CORE_KERNELS_EMULATOR_SANITIZE=1`` builds with
AddressSanitizer and UndefinedBehaviorSanitizer (the process must then be started with their runtime preloaded, see
:func:`sanitizer_environment`);
``CORE_KERNELS_EMULATOR_DTYPES=float32,int32`` leaves out instances of other types.

Callers may not assume that a launch is fast, or that races are found (see ``fibers.h``).
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from core_kernels._user_cache import cache_subfolder
from core_kernels.errors import CoreKernelsError, MissingDependencyError
from core_kernels.kernels.cuda._instances import Instance
from core_kernels.kernels.cuda._source import SOURCE_DIR, digest, flatten, registered_instances

__all__ = [
    "EmulatorError",
    "block_window",
    "build",
    "build_all",
    "compiler_skip_reason",
    "launch",
    "run_library",
    "run_source",
    "sanitizer_environment",
    "shuffle_seed",
]

HEADER_DIR = Path(__file__).parent
_BASE_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-w")
_SANITIZE_FLAGS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
_seed: contextvars.ContextVar[int] = contextvars.ContextVar("core_kernels_emulator_seed", default=1)

_window: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar(
    "core_kernels_block_window", default=(0, 1 << 63)
)


class EmulatorError(CoreKernelsError, RuntimeError):
    """A kernel failed in the emulator: threads that wait for each other for ever, a bad warp mask, a build error."""


@contextmanager
def shuffle_seed(seed: int) -> Iterator[None]:
    """Run the launches inside the block with another order of threads and blocks.

    Args:
        seed: Any integer; equal seeds give equal orders.
    """
    token = _seed.set(seed & (1 << 64) - 1)
    try:
        yield
    finally:
        _seed.reset(token)


@contextmanager
def block_window(first: int, count: int) -> Iterator[None]:
    """Run only some blocks of each launch inside the block: those numbered ``first`` to ``first + count - 1``.

    For kernels at row numbers that no test could reach by running all blocks before them.

    Args:
        first: Number of the first block, x fastest.
        count: Number of blocks.
    """
    token = _window.set((first, count))
    try:
        yield
    finally:
        _window.reset(token)


def compiler_skip_reason() -> str | None:
    """Return why kernels cannot be emulated here, ``None`` when they can."""
    return None if _compiler() else "g++ is not installed (CUDA kernels are emulated with it)"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def is_sanitized() -> bool:
    """Whether libraries are built with the sanitizers, as the environment asks."""
    return os.environ.get("CORE_KERNELS_EMULATOR_SANITIZE") == "1"


def sanitizer_environment() -> dict[str, str]:
    """Return the environment variables with which a Python process can load sanitized libraries.

    Raises:
        MissingDependencyError: g++ or its sanitizer runtime is not installed.
    """
    runtimes = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run(
            [_require_compiler(), f"-print-file-name={name}"], capture_output=True, text=True
        ).stdout.strip()
        if not os.path.isabs(found):
            raise MissingDependencyError(
                f"{name} of g++ is not installed; install the package libasan of your g++ version"
            )
        runtimes.append(os.path.realpath(found))
    return {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0,abort_on_error=0,exitcode=99,detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1,halt_on_error=1,exitcode=99",
        "CORE_KERNELS_EMULATOR_SANITIZE": "1",
    }


def _require_compiler() -> str:
    found = _compiler()
    if not found:
        raise MissingDependencyError(f"{compiler_skip_reason()}; install g++ 11 or newer, or set CXX")
    return found


def build(source: str, expressions: Sequence[str]) -> ctypes.CDLL:
    """Compile kernel text for the emulator and load it.

    Args:
        source: CUDA C++ text; may include this package's ``.cuh`` files by name.
        expressions: C++ names of the kernels to call.

    Returns:
        The library, whose ``core_emulate`` runs a kernel by name.

    Raises:
        EmulatorError: The text does not compile.
        MissingDependencyError: There is no g++.
    """
    return _load(source, tuple(expressions), is_sanitized())


def _program(source: str, expressions: Sequence[str]) -> str:
    entries = ",\n".join(f'    EMULATOR_ENTRY("{one}", {one})' for one in expressions)
    return f"""#include "launch.h"
{source}
static const emulator::Entry entries[] = {{
{entries}
}};
extern "C" __attribute__((visibility("default")))
int core_emulate(const char* name, int num_arguments, void** arguments, const unsigned* grid, const unsigned* block,
                 const uint64_t* window, unsigned long long seed, char* message, int message_bytes) {{
    return emulator::launch(entries, {len(expressions)}, name, num_arguments, arguments, grid, block, window, seed,
                            message, message_bytes);
}}
"""


@functools.cache
def _load(source: str, expressions: tuple[str, ...], sanitized: bool) -> ctypes.CDLL:
    text = _program(source, expressions)
    flags = (*_BASE_FLAGS, *(_SANITIZE_FLAGS if sanitized else ("-O1",)))
    headers = "".join((HEADER_DIR / name).read_text() for name in ("fibers.h", "device.h", "launch.h"))
    compiler = _require_compiler()
    library = cache_subfolder("emulator") / f"{digest(text, flatten(source), headers, compiler, *flags)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            code, built = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            code.write_text(text)
            # The files are included, not put in place, so that messages name the .cuh file and line.
            command = [compiler, *flags, f"-I{HEADER_DIR}", f"-I{SOURCE_DIR}", str(code), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": ""})
            if done.returncode:
                raise EmulatorError(f"g++ cannot build the kernels: {done.stderr[:4000]}")
            os.replace(built, library)
    return ctypes.CDLL(str(library))


@functools.cache
def _instances(source: str) -> list[str]:
    wanted = os.environ.get("CORE_KERNELS_EMULATOR_DTYPES")
    kept = set(wanted.split(",")) | {"-"} if wanted else None
    return [
        instance.expression
        for instance in registered_instances()
        if instance.source == source and (kept is None or {instance.labels["dtype"], instance.labels["index"]} <= kept)
    ]


def build_all() -> None:
    """Build every kernel of the package, two compilers at a time."""
    sources = sorted({instance.source for instance in registered_instances()})
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_library_of, sources))


@functools.cache
def _library_of(source: str) -> ctypes.CDLL:
    return build(f'#include "{source}"\n', _instances(source))


_locks: dict[int, threading.Lock] = {}


def run_library(
    library: ctypes.CDLL, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Tensor | float | None]
) -> None:
    """Run a kernel of a library that :func:`build` made; arguments as for :func:`run_source`.

    A library runs one launch at a time, because a block's state is global in it.
    """
    values = [_pack(arg) for arg in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    message = ctypes.create_string_buffer(400)
    sizes = [(ctypes.c_uint * 3)(*(*extent, 1, 1, 1)[:3]) for extent in (grid, block)]
    window = (ctypes.c_uint64 * 2)(*_window.get())
    with _locks.setdefault(library._handle, threading.Lock()):
        failed = library.core_emulate(
            name.encode(), len(values), pointers, *sizes, window, ctypes.c_uint64(_seed.get()), message, len(message)
        )
    if failed:
        raise EmulatorError(f"{name}: {message.value.decode()}")


def _pack(arg: Tensor | float | None) -> ctypes._SimpleCData:
    if arg is None:
        return ctypes.c_void_p(0)
    if isinstance(arg, Tensor):
        if arg.device.type != "cpu":
            raise EmulatorError(f"the emulator runs on CPU tensors, got one on {arg.device}")
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, float):
        return ctypes.c_double(arg)
    return ctypes.c_int64(int(arg))


def launch(instance: Instance, grid: Sequence[int], block: int, args: Sequence[Tensor | float | None]) -> None:
    """Run a registered kernel instance on CPU tensors.

    Args:
        instance: What to run.
        grid: Blocks along x and y.
        block: Threads of a block.
        args: CPU tensors, ``None``, integers and floats, in the kernel's order.

    Raises:
        EmulatorError: The kernel got stuck or misused a collective.
    """
    run_library(_library_of(instance.source), instance.expression, grid, (block,), args)


def run_source(
    source: str, kernel: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Tensor | int | float | None]
) -> None:
    """Compile CUDA C++ text and run one of its kernels on CPU tensors.

    Args:
        source: The text; may include this package's ``.cuh`` files by name.
        kernel: C++ name of the kernel, with its template arguments.
        grid: Blocks along x, y, z; missing ones are 1.
        block: Threads along x, y, z; missing ones are 1.
        args: The kernel's arguments: pointers (tensors, ``None``) and 64-bit scalars.

    Raises:
        EmulatorError: The text does not compile, or the kernel fails.

    For example, with ``out = torch.zeros(4, dtype=torch.int64)``::

        text = "__global__ void count(long long* out) { out[threadIdx.x] = threadIdx.x * 10; }"
        run_source(text, "count", (1,), (4,), [out])  # out is now 0, 10, 20, 30
    """
    run_library(build(source, (kernel,)), kernel, grid, block, args)
