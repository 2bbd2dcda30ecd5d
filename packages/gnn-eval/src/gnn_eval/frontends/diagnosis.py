"""Finding the operator for which a model cannot be evaluated in parts, when tracing failed before typing could tell.

``torch.export`` reports that a size became fixed, not which operator wanted it so. The model is traced again with fixed
sizes, whose numbers tell nodes from edges, and typing names the operator that mixes rows. A size or branch taken from
values in the graph cannot be traced at all; there the line that reads the value is named.
"""

from __future__ import annotations

import logging

from torch import nn

from gnn_eval.errors import UnsupportedModelError
from gnn_eval.frontends import export
from gnn_eval.model_call import ModelCall
from gnn_eval.simplify import simplify
from gnn_eval.typing_rules import assign_types

__all__ = ["name_the_operator"]

_logger = logging.getLogger(__name__)


def name_the_operator(model: nn.Module, call: ModelCall, error: UnsupportedModelError) -> UnsupportedModelError:
    """Return a refusal that names the operator and its line, or the one given if that is the best there is.

    Args:
        model: The model.
        call: Its call.
        error: Why tracing failed.
    """
    if error.operator != "torch.export":
        return error
    cause = error.__cause__
    if cause is not None and ("DataDependent" in type(cause).__name__ or "data-dependent" in str(cause)):
        shown = str(cause).strip().splitlines()[0][:200]
        return UnsupportedModelError(
            "aten._local_scalar_dense.default",
            f"{type(model).__name__} takes a size or a branch from values in the graph ({shown})",
            "rewrite it without .item(), or evaluate it with a full forward",
            error.source,
        )
    try:
        assign_types(simplify(export.capture_fixed(model, call)))
    except UnsupportedModelError as found:
        return found
    except Exception:
        _logger.debug("the model cannot be traced with fixed sizes either", exc_info=True)
    return error
