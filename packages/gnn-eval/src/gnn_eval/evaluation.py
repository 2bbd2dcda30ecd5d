"""The one-line entry: evaluate a model on a graph, exactly and in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnn_eval.engine import Engine, RunOptions
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.model_call import ModelCall, unwrapped
from gnn_eval.plan import Plan, asked_rows
from gnn_eval.planner import compile as compile_model

__all__ = ["evaluate", "run_call", "score_links"]


def evaluate(
    model: nn.Module,
    data: Any,
    nodes: Any = None,
    memory: int | str | None = None,
    order: str = "auto",
    store: str | Path = "ram",
    out: Tensor | str | Path | None = None,
    progress: bool = False,
    verify: bool = True,
    *,
    frontend: str = "auto",
    roles: dict[str, str] | None = None,
    batch_rows: int | None = None,
    fuse: bool = True,
    group: Any = None,
    resume: bool = False,
) -> Any:
    """Return the model's output for every node, layer by layer and in blocks, equal to the full forward.

    Args:
        model: An unmodified GNN, in the mode in which it is to be evaluated (usually ``model.eval()``).
        data: A tuple of positional arguments, a dict of keyword arguments, a ``Data`` or ``HeteroData``, or a
            :class:`gnn_eval.StoredGraph`.
        nodes: Ids, a mask, or a dict of these by node type; only what these need is computed, and rows come back in
            the order asked. ``None``: all nodes.
        memory: Bytes by which the run may raise the memory of this process above that at its start, a number or text
            such as ``"2GB"``: blocks, what is held between layers, edges sorted by destination, and the result unless
            it goes to a file. Inputs in memory and pages of mapped files do not count, nor do libraries loaded and
            kernels compiled on first use. From 64 MiB on, blocks are sized by measurement too; below, by the memory
            model alone. What depends on structure alone is evaluated as a whole before blocks are sized. ``None``:
            blocks of a size that suits the cache, no limit.
        order: ``"auto"``, ``"natural"``, ``"cluster"``, ``"rcm"`` or ``"metis"``: the sequence in which nodes are
            computed; it never shows in the result.
        store: ``"ram"``, or a directory for what is stored between layers.
        out: A tensor or a path of a ``.npy`` file to write the result to.
        progress: Show a progress bar with the time left.
        verify: Compare with a full forward on a random subgraph when the model is first seen.
        frontend: See :func:`gnn_eval.compile`.
        roles: See :func:`gnn_eval.compile`.
        batch_rows: Fixed number of destinations per block instead of one from ``memory``.
        fuse: Use fused kernels; ``False`` keeps the model's own operators, so results are bit for bit those of the
            full forward on CPU.
        group: A ``core_kernels.comm.Group``; its ranks share the work, and all get the result.
        resume: Go on with an unfinished run in ``store``.

    Returns:
        What ``model(...)`` returns, computed without gradients.

    Raises:
        UnsupportedModelError: If an operator mixes rows in a way that is not along edges.
        InexactPlanError: If plan and full forward differ on the subgraph.
        EvaluationArgumentError: If an argument cannot be used.

    Determinism: with ``fuse=False`` on CPU bit-identical to the full forward for any block size and order.

    >>> class Mean(nn.Module):
    ...     def forward(self, x, edge_index):
    ...         return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
    >>> x, edge_index = torch.eye(3), torch.tensor([[0, 1], [1, 2]])
    >>> evaluate(Mean(), (x, edge_index))[2]
    tensor([0., 1., 0.])
    """
    from gnn_eval.stored_graph import StoredGraph

    model = unwrapped(model)
    example = data.example(model) if isinstance(data, StoredGraph) else data
    plan = compile_model(model, example, frontend, roles, verify)
    return plan.run(
        data, nodes, memory, order, store, out, progress, batch_rows=batch_rows, fuse=fuse, group=group, resume=resume
    )


def run_call(
    plan: Plan, call: ModelCall, nodes: Any = None, batch_rows: int | None = None, fuse: bool = True
) -> list[Tensor]:
    """Run a plan on a bound call in memory and return its outputs as a flat list."""
    stores, structure = plan._bind(call)
    asked = plan._asked(nodes, structure)
    options = RunOptions(asked, batch_rows=batch_rows, fuse=fuse)
    compiled = plan.compiled
    results = Engine(compiled.program, compiled.stages, plan.model, stores, structure, options).run()
    return [asked_rows(results[n], asked[n]) for n in compiled.program.outputs]


def score_links(embeddings: Tensor, links: Tensor, decoder: Any = None, batch_links: int = 1 << 18) -> Tensor:
    """Score links from encoded nodes, a range of links at a time.

    Args:
        embeddings: Encoded nodes ``[num_nodes, features]``.
        links: int64 ``[2, num_links]``.
        decoder: Called with the rows of both ends; their dot product when left out.
        batch_links: Links per range.

    Returns:
        One score per link.

    Raises:
        EvaluationArgumentError: If a link names no row, or an argument has another shape.

    >>> score_links(torch.eye(2), torch.tensor([[0, 0], [0, 1]]))
    tensor([1., 0.])
    """
    if links.dim() != 2 or links.size(0) != 2 or links.dtype not in (torch.int64, torch.int32):
        raise EvaluationArgumentError(
            f"links has shape {list(links.shape)} and {links.dtype}; expected integers of shape [2, links]; "
            "transpose it, or call .long()"
        )
    if links.numel() and (int(links.min()) < 0 or int(links.max()) >= embeddings.size(0)):
        bad = int(links.min()) if int(links.min()) < 0 else int(links.max())
        raise EvaluationArgumentError(
            f"links holds {bad}, outside [0, {embeddings.size(0)}); pass ids of rows of embeddings"
        )
    if batch_links < 1:
        raise EvaluationArgumentError(f"batch_links={batch_links} is not valid: expected at least 1; leave it out")
    decode = decoder or (lambda left, right: (left * right).sum(-1))
    with torch.inference_mode():
        parts = [
            decode(embeddings[links[0, s : s + batch_links]], embeddings[links[1, s : s + batch_links]])
            for s in range(0, links.size(1), batch_links)
        ]
        return torch.cat(parts) if parts else decode(embeddings[links[0]], embeddings[links[1]])
