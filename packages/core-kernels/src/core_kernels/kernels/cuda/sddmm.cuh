// One value per edge from its two end rows: dot products per head, sums and products per column, and what is like them.
//
// A task's edge lanes take its positions in turns; the column lanes of one position share its columns and, for dot
// products, add up in a fixed tree. See rows.cuh for tasks and lanes.

#pragma once

#include "rows.cuh"

namespace core {

// a[source, c] * b[destination, c]
template <class T, class I, int VEC>
struct ProductTerm {
    const I* indices;
    const T *a, *b;
    i64 width;
    __device__ Accumulator<T> operator()(i64 p, i64, i64 row, i64 column) const {
        Pack<T, VEC> left = load_pack<VEC>(a + i64(indices[p]) * width + column);
        Pack<T, VEC> right = load_pack<VEC>(b + row * width + column);
        Accumulator<T> sum = 0;
        for (int v = 0; v < VEC; ++v) sum += widen(left.value[v]) * widen(right.value[v]);
        return sum;
    }
};

// grad[destination, c] * x[source, c] where this edge won the extremum of column c
template <class T, class I>
struct WonProductTerm {
    const I* indices;
    const T *x, *grad;
    const i32* arg;
    i64 width;
    __device__ Accumulator<T> operator()(i64 p, i64 slot, i64 row, i64 column) const {
        i64 at = row * width + column;
        if (i64(arg[at]) != slot) return 0;
        return widen(grad[at]) * widen(x[i64(indices[p]) * width + column]);
    }
};

// out[edge, h] = sum of term over the columns of head h; divided by the degree for `mean`.
template <int VEC, class T, class Term>
__device__ __forceinline__ void dot_per_edge(const Term& term, const Tasks& tasks, const Lanes& lanes,
                                             const i64* edge_ids_or_null, T* out, i64 heads, i64 head_width, bool mean) {
    Task task = find_task(tasks, lanes.group());
    if (!task.exists()) return;
    u32 mask = group_mask(lanes.num_columns);
    i64 row_begin = tasks.indptr[task.row];
    Accumulator<T> divisor = mean ? Accumulator<T>(tasks.indptr[task.row + 1] - row_begin) : Accumulator<T>(1);
    for (i64 p = task.begin + lanes.edge; p < task.end; p += lanes.num_edges()) {
        i64 edge = edge_ids_or_null ? edge_ids_or_null[p] : p;
        for (i64 head = 0; head < heads; ++head) {
            Accumulator<T> sum = 0;
            for (i64 c = lanes.column * VEC; c < head_width; c += i64(lanes.num_columns) * VEC)
                sum += term(p, p - row_begin, task.row, head * head_width + c);
            sum = group_sum(sum, lanes.num_columns, mask);
            if (lanes.column == 0) out[edge * heads + head] = narrow<T>(mean ? sum / divisor : sum);
        }
    }
}

template <class T, class I, int VEC>
__global__ void __launch_bounds__(block_threads, min_blocks)
    sddmm_dot(const i64* indptr, const I* indices, const T* a, const T* b, const i64* edge_ids_or_null, const i64* order_or_null,
              const i64* chunk_start_or_null, T* out, i64 num_rows, i64 max_chunks, i64 width, i64 heads, i64 column_lanes,
              i64 group_lanes, i64 mean) {
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    ProductTerm<T, I, VEC> term = {indices, a, b, width};
    dot_per_edge<VEC>(term, tasks, Lanes(column_lanes, group_lanes), edge_ids_or_null, out, heads, divide_small(width, heads),
                      mean != 0);
}

template <class T, class I>
__global__ void __launch_bounds__(block_threads, min_blocks)
    won_dot(const i64* indptr, const I* indices, const T* x, const T* grad, const i32* arg, const i64* edge_ids_or_null,
            const i64* order_or_null, const i64* chunk_start_or_null, T* out, i64 num_rows, i64 max_chunks, i64 width, i64 heads,
            i64 column_lanes, i64 group_lanes) {
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    WonProductTerm<T, I> term = {indices, x, grad, arg, width};
    dot_per_edge<1>(term, tasks, Lanes(column_lanes, group_lanes), edge_ids_or_null, out, heads, divide_small(width, heads), false);
}

// out[edge, c] = a[source, c] + b[destination, c], or their product for `multiply`.
template <class T, class I, int VEC>
__global__ void __launch_bounds__(block_threads, min_blocks)
    sddmm_elementwise(const i64* indptr, const I* indices, const T* a, const T* b, const i64* edge_ids_or_null,
                      const i64* order_or_null, const i64* chunk_start_or_null, T* out, i64 num_rows, i64 max_chunks, i64 width,
                      i64 column_lanes, i64 group_lanes, i64 multiply) {
    Tasks tasks = {indptr, order_or_null, chunk_start_or_null, num_rows, max_chunks};
    Lanes lanes(column_lanes, group_lanes);
    Task task = find_task(tasks, lanes.group());
    if (!task.exists()) return;
    for (i64 p = task.begin + lanes.edge; p < task.end; p += lanes.num_edges()) {
        i64 edge = edge_ids_or_null ? edge_ids_or_null[p] : p, source = i64(indices[p]);
        for (i64 c = lanes.column * VEC; c < width; c += i64(lanes.num_columns) * VEC) {
            Pack<T, VEC> left = load_pack<VEC>(a + source * width + c), right = load_pack<VEC>(b + task.row * width + c), result;
            for (int v = 0; v < VEC; ++v) {
                Accumulator<T> l = widen(left.value[v]), r = widen(right.value[v]);
                result.value[v] = narrow<T>(multiply ? l * r : l + r);
            }
            store_pack<VEC>(out + edge * width + c, result);
        }
    }
}

}  // namespace core
