"""The training state of a job, and its way to workers that lack it.

State is whatever has ``state_dict`` and ``load_state_dict``: modules, optimizers, schedulers, scalers. Its tensors are
one long stream of bytes. When workers join, or when some are a step behind after a failure, every worker that has the
newest state sends its share of the stream to every worker that lacks it, straight into the receiver's tensors.
Everything that is no tensor travels in front, with the names and shapes, which must match.

An optimizer makes its state at its first step; a newcomer makes it beforehand by a step without gradients and without
learning rate, so that nothing is allocated while others wait.

Source: "Elastic Deep Learning in Multi-Tenant GPU Clusters", one worker broadcasts the model. Where we differ: all old
workers are sources.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from elastic_train import session
from elastic_train.errors import StateMismatchError, input_error
from elastic_train.group import Links

__all__ = ["State", "locals_of", "receive_bytes", "send_bytes"]

# Below this size tensors share a message: gloo's cost of one more message is that of about this many bytes.
_SMALL_BYTES = 1 << 20


@runtime_checkable
class _Sharded(Protocol):
    """A tensor of which each process holds a part, such as a ``DTensor``."""

    def to_local(self) -> Tensor: ...


class _Slot:
    """Stands for a tensor in a structure of plain values."""

    def __init__(self, index: int):
        self.index = index


class State:
    """The objects whose state a newcomer needs.

    Args:
        **objects: Anything with ``state_dict()`` and ``load_state_dict(state)``.

    >>> model = torch.nn.Linear(3, 2)
    >>> State(model=model, optimizer=torch.optim.AdamW(model.parameters())).num_bytes()
    32
    """

    def __init__(self, **objects: Any):
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise input_error(name, value, "an object with state_dict and load_state_dict", "leave it out")
        self._objects = objects
        session.adopt_state(self)

    def prepare(self) -> None:
        """Let optimizers that never stepped make their state, without changing a parameter.

        Raises:
            InputError: A tensor could not be sent to a newcomer later on.
        """
        for value in self._objects.values():
            optimizer = getattr(value, "inner", value)
            if isinstance(optimizer, torch.optim.Optimizer) and not optimizer.state:
                _make_optimizer_state(optimizer)
        self.capture()  # refuses now what would else stop the job when it first grows

    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in locals_of([tensor for _, tensor in self.capture()[1]]))

    def capture(self) -> tuple[Any, list[tuple[str, Tensor]]]:
        """Return the state with slots in place of tensors, and the tensors with their names."""
        tensors: list[tuple[str, Tensor]] = []
        plain = _lift({name: value.state_dict() for name, value in self._objects.items()}, "", tensors)
        return plain, tensors

    def share(self, links: Links, sources: Sequence[int], progress: dict[str, Any]) -> dict[str, Any]:
        """Bring the state of the sources to all other members.

        Args:
            links: The members.
            sources: Ranks that have the state, the same on every member.
            progress: What travels along, such as the step.

        Returns:
            What the sources passed as ``progress``.

        Raises:
            StateMismatchError: A receiver's state has other names, shapes or types.

        Collective: all members.
        """
        receivers = [rank for rank in range(links.size) if rank not in sources]
        if not receivers:
            return progress
        plain, tensors = self.capture()
        layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
        if links.rank in sources:
            if links.rank == sources[0]:
                send_bytes(links, pickle.dumps((plain, layout, progress)), receivers)
            pieces = _pieces(tensors, len(sources), list(sources).index(links.rank))
            works = [
                links.send_async(message, rank, 2)
                for message in _messages(pieces, is_filled=True)[0]
                for rank in receivers
            ]
            for work in works:
                work.wait()
            return progress
        plain, expected, progress = pickle.loads(receive_bytes(links, sources[0]))
        _compare(layout, expected, links)
        works, copies = [], []
        for index, source in enumerate(sources):
            messages, small = _messages(_pieces(tensors, len(sources), index), is_filled=False)
            works += [links.receive_async(message, source, 2) for message in messages]
            copies.append((messages, small))
        for work in works:
            work.wait()
        for messages, small in copies:
            offset = 0
            for piece in small:
                piece.copy_(messages[0][offset : offset + len(piece)])
                offset += len(piece)
        self.restore(plain, [tensor for _, tensor in tensors])
        return progress

    def late_tensors(self) -> set[int]:
        """Return the addresses of tensors that only a wrapped optimizer changes, so may be copied until it steps."""
        wrapped = [getattr(value, "inner", None) for value in self._objects.values()]
        optimizers = [inner for inner in wrapped if isinstance(inner, torch.optim.Optimizer)]
        held = [p for inner in optimizers for group in inner.param_groups for p in group["params"]]
        held += [v for inner in optimizers for state in inner.state.values() for v in state.values()
                 if isinstance(v, Tensor)]  # fmt: skip
        return {local.data_ptr() for local in locals_of(held)}

    def restore(self, plain: Any, tensors: list[Tensor]) -> None:
        """Give the objects a state whose tensors are those that :meth:`capture` returned, filled since."""
        for name, value in self._objects.items():
            # Modules already hold the tensors that were filled; their state has nothing else.
            if isinstance(value, torch.nn.Module):
                continue
            try:
                value.load_state_dict(_lower(plain[name], tensors))
            except Exception as error:
                raise StateMismatchError(
                    f"{name!r} cannot take the state of the job ({type(error).__name__}: {error}): expected its "
                    "load_state_dict to accept what state_dict gave on another worker; correct that object"
                ) from error


def _make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.grad for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient


def _lift(value: Any, where: str, tensors: list[tuple[str, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        if not value.is_contiguous():
            raise input_error(where, tuple(value.stride()), "a contiguous tensor", "store it contiguously")
        tensors.append((where, value.detach()))
        return _Slot(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _lift(item, f"{where}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_lift(item, f"{where}[{index}]", tensors) for index, item in enumerate(value))
    return value


def _lower(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _lower(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_lower(item, tensors) for item in value)
    return value


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what this process holds of the tensors: of a sharded one, its shard, in place."""
    with torch.no_grad():
        return [value.to_local() if isinstance(value, _Sharded) else value for value in tensors]


def _pieces(tensors: list[tuple[str, Tensor]], num_shares: int, share: int) -> list[Tensor]:
    """Return one share of the stream of bytes, as views of the tensors."""
    held = locals_of([tensor for _, tensor in tensors])
    views = [tensor.reshape(-1).view(torch.uint8) for tensor in held if tensor.numel()]
    total = sum(len(view) for view in views)
    begin, end = total * share // num_shares, total * (share + 1) // num_shares
    pieces, offset = [], 0
    for view in views:
        first, last = max(begin - offset, 0), min(end - offset, len(view))
        if first < last:
            pieces.append(view[first:last])
        offset += len(view)
    return pieces


def _messages(pieces: list[Tensor], is_filled: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return what is sent, all small pieces in the first message; and the small pieces."""
    small = [piece for piece in pieces if len(piece) < _SMALL_BYTES]
    large = [piece for piece in pieces if len(piece) >= _SMALL_BYTES]
    if is_filled:
        packed = torch.cat([piece.cpu() for piece in small]) if small else torch.zeros(0, dtype=torch.uint8)
    else:
        packed = torch.empty(sum(map(len, small)), dtype=torch.uint8)
    return ([packed, *large] if len(packed) else large), small


def send_bytes(links: Links, data: bytes, receivers: list[int], is_async: bool = False) -> list[Any]:
    """Send bytes to some members, which call :func:`receive_bytes`; returns what to wait for if asynchronous."""
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    length = torch.tensor([len(payload)])
    works = [links.send_async(part, rank, tag) for rank in receivers for tag, part in ((0, length), (1, payload))]
    for work in [] if is_async else works:
        work.wait()
    return works if is_async else []


def receive_bytes(links: Links, source: int) -> bytes:
    """Receive what a member sends with :func:`send_bytes`."""
    length = torch.zeros(1, dtype=torch.int64)
    links.receive_async(length, source, 0).wait()
    payload = torch.empty(int(length), dtype=torch.uint8)
    links.receive_async(payload, source, 1).wait()
    return payload.numpy().tobytes()


def _compare(layout: list[tuple], expected: list[tuple], links: Links) -> None:
    if layout == expected:
        return
    mine, theirs = sorted(set(layout) - set(expected)), sorted(set(expected) - set(layout))
    raise StateMismatchError(
        f"worker {links.members[links.rank]!r} cannot take the state of the job: it has {mine[:3]}, expected "
        f"{theirs[:3]} ({len(expected)} tensors); run the same script with the same arguments on every worker"
    )
