"""Kernels as templates, and the list of their instances.

A kernel is a C++ template in a ``.cuh`` file; an instance fixes its element type, index type and options. Launchers
ask for an instance, the compile check builds all of them, the emulator builds the same. Nothing here needs a CUDA
library.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from core_kernels.errors import argument_error

__all__ = ["FLOATS", "INDICES", "WIDE", "Instance", "Kernel", "accumulator"]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)

# Elements of one wide load: 16 bytes of float32 and float64; 8 of 16-bit types, so that a warp still spans 128 columns.
WIDE = {torch.float32: 4, torch.float64: 2, torch.float16: 4, torch.bfloat16: 4}

_CPP = {
    None: "",
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "core::f16",
    torch.bfloat16: "core::bf16",
    torch.int32: "core::i32",
    torch.int64: "core::i64",
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels add up values of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _name(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Instance:
    """One compiled form of a kernel.

    Attributes:
        kernel: The kernel and its options, for example ``spmm_sum[vec=4]``.
        source: File name of the ``.cuh`` source.
        expression: The C++ name, for example ``core::spmm_sum<float, core::i64, 4>``.
        dtype: Element type, ``None`` when the kernel has none.
        index: Index type, ``None`` when the kernel has none.
    """

    kernel: str
    source: str
    expression: str
    dtype: torch.dtype | None
    index: torch.dtype | None

    @functools.cached_property
    def labels(self) -> dict[str, str]:
        """Kernel, dtype and index as they stand in reports."""
        return {"kernel": self.kernel, "dtype": _name(self.dtype), "index": _name(self.index)}


@dataclass(frozen=True)
class Kernel:
    """A kernel template.

    Args:
        name: Function name in namespace ``core``.
        source: File name of the ``.cuh`` source.
        dtypes: Element types, the first template argument; empty when it has none.
        indices: Index types, the next template argument; empty when it has none.
        vec: Whether columns per load, 1 or wide, is the next template argument.
        options: Further integer template arguments and their values, in order.
        narrow_options: Further ones that only 16-bit element types vary; the others have the last value.
    """

    name: str
    source: str
    dtypes: tuple[torch.dtype, ...] = ()
    indices: tuple[torch.dtype, ...] = ()
    vec: bool = False
    options: dict[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    narrow_options: dict[str, tuple[int, ...]] = field(default_factory=dict, hash=False)

    def instance(self, dtype: torch.dtype | None = None, index: torch.dtype | None = None, **options: int) -> Instance:
        """Return the instance for these types and options.

        Raises:
            ArgumentError: The kernel is not built for that type.
        """
        return self._instance(dtype, index, tuple(options.items()))

    @functools.lru_cache(maxsize=4096)  # noqa: B019  kernels are module constants, they live as long as the cache
    def _instance(self, dtype: torch.dtype | None, index: torch.dtype | None, options: tuple) -> Instance:
        for what, given, known in (("dtype", dtype, self.dtypes), ("index dtype", index, self.indices)):
            if given not in (known or (None,)):
                names = ", ".join(_name(one) for one in known) or "none"
                raise argument_error(what, given, f"one of {names} for kernel {self.name}", "convert the tensor")
        arguments = [_CPP[one] for one in (dtype, index) if one is not None] + [str(value) for _, value in options]
        shown = ",".join(f"{key}={value}" for key, value in options)
        return Instance(
            kernel=f"{self.name}[{shown}]" if shown else self.name,
            source=self.source,
            expression=f"core::{self.name}<{', '.join(arguments)}>" if arguments else f"core::{self.name}",
            dtype=dtype,
            index=index,
        )

    def instances(self) -> Iterator[Instance]:
        """Yield every instance that launchers can ask for."""
        for dtype in self.dtypes or (None,):
            for index in self.indices or (None,):
                for options in self._option_sets(dtype):
                    yield self.instance(dtype, index, **options)

    def _option_sets(self, dtype: torch.dtype | None) -> Iterator[dict[str, int]]:
        sets: list[dict[str, int]] = [{}]
        if self.vec:
            assert dtype is not None  # loads have an element type
            sets = [{"vec": 1}, {"vec": WIDE[dtype]}]
        narrow = dtype is not None and dtype.itemsize == 2
        varied = {key: values if narrow else values[-1:] for key, values in self.narrow_options.items()}
        for key, values in (self.options | varied).items():
            sets = [{**chosen, key: value} for chosen in sets for value in values]
        return iter(sets)
