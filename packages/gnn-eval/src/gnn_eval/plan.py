"""A compiled model: what is computed in which stage, and how to run it on a graph.

A plan holds the typed program and the stages made from it; it does not depend on a particular graph, and it reads the
model's parameters each time it runs, so it stays valid while the model is trained. It is saved as JSON without weights.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnn_eval.adjacency import AdjacencyForm
from gnn_eval.containers import fill
from gnn_eval.disk_rows import DiskRows
from gnn_eval.engine import Engine, RunOptions
from gnn_eval.errors import EvaluationArgumentError
from gnn_eval.explain import StageSummary, explain_plan, summarise_stages
from gnn_eval.hoisting import StructureEvaluator
from gnn_eval.lowering import StageProgram
from gnn_eval.model_call import ModelCall, bind_call
from gnn_eval.plan_file import compiled_from_json, compiled_to_json
from gnn_eval.program import Program
from gnn_eval.requests import as_node_ids
from gnn_eval.row_stores import RamRows, RowStore
from gnn_eval.run_report import RunReport

__all__ = ["Compiled", "Plan", "asked_rows"]


@dataclass
class Compiled:
    """What compilation makes of a model, without the model.

    Attributes:
        program: The typed program.
        stages: Its stages in order.
        stored: Values stored between stages.
        result_skeleton: How the outputs form the model's result.
        frontend: Front end that captured the model.
        forms: What the sparse adjacencies of the example were.
        is_verified: Whether it was compared with the full forward.
    """

    program: Program
    stages: list[StageProgram]
    stored: set[str]
    result_skeleton: Any
    frontend: str
    forms: tuple[AdjacencyForm, ...] = ()
    is_verified: bool = False


class Plan:
    """A model compiled for layer-wise evaluation.

    Args:
        model: The model; its parameters are read when the plan runs.
        compiled: The result of compilation.
        roles: Roles given by the caller, used again to bind new inputs.

    Attributes:
        last_report: What the last run did, stage by stage.
    """

    def __init__(self, model: nn.Module, compiled: Compiled, roles: dict[str, str] | None = None):
        self.model, self.compiled, self._roles = model, compiled, roles
        self.last_report = RunReport()

    @property
    def stages(self) -> list[StageSummary]:
        """The stages: what each reads, computes and stores, with its memory per row."""
        return summarise_stages(self.compiled)

    def explain(self, counts: dict[str, int] | None = None) -> str:
        """Return the plan in words and numbers.

        Args:
            counts: Numbers of nodes and edges, as ``{"n_node": 10_000, "e_edge_index": 50_000}``; with them, bytes are
                given for the whole graph.
        """
        return explain_plan(self.compiled, counts)

    def run(
        self,
        data: Any,
        nodes: Any = None,
        memory: int | str | None = None,
        order: str = "auto",
        store: str | Path = "ram",
        out: Tensor | str | Path | None = None,
        progress: bool = False,
        *,
        batch_rows: int | None = None,
        fuse: bool = True,
        group: Any = None,
        resume: bool = False,
    ) -> Any:
        """Evaluate the model on a graph; see :func:`gnn_eval.evaluate` for the arguments."""
        from gnn_eval.out_of_core import sample_identity
        from gnn_eval.stored_graph import StoredGraph

        memory_bytes = parse_bytes(memory)
        _check_positive(memory_bytes=memory_bytes, batch_rows=batch_rows)
        row_of_node = None
        if isinstance(data, StoredGraph):
            stores, structure = data.bind(self.compiled.program, self.model, self._roles)
            identity, row_of_node = data.identity, data.row_of_node
        else:
            call = bind_call(self.model, data, self._roles)
            call.check_ids()
            stores, structure = self._bind(call)
            identity = functools.partial(sample_identity, dict(zip(call.names, call.tensors, strict=True)))
        asked = self._asked(nodes, structure)
        shown: dict[str, Tensor | None] = asked
        if row_of_node is not None:
            asked = {name: ids if ids is None else row_of_node[ids] for name, ids in asked.items()}
            shown = {name: row_of_node if ids is None else ids for name, ids in asked.items()}
        options = RunOptions(asked, memory_bytes, batch_rows, order, fuse, group)
        return self._run(stores, structure, options, identity, shown, store, out, progress, resume)

    def _bind(self, call: ModelCall) -> tuple[dict[str, RowStore], StructureEvaluator]:
        program = self.compiled.program
        if len(call.tensors) != len(program.inputs) or list(program.roles.values()) != call.roles:
            given = ", ".join(f"{name} ({role.kind})" for name, role in zip(call.names, call.roles, strict=True))
            expected = ", ".join(f"{program[n].args[0]} ({program.roles[n].kind})" for n in program.inputs)
            raise EvaluationArgumentError(
                f"the plan was compiled for other inputs: got {given}; expected {expected}; compile the model again"
            )
        forms = call.forms()
        known = self.compiled.forms
        if len(forms) != len(known) or not all(a.covers(b) for a, b in zip(known, forms, strict=True)):
            raise EvaluationArgumentError(
                f"the plan was verified for {_shown_forms(known)}; got {_shown_forms(forms)}; compile the model again"
            )
        inputs = dict(zip(program.inputs, call.tensors, strict=True))
        structure = StructureEvaluator(program, self.model, inputs, call.counts())
        kinds = ("node", "edge")
        stores: dict[str, RowStore] = {n: RamRows(t) for n, t in inputs.items() if program.roles[n].kind in kinds}
        return stores, structure

    def _asked(self, nodes: Any, structure: StructureEvaluator) -> dict[str, Tensor | None]:
        program = self.compiled.program
        types = program.node_spaces()
        if isinstance(nodes, dict):
            unknown = [node_type for node_type in nodes if node_type not in types.values()]
            if unknown:
                raise EvaluationArgumentError(
                    f"nodes has the type {unknown[0]!r}; expected some of {', '.join(types.values())}; "
                    "use these names, or pass ids alone for a graph of one type"
                )
        asked: dict[str, Tensor | None] = {}
        for name in program.outputs:
            space = program[name].type.rows
            node_type = types.get(space)
            if nodes is None or node_type is None:
                asked[name] = None
            elif isinstance(nodes, dict):
                chosen = nodes.get(node_type, torch.empty(0, dtype=torch.int64))
                asked[name] = as_node_ids(chosen, structure.count_of(space), node_type)
            else:
                asked[name] = as_node_ids(nodes, structure.count_of(space), node_type)
        return asked

    def _run(
        self,
        stores: dict[str, RowStore],
        structure: StructureEvaluator,
        options: RunOptions,
        identity: Callable[[], str],
        shown: dict[str, Tensor | None],
        store: str | Path,
        out: Tensor | str | Path | None,
        progress: bool,
        resume: bool,
    ) -> Any:
        from gnn_eval.out_of_core import Workspace, deliver, open_output, run_fingerprint
        from gnn_eval.progress import show_progress

        compiled, asked = self.compiled, options.asked
        store = "ram" if store is None else store
        _check_files(stores, store, out)
        if str(store) != "ram":
            place = None if isinstance(out, Tensor) or out is None else str(out)
            settings = [options.order, options.batch_rows, options.fuse, place]
            fingerprint = run_fingerprint(compiled, self.model, identity(), asked, settings)
            options.workspace = Workspace(Path(store), fingerprint, resume, options.group)
        if out is not None:
            outputs = open_output(out, compiled, structure, shown)
            in_place = isinstance(out, Tensor) or options.group is None or options.workspace is not None
            if in_place and all(ids is None for ids in shown.values()):
                options.outputs = outputs
        engine = Engine(compiled.program, compiled.stages, self.model, stores, structure, options)
        with show_progress(progress, compiled, structure) as options.on_progress:
            results = engine.run()
        self.last_report = engine.report
        limit, group = options.memory_bytes, options.group
        tensors = [deliver(results[n], shown[n], out, limit, group) for n in compiled.program.outputs]
        if options.workspace is not None:
            options.workspace.finish(list(results.values()))
        return fill(compiled.result_skeleton, tensors, lambda node_type: structure.counts[f"n_{node_type}"])

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, without weights."""
        Path(path).write_text(json.dumps({"roles": self._roles, **compiled_to_json(self.compiled)}) + "\n")

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Plan:
        """Read a plan for a model with the same architecture; nothing is traced again."""
        document = json.loads(Path(path).read_text())
        return cls(model, compiled_from_json(document, str(path)), document.get("roles"))


def _check_files(stores: dict[str, RowStore], store: str | Path, out: Tensor | str | Path | None) -> None:
    """Raise if what is written would replace a file that is read, or cannot be written."""
    inputs = [rows.path.resolve() for rows in stores.values() if isinstance(rows, DiskRows)]
    if str(store) != "ram":
        directory = Path(store).resolve()
        if directory.exists() and not directory.is_dir():
            raise EvaluationArgumentError(f"store={store} is a file; expected a directory; name another")
        if any(directory == path.parent for path in inputs):
            raise EvaluationArgumentError(
                f"store={store} is the directory of the graph; expected one for what is made; name another"
            )
    if isinstance(out, Tensor) and out.requires_grad:
        raise EvaluationArgumentError("out requires gradients; expected a plain tensor; pass out.detach()")
    if out is None or isinstance(out, Tensor):
        return
    path = Path(out).resolve()
    if path.is_dir() or not path.parent.is_dir():
        problem = "a directory" if path.is_dir() else f"in {path.parent}, which does not exist"
        raise EvaluationArgumentError(f"out={out} is {problem}; expected the path of a .npy file; name one")
    if any(path.parent == read.parent for read in inputs) and (path.parent / "manifest.json").exists():
        raise EvaluationArgumentError(
            f"out={out} lies in the directory of the graph; expected another directory, so that no input is replaced; "
            "name one"
        )


def parse_bytes(memory: int | str | None) -> int | None:
    """Return a number of bytes; text may have a unit.

    >>> parse_bytes("1.5GB"), parse_bytes("256 MiB"), parse_bytes(1000)
    (1500000000, 268435456, 1000)
    """
    if memory is None or isinstance(memory, int):
        return memory
    text = str(memory).strip().lower().replace("ib", "i").removesuffix("b")
    units = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    for unit, factor in units.items():
        if text.endswith(unit):
            text, scale = text.removesuffix(unit), factor
            break
    else:
        scale = 1
    try:
        return int(float(text) * scale)
    except (ValueError, OverflowError):
        raise EvaluationArgumentError(
            f"memory={memory!r} is not valid: expected bytes, or text such as '512MB' or '4GiB'; pass a number"
        ) from None


def _check_positive(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number <= 0):
            raise EvaluationArgumentError(f"{name}={number} is not valid: expected at least 1, or None; leave it out")


def _shown_forms(forms: Sequence[AdjacencyForm]) -> str:
    def shown(form: AdjacencyForm) -> str:
        weights = "with weights" if form.weighted else "without weights"
        return f"a {form.name} {weights} {'and with' if form.has_loops else 'or'} self-loops"

    return ", ".join(map(shown, forms)) or "edge lists"


def asked_rows(store: RowStore, ids: Tensor | None) -> Tensor:
    """Return the rows ``ids`` of a result, all of them if ``None``."""
    if ids is not None:
        return store.read_rows(ids)
    whole = store.whole()
    return store.read_range(0, store.num_rows) if whole is None else whole
