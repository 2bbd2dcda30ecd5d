"""First values of rows: a function of seed, table, row and column alone, so that every sharding starts alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core_kernels.random import random_bits, uniform
from recsys_embed.tables import EmbeddingBagConfig, RowLayout

__all__ = ["initial_rows"]

_BLOCK_ROWS = 1 << 16


def initial_rows(
    tables: Sequence[EmbeddingBagConfig], layout: RowLayout, rank: int, seed: int, dtype: torch.dtype
) -> Tensor:
    """Return the first values of the rows that a rank owns, in slot order, uniform within each table's bound.

    Args:
        tables: All tables of the collection; a table's number keys its values.
        layout: The row space.
        rank: The owner.
        seed: Key of all values.
        dtype: Of the result.
    """
    rows = layout.own_rows(rank)
    weight = torch.empty(len(rows), layout.width, dtype=dtype)
    columns = torch.arange(layout.width)
    ends = torch.tensor([layout.first_row[t.name] + t.num_embeddings for t in layout.tables])
    number_of_table = {table.name: number for number, table in enumerate(tables)}
    for begin in range(0, len(rows), _BLOCK_ROWS):
        block = rows[begin : begin + _BLOCK_ROWS]
        which = torch.searchsorted(ends, block, right=True)
        for number, table in enumerate(layout.tables):
            chosen = (which == number).nonzero().view(-1)
            own = block[chosen] - layout.first_row[table.name]
            bits = random_bits(seed, 0, number_of_table[table.name], own.unsqueeze(1), columns)
            weight[begin + chosen] = ((2 * uniform(bits) - 1) * table.init_bound).to(dtype)
    return weight
