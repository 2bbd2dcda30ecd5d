"""What this machine has for running and checking CUDA kernels, what would fail, and what to do about it.

Every probe is guarded: a broken library is a line in the result, never an exception.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["examine"]

# Distribution names by the import that needs them; several wheels may provide one import.
_LIBRARIES = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "numba": ("numba",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "numba-cuda": ("numba-cuda",),
    "cuda-bindings": ("cuda-bindings",),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "nccl4py": ("nccl4py",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nvidia-ml-py": ("nvidia-ml-py",),
    "torch_geometric": ("torch_geometric",),
    "pymetis": ("pymetis",),
}


def examine() -> dict[str, Any]:
    """Probe this machine.

    Returns:
        A JSON-able dict: ``python``, ``libraries`` (version or None), ``driver``, ``devices``, ``compilers``, and
        ``findings``: a list of ``{"what", "ok", "fact", "remedy"}``.

    >>> report = examine()
    >>> report["libraries"]["torch"] is not None
    True
    """
    libraries = {name: _version(distributions) for name, distributions in _LIBRARIES.items()}
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": libraries,
        "driver": _guarded(_driver),
        "torch_cuda": _guarded(_torch_cuda),
        "devices": _guarded(_devices) or [],
        "compilers": {
            "nvrtc": _guarded(_nvrtc_version),
            "nvcc": _guarded(lambda: _tool_version("nvcc", r"release ([\d.]+)")),
            "ptxas": _guarded(lambda: _tool_version("ptxas", r"release ([\d.]+)")),
            "g++": _guarded(lambda: _tool_version("g++", r"(\d+\.\d+\.\d+)")),
        },
    }
    facts["findings"] = _findings(facts)
    return facts


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # a probe meets every way in which a library can be broken
        return f"unusable: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    """Return the CUDA version the driver supports, from the driver library itself."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1") if _has_driver() else None
    if library is None:
        return None
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _devices() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [{"name": one.name, "arch": f"sm_{one.major}{one.minor}", "memory_bytes": one.total_memory} for one in found]


def _nvrtc_version() -> str | None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return None
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _tool_version(tool: str, pattern: str) -> str | None:
    if shutil.which(tool) is None:
        return None
    shown = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20).stdout
    found = re.search(pattern, shown)
    return found[1] if found else "unknown"


def _usable(version: str | None) -> bool:
    return version is not None and not version.startswith("unusable")


def _findings(facts: dict[str, Any]) -> list[dict[str, Any]]:
    libraries, compilers, driver = facts["libraries"], facts["compilers"], facts["driver"]
    findings: list[dict[str, Any]] = []

    def find(what: str, ok: bool, fact: str, remedy: str) -> None:
        findings.append({"what": what, "ok": ok, "fact": fact, "remedy": "" if ok else remedy})

    devices = facts["devices"] if isinstance(facts["devices"], list) else []
    major = str(facts["torch_cuda"] or driver or "13").split(".")[0]
    extra = f"core-kernels[cuda{'12' if major == '12' else '13'}]"
    find("CPU kernels", libraries["numba"] is not None, f"numba {libraries['numba']}", "pip install numba")
    find(
        "NVIDIA driver",
        _usable(driver),
        f"driver for CUDA {driver}",
        "install the NVIDIA driver; CPU tensors need none",
    )
    find(
        "torch on CUDA",
        _usable(facts["torch_cuda"]) and bool(devices),
        f"torch built for CUDA {facts['torch_cuda']}, {len(devices)} devices visible",
        "install a CUDA build of torch on a machine with a device, or check CUDA_VISIBLE_DEVICES",
    )
    find("CUDA kernels", libraries["cupy"] is not None, f"cupy {libraries['cupy']}", f"pip install '{extra}'")
    find(
        "generated CUDA kernels",
        libraries["numba-cuda"] is not None,
        f"numba-cuda {libraries['numba-cuda']}",
        f"pip install '{extra}'",
    )
    find("NCCL groups", libraries["nccl"] is not None, f"nccl {libraries['nccl']}", "comes with a CUDA build of torch")
    compiler = next((f"{name} {compilers[name]}" for name in ("nvrtc", "nvcc") if _usable(compilers[name])), None)
    find(
        "core-kernels compile",
        compiler is not None,
        compiler or "no NVRTC, no nvcc",
        f"pip install '{extra}', or a toolkit",
    )
    find("emulated kernels", _usable(compilers["g++"]), f"g++ {compilers['g++']}", "install g++ 11 or newer")
    if compiler and _usable(driver):
        newer = _numbers(compiler.split()[1]) > _numbers(driver)
        remedy = f"hold the compilers to the driver: pip install 'cuda-toolkit=={driver}.*'"
        find("compiler against driver", not newer, f"{compiler}, driver for CUDA {driver}", remedy)
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
