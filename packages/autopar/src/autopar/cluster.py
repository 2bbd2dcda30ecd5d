"""The machine a plan is made for: how many devices, how they compute, what their collectives cost.

Meshes are laid over devices row by row: the last axis joins neighbours, which share a host while it has room. An axis
of ``n`` ranks at distance ``s`` therefore has ``min(n, devices_per_host / s)`` ranks on each host. Groups of one axis
that run at the same time share the host's network, so their bytes there add up.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from autopar.errors import ProblemError
from autopar.resharding import Message
from core_kernels.interconnect import Interconnect
from core_kernels.plan import PlanDocument

if TYPE_CHECKING:
    from core_kernels.comm import Group

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster(PlanDocument):
    """Devices, their rates and their interconnect; ``save`` and ``load`` keep it in one JSON file.

    Attributes:
        num_devices: Number of devices.
        devices_per_host: Devices that share a host.
        interconnect: Measured or preset costs of collectives.
        flops_per_second: Rate of dense products on one device.
        bytes_per_second: Rate at which one device reads and writes memory.
        launch_seconds: Least time of one operator, forward or backward.
        memory_bytes: Memory of one device, for ``mini_parallelism``; 0 when unknown.
        overlap: Share of gradient synchronisation hidden behind the backward pass, 0 to 1; the executor here hides
            nothing, so 0 unless another one runs the plan.
        operator_seconds: Measured operators, by the keys of :mod:`autopar.operator_profile`.

    >>> cluster = Cluster.preset("a100-nvlink-8")
    >>> cluster.num_devices, cluster.group_shape((2, 4), 0), cluster.meshes()
    (8, '1x2', [(8,), (2, 4), (4, 2)])
    """

    schema: ClassVar[str] = "autopar.cluster"
    version: ClassVar[int] = 1

    num_devices: int
    devices_per_host: int
    interconnect: Interconnect
    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float = 5e-6
    memory_bytes: float = 0.0
    overlap: float = 0.0
    operator_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.devices_per_host < 1:
            raise ProblemError(
                f"num_devices={self.num_devices} and devices_per_host={self.devices_per_host} are not valid: expected "
                "at least 1 each; count the devices"
            )
        if not 0 <= self.overlap <= 1:
            raise ProblemError(f"overlap={self.overlap} is not valid: expected 0 to 1; 0 hides nothing")

    @classmethod
    def preset(
        cls, name: str, num_devices: int | None = None, devices_per_host: int | None = None, memory_bytes: float = 0.0
    ) -> Cluster:
        """Return a cluster from an interconnect's preset, such as ``"a100-8x8-ib"``.

        Args:
            name: Preset of :class:`core_kernels.interconnect.Interconnect`.
            num_devices: Number of devices; that of the preset when left out.
            devices_per_host: Devices that share a host; that of the preset when left out.
            memory_bytes: Memory of one device.
        """
        return cls.from_interconnect(Interconnect.preset(name), num_devices, devices_per_host, memory_bytes)

    @classmethod
    def from_interconnect(
        cls,
        interconnect: Interconnect,
        num_devices: int | None = None,
        devices_per_host: int | None = None,
        memory_bytes: float = 0.0,
        launch_seconds: float | None = None,
    ) -> Cluster:
        """Return a cluster whose rates are those of an interconnect; its spmm rate stands for memory traffic."""
        hosts, ranks = (int(part) for part in interconnect.group_shape.split("x"))
        per_host = ranks if devices_per_host is None else devices_per_host
        memory_rate = interconnect.rate("gather_bytes_per_second")
        if launch_seconds is None:
            launch_seconds = 5e-6 if memory_rate > 1e11 else 10e-6
        return cls(
            hosts * ranks if num_devices is None else num_devices,
            per_host,
            interconnect,
            interconnect.rate("matmul_flops_per_second"),
            memory_rate,
            launch_seconds,
            memory_bytes,
        )

    @classmethod
    def measure(cls, group: Group, budget_seconds: float = 12.0) -> Cluster:
        """Measure collectives, as they follow each other in a step, and rates. Collective: all ranks of ``group``."""
        from autopar.calibration import measure_steady

        found = Interconnect.measure(group, budget_seconds=budget_seconds / 2)
        return cls.from_interconnect(measure_steady(group, found, budget_seconds / 2))

    def resized(self, num_devices: int) -> Cluster:
        """Return the same machine with another number of devices."""
        from dataclasses import replace

        return replace(self, num_devices=num_devices)

    def meshes(self, max_axes: int = 2) -> list[tuple[int, ...]]:
        """Return every mesh of all devices with up to ``max_axes`` axes longer than 1."""
        found: list[tuple[int, ...]] = [(self.num_devices,)]
        for axes in range(2, max_axes + 1):
            divisors = [d for d in range(2, self.num_devices) if self.num_devices % d == 0]
            found += [mesh for mesh in itertools.product(divisors, repeat=axes) if math.prod(mesh) == self.num_devices]
        return found

    def group_shape(self, mesh: Sequence[int], axis: int) -> str:
        """Return ``"HxR"``, hosts and ranks per host of the groups along one axis."""
        stride = math.prod(mesh[axis + 1 :])
        # Without a network every device shares the one host.
        together = self.devices_per_host if "network" in self.interconnect.links else self.num_devices
        per_host = math.gcd(mesh[axis], max(1, together // stride))
        return f"{mesh[axis] // per_host}x{per_host}"

    def message_seconds(self, message: Message, mesh: tuple[int, ...]) -> float:
        """Return the seconds of one collective on a mesh."""
        return self._collective_seconds(message.collective, message.num_bytes, mesh, message.axis)

    @functools.lru_cache(maxsize=1 << 18)  # noqa: B019 - clusters are few and live as long as the process plans
    def _collective_seconds(self, collective: str, num_bytes: int, mesh: tuple[int, ...], axis: int) -> float:
        shape = self.group_shape(mesh, axis)
        hosts, per_host = (int(part) for part in shape.split("x"))
        sharing = 1
        if hosts > 1 and not self.interconnect.is_measured(collective, shape):
            sharing = min(self.devices_per_host, math.prod(mesh)) // per_host
        return self.interconnect.seconds(collective, num_bytes * max(1, sharing), shape)

    def __hash__(self) -> int:
        return id(self)
