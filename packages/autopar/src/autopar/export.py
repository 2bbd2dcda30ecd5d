"""A plan written as calls of torch's own parallel APIs, where such calls exist.

Per module and mesh axis a plan's weight is one of four things, and three have a name in torch: kept whole and its
gradient summed (data parallelism), kept split and gathered for use (``fully_shard``), used split by rows or columns
(``ColwiseParallel``, ``RowwiseParallel``). Anything else, such as a convolution split by channels, and layouts of
single operators in between, can only be run by :func:`autopar.apply`; :class:`Export` lists what was left out.

Callers may not assume equal speed or memory: torch then decides about every layout that no call fixes.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.graph import Graph, Operator
from autopar.placement import Layout, P, parse_layout
from autopar.plan import OperatorPlan, ParameterPlan, Plan

__all__ = ["Export", "export_calls"]


@dataclass(frozen=True)
class Export:
    """A plan as source text.

    Attributes:
        text: Lines of Python that expect ``model`` and leave it parallel.
        left_out: What has no equivalent call, a line each; empty when the calls say all that the plan says of weights.
    """

    text: str
    left_out: tuple[str, ...]


def export_calls(plan: Plan, graph: Graph) -> Export:
    """Write a plan as ``parallelize_module``, ``fully_shard`` and ``replicate`` calls.

    Args:
        plan: The plan.
        graph: The step it was made for.

    Returns:
        Source text and what could not be said in it.

    Raises:
        PlanMismatchError: The plan was made for another step.

    >>> from autopar import Cluster, models, search_presets, trace
    >>> graph = trace(*models.mlp())
    >>> plan = search_presets(graph, Cluster.preset("loopback-cpu"))["fsdp"]
    >>> print(export_calls(plan, graph).text.splitlines()[-1])
    fully_shard(model, mesh=mesh["axis0"], reshard_after_forward=True)
    """
    plan.check(graph)
    names = [f"axis{axis}" for axis in range(len(plan.mesh))]
    lines = [
        "from torch.distributed.device_mesh import init_device_mesh",
        f"mesh = init_device_mesh(device_type, {tuple(plan.mesh)}, mesh_dim_names={tuple(names)})",
    ]
    left_out: list[str] = []
    imports: dict[str, str] = {}
    # Tensor parallelism first: fully_shard and replicate expect modules that are already split over the other axes.
    order = sorted(range(len(plan.mesh)), key=lambda axis: -len(_split_modules(plan, graph, axis, [])))
    for axis in order:
        if plan.mesh[axis] > 1:
            lines += _axis_calls(plan, graph, axis, names[axis], imports, left_out)
    return Export("\n".join([*imports.values(), *lines]), tuple(left_out))


def _axis_calls(
    plan: Plan, graph: Graph, axis: int, name: str, imports: dict[str, str], left_out: list[str]
) -> list[str]:
    modules = _split_modules(plan, graph, axis, left_out)
    lines = []
    if modules:
        imports["tensor"] = (
            "from torch.distributed.tensor import Partial, Replicate, Shard\n"
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module"
        )
        lines.append(f'parallelize_module(model, mesh["{name}"], {{')
        lines += [f'    "{module}": {call},' for module, call in modules.items()]
        lines.append("})")
    kinds = {
        parameter: _kind(plan.parameters[parameter], axis) for parameter in (p.target for p in graph.parameters)
    }  # fmt: skip
    gathered = [parameter for parameter, kind in kinds.items() if kind in ("dropped", "gathered")]
    if gathered:
        imports["shard"] = "from torch.distributed.fsdp import fully_shard"
        drops = all(kinds[parameter] == "dropped" for parameter in gathered)
        lines.append(f'fully_shard(model, mesh=mesh["{name}"], reshard_after_forward={drops})')
        whole = [p for p, kind in kinds.items() if kind == "summed" and p.rpartition(".")[0] not in modules]
        left_out += [f"{parameter} stays whole over {name}; fully_shard splits it too" for parameter in whole]
    elif any(kind == "summed" for kind in kinds.values()) and not modules:
        imports["replicate"] = "from torch.distributed._composable.replicate import replicate"
        lines.append(f'replicate(model, device_mesh=mesh["{name}"])')
    return lines


def _kind(parameter: ParameterPlan, axis: int) -> str:
    stored = parse_layout(parameter.stored)[axis]
    used = {parse_layout(layout)[axis] for layout in parameter.used.split(" and ")}
    if stored >= 0 and used == {stored}:
        return "split"
    if stored >= 0 and all(form < 0 for form in used):
        return "dropped" if parameter.drop else "gathered"
    return "summed" if all(form < 0 for form in used) else "other"


def _split_modules(plan: Plan, graph: Graph, axis: int, left_out: list[str]) -> dict[str, str]:
    """Return per module whose weight is used split the style that torch has for it."""
    found: dict[str, str] = {}
    readers = graph.consumers()
    for position, operator in enumerate(graph.operators):
        if operator.kind != "parameter" or _kind(plan.parameters[operator.target], axis) not in ("split", "other"):
            continue
        module, _, last = operator.target.rpartition(".")
        uses = [(graph.operators[reader], slot) for reader, slot in readers[position]]
        style = _style(uses[0][0], plan, axis) if len(uses) == 1 and last == "weight" else None
        if _kind(plan.parameters[operator.target], axis) == "split" and style is not None:
            found[module] = style
        elif last == "weight" or module not in found:
            stored, used = plan.parameters[operator.target].stored, plan.parameters[operator.target].used
            left_out.append(f"{operator.target}: stored {stored}, used {used} over axis{axis} has no equivalent call")
    return found


def _style(operator: Operator, plan: Plan, axis: int) -> str | None:
    """Return the call for one operator, ``None`` when torch has none."""
    part: OperatorPlan = plan.operators[operator.name]
    if operator.kind not in ("linear", "embedding"):
        return None
    slot, data = (1, 0) if operator.kind == "linear" else (0, 1)
    weight: Layout = parse_layout(part.inputs[slot])
    by_output = weight[axis] == (0 if operator.kind == "linear" else 1)
    name = "ColwiseParallel" if by_output else "RowwiseParallel"
    taken = _placement(parse_layout(part.inputs[data])[axis])
    given = _placement(parse_layout(part.delivered or part.output)[axis])
    return f"{name}(input_layouts={taken}, output_layouts={given})"


def _placement(form: int) -> str:
    if form >= 0:
        return f"Shard({form})"
    return "Partial()" if form == P else "Replicate()"
