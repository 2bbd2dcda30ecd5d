"""The default front end: ``torch.export`` with the number of nodes and edges left open.

The model is traced through its convolutions down to ATen operators, so degree normalisation, self-loop rewiring and
multi-hop layers are seen as what they are. Tracing runs on fake tensors and on a copy of the modules that shares the
parameters: the user's model, its caches and its mode stay as they were.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from gnn_eval.containers import take_apart
from gnn_eval.errors import UnsupportedModelError
from gnn_eval.model_call import ModelCall, count_of, num_rows_of
from gnn_eval.program import Program, Ref, Role, Value
from gnn_eval.sizes import Size

__all__ = ["FlatModel", "capture", "capture_fixed", "copy_sharing_parameters"]

_logger = logging.getLogger(__name__)
_TALKATIVE = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export")
_PRIMES = (53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)
_EDGE_PRIMES = (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283, 293, 307, 311, 313, 317)


class _Record:
    """What a trace leaves behind; not a module attribute, since export undoes changes to those."""

    skeleton: Any = None


class FlatModel(nn.Module):
    """A model called with a flat list of tensors, returning a flat list of tensors.

    Args:
        model: The model.
        call: How the flat tensors form its arguments.
    """

    def __init__(self, model: nn.Module, call: ModelCall):
        super().__init__()
        self.model = model
        self._call = call
        self._record = _Record()

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Call the model and flatten its result."""
        args, kwargs = self._call.arguments(list(tensors))
        if self._call.lifted:
            lifted = dict(zip(self._call.lifted, tensors[len(tensors) - len(self._call.lifted) :], strict=True))
            result = torch.func.functional_call(self.model, lifted, args, kwargs)
        else:
            result = self.model(*args, **kwargs)
        self._record.skeleton, leaves = take_apart(result)
        return [tensor for _, tensor in leaves]


def copy_sharing_parameters(model: nn.Module) -> nn.Module:
    """Copy the modules of ``model`` without its tensors' memory, and forget what layers have cached of a graph."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # programs hold locks, and are never changed
        shared |= {id(part): part for part in vars(module).values() if type(part).__name__ == "VertexProgram"}
    copied = copy.deepcopy(model, shared)
    for module in copied.modules():
        for name in ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h"):
            if getattr(module, name, None) is not None:
                setattr(module, name, None)
    return copied


def capture(
    model: nn.Module, call: ModelCall, prepare: Callable[[nn.Module], Any] | None = None
) -> tuple[Program, Any]:
    """Trace ``model`` and return its program and the skeleton of its result.

    Args:
        model: The model, on any device and in the mode in which it is to be evaluated.
        call: The call; only names, roles, dtypes and trailing shapes of its tensors are used.
        prepare: Called with the copy before tracing; the opaque front end hides convolutions here.

    Returns:
        The program, untyped, and the skeleton of the model's result.

    Raises:
        UnsupportedModelError: If the model's control flow depends on the values in the graph.
    """
    copied = copy_sharing_parameters(model)
    if prepare is not None:
        prepare(copied)
    flat = FlatModel(copied, call)
    tensors, dims = _example(call)
    try:
        with _quietly(), torch.no_grad():
            exported = torch.export.export(flat, tuple(tensors), dynamic_shapes=(tuple(dims),), strict=False)
            exported = exported.run_decompositions({})
    except UnsupportedModelError:
        raise
    except Exception as error:
        _logger.debug("torch.export failed", exc_info=True)
        raise UnsupportedModelError(
            "torch.export",
            f"{type(model).__name__} cannot be traced with open numbers of nodes and edges ({_first_line(error)})",
            "remove control flow that depends on values of the graph",
            _line_of_error(error),
        ) from error
    if changed := list(exported.graph_signature.user_inputs_to_mutate.values()):
        place = list(exported.graph_signature.user_inputs).index(changed[0])
        raise UnsupportedModelError(
            "an operator in place", f"the model changes its input {call.names[place]}", "change a copy, x.clone()"
        )
    return _Reader(exported, call, {}).program(), flat._record.skeleton


def capture_fixed(model: nn.Module, call: ModelCall) -> Program:
    """Trace ``model`` with fixed numbers of nodes and edges; the program only serves to look at its operators."""
    flat = FlatModel(copy_sharing_parameters(model), call)
    tensors, _ = _example(call)
    sizes = {
        num_rows_of(role, tensor): count_of(role)
        for role, tensor in zip(call.roles, tensors, strict=True)
        if role.kind != "const"
    }
    with _quietly(), torch.no_grad():
        exported = torch.export.export(flat, tuple(tensors), strict=False).run_decompositions({})
    return _Reader(exported, call, sizes).program()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep torch from printing what it traced when a model cannot be exported; the error itself says enough."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _example(call: ModelCall) -> tuple[list[torch.Tensor], list[dict]]:
    """Return small inputs of distinct sizes, and their open dimensions."""
    sizes: dict[str, int] = {}
    dims: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    open_dims: list[dict] = []
    for role, tensor in zip(call.roles, call.tensors, strict=True):
        if role.kind == "const":
            tensors.append(tensor)
            open_dims.append({})
            continue
        count = count_of(role)
        if count not in sizes:
            pool = _PRIMES if role.kind == "node" else _EDGE_PRIMES
            taken = [s for s in sizes.values() if s in pool]
            sizes[count] = pool[len(taken) % len(pool)] + 300 * (len(taken) // len(pool))
            dims[count] = Dim(f"dim{len(dims)}")
        dim = 1 if role.kind == "relation" else 0
        shape = list(tensor.shape)
        shape[dim] = sizes[count]
        tensors.append(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
        open_dims.append({dim: dims[count]})
    return tensors, open_dims


class _Reader:
    """Turns the operators of an exported program into values.

    Args:
        exported: The exported program.
        call: The call it was traced with.
        sizes: For a trace with fixed sizes, the count that each of the example's sizes stands for.
    """

    def __init__(self, exported: ExportedProgram, call: ModelCall, sizes: dict[int, str]):
        self._exported = exported
        self._call = call
        self._fixed_sizes = sizes
        self._counts: dict[str, str] = {}
        self._constants: dict[str, torch.Tensor] = {}

    def program(self) -> Program:
        values: dict[str, Value] = {}
        inputs: list[str] = []
        roles: dict[str, Role] = {}
        outputs: list[str] = []
        specs = {
            spec.arg.name: spec for spec in self._exported.graph_signature.input_specs if hasattr(spec.arg, "name")
        }
        mutated = self._exported.graph_signature.buffers_to_mutate
        for node in self._exported.graph.nodes:
            if node.op == "placeholder":
                value = self._placeholder(node, specs[node.name], inputs, roles)
                values[value.name] = value
            elif node.op == "call_function":
                if "assert" in str(node.target) or "sym_constrain" in str(node.target):
                    continue
                values[node.name] = self._operator(node)
            elif node.op == "output":
                outputs = [arg.name for arg in node.args[0] if arg.name not in mutated]
        return Program(values, inputs, roles, outputs, self._constants)

    def _placeholder(self, node: Any, spec: Any, inputs: list[str], roles: dict[str, Role]) -> Value:
        kind = spec.kind.name
        fake = node.meta["val"]
        if kind == "USER_INPUT":
            place = len(inputs)
            role = self._call.roles[place]
            if role.kind != "const":
                symbol = fake.shape[1 if role.kind == "relation" else 0]
                self._counts[str(symbol)] = count_of(role)
            inputs.append(node.name)
            roles[node.name] = role
            return Value(node.name, "input", (self._call.names[place],), shape=self._shape(fake), dtype=fake.dtype)
        name = spec.target.removeprefix("model.")
        if kind in ("PARAMETER", "BUFFER") and spec.target in self._exported.state_dict:
            return Value(node.name, "parameter", (name,), shape=self._shape(fake), dtype=fake.dtype)
        tensor: Any = self._exported.constants.get(spec.target, self._exported.state_dict.get(spec.target))
        self._constants[node.name] = tensor
        return Value(node.name, "constant", shape=self._shape(fake), dtype=fake.dtype)

    def _operator(self, node: Any) -> Value:
        meta = node.meta.get("val")
        target = node.target
        op = str(target) if isinstance(target, torch._ops.OpOverload) else f"{target.__module__}.{target.__name__}"
        op = op.replace("_operator.", "operator.")
        value = Value(node.name, op, self._encode(node.args), self._encode(node.kwargs), source=_source_of(node))
        if isinstance(meta, torch.Tensor):
            value.shape, value.dtype = self._shape(meta), meta.dtype
        elif isinstance(meta, (int, torch.SymInt)) and not isinstance(meta, bool):
            value.size = self._size(meta)
        return value

    def _encode(self, tree: Any) -> Any:
        if isinstance(tree, torch.fx.Node):
            return Ref(tree.name)
        if isinstance(tree, (list, tuple)):
            return tuple(self._encode(item) for item in tree) if isinstance(tree, tuple) else [*map(self._encode, tree)]
        if isinstance(tree, dict):
            return {key: self._encode(item) for key, item in tree.items()}
        return tree

    def _shape(self, fake: torch.Tensor) -> tuple[Size, ...]:
        return tuple(self._size(size) for size in fake.shape)

    def _size(self, size: int | torch.SymInt) -> Size:
        if isinstance(size, int):
            return Size.of(self._fixed_sizes[size]) if size in self._fixed_sizes else Size((), size)
        expression = size.node.expr
        total = Size()
        for term, coefficient in expression.as_coefficients_dict().items():
            if term.is_number:
                total = total + int(term * coefficient)
            elif term.is_Symbol and coefficient == int(coefficient):
                total = total + Size.of(self._counts.get(str(term), str(term))) * int(coefficient)
            else:
                total = total + Size.of(f"({term * coefficient})")
        return total


def _source_of(node: Any) -> str:
    """Return module path, file, line and text of the innermost line of model code that made ``node``."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = modules[-1][0] if modules else ""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    where, text = "", ""
    for place, line in enumerate(lines):
        if line.startswith("File "):
            file, number = line.split('"')[1], line.split("line ")[1].split(",")[0]
            where = f"{'/'.join(file.split('/')[-2:])}:{number}"
            text = lines[place + 1] if place + 1 < len(lines) else ""
    shown = f"{where} `{text}`" if where else ""
    return f"{path.removeprefix('model.')} {shown}".strip()


def _line_of_error(error: BaseException) -> str:
    """Return the innermost line of code outside torch that an error passed through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "gnn_eval" not in file:
            found = f"{'/'.join(file.split('/')[-2:])}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
