"""Compilation: from a model and an example of its inputs to a verified plan."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

from gnn_eval.containers import takes_graph
from gnn_eval.errors import EvaluationArgumentError, UnsupportedModelError
from gnn_eval.frontends import export, opaque, vertex
from gnn_eval.frontends.diagnosis import name_the_operator
from gnn_eval.lowering import StageProgram, lower
from gnn_eval.model_call import ModelCall, bind_call, unwrapped
from gnn_eval.model_state import state_of
from gnn_eval.plan import Compiled, Plan
from gnn_eval.program import Program
from gnn_eval.registry import spec_of
from gnn_eval.simplify import simplify
from gnn_eval.stages import Levels, later_uses
from gnn_eval.storage import choose_stored, cost_of
from gnn_eval.typing_rules import assign_types
from gnn_eval.verify import full_forward, subgraph_call, verify_call

__all__ = ["FRONTENDS", "compile", "compile_call"]

FRONTENDS = ("auto", "export", "fx")
_logger = logging.getLogger(__name__)
_known_plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Compiled]] = weakref.WeakKeyDictionary()


def compile(
    model: nn.Module,
    example_inputs: Any,
    frontend: str = "auto",
    roles: dict[str, str] | None = None,
    verify: bool = True,
) -> Plan:
    """Compile a model for layer-wise evaluation.

    Args:
        model: The model, in the mode in which it is to be evaluated; neither it nor its mode is changed.
        example_inputs: A tuple of positional arguments, a dict of keyword arguments, a ``Data`` or ``HeteroData``.
            Plans do not depend on the graph's size, only on names, dtypes and feature widths.
        frontend: ``"export"`` traces convolutions down to operators; ``"fx"`` keeps each convolution as one opaque
            node evaluated on blocks; ``"auto"`` tries the first, then the second.
        roles: What inputs mean where names and sizes do not tell: ``"node"``, ``"edge"``, ``"relation"``, ``"const"``
            by dotted name.
        verify: Compare the plan with a full forward on a random subgraph before returning it.

    Returns:
        The plan. A second call with the same model and kind of inputs returns it at once.

    Raises:
        UnsupportedModelError: If an operator mixes rows in a way that is not along edges.
        InexactPlanError: If the plan and the full forward differ on the subgraph.
        EvaluationArgumentError: If the inputs do not fit the model.
    """
    model = unwrapped(model)
    call = bind_call(model, example_inputs, roles)
    call.check_ids()
    return compile_call(model, call, frontend, roles, verify)


def compile_call(
    model: nn.Module, call: ModelCall, frontend: str = "auto", roles: dict[str, str] | None = None, verify: bool = True
) -> Plan:
    """Compile a model for a call that is bound already; see :func:`compile`."""
    if frontend not in FRONTENDS:
        raise EvaluationArgumentError(
            f"frontend={frontend!r} is not valid: expected one of {', '.join(FRONTENDS)}; pass 'auto'"
        )
    key = (frontend, call.signature(), repr(call.skeleton), tuple(call.lifted), state_of(model))
    plans = _known_plans.setdefault(model, {})
    if key not in plans:
        plans[key] = _compile_first_that_works(model, call, frontend, verify)
    elif verify and not plans[key].is_verified:
        _verify(plans[key], model, call)
    return Plan(model, plans[key], roles)


def _verify(compiled: Compiled, model: nn.Module, call: ModelCall) -> None:
    verify_call(Plan(model, compiled), model, call)
    compiled.is_verified = True


def _compile_first_that_works(model: nn.Module, call: ModelCall, frontend: str, verify: bool) -> Compiled:
    attempts = list(_captures(frontend, model, call))
    telling: UnsupportedModelError | None = None
    for place, (name, capture) in enumerate(attempts):
        try:
            program, skeleton = capture()
        except UnsupportedModelError as error:
            if telling is None or error.operator != "torch.export":
                telling = error
            if place + 1 == len(attempts):
                full_forward(model, subgraph_call(call))  # says so if the model itself fails on these inputs
                raise name_the_operator(model, call, telling) from error
            _logger.debug("front end %s failed, trying the next", name, exc_info=True)
            continue
        compiled = _plan_program(program, skeleton, name)
        compiled.forms = tuple(call.forms())
        if verify:
            _verify(compiled, model, call)
        return compiled
    raise AssertionError("the loop returns or raises")


def _captures(frontend: str, model: nn.Module, call: ModelCall) -> Any:
    if takes_graph(call.skeleton):
        yield "vertex", lambda: vertex.capture(model, call)
        return
    if any(spec_of(module) is not None for module in model.modules()):
        yield "fx", lambda: opaque.capture(model, call, only_needed=True)
    if frontend != "fx":
        yield "export", lambda: export.capture(model, call)
    if frontend != "export":
        yield "fx", lambda: opaque.capture(model, call, only_needed=frontend == "auto")
        if frontend == "auto":
            yield "fx", lambda: opaque.capture(model, call, only_needed=False)


def _plan_program(program: Any, skeleton: Any, frontend: str) -> Compiled:
    program = simplify(program)
    assign_types(program)
    levels = Levels(program)
    stored = choose_stored(program, later_uses(program, levels))
    stored = _without_needless(program, levels, stored)
    return Compiled(program, lower(program, levels, stored), stored, skeleton, frontend)


def _without_needless(program: Program, levels: Levels, stored: set[str]) -> set[str]:
    """Return the stored values without those that are cheaper to make again, by the cost of the lowered stages.

    The minimum cut charges a value that also leads to source rows as if it were made again there; where it is only read
    at a block's own rows, its stages tell better.
    """
    stages = lower(program, levels, stored)
    for name in sorted(stored - set(program.outputs)):
        loads = [step for stage in stages for step in stage.loads() if step.name == name]
        if not loads or any(step.rows.kind != "range" for step in loads):
            continue
        others = lower(program, levels, stored - {name})
        if _num_edge_steps(others) == _num_edge_steps(stages) and cost_of(program, others) < cost_of(program, stages):
            stored, stages = stored - {name}, others
    return stored


def _num_edge_steps(stages: list[StageProgram]) -> int:
    return sum(step.action not in ("load", "apply") for stage in stages for step in stage.steps)
