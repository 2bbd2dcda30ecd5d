"""Proof on the user's model and data that a plan equals the full forward.

A random induced subgraph of at most 512 nodes per type is made from the given graph, with self-loops, duplicate edges
and isolated nodes added. The full forward of the model runs on it, and the plan runs on it in many small blocks, in
another order, fused, and for a subset of nodes only. All must agree, so a plan that mixes rows across blocks, or a
convolution that looks beyond its block, is found before it is used.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gnn_eval.containers import take_apart, takes_graph
from gnn_eval.errors import EvaluationArgumentError, InexactPlanError
from gnn_eval.frontends.export import FlatModel, copy_sharing_parameters
from gnn_eval.model_call import ModelCall

if TYPE_CHECKING:
    from gnn_eval.plan import Plan

__all__ = ["Verification", "full_forward", "relative_error", "subgraph_call", "verify_call"]

_logger = logging.getLogger(__name__)
_MAX_NODES = 512
_ISOLATED = 7
_ADDED_EDGES = 12
_BLOCK_ROWS = 61
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass
class Verification:
    """Errors of the plan on a subgraph, relative to the largest value of the full forward.

    Attributes:
        blocks: Unfused, in small blocks.
        fused: Fused, in small blocks.
        subset: Unfused, for some nodes in a random order.
        bit_identical: Whether the unfused run equals the full forward bit for bit.
        num_nodes: Nodes of the subgraph.
        num_edges: Edges of the subgraph.
    """

    blocks: float
    fused: float
    subset: float
    bit_identical: bool
    num_nodes: int
    num_edges: int


def verify_call(plan: Plan, model: nn.Module, call: ModelCall, seed: int = 0) -> Verification:
    """Compare a plan with the full forward on a random subgraph of a call's graph.

    Raises:
        InexactPlanError: If they differ by more than rounding.
    """
    small = subgraph_call(call, seed)
    expected = full_forward(model, small)
    tolerance = max(_TOLERANCE.get(t.dtype, 1e-5) for t in expected)
    blocks = plan_outputs(plan, small, batch_rows=_BLOCK_ROWS, fuse=False)
    errors = {"blocks": _worst(blocks, expected)}
    errors["fused"] = _worst(plan_outputs(plan, small, batch_rows=_BLOCK_ROWS, fuse=True), expected)
    errors["subset"] = _subset_error(plan, small, expected, seed)
    for name, error in errors.items():
        limit = tolerance if name != "fused" else 4 * tolerance
        if not error <= limit:
            raise InexactPlanError(
                f"the plan ({plan.compiled.frontend} front end, {name}) differs from the full forward of "
                f"{type(model).__name__} by {error:.2g} on a subgraph, relative to its largest value; expected at most "
                f"{limit:g}; the model is not evaluated layer-wise: use a full forward, or report this model"
            )
    _check_given_form(plan, model, call, seed)
    same = all(torch.equal(a, b) or _equal_with_nan(a, b) for a, b in zip(blocks, expected, strict=True))
    counts = small.counts()
    nodes = sum(c for n, c in counts.items() if n.startswith("n_"))
    edges = sum(c for n, c in counts.items() if n.startswith("e_"))
    return Verification(errors["blocks"], errors["fused"], errors["subset"], same, nodes, edges)


def _check_given_form(plan: Plan, model: nn.Module, call: ModelCall, seed: int) -> None:
    """Compare with a full forward on sparse adjacencies of the caller's form, with self-loops if the graph has any."""
    forms = call.forms()
    if not forms:
        return
    small = _without_repeats(subgraph_call(call, seed, 0), any(form.has_loops for form in forms))
    args, kwargs = small.as_given()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = copy_sharing_parameters(model)(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        _logger.info(
            "%s does not take a %s itself (%s); its edges are used", type(model).__name__, forms[0].name, error
        )
        return
    expected = [tensor for _, tensor in take_apart(result)[1]]
    error = _worst(plan_outputs(plan, small, batch_rows=_BLOCK_ROWS, fuse=False), expected)
    if not error <= max(_TOLERANCE.get(t.dtype, 1e-5) for t in expected):
        raise InexactPlanError(
            f"{type(model).__name__} gives another result for a {forms[0].name} than for the same edges as a list, by "
            f"{error:.2g} relative to the largest value (layers treat self-loops or weights of the two differently); "
            "expected the same; remove the self-loops, or pass edge_index and edge_weight to say which is meant"
        )


def _without_repeats(call: ModelCall, add_loops: bool) -> ModelCall:
    """Return a call whose relations have no edge twice, and some self-loops if asked for."""
    tensors = list(call.tensors)
    for place, role in enumerate(call.roles):
        if role.kind != "relation":
            continue
        edges = tensors[place].clone()
        if add_loops and role.source == role.destination:
            edges[0, :_ADDED_EDGES] = edges[1, :_ADDED_EDGES]
        _, first = np.unique(edges.numpy(), axis=1, return_index=True)
        kept = torch.from_numpy(np.sort(first))
        tensors[place] = edges[:, kept]
        for other, value in enumerate(call.roles):
            if value.kind == "edge" and value.space == role.space:
                tensors[other] = tensors[other][kept]
    return replace(call, tensors=tensors)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference over the largest absolute value; infinite where NaNs differ."""
    if found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(found, expected) else float("inf")
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    difference = (found - expected).abs().nan_to_num(0, posinf=float("inf"))
    same_infinite = found == expected
    difference[same_infinite] = 0
    scale = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    return difference.max().item() / max(scale, 1e-12)


def subgraph_call(call: ModelCall, seed: int = 0, added: int = _ADDED_EDGES) -> ModelCall:
    """Return the call on a random induced subgraph, with isolated nodes.

    Args:
        call: The call on the whole graph.
        seed: Seed of the choice.
        added: Number of duplicate edges, and of self-loops, to add.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = call.counts()
    kept = _choose_nodes(call, counts, generator)
    # Layers on graph objects may rely on the graph being symmetric or free of loops, so it is left as it is.
    added = 0 if takes_graph(call.skeleton) else added
    edges = {
        role.space: _choose_edges(role.source, role.destination, tensor, kept, generator, added)
        for role, tensor in zip(call.roles, call.tensors, strict=True)
        if role.kind == "relation"
    }
    tensors: list[Tensor] = []
    for role, tensor in zip(call.roles, call.tensors, strict=True):
        if role.kind == "node":
            tensors.append(tensor[kept[role.space]])
        elif role.kind == "relation":
            tensors.append(edges[role.space][1].to(tensor.dtype))
        elif role.kind == "edge":
            tensors.append(tensor[edges[role.space][0]])
        else:
            tensors.append(tensor)
    return replace(call, tensors=tensors)


def _choose_nodes(call: ModelCall, counts: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Pick nodes along random edges, so that the subgraph has edges, plus some at random."""
    wanted: dict[str, list[Tensor]] = {n.removeprefix("n_"): [] for n in counts if n.startswith("n_")}
    num_relations = max(sum(role.kind == "relation" for role in call.roles), 1)
    for role, tensor in zip(call.roles, call.tensors, strict=True):
        if role.kind == "relation" and tensor.size(1):
            share = max(_MAX_NODES // (2 * num_relations), 8)
            seeds = torch.randint(tensor.size(1), (max(share // 8, 1),), generator=generator)
            ends = tensor[1][seeds]
            into = torch.isin(tensor[1], ends).nonzero().flatten()[: 4 * share]
            picks = torch.cat([seeds, into])[: 2 * share]
            wanted[role.source].append(tensor[0][picks].long())
            wanted[role.destination].append(tensor[1][picks].long())
    kept: dict[str, Tensor] = {}
    for node_type, parts in wanted.items():
        total = counts[f"n_{node_type}"]
        extra = torch.randint(max(total, 1), (min(total, 32),), generator=generator)
        ids = torch.cat([*parts, extra]).unique()
        kept[node_type] = ids[torch.randperm(ids.numel(), generator=generator)][:_MAX_NODES]
    return kept


def _choose_edges(
    source: str, destination: str, edges: Tensor, kept: dict[str, Tensor], generator: torch.Generator, added: int
) -> tuple[Tensor, Tensor]:
    """Return edge ids and renumbered edges among the nodes kept; some nodes lose all edges, some edges are added."""
    place_src, place_dst = (_places(kept[t], int(edges[r].max()) + 1 if edges.size(1) else 1)
                            for r, t in enumerate((source, destination)))  # fmt: skip
    if edges.size(1) == 0:
        return torch.empty(0, dtype=torch.int64), edges.long()
    ends = torch.stack([place_src[edges[0].long()], place_dst[edges[1].long()]])
    lonely = kept[destination].numel() - _ISOLATED
    inside = (ends >= 0).all(0)
    if lonely > _ISOLATED:
        inside &= ends[1] < lonely
        if source == destination:
            inside &= ends[0] < lonely
    ids = inside.nonzero().flatten()
    if ids.numel() == 0:
        return ids, torch.empty(2, 0, dtype=torch.int64)
    again = ids[torch.randint(ids.numel(), (added,), generator=generator)]
    loops = ids[torch.randint(ids.numel(), (added if source == destination else 0,), generator=generator)]
    chosen = torch.cat([ids, again, loops])
    result = ends[:, chosen]
    if loops.numel():
        result[0, -loops.numel() :] = result[1, -loops.numel() :]
    shuffled = torch.randperm(chosen.numel(), generator=generator)
    if bool((edges[1, 1:] >= edges[1, :-1]).all()):  # some layers ask for edges sorted by destination
        shuffled = result[1].argsort(stable=True)
    return chosen[shuffled], result[:, shuffled].contiguous()


def _places(ids: Tensor, bound: int) -> Tensor:
    bound = max(bound, int(ids.max()) + 1 if ids.numel() else 0)
    places = torch.full((bound,), -1, dtype=torch.int64)
    places[ids] = torch.arange(ids.numel())
    return places


def full_forward(model: nn.Module, call: ModelCall) -> list[Tensor]:
    """Return the outputs of the model itself on a call, as a flat list.

    Raises:
        EvaluationArgumentError: If the model fails.
    """
    flat = FlatModel(copy_sharing_parameters(model), call)
    try:
        with torch.no_grad():
            return flat(*call.tensors)
    except Exception as error:
        raise EvaluationArgumentError(
            f"{type(model).__name__} fails on a subgraph of {call.counts()}: {error}; expected a model that runs "
            "on these inputs and on graphs of any size; check the shapes of the inputs against the model's layers"
        ) from error


def plan_outputs(plan: Plan, call: ModelCall, **options: Any) -> list[Tensor]:
    """Run a plan on a call and return its outputs as a flat list."""
    from gnn_eval.evaluation import run_call

    return run_call(plan, call, **options)


def _subset_error(plan: Plan, call: ModelCall, expected: list[Tensor], seed: int) -> float:
    program = plan.compiled.program
    types = program.node_spaces()
    counts = call.counts()
    generator = torch.Generator().manual_seed(seed + 1)
    nodes = {}
    for node_type in types.values():
        total = counts.get(f"n_{node_type}", 0)
        nodes[node_type] = torch.randperm(total, generator=generator)[: max(total // 5, 1)]
    found = plan_outputs(plan, call, nodes=nodes, batch_rows=_BLOCK_ROWS // 2, fuse=False)
    worst = 0.0
    for name, result, full in zip(program.outputs, found, expected, strict=True):
        value = program[name]
        node_type = types.get(value.type.rows)
        wanted = full if node_type is None else full.index_select(value.type.row_dim, nodes[node_type])
        scale = full.abs().max() if full.dtype.is_floating_point and full.numel() else None
        error = relative_error(result, wanted)
        if scale is not None and wanted.numel() and scale > 0:
            error *= min(1.0, (wanted.abs().max() / scale).item())
        worst = max(worst, error)
    return worst


def _worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((relative_error(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)


def _equal_with_nan(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
