"""Reads the sizes users write: fanouts, cache sizes, host shapes."""

from __future__ import annotations

from collections.abc import Sequence

from gnn_parallel.errors import input_error

__all__ = ["parse_cache", "parse_fanouts", "parse_shape"]


def parse_fanouts(fanouts: Sequence[int] | str) -> tuple[int, ...]:
    """Return fanouts as a tuple.

    Args:
        fanouts: Integers, or text such as ``"10,10"``.

    Raises:
        InputError: Empty, not integers, or neither positive nor -1.

    >>> parse_fanouts("15,10,-1")
    (15, 10, -1)
    """
    remedy = 'pass one number per layer, such as "10,10"'
    try:
        items = fanouts.split(",") if isinstance(fanouts, str) else list(fanouts)
        parsed = tuple(int(item) for item in items)
        exact = all(float(item) == number for item, number in zip(items, parsed, strict=True))
    except (TypeError, ValueError, OverflowError):
        raise input_error("fanouts", fanouts, "integers", remedy) from None
    if not parsed or not exact or any(number < 1 and number != -1 for number in parsed):
        raise input_error("fanouts", fanouts, "integers of at least 1, or -1 for all neighbours", remedy)
    return parsed


def parse_cache(cache: int | float | str, num_nodes: int, row_bytes: int) -> int:
    """Return a cache size as a number of rows.

    Args:
        cache: Rows, a share of all rows (``"10%"`` or a float below 1), or bytes (``"4GB"``).
        num_nodes: Number of all rows.
        row_bytes: Bytes of one row.

    Raises:
        InputError: Not a size, or larger than all rows.

    >>> parse_cache("10%", 1000, 64), parse_cache("64KB", 1000, 64), parse_cache(5, 1000, 64)
    (100, 1000, 5)
    """
    remedy = 'pass rows, a share such as "10%" or a size such as "4GB"'
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    try:
        if isinstance(cache, str) and cache.strip().endswith("%"):
            rows = round(float(cache.strip()[:-1]) / 100 * num_nodes)
        elif isinstance(cache, str) and cache.strip()[-2:].upper() in units:
            rows = int(float(cache.strip()[:-2]) * units[cache.strip()[-2:].upper()] // max(1, row_bytes))
        elif isinstance(cache, float) and cache < 1:
            rows = round(cache * num_nodes)
        else:
            rows = int(cache)
    except (ValueError, OverflowError):
        raise input_error("cache", cache, "a size", remedy) from None
    if not 0 <= rows <= num_nodes:
        raise input_error("cache", cache, f"between 0 and the graph's {num_nodes} rows, it is {rows} rows", remedy)
    return rows


def parse_shape(group_shape: str) -> tuple[int, int]:
    """Return hosts and ranks per host.

    Args:
        group_shape: ``"HxR"``.

    Raises:
        InputError: Not two positive integers.

    >>> parse_shape("8x4")
    (8, 4)
    """
    try:
        hosts, ranks = (int(part) for part in group_shape.split("x"))
    except ValueError:
        hosts = ranks = 0
    if hosts < 1 or ranks < 1:
        expected = "'HxR', hosts and ranks of each, such as '2x4'"
        raise input_error("group_shape", group_shape, expected, "write both numbers")
    return hosts, ranks
