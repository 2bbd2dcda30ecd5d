"""The machine as planners see it: seconds of every collective, copy and row gather, and rates of kernels.

A measured interconnect holds a curve per collective and group shape, ``"HxR"`` for H hosts with R ranks each. For
shapes that were not measured, and in presets, seconds follow from two links, inside a host and between hosts. Symbols:
P = H R ranks; a the latency and B the rate of the slowest link crossed, per rank inside a host, per host between
hosts::

    send_recv       a + n / B                              n bytes of the message
    all_to_all      (P-1) a + max(n / B_local, n R (P-R)/(P-1) / B_host)      n bytes that leave one rank
    all_gather,     (P-1) a + max(n / B_local, n P/(P-1) (H-1)/H / B_host)    n bytes that enter (leave) one rank
    reduce_scatter
    all_reduce      2 (P-1) a + 2 max((P-1)/P n / B_local, (H-1)/H n / B_host)    n bytes of the tensor
    broadcast       ceil(log2 P) a + n / B                 n bytes of the tensor

Callers may not assume that an estimate from links is as good as a curve: ask :meth:`Interconnect.is_measured`.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from core_kernels.errors import argument_error
from core_kernels.interconnect.curve import Curve, Link
from core_kernels.plan import PlanDocument

if TYPE_CHECKING:
    from core_kernels.comm import Group

__all__ = ["COLLECTIVES", "LOCAL_COPIES", "Interconnect"]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
LOCAL_COPIES = ("host_copy", "row_gather", "host_to_device", "device_to_host")


@dataclass(frozen=True)
class Interconnect(PlanDocument):
    """Measured or assumed costs of one machine; ``save`` and ``load`` keep it in one JSON file.

    Attributes:
        name: What it describes, ``"measured"`` or the preset's name.
        assumption: Where the numbers come from, in words.
        machine: Facts about the machine it was measured on; empty for a preset.
        group_shape: The shape taken when none is asked for.
        curves: Per group shape and collective a curve; local copies stand under ``"local"``.
        links: ``"local"``, ``"network"`` (per host) and local copies as straight lines.
        rates: Kernel rates, such as ``"spmm_bytes_per_second"``.

    >>> interconnect = Interconnect.preset("ethernet-1gbit")
    >>> round(interconnect.seconds("send_recv", 125_000_000), 2)
    1.05
    """

    schema: ClassVar[str] = "core_kernels.interconnect"
    version: ClassVar[int] = 1

    name: str
    assumption: str
    group_shape: str
    machine: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    @classmethod
    def measure(cls, group: Group, group_shape: str | None = None, budget_seconds: float = 12.0) -> Interconnect:
        """Measure on the ranks of ``group``; see :func:`core_kernels.interconnect.measure.measure_interconnect`."""
        from core_kernels.interconnect.measure import measure_interconnect

        return measure_interconnect(group, group_shape, budget_seconds)

    @classmethod
    def preset(cls, name: str) -> Interconnect:
        """Return a preset by name; :data:`core_kernels.interconnect.PRESETS` lists them with their assumptions."""
        from core_kernels.interconnect.presets import PRESETS

        if name not in PRESETS:
            raise argument_error("name", name, f"one of {', '.join(sorted(PRESETS))}", "choose one, or measure")
        return PRESETS[name]

    @property
    def machine_fingerprint(self) -> str:
        """16 hexadecimal digits of the machine it was measured on, the same for every measurement there."""
        facts = json.dumps(self.machine, sort_keys=True)
        return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    @property
    def group_shapes(self) -> list[str]:
        """Group shapes that were measured."""
        return sorted(shape for shape in self.curves if shape != "local")

    def is_measured(self, operation: str, group_shape: str | None = None) -> bool:
        """Whether :meth:`seconds` reads a measured curve, not an estimate from links."""
        return operation in self.curves.get(self._place(operation, group_shape), {})

    def seconds(self, operation: str, num_bytes: float, group_shape: str | None = None) -> float:
        """Return the seconds of one operation.

        Args:
            operation: One of :data:`COLLECTIVES`, with or without the ending ``_v``, or of :data:`LOCAL_COPIES`.
            num_bytes: For all_to_all, all_gather and reduce_scatter the most payload that leaves or enters one rank;
                for all_reduce, broadcast and send_recv the bytes of the tensor; for copies and gathers the bytes moved.
            group_shape: ``"HxR"``; the measured one when left out. One rank costs nothing.

        Raises:
            ArgumentError: An unknown operation, or a shape that was neither measured nor can be estimated.
        """
        operation = operation.removesuffix("_v")
        if operation not in COLLECTIVES + LOCAL_COPIES:
            known = ", ".join(COLLECTIVES + LOCAL_COPIES)
            raise argument_error("operation", operation, f"one of {known}", "choose one of them")
        if not num_bytes >= 0:
            raise argument_error("num_bytes", num_bytes, "a number of at least 0", "count payload bytes")
        place = self._place(operation, group_shape)
        curve = self.curves.get(place, {}).get(operation)
        if curve is not None:
            return curve.at(num_bytes)
        if operation in LOCAL_COPIES:
            return self._link(operation, operation, place).at(num_bytes)
        num_hosts, ranks_per_host = _parse_shape(place)
        if num_hosts * ranks_per_host == 1:
            return 0.0
        local = self._link("local", operation, place) if ranks_per_host > 1 else None
        network = self._link("network", operation, place) if num_hosts > 1 else None
        return _estimate_seconds(operation, num_bytes, num_hosts, ranks_per_host, local, network)

    def rate(self, name: str) -> float:
        """Return a kernel rate by name.

        Raises:
            ArgumentError: The rate is not known here.
        """
        if name not in self.rates:
            known = ", ".join(sorted(self.rates)) or "none"
            raise argument_error("name", name, f"a rate of this interconnect ({known})", "measure it on the machine")
        return self.rates[name]

    def _place(self, operation: str, group_shape: str | None) -> str:
        return "local" if operation in LOCAL_COPIES else group_shape or self.group_shape

    def _link(self, name: str, operation: str, place: str) -> Link:
        if name not in self.links:
            raise argument_error(
                "group_shape",
                place,
                f"a measured shape for {operation} ({', '.join(self.group_shapes) or 'none'}) or a {name!r} link",
                "calibrate on ranks of that shape, or start from a preset",
            )
        return self.links[name]


def _parse_shape(group_shape: str) -> tuple[int, int]:
    try:
        num_hosts, ranks_per_host = (int(part) for part in group_shape.split("x"))
        if num_hosts < 1 or ranks_per_host < 1:
            raise ValueError
    except ValueError:
        expected = "'HxR', H hosts with R ranks each, such as '2x4'"
        raise argument_error("group_shape", group_shape, expected, "write both numbers") from None
    return num_hosts, ranks_per_host


def _estimate_seconds(
    operation: str, num_bytes: float, num_hosts: int, ranks_per_host: int, local: Link | None, network: Link | None
) -> float:
    """Apply the formulas in the module's docstring; a link that is not crossed is ``None``."""
    num_ranks = num_hosts * ranks_per_host
    crossed = [link for link in (local, network) if link is not None]
    latency = max(link.latency_seconds for link in crossed)
    per_local_byte = 1 / local.bytes_per_second if local else 0.0
    per_network_byte = 1 / network.bytes_per_second if network else 0.0
    slowest = max(per_local_byte, per_network_byte)
    if operation == "send_recv":
        return latency + num_bytes * slowest
    if operation == "broadcast":
        return math.ceil(math.log2(num_ranks)) * latency + num_bytes * slowest
    if operation == "all_to_all":
        leaving_host = num_bytes * ranks_per_host * (num_ranks - ranks_per_host) / (num_ranks - 1)
        return (num_ranks - 1) * latency + max(num_bytes * per_local_byte, leaving_host * per_network_byte)
    across = (num_hosts - 1) / num_hosts
    if operation == "all_reduce":
        inside = (num_ranks - 1) / num_ranks * num_bytes * per_local_byte
        return 2 * (num_ranks - 1) * latency + 2 * max(inside, across * num_bytes * per_network_byte)
    whole = num_bytes * num_ranks / (num_ranks - 1)
    return (num_ranks - 1) * latency + max(num_bytes * per_local_byte, across * whole * per_network_byte)
