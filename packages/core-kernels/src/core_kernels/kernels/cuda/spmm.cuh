// Sparse matrix times dense matrix over in-edges: weighted sums, extrema with the slot that won, and their gradients.
//
// Summary of the mapping: see rows.cuh. Hubs are summed in chunks whose partial sums a second kernel adds in order, so
// results repeat bit by bit; `atomic` lets chunks add to the output directly instead, in whatever order they finish.
// segment_sum, scatter_add, embedding_bag and sketch_insert_ are the same sums over other index lists.

#pragma once

#include "rows.cuh"

namespace core {

// weight[edge_ids[p], head] * src_scale[indices[p]] * x[indices[p], column...]
template <class T, class I>
struct SourceTerm {
    const I* indices_or_null;
    const i64* edge_ids_or_null;
    const T* x;
    const T* weight_or_null;
    const Accumulator<T>* src_scale_or_null;
    i64 width, heads, head_width;

    __device__ i64 source(i64 p) const { return indices_or_null ? i64(indices_or_null[p]) : p; }
    __device__ Accumulator<T> coefficient(i64 p, i64 source, i64 column) const {
        Accumulator<T> result = 1;
        if (weight_or_null) {
            i64 edge = edge_ids_or_null ? edge_ids_or_null[p] : p;
            result = widen(weight_or_null[heads == 1 ? edge : edge * heads + divide_small(column, head_width)]);
        }
        if (src_scale_or_null) result *= src_scale_or_null[source];
        return result;
    }
    template <int VEC>
    __device__ void add(Accumulator<T> (&sum)[VEC], i64 p, i64 column) const {
        i64 s = source(p);
        Accumulator<T> factor = coefficient(p, s, column);
        Pack<T, VEC> row = load_pack<VEC>(x + s * width + column);
        for (int v = 0; v < VEC; ++v) sum[v] += factor * widen(row.value[v]);
    }
};

// What happens to a finished row sum: scaled, divided by the degree for `mean`, written or added to its output row.
template <class T>
struct RowResult {
    const i64* indptr;
    const Accumulator<T>* dst_scale_or_null;
    const i64* row_ids_or_null;  // output row of each row; -1 writes nothing
    T* out;
    i64 width;
    bool mean, accumulate;

    __device__ Accumulator<T> scale(i64 row) const {
        Accumulator<T> result = dst_scale_or_null ? dst_scale_or_null[row] : Accumulator<T>(1);
        i64 degree = indptr[row + 1] - indptr[row];
        return mean && degree > 0 ? result / Accumulator<T>(degree) : result;
    }
    template <int VEC>
    __device__ void store(const Accumulator<T> (&sum)[VEC], i64 row, i64 column) const {
        i64 target = row_ids_or_null ? row_ids_or_null[row] : row;
        if (target < 0) return;
        T* address = out + target * width + column;
        Pack<T, VEC> result;
        if (accumulate) result = load_pack<VEC>(address);
        Accumulator<T> factor = scale(row);
        for (int v = 0; v < VEC; ++v) {
            Accumulator<T> before = accumulate ? widen(result.value[v]) : Accumulator<T>(0);
            result.value[v] = narrow<T>(before + factor * sum[v]);
        }
        store_pack<VEC>(address, result);
    }
};

__device__ __forceinline__ void add_atomically(float* address, float value) { atomicAdd(address, value); }
__device__ __forceinline__ void add_atomically(double* address, double value) { atomicAdd(address, value); }
__device__ __forceinline__ void add_atomically(f16*, float) {}  // the launcher refuses 16-bit atomics
__device__ __forceinline__ void add_atomically(bf16*, float) {}

template <class T, class I, int VEC>
__global__ void __launch_bounds__(block_threads, min_blocks)
    spmm_sum(const i64* indptr, const I* indices_or_null, const i64* edge_ids_or_null, const T* x, const T* weight_or_null,
             const Accumulator<T>* src_scale_or_null, const Accumulator<T>* dst_scale_or_null, const i64* order_or_null,
             const i64* chunk_start_or_null, const i64* row_ids_or_null, Accumulator<T>* partial, T* out, i64 num_rows,
             i64 max_chunks, i64 width, i64 heads, i64 column_lanes, i64 group_lanes, i64 mean, i64 accumulate, i64 atomic) {
    Lanes lanes(column_lanes, group_lanes);
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    SourceTerm<T, I> term = {indices_or_null, edge_ids_or_null, x, weight_or_null, src_scale_or_null, width, heads, divide_small(width, heads)};
    RowResult<T> result = {indptr, dst_scale_or_null, row_ids_or_null, out, width, mean != 0, accumulate != 0};
    Task task = find_task(tasks, lanes.group());
    i64 step = i64(lanes.num_columns) * VEC;
    for (i64 first = blockIdx.y * step; first < width; first += gridDim.y * step) {
        i64 column = first + lanes.column * VEC;
        bool active = task.exists() && column < width;
        Accumulator<T> sum[VEC];
        sum_positions<VEC>(sum, term, task, lanes, column, active);
        if (!active || lanes.edge != 0) continue;
        if (!task.is_chunk())
            result.store(sum, task.row, column);
        else if (atomic)
            for (int v = 0; v < VEC; ++v) add_atomically(out + task.row * width + column + v, result.scale(task.row) * sum[v]);
        else
            for (int v = 0; v < VEC; ++v) partial[task.chunk * width + column + v] = sum[v];
    }
}

// Second pass: the group of a hub's first chunk adds the hub's partial sums.
template <class T>
__global__ void __launch_bounds__(block_threads, min_blocks)
    combine_chunks(const i64* indptr, const Accumulator<T>* dst_scale_or_null, const i64* order_or_null,
                   const i64* chunk_start, const i64* row_ids_or_null, const Accumulator<T>* partial, T* out, i64 num_rows,
                   i64 max_chunks, i64 width, i64 mean, i64 accumulate) {
    Lanes lanes(32, 32);
    Tasks tasks = {indptr, order_or_null, chunk_start, num_rows, max_chunks};
    if (lanes.group() >= max_chunks) return;
    Task task = chunk_task(tasks, lanes.group());
    if (!task.exists() || task.chunk != task.first_chunk) return;
    RowResult<T> result = {indptr, dst_scale_or_null, row_ids_or_null, out, width, mean != 0, accumulate != 0};
    i64 stop = stop_chunk(tasks, task);
    for (i64 column = i64(blockIdx.y) * 32 + lanes.column; column < width; column += i64(gridDim.y) * 32) {
        Accumulator<T> sum[1];
        sum_chunks<1>(sum, partial, task.first_chunk, stop, width, column);
        result.store(sum, task.row, column);
    }
}

// ---- extrema ------------------------------------------------------------------------------------------------------------------

// A candidate for an extremum: its value and slot, slot -1 for none. The first of equals wins, and a NaN beats numbers.
template <class Acc>
struct Candidate {
    Acc value;
    i64 slot;
    __device__ bool loses_to(Acc other, i64 other_slot, bool largest) const {
        if (other_slot < 0) return false;
        if (slot < 0) return true;
        bool nan = value != value, other_nan = other != other;
        if (nan || other_nan) return nan == other_nan ? other_slot < slot : other_nan;
        if (other == value) return other_slot < slot;
        return largest ? other > value : other < value;
    }
    __device__ void offer(Acc other, i64 other_slot, bool largest) {
        if (!loses_to(other, other_slot, largest)) return;
        value = other;
        slot = other_slot;
    }
};

template <class T, class I>
__global__ void __launch_bounds__(block_threads, min_blocks)
    spmm_extremum(const i64* indptr, const I* indices_or_null, const i64* edge_ids_or_null, const T* x, const T* weight_or_null,
                  const i64* order_or_null, const i64* chunk_start_or_null, Accumulator<T>* partial, i64* partial_slot, T* out,
                  i32* arg, i64 num_rows, i64 max_chunks, i64 width, i64 heads, i64 column_lanes, i64 group_lanes, i64 largest) {
    Lanes lanes(column_lanes, group_lanes);
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    SourceTerm<T, I> term = {indices_or_null, edge_ids_or_null, x, weight_or_null, nullptr, width, heads, divide_small(width, heads)};
    Task task = find_task(tasks, lanes.group());
    for (i64 first = blockIdx.y * i64(lanes.num_columns); first < width; first += gridDim.y * i64(lanes.num_columns)) {
        i64 column = first + lanes.column;
        bool active = task.exists() && column < width;
        Candidate<Accumulator<T>> best = {0, -1};
        if (active) {
            i64 row_begin = indptr[task.row];
            for (i64 p = task.begin + lanes.edge; p < task.end; p += lanes.num_edges()) {
                Accumulator<T> value[1] = {0};
                i64 s = term.source(p);
                value[0] = widen(x[s * width + column]);
                if (weight_or_null) value[0] *= term.coefficient(p, s, column);
                best.offer(value[0], p - row_begin, largest != 0);
            }
        }
        for (int offset = lanes.num_columns; offset < lanes.size; offset *= 2) {
            Accumulator<T> other = __shfl_xor_sync(whole_warp, best.value, offset);
            best.offer(other, __shfl_xor_sync(whole_warp, best.slot, offset), largest != 0);
        }
        if (!active || lanes.edge != 0) continue;
        if (task.is_chunk()) {
            partial[task.chunk * width + column] = best.value;
            partial_slot[task.chunk * width + column] = best.slot;
        } else {
            out[task.row * width + column] = narrow<T>(best.value);
            arg[task.row * width + column] = i32(best.slot);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(block_threads, min_blocks)
    combine_extrema(const i64* indptr, const i64* order_or_null, const i64* chunk_start, const Accumulator<T>* partial,
                    const i64* partial_slot, T* out, i32* arg, i64 num_rows, i64 max_chunks, i64 width, i64 largest) {
    Lanes lanes(32, 32);
    Tasks tasks = {indptr, order_or_null, chunk_start, num_rows, max_chunks};
    if (lanes.group() >= max_chunks) return;
    Task task = chunk_task(tasks, lanes.group());
    if (!task.exists() || task.chunk != task.first_chunk) return;
    i64 stop = stop_chunk(tasks, task);
    for (i64 column = i64(blockIdx.y) * 32 + lanes.column; column < width; column += i64(gridDim.y) * 32) {
        Candidate<Accumulator<T>> best = {0, -1};
        for (i64 chunk = task.first_chunk; chunk < stop; ++chunk)
            best.offer(partial[chunk * width + column], partial_slot[chunk * width + column], largest != 0);
        out[task.row * width + column] = narrow<T>(best.value);
        arg[task.row * width + column] = i32(best.slot);
    }
}

// Gradient of an extremum: a source row walks its out-edges and takes the gradient where it won.
template <class T, class I>
struct WinnerTerm {
    const i64* indptr;
    const I* t_indices;
    const i64* t_positions;
    const i64* edge_ids_or_null;
    const T* grad;
    const i32* arg;
    const T* weight_or_null;
    i64 width, heads, head_width;
    template <int VEC>
    __device__ void add(Accumulator<T> (&sum)[VEC], i64 q, i64 column) const {
        i64 destination = t_indices[q], p = t_positions[q], at = destination * width + column;
        if (i64(arg[at]) != p - indptr[destination]) return;
        Accumulator<T> value = widen(grad[at]);
        if (weight_or_null) value *= widen(weight_or_null[(edge_ids_or_null ? edge_ids_or_null[p] : p) * heads + divide_small(column, head_width)]);
        sum[0] += value;
    }
};

template <class T, class I>
__global__ void __launch_bounds__(block_threads, min_blocks)
    spmm_extremum_backward(const i64* indptr, const i64* t_indptr, const I* t_indices, const i64* t_positions,
                           const i64* edge_ids_or_null, const T* grad, const i32* arg, const T* weight_or_null,
                           const i64* order_or_null, const i64* chunk_start_or_null, Accumulator<T>* partial, T* out,
                           i64 num_src, i64 max_chunks, i64 width, i64 heads, i64 column_lanes, i64 group_lanes) {
    Lanes lanes(column_lanes, group_lanes);
    Tasks tasks = {t_indptr, order_or_null, chunk_start_or_null, num_src, max_chunks};
    WinnerTerm<T, I> term = {indptr, t_indices, t_positions, edge_ids_or_null, grad, arg, weight_or_null, width, heads, divide_small(width, heads)};
    RowResult<T> result = {t_indptr, nullptr, nullptr, out, width, false, false};
    Task task = find_task(tasks, lanes.group());
    for (i64 first = blockIdx.y * i64(lanes.num_columns); first < width; first += gridDim.y * i64(lanes.num_columns)) {
        i64 column = first + lanes.column;
        bool active = task.exists() && column < width;
        Accumulator<T> sum[1];
        sum_positions<1>(sum, term, task, lanes, column, active);
        if (!active || lanes.edge != 0) continue;
        if (task.is_chunk())
            partial[task.chunk * width + column] = sum[0];
        else
            result.store(sum, task.row, column);
    }
}

}  // namespace core
