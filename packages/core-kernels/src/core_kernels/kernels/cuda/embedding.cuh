// Backward of an embedding bag fused with one exact optimiser step.
//
// The launcher sorts the ids, so each named table row is one run of occurrences. A group sums a run's gradients in registers
// and updates the row once. The chunks of a hot row leave partial sums; a second kernel adds them in order and updates.
// Row-wise Adagrad needs the whole row's gradient before it may write: rows wider than one tile are summed twice.

#pragma once

#include "spmm.cuh"

namespace core {

enum UpdateRule { sgd, momentum, adagrad, rowwise_adagrad, adam };

template <bool SAME, class A, class B>
struct Select {
    typedef A type;
};
template <class A, class B>
struct Select<false, A, B> {
    typedef B type;
};

__device__ __forceinline__ float square_root(float x) { return sqrtf(x); }
__device__ __forceinline__ double square_root(double x) { return sqrt(x); }

// Optimiser state in the type S: one value per weight, or per row for row-wise Adagrad.
template <class T, class S>
struct Update {
    typedef Accumulator<T> Acc;
    T* weight;
    S *first, *second;
    i64 width, rule;
    Acc lr, eps, beta1, beta2, weight_decay, correction1, correction2;

    __device__ Acc gradient(Acc sum, i64 row, i64 column) const {
        return sum + weight_decay * widen(weight[row * width + column]);
    }

    __device__ void apply(i64 row, i64 column, Acc sum, Acc row_state) const {
        i64 at = row * width + column;
        Acc w = widen(weight[at]), g = sum + weight_decay * w, step = g;
        if (rule == momentum) {
            step = beta1 * widen(first[at]) + g;
            first[at] = narrow<S>(step);
        } else if (rule == adagrad) {
            Acc state = widen(first[at]) + g * g;
            first[at] = narrow<S>(state);
            step = g / (square_root(state) + eps);
        } else if (rule == rowwise_adagrad) {
            step = g / (square_root(row_state) + eps);
        } else if (rule == adam) {
            Acc mean = beta1 * widen(first[at]) + (1 - beta1) * g;
            Acc square = beta2 * widen(second[at]) + (1 - beta2) * g * g;
            first[at] = narrow<S>(mean);
            second[at] = narrow<S>(square);
            step = mean / correction1 / (square_root(square / correction2) + eps);
        }
        weight[at] = narrow<T>(w - lr * step);
    }
};

// Updates one table row. `sums(sum, column, active)` gives the summed gradient of VEC columns; the warp calls it together.
template <int VEC, class T, class S, class Sums>
__device__ __forceinline__ void update_row(const Update<T, S>& update, const Sums& sums, const Lanes& lanes, i64 row) {
    typedef Accumulator<T> Acc;
    i64 step = i64(lanes.num_columns) * VEC;
    bool one_tile = update.width <= step;
    Acc sum[VEC], square_sum = 0, row_state = 0;
    if (update.rule == rowwise_adagrad) {
        for (i64 first = 0; first < update.width; first += step) {
            i64 column = first + lanes.column * VEC;
            bool active = row >= 0 && column < update.width;
            sums(sum, column, active);
            for (int v = 0; active && v < VEC; ++v) {
                Acc g = update.gradient(sum[v], row, column + v);
                square_sum += g * g;
            }
        }
        if (row >= 0) row_state = widen(update.first[row]);
        for (int offset = lanes.num_columns / 2; offset > 0; offset /= 2)
            square_sum += __shfl_xor_sync(whole_warp, square_sum, offset);
        row_state += square_sum / Acc(update.width);
        __syncwarp();  // every lane has read the state before one writes it
        if (row >= 0 && lanes.column == 0 && lanes.edge == 0) update.first[row] = narrow<S>(row_state);
        row_state = widen(narrow<S>(row_state));
    }
    for (i64 first = 0; first < update.width; first += step) {
        i64 column = first + lanes.column * VEC;
        bool active = row >= 0 && column < update.width;
        if (update.rule != rowwise_adagrad || !one_tile) sums(sum, column, active);
        if (!active || lanes.edge != 0) continue;
        for (int v = 0; v < VEC; ++v) update.apply(row, column + v, sum[v], row_state);
    }
}

template <class T>
struct RunSums {
    const SourceTerm<T, i64>& term;
    const Task& task;
    const Lanes& lanes;
    template <int VEC>
    __device__ void operator()(Accumulator<T> (&sum)[VEC], i64 column, bool active) const {
        sum_positions<VEC>(sum, term, task, lanes, column, active);
    }
};

template <class T>
struct ChunkSums {
    const Accumulator<T>* partial;
    i64 first, stop, width;
    template <int VEC>
    __device__ void operator()(Accumulator<T> (&sum)[VEC], i64 column, bool active) const {
        sum_chunks<VEC>(sum, partial, active ? first : 0, active ? stop : 0, width, column);
    }
};

template <class T, int VEC, int FULL_STATE>
__global__ void __launch_bounds__(block_threads, min_blocks)
    embedding_update(const i64* starts, const i64* bags, const i64* occurrences, const T* grad, const T* sample_weight_or_null,
                     const Accumulator<T>* bag_scale_or_null, const i64* chunk_start_or_null, const i64* row_ids,
                     Accumulator<T>* partial, T* weight, void* first, void* second, i64 num_runs, i64 max_chunks, i64 width,
                     i64 column_lanes, i64 group_lanes, i64 rule, double lr, double eps, double beta1, double beta2,
                     double weight_decay, double correction1, double correction2) {
    typedef Accumulator<T> Acc;
    typedef typename Select<FULL_STATE != 0, Acc, T>::type S;
    Lanes lanes(column_lanes, group_lanes);
    Tasks tasks = {starts, nullptr, chunk_start_or_null, num_runs, max_chunks};
    SourceTerm<T, i64> term = {bags, occurrences, grad, sample_weight_or_null, bag_scale_or_null, width, 1, width};
    Update<T, S> update = {weight, (S*)first, (S*)second, width, rule, Acc(lr), Acc(eps), Acc(beta1), Acc(beta2),
                           Acc(weight_decay), Acc(correction1), Acc(correction2)};
    Task task = find_task(tasks, lanes.group());
    bool whole = task.exists() && !task.is_chunk();
    i64 row = whole ? row_ids[task.row] : -1;
    // Every warp holds either chunks or rows in its lanes, or some of both where they meet; all lanes take both steps.
    if (__any_sync(whole_warp, task.exists() && task.is_chunk())) {
        for (i64 at = 0; at < width; at += i64(lanes.num_columns) * VEC) {
            i64 column = at + lanes.column * VEC;
            bool active = task.exists() && task.is_chunk() && column < width;
            Acc sum[VEC];
            sum_positions<VEC>(sum, term, task, lanes, column, active);
            if (active && lanes.edge == 0)
                for (int v = 0; v < VEC; ++v) partial[task.chunk * width + column + v] = sum[v];
        }
    }
    if (__any_sync(whole_warp, row >= 0)) update_row<VEC>(update, RunSums<T>{term, task, lanes}, lanes, row);
}

template <class T, int FULL_STATE>
__global__ void __launch_bounds__(block_threads, min_blocks)
    embedding_update_chunks(const i64* starts, const i64* chunk_start, const i64* row_ids, const Accumulator<T>* partial, T* weight,
                            void* first, void* second, i64 num_runs, i64 max_chunks, i64 width, i64 rule, double lr, double eps,
                            double beta1, double beta2, double weight_decay, double correction1, double correction2) {
    typedef Accumulator<T> Acc;
    typedef typename Select<FULL_STATE != 0, Acc, T>::type S;
    Lanes lanes(32, 32);
    Tasks tasks = {starts, nullptr, chunk_start, num_runs, max_chunks};
    Update<T, S> update = {weight, (S*)first, (S*)second, width, rule, Acc(lr), Acc(eps), Acc(beta1), Acc(beta2),
                           Acc(weight_decay), Acc(correction1), Acc(correction2)};
    if (lanes.group() >= max_chunks) return;  // groups are whole warps here
    Task task = chunk_task(tasks, lanes.group());
    if (!task.exists() || task.chunk != task.first_chunk) return;
    ChunkSums<T> sums = {partial, task.first_chunk, stop_chunk(tasks, task), width};
    update_row<1>(update, sums, lanes, row_ids[task.row]);
}

}  // namespace core
