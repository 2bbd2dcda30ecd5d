"""Gradients and state of a model whose input weights may be spread over ranks.

Under NFP a rank holds the authoritative columns of the input weights, and only their gradient; everything else is
replicated. This class sums gradients, and puts columns together wherever a whole tensor is wanted, so that no
checkpoint knows under which strategy and by how many ranks it was made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gnn_parallel.errors import input_error
from gnn_parallel.ranks import Ranks

__all__ = ["SpreadParameters", "used_once"]


def used_once(parameters: list[nn.Parameter], model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that one module alone holds.

    Another module would give a tied parameter gradients in all columns on every rank: it is not spread but summed.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> used_once([model[0].weight], model)
    []
    """
    holders = [id(p) for module in model.modules() for p in {id(p): p for p in module._parameters.values()}.values()]
    return [parameter for parameter in parameters if holders.count(id(parameter)) == 1]


class SpreadParameters:
    """The parameters of a model over the ranks.

    Args:
        model: The model.
        spread: Weights ``[*, input]`` whose columns are spread over the ranks of a host; empty for none.
        columns: Those of this rank.
        ranks: The ranks.

    Collective: every method.
    """

    def __init__(self, model: nn.Module, spread: list[nn.Parameter], columns: slice, ranks: Ranks):
        self.model, self.columns, self.ranks = model, columns, ranks
        self._spread = {id(parameter) for parameter in spread}

    def is_spread(self, parameter: Tensor) -> bool:
        """Whether other ranks hold some columns of a parameter."""
        return id(parameter) in self._spread

    def sum_gradients(self) -> None:
        """Add up gradients over the ranks that hold the same parameters."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._sum([p for p in trained if not self.is_spread(p)], None)
        if self.ranks.num_hosts > 1:
            self._sum([p for p in trained if self.is_spread(p)], self.columns)

    def _sum(self, parameters: list[nn.Parameter], columns: slice | None) -> None:
        group = self.ranks.whole if columns is None else self.ranks.across
        if group.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad if columns is None else parameter.grad[:, columns]
            by_dtype.setdefault(parameter.dtype, []).append(grad)
        for grads in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            group.all_reduce(flat, tag="parameter_gradients", out=flat)
            for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(piece.view_as(grad))

    def whole(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Return a copy of a parameter-shaped tensor with every rank's columns in place.

        Args:
            parameter: The parameter it belongs to.
            value: Its value, gradient or optimizer state.
        """
        if not self.is_spread(parameter):
            return value.detach().clone()
        mine = torch.zeros_like(value)
        mine[:, self.columns] = value.detach()[:, self.columns]
        return self.ranks.inside.all_reduce(mine, tag="checkpoint", out=mine)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter, whole, by name."""
        return {
            name: self.whole(p, torch.zeros_like(p) if p.grad is None else p.grad)
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict, whole."""
        parameters = dict(self.model.named_parameters())
        return {
            name: self.whole(parameters[name], value) if name in parameters else value.detach().clone()
            for name, value in self.model.state_dict().items()
        }

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict, whole."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        document = optimizer.state_dict()
        state = {
            index: {
                key: self.whole(parameters[index], value)
                if isinstance(value, Tensor) and value.shape == parameters[index].shape
                else value
                for key, value in entries.items()
            }
            for index, entries in document["state"].items()
        }
        return {**document, "state": state}

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients so that their norm is at most ``max_norm``; columns of other ranks count once.

        Returns:
            The norm before.
        """
        if not max_norm > 0:
            raise input_error("max_norm", max_norm, "a positive number", "pass the largest norm you allow")
        zero = torch.zeros((), dtype=torch.float64)
        with_grad = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        spread = [grad[:, self.columns] for p, grad in with_grad if self.is_spread(p)]
        squares = sum((grad.double().square().sum() for grad in spread), zero)
        squares = self.ranks.inside.all_reduce(squares, tag="clip")
        shared = [grad for p, grad in with_grad if not self.is_spread(p)]
        norm = float(sum((grad.double().square().sum() for grad in shared), squares).sqrt())
        if norm > max_norm:
            for _, grad in with_grad:
                grad.mul_(max_norm / norm)
        return norm
