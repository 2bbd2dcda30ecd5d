"""Read the table printed by ``nvidia-smi topo -m``.

Rows and columns are devices and network cards; a cell is ``X``, ``NV<n>`` (n bonded NVLinks) or a PCIe class. The
table says nothing of rates, so nominal ones are used, and the tree of switches is inferred.
"""

from __future__ import annotations

import re

from core_kernels.topology.levels import LEVELS, NVLinks, tree_from_levels
from core_kernels.topology.model import Topology, TopologyError

__all__ = ["from_smi_text"]

_END = re.compile(r"GPU\d+|NIC\d+|mlx\d+_\d+|ib\d+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def from_smi_text(text: str, name: str = "nvidia-smi") -> Topology:
    """Build a topology from the text of ``nvidia-smi topo -m``.

    Args:
        text: The whole output; legend and colour codes are skipped.
        name: Name of the topology.

    Raises:
        TopologyError: There is no table, or a row does not fit its header.

    >>> table = '''
    ... \tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
    ... GPU0\t X \tNV2\t0-19\t0
    ... GPU1\tNV2\t X \t0-19\t0
    ... '''
    >>> from_smi_text(table).bytes_per_second(0, 1)
    48000000000.0
    """
    lines = [_COLOUR.sub("", line).rstrip() for line in text.splitlines()]
    columns, affinity_column = _header(lines)
    cells: dict[str, list[str]] = {}
    numa: dict[str, int | None] = {}
    for line in lines:
        row = [cell.strip() for cell in re.split(r"\t+|\s{2,}", line.strip())]
        if len(row) > 1 and row[0] in columns and not _END.fullmatch(row[1]):
            values = row[1 : len(columns) + 1]
            if len(values) < len(columns):
                raise TopologyError(
                    f"row {row[0]} has {len(values)} cells; expected {len(columns)}, one per column; "
                    "save the whole output of nvidia-smi topo -m"
                )
            cells[row[0]] = values
            numa[row[0]] = _numa_of(row, len(columns), affinity_column)
    missing = [column for column in columns if column not in cells]
    if missing:
        raise TopologyError(f"the table has no row for {missing[0]}; expected a row per column; save the whole output")
    devices = [column for column in columns if column.startswith("GPU")]
    cards = [column for column in columns if not column.startswith("GPU")]
    levels, pairs = _read_cells(devices, cards, columns, cells)
    order = [*devices, *cards]
    return tree_from_levels(
        name, devices, levels, [numa[end] for end in order], NVLinks(pairs), cards, source="nvidia-smi, inferred tree"
    )


def _header(lines: list[str]) -> tuple[list[str], int | None]:
    """Find the columns, and which of the columns after them holds the NUMA node."""
    for line in lines:
        row = [cell.strip() for cell in re.split(r"\t+|\s{2,}", line.strip())]
        if len(row) > 1 and row[0] == "GPU0" and (len(row) == 2 or not re.fullmatch(r"X|NV\d+|[A-Z]{3,4}", row[1])):
            columns = [cell for cell in row if _END.fullmatch(cell)]
            rest = row[len(columns) :]
            return columns, rest.index("NUMA Affinity") if "NUMA Affinity" in rest else None
    raise TopologyError(
        "the text holds no table of devices; expected a header line that starts with GPU0; "
        "pass the output of nvidia-smi topo -m, or a topology in JSON, YAML or NCCL XML"
    )


def _numa_of(row: list[str], num_columns: int, affinity_column: int | None) -> int | None:
    position = num_columns + 1 + (affinity_column or 0)
    if affinity_column is None or position >= len(row) or not row[position].split("-")[0].isdigit():
        return None
    return int(row[position].split("-")[0])


def _read_cells(devices, cards, columns, cells):
    """Split the cells into PCIe classes and NVLink counts, indexed with devices first."""
    order = [*devices, *cards]
    levels: dict[tuple[int, int], str] = {}
    pairs: dict[tuple[int, int], int] = {}
    for i, row in enumerate(order):
        for j, column in enumerate(order):
            cell = cells[row][columns.index(column)]
            if i >= j or cell == "X":
                continue
            if re.fullmatch(r"NV\d+", cell):
                pairs[(i, j)] = int(cell[2:])
            elif cell in LEVELS:
                levels[(i, j)] = cell
            else:
                raise TopologyError(
                    f"cell {row}, {column} is {cell!r}; expected X, NV<n> or one of {LEVELS}; correct the table"
                )
    return levels, pairs
