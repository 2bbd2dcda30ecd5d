"""What communication and memory cost on a machine: measured once, saved as one JSON file, read by every planner.

``Interconnect.measure(group)`` measures, ``Interconnect.load(path)`` reads, ``Interconnect.preset(name)`` assumes;
``interconnect.seconds("all_to_all", num_bytes)`` answers.
"""

from __future__ import annotations

from core_kernels.interconnect.curve import Curve, Link
from core_kernels.interconnect.model import COLLECTIVES, LOCAL_COPIES, Interconnect
from core_kernels.interconnect.presets import PRESETS

__all__ = ["COLLECTIVES", "LOCAL_COPIES", "PRESETS", "Curve", "Interconnect", "Link"]
