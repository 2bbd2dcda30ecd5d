// Softmax over segments with its gradient, and the adjoints of segment reductions.
//
// A segment that fits one task is finished by its group: maximum, sum of exponentials, result. The chunks of a hub leave
// (maximum, sum) pairs, which merge exactly; a second kernel lets every chunk merge its row's pairs, in order, and write its
// own positions. Reductions themselves are spmm.cuh over the edge ids.

#pragma once

#include "rows.cuh"

namespace core {

// out[edge_ids[p], c] = dst_scale[d] * x[d, c]
template <class T, int VEC>
__global__ void __launch_bounds__(block_threads, min_blocks)
    segment_expand(const T* x, const i64* indptr, const i64* edge_ids_or_null, const Accumulator<T>* dst_scale_or_null,
                   const i64* order_or_null, const i64* chunk_start_or_null, T* out, i64 num_rows, i64 max_chunks, i64 width,
                   i64 column_lanes, i64 group_lanes) {
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    Lanes lanes(column_lanes, group_lanes);
    Task task = find_task(tasks, lanes.group());
    if (!task.exists()) return;
    Accumulator<T> scale = dst_scale_or_null ? dst_scale_or_null[task.row] : Accumulator<T>(1);
    for (i64 c = lanes.column * VEC; c < width; c += i64(lanes.num_columns) * VEC) {
        Pack<T, VEC> value = load_pack<VEC>(x + task.row * width + c);
        for (int v = 0; v < VEC; ++v) value.value[v] = narrow<T>(scale * widen(value.value[v]));
        for (i64 p = task.begin + lanes.edge; p < task.end; p += lanes.num_edges())
            store_pack<VEC>(out + (edge_ids_or_null ? edge_ids_or_null[p] : p) * width + c, value);
    }
}

// out[edge_ids[p], c] = grad[d, c] where p won column c of its segment, else 0
template <class T>
__global__ void __launch_bounds__(block_threads, min_blocks)
    segment_extremum_backward(const T* grad, const i32* arg, const i64* indptr, const i64* edge_ids_or_null,
                              const i64* order_or_null, const i64* chunk_start_or_null, T* out, i64 num_rows, i64 max_chunks,
                              i64 width, i64 column_lanes, i64 group_lanes) {
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    Lanes lanes(column_lanes, group_lanes);
    Task task = find_task(tasks, lanes.group());
    if (!task.exists()) return;
    i64 row_begin = indptr[task.row];
    for (i64 c = lanes.column; c < width; c += lanes.num_columns) {
        i64 at = task.row * width + c, winner = row_begin + arg[at];
        for (i64 p = task.begin + lanes.edge; p < task.end; p += lanes.num_edges())
            out[(edge_ids_or_null ? edge_ids_or_null[p] : p) * width + c] = p == winner ? grad[at] : narrow<T>(0);
    }
}

// ---- softmax ------------------------------------------------------------------------------------------------------------------

// The state of a softmax over some positions: their maximum and the sum of exp(value - base).
template <class Acc>
struct SoftmaxState {
    Acc maximum, sum;
    // The maximum, or 0 where there is none: exp(-inf - 0) is 0, exp(-inf + inf) would be no number.
    __device__ static Acc base(Acc maximum) { return maximum == -infinity<Acc>() ? Acc(0) : maximum; }
    __device__ Acc probability(Acc value) const { return sum == 0 ? Acc(0) : exp(value - base(maximum)) / sum; }
};

// The state of all chunks of a row, merged in order.
template <class Acc>
__device__ __forceinline__ SoftmaxState<Acc> merge_chunks(const Acc* maxima, const Acc* sums, i64 first, i64 stop, i64 width, i64 c) {
    SoftmaxState<Acc> all = {-infinity<Acc>(), 0};
    for (i64 chunk = first; chunk < stop; ++chunk) all.maximum = max(all.maximum, maxima[chunk * width + c]);
    for (i64 chunk = first; chunk < stop; ++chunk)
        all.sum += sums[chunk * width + c] * exp(SoftmaxState<Acc>::base(maxima[chunk * width + c]) -
                                                 SoftmaxState<Acc>::base(all.maximum));
    return all;
}

template <class T>
__global__ void __launch_bounds__(block_threads, min_blocks)
    segment_softmax(const T* logits, const i64* indptr, const i64* edge_ids_or_null, const i64* order_or_null,
                    const i64* chunk_start_or_null, Accumulator<T>* maxima, Accumulator<T>* sums, T* out, i64 num_rows,
                    i64 max_chunks, i64 width, i64 column_lanes, i64 group_lanes) {
    typedef Accumulator<T> Acc;
    Lanes lanes(column_lanes, group_lanes);
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    Task task = find_task(tasks, lanes.group());
    for (i64 first = 0; first < width; first += lanes.num_columns) {
        i64 c = first + lanes.column, begin = task.begin + lanes.edge;
        i64 end = task.exists() && c < width ? task.end : begin;
        SoftmaxState<Acc> state = {-infinity<Acc>(), 0};
        for (i64 p = begin; p < end; p += lanes.num_edges())
            state.maximum = max(state.maximum, Acc(widen(logits[(edge_ids_or_null ? edge_ids_or_null[p] : p) * width + c])));
        for (int offset = lanes.num_columns; offset < lanes.size; offset *= 2)
            state.maximum = max(state.maximum, __shfl_xor_sync(whole_warp, state.maximum, offset));
        for (i64 p = begin; p < end; p += lanes.num_edges())
            state.sum += exp(widen(logits[(edge_ids_or_null ? edge_ids_or_null[p] : p) * width + c]) - state.base(state.maximum));
        for (int offset = lanes.num_columns; offset < lanes.size; offset *= 2)
            state.sum += __shfl_xor_sync(whole_warp, state.sum, offset);
        if (task.is_chunk()) {
            if (task.exists() && c < width && lanes.edge == 0) {
                maxima[task.chunk * width + c] = state.maximum;
                sums[task.chunk * width + c] = state.sum;
            }
            continue;
        }
        for (i64 p = begin; p < end; p += lanes.num_edges()) {
            i64 at = (edge_ids_or_null ? edge_ids_or_null[p] : p) * width + c;
            out[at] = narrow<T>(state.probability(widen(logits[at])));
        }
    }
}

template <class T>
__global__ void __launch_bounds__(block_threads, min_blocks)
    segment_softmax_chunks(const T* logits, const i64* indptr, const i64* edge_ids_or_null, const i64* order_or_null,
                           const i64* chunk_start, const Accumulator<T>* maxima, const Accumulator<T>* sums, T* out,
                           i64 num_rows, i64 max_chunks, i64 width, i64 column_lanes, i64 group_lanes) {
    Lanes lanes(column_lanes, group_lanes);
    Tasks tasks = {indptr, order_or_null, chunk_start, num_rows, max_chunks};
    if (lanes.group() >= max_chunks) return;
    Task task = chunk_task(tasks, lanes.group());
    if (!task.exists()) return;
    for (i64 c = lanes.column; c < width; c += lanes.num_columns) {
        SoftmaxState<Accumulator<T>> state = merge_chunks(maxima, sums, task.first_chunk, stop_chunk(tasks, task), width, c);
        for (i64 p = task.begin + lanes.edge; p < task.end; p += lanes.num_edges()) {
            i64 at = (edge_ids_or_null ? edge_ids_or_null[p] : p) * width + c;
            out[at] = narrow<T>(state.probability(widen(logits[at])));
        }
    }
}

// ---- gradient of softmax: out * (grad - sum of out * grad over the segment) -----------------------------------------------------

template <class T>
struct SoftmaxGradTerm {
    const T *grad, *out;
    const i64* edge_ids_or_null;
    i64 width;
    template <int VEC>
    __device__ void add(Accumulator<T> (&sum)[VEC], i64 p, i64 c) const {
        i64 at = (edge_ids_or_null ? edge_ids_or_null[p] : p) * width + c;
        sum[0] += widen(out[at]) * widen(grad[at]);
    }
    __device__ void store(T* grad_logits, const Task& task, const Lanes& lanes, i64 c, Accumulator<T> dot) const {
        for (i64 p = task.begin + lanes.edge; p < task.end; p += lanes.num_edges()) {
            i64 at = (edge_ids_or_null ? edge_ids_or_null[p] : p) * width + c;
            grad_logits[at] = narrow<T>(widen(out[at]) * (widen(grad[at]) - dot));
        }
    }
};

template <class T>
__global__ void __launch_bounds__(block_threads, min_blocks)
    segment_softmax_backward(const T* grad, const T* out, const i64* indptr, const i64* edge_ids_or_null,
                             const i64* order_or_null, const i64* chunk_start_or_null, Accumulator<T>* partial, T* grad_logits,
                             i64 num_rows, i64 max_chunks, i64 width, i64 column_lanes, i64 group_lanes) {
    Lanes lanes(column_lanes, group_lanes);
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    SoftmaxGradTerm<T> term = {grad, out, edge_ids_or_null, width};
    Task task = find_task(tasks, lanes.group());
    for (i64 first = 0; first < width; first += lanes.num_columns) {
        i64 c = first + lanes.column;
        bool active = task.exists() && c < width;
        Accumulator<T> dot[1];
        sum_positions<1>(dot, term, task, lanes, c, active);
        if (!active) continue;
        if (!task.is_chunk())
            term.store(grad_logits, task, lanes, c, dot[0]);
        else if (lanes.edge == 0)
            partial[task.chunk * width + c] = dot[0];
    }
}

template <class T>
__global__ void __launch_bounds__(block_threads, min_blocks)
    segment_softmax_backward_chunks(const T* grad, const T* out, const i64* indptr, const i64* edge_ids_or_null,
                                    const i64* order_or_null, const i64* chunk_start, const Accumulator<T>* partial,
                                    T* grad_logits, i64 num_rows, i64 max_chunks, i64 width, i64 column_lanes, i64 group_lanes) {
    Lanes lanes(column_lanes, group_lanes);
    Tasks tasks = {indptr, order_or_null, chunk_start, num_rows, max_chunks};
    SoftmaxGradTerm<T> term = {grad, out, edge_ids_or_null, width};
    if (lanes.group() >= max_chunks) return;
    Task task = chunk_task(tasks, lanes.group());
    if (!task.exists()) return;
    for (i64 c = lanes.column; c < width; c += lanes.num_columns) {
        Accumulator<T> dot[1];
        sum_chunks<1>(dot, partial, task.first_chunk, stop_chunk(tasks, task), width, c);
        term.store(grad_logits, task, lanes, c, dot[0]);
    }
}

}  // namespace core
