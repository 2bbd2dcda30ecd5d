"""Schemas and exact meanings of the raw operators ``torch.ops.core_kernels.<op>``.

An implementation is a function named as the operator, in the module of the operator's family. Its arguments are the
schema's, in order, less ``checked`` and those that end in ``_grad``. An operator whose output shapes are known
beforehand (``fills``) passes its allocated outputs behind them; the implementation fills every element and returns
nothing. The others return their tensors. Implementations may assume what the dispatcher checked: shapes fit, feature
tensors are contiguous 2-D, ids are in range, ids and pointers contiguous.

Vocabulary of the arguments (``E`` edges, ``W`` columns, ``H`` heads, ``H`` divides ``W``, head ``h`` owns the columns
``[h*W/H, (h+1)*W/H)``):

- ``indptr`` int64 ``[num_dst + 1]``, ``indices`` int32 or int64 ``[E]``: in-edges by destination; position ``p`` of row
  ``d`` (``indptr[d] <= p < indptr[d+1]``) is an edge from source ``indices[p]``.
- ``edge_ids`` int64 ``[E]`` or None: edge-wise tensors are addressed by ``edge_ids[p]``, by ``p`` itself when None.
- ``t_indptr``, ``t_indices``, ``t_edge_ids``: the same three of the transposed graph; only gradients read them.
- ``t_positions`` int64 ``[E]``: the position in the graph of each position of the transposed graph.
- ``arg`` int32 ``[num_dst, W]``: the slot ``p - indptr[d]`` that won an extremum, the first of equals; -1 in empty
  rows.
- ``weight`` ``[E, H]`` (``H == 1`` for plain weights), dtype of ``x``.
- ``src_scale`` ``[num_src]``, ``dst_scale`` ``[num_dst]``: constants that multiply source rows and results.

Callers of raw operators vouch for ``indptr`` and ``indices``; :class:`core_kernels.Graph` validates them once.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OPERATORS", "Operator"]

_T_GRAD = "Tensor? t_indptr_grad, Tensor? t_indices_grad, Tensor? t_edge_ids_grad"
_DRAW = "int fanout, bool replace, int seed, int step, int layer"


@dataclass(frozen=True)
class Operator:
    """One raw operator.

    Attributes:
        family: Name of the module that holds it in each implementation package.
        signature: Arguments and results in torch's schema language.
        fills: Whether outputs are allocated by the dispatcher and passed last.
        meaning: What it computes, exactly.
    """

    family: str
    signature: str
    fills: bool
    meaning: str


OPERATORS: dict[str, Operator] = {
    "spmm_sum": Operator(
        "spmm",
        "(Tensor indptr, Tensor indices, Tensor x, Tensor? weight, Tensor? edge_ids, Tensor? src_scale, "
        f"Tensor? dst_scale, {_T_GRAD}) -> Tensor",
        True,
        "out[d] = dst_scale[d] * sum_p weight[edge_ids[p], head] * src_scale[indices[p]] * x[indices[p]]; empty "
        "rows 0. "
        "Rows above 4,096 edges are summed in chunks of 4,096 positions, so that fp32 errors of hubs stay bounded.",
    ),
    "spmm_sum_out": Operator(
        "spmm",
        "(Tensor indptr, Tensor indices, Tensor x, Tensor? weight, Tensor? edge_ids, Tensor? src_scale, "
        "Tensor? dst_scale, Tensor(a!) out) -> ()",
        True,
        "spmm_sum into a given tensor; implementations need not define it.",
    ),
    "spmm_extremum": Operator(
        "spmm",
        "(Tensor indptr, Tensor indices, Tensor x, Tensor? weight, Tensor? edge_ids, bool largest, "
        "Tensor? t_indptr_grad, Tensor? t_indices_grad, Tensor? t_positions_grad) -> (Tensor, Tensor)",
        True,
        "out, arg: maximum (or minimum) over p of weight * x[indices[p]] per column, and its slot; empty rows 0 "
        "and -1. "
        "A NaN wins.",
    ),
    "spmm_extremum_backward": Operator(
        "spmm",
        "(Tensor indptr, Tensor indices, Tensor grad, Tensor arg, Tensor? weight, Tensor? edge_ids, Tensor t_indptr, "
        "Tensor t_indices, Tensor t_positions) -> Tensor",
        True,
        "grad_x[s, c] = sum over edges (s, d) at slot arg[d, c] of weight * grad[d, c]; num_src = len(t_indptr) - 1. "
        "Without atomics: walk the transposed rows and take what matches arg, or walk rows in order on one thread.",
    ),
    "spmm_extremum_weight_backward": Operator(
        "spmm",
        "(Tensor indptr, Tensor indices, Tensor x, Tensor grad, Tensor arg, Tensor? edge_ids, int heads) -> Tensor",
        True,
        "grad_weight[edge, h] = sum over columns c of head h with arg[d, c] == slot of grad[d, c] * x[s, c].",
    ),
    "sddmm": Operator(
        "sddmm",
        f"(Tensor indptr, Tensor indices, Tensor a, Tensor b, Tensor? edge_ids, str op, int heads, {_T_GRAD}) "
        f"-> Tensor",
        True,
        "Edge-wise result at edge_ids[p] of source row a[indices[p]] and destination row b[d]: op 'dot' sums "
        "the product "
        "over each head's columns -> [E, heads]; 'add' and 'mul' are elementwise -> [E, W] (heads = W).",
    ),
    "segment_sum": Operator(
        "segment",
        "(Tensor x, Tensor indptr, Tensor? edge_ids, Tensor? dst_scale) -> Tensor",
        True,
        "out[d] = dst_scale[d] * sum_p x[edge_ids[p]]; empty segments 0; chunks of 4,096 as spmm_sum.",
    ),
    "segment_expand": Operator(
        "segment",
        "(Tensor x, Tensor indptr, Tensor? edge_ids, Tensor? dst_scale, int num_edges) -> Tensor",
        True,
        "out[edge_ids[p]] = dst_scale[d] * x[d]: the adjoint of segment_sum. num_edges = indptr[-1].",
    ),
    "segment_extremum": Operator(
        "segment",
        "(Tensor x, Tensor indptr, Tensor? edge_ids, bool largest) -> (Tensor, Tensor)",
        True,
        "out, arg: maximum (or minimum) per column of each segment and its slot; empty segments 0 and -1. A NaN wins.",
    ),
    "segment_extremum_backward": Operator(
        "segment",
        "(Tensor grad, Tensor arg, Tensor indptr, Tensor? edge_ids, int num_edges) -> Tensor",
        True,
        "out[edge_ids[indptr[d] + arg[d, c]], c] = grad[d, c], zero elsewhere.",
    ),
    "segment_softmax": Operator(
        "segment",
        "(Tensor logits, Tensor indptr, Tensor? edge_ids) -> Tensor",
        True,
        "Softmax of [E, H] logits over each segment, per column, the maximum subtracted first; a segment whose maximum "
        "is -inf gives zeros.",
    ),
    "segment_softmax_backward": Operator(
        "segment",
        "(Tensor grad, Tensor out, Tensor indptr, Tensor? edge_ids) -> Tensor",
        True,
        "out * (grad - sum over the segment of out * grad).",
    ),
    "sample_neighbors": Operator(
        "sampling",
        f"(Tensor indptr, Tensor indices, Tensor? edge_ids, Tensor seeds, Tensor? keys, {_DRAW}) "
        "-> (Tensor, Tensor, Tensor)",
        False,
        "(row pointers int64 [S+1], sources (dtype of indices), edge ids int64). Row i has the in-neighbours of "
        "seeds[i]: "
        "all of them in order when fanout == -1 or degree <= fanout (without replacement); else `fanout` draws. With "
        "u_j = the upper 32 bits of the hash of (seed, step, layer, key, j), key = keys[i] or seeds[i], degree n: with "
        "replacement slot_j = (u_j * n) >> 32; without, Floyd: i = n - fanout + j, t = (u_j * (i + 1)) >> 32, "
        "slot_j = i if t was taken before else t. Draws are returned in order of j. Degrees stay below 2**32.",
    ),
    "sample_block": Operator(
        "sampling",
        f"(Tensor indptr, Tensor indices, Tensor? edge_ids, Tensor seeds, Tensor? keys, {_DRAW}, int num_src) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        False,
        "sample_neighbors, then relabelling: (row pointers, local sources int32, source ids int64, edge ids). "
        "Source ids "
        "are the seeds (distinct), then new ids in first-seen order. Ids lie below num_src.",
    ),
    "unique_relabel": Operator(
        "relabel",
        "(Tensor ids) -> (Tensor, Tensor)",
        False,
        "(unique, local): the distinct ids in first-seen order (dtype of ids) and int64 positions: "
        "unique[local] == ids.",
    ),
    "gather": Operator(
        "gather",
        "(Tensor x, Tensor index, bool checked) -> Tensor",
        True,
        "out[i] = x[index[i]]; x [N, W] of any dtype.",
    ),
    "gather_out": Operator(
        "gather",
        "(Tensor x, Tensor index, bool checked, Tensor(a!) out) -> ()",
        True,
        "gather into a given tensor; implementations need not define it.",
    ),
    "scatter_add": Operator(
        "gather",
        "(Tensor x, Tensor index, int num_rows, bool checked) -> Tensor",
        True,
        "out[r] = sum of x[i] over index[i] == r, in ascending i; rows nobody names are 0.",
    ),
    "bucket_by_owner": Operator(
        "pack",
        "(Tensor ids, Tensor offsets, bool checked) -> (Tensor, Tensor)",
        True,
        "order int64 [n], counts int64 [P]: owner p holds ids in [offsets[p], offsets[p+1]); order lists positions by "
        "owner, stable.",
    ),
    "unpack_rows_": Operator(
        "pack",
        "(Tensor(a!) out, Tensor index, Tensor rows, bool accumulate, bool checked) -> ()",
        True,
        "out[index[i]] = rows[i] (the last of equals stays), or += in ascending i; `out` is the first argument here.",
    ),
    "embedding_bag": Operator(
        "embedding",
        "(Tensor weight, Tensor ids, Tensor offsets, Tensor? sample_weight, bool mean, bool checked) -> Tensor",
        True,
        "out[b] = sum (or mean) over i in [offsets[b], offsets[b+1]) of sample_weight[i] * weight[ids[i]]; offsets has "
        "B + 1 entries; empty bags 0.",
    ),
    "embedding_bag_backward": Operator(
        "embedding",
        "(Tensor grad, Tensor ids, Tensor offsets, Tensor? sample_weight, bool mean, int num_rows, bool checked) "
        "-> Tensor",
        True,
        "Dense gradient of the table, summed in ascending i.",
    ),
    "embedding_bag_sample_weight_backward": Operator(
        "embedding",
        "(Tensor grad, Tensor weight, Tensor ids, Tensor offsets, bool mean, bool checked) -> Tensor",
        True,
        "grad_sample_weight[i] = dot(grad[bag of i], weight[ids[i]]), divided by the bag's length for mean.",
    ),
    "embedding_update_": Operator(
        "embedding",
        "(Tensor(a!) weight, Tensor(b!)? first, Tensor(c!)? second, Tensor ids, Tensor offsets, Tensor grad, "
        "Tensor? sample_weight, str optimizer, bool mean, float lr, float eps, float beta1, float beta2, "
        "float weight_decay, int step, bool checked) -> ()",
        False,
        "Backward of embedding_bag fused with one exact optimiser step: the gradient g of a row is summed over all its "
        "occurrences in ascending i (chunks of 4,096), then the row is updated once; rows not named stay untouched. "
        "g += weight_decay * w. 'sgd': w -= lr*g. 'momentum': first = beta1*first + g; w -= lr*first. 'adagrad': first "
        "+= g*g; w -= lr*g/(sqrt(first)+eps). 'rowwise_adagrad': first [N] += mean(g*g); w -= lr*g/(sqrt(first)+eps). "
        "'adam': first = beta1*first+(1-beta1)*g; second = beta2*second+(1-beta2)*g*g; w -= lr*(first/(1-beta1**step)) "
        "/(sqrt(second/(1-beta2**step))+eps), rows not named keep their state (lazy).",
    ),
    "quantize_rows": Operator(
        "quantize",
        "(Tensor x, int bits) -> (Tensor, Tensor, Tensor)",
        True,
        "codes uint8 [N, W] (bits 8) or [N, ceil(W/2)] (bits 4, even column in the low half), scale fp32 [N] = (max - "
        "min) / (2**bits - 1), offset fp32 [N] = min. code = min(floor((x - offset) / scale + 0.5), 2**bits - "
        "1); scale "
        "0 gives code 0.",
    ),
    "dequantize_rows": Operator(
        "quantize",
        "(Tensor codes, Tensor scale, Tensor offset, int bits, int width) -> Tensor",
        True,
        "fp32 [N, width]: offset + scale * code.",
    ),
    "sketch_insert_": Operator(
        "sketch",
        "(Tensor(a!) table, Tensor keys, Tensor values, int seed) -> ()",
        True,
        "For each table row r and key k: h = hash(seed, 0, r, k, 0); table[r, (h >> 32) * columns >> 32] += (+1 "
        "if h & 1 "
        "else -1) * value, in ascending order. `table` fp32 [R, C] is the first argument here.",
    ),
    "sketch_estimate": Operator(
        "sketch",
        "(Tensor table, Tensor keys, int seed) -> Tensor",
        True,
        "fp32 [n]: the median over table rows of sign * table[r, column]; the mean of the middle two when R is even.",
    ),
}
