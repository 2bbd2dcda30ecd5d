"""Vertex programs: a GNN layer written once, as a function of one vertex, and run fused everywhere.

Source: Wu et al., Seastar: Vertex-Centric Programming for Graph Neural Networks, EuroSys 2021
(https://doi.org/10.1145/3447786.3456247).
"""

from core_kernels.vertex.functions import (
    dot,
    elu,
    exp,
    feature_sum,
    leaky_relu,
    log,
    max,
    maximum,
    mean,
    min,
    minimum,
    relu,
    sigmoid,
    softmax,
    sqrt,
    sum,
    tanh,
)
from core_kernels.vertex.program import Reads, VertexProgram, program
from core_kernels.vertex.states import ReduceState

__all__ = [
    "Reads",
    "ReduceState",
    "VertexProgram",
    "dot",
    "elu",
    "exp",
    "feature_sum",
    "leaky_relu",
    "log",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "program",
    "relu",
    "sigmoid",
    "softmax",
    "sqrt",
    "sum",
    "tanh",
]
