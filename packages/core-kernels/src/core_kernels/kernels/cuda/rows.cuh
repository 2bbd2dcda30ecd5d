// Work on the rows of a CSR structure: tasks of bounded size, and the layout of lanes inside a task.
//
// A task is one row, or one chunk of `chunk_edges` positions of a hub (a row with more). Rows come in the launcher's
// `order`, by falling power-of-two bucket of their degree, so that tasks that share a warp are about equally long. Chunks
// come first: tasks [0, max_chunks) are chunks, of which only the first chunk_start[num_rows] exist (a bound known without
// asking the device: 2 * E / chunk_edges); task max_chunks + i is row order[i].
//
// A task is done by a group of `lanes.size` consecutive lanes, at most a warp, laid out as edge lanes x column lanes.
// Columns advance by the columns the *group* covers, never by the block, so every width is covered.

#pragma once

#include "common.cuh"

namespace core {

constexpr i64 chunk_edges = 4096;

struct Tasks {
    const i64* indptr;
    const i64* order_or_null;        // [num_rows]
    const i64* chunk_start_or_null;  // [num_rows + 1], in the order of `order`; null when max_chunks is 0
    i64 num_rows, max_chunks;
};

struct Task {
    i64 row, begin, end;
    i64 chunk;        // number of the chunk, -1 for a whole row
    i64 first_chunk;  // of the chunk's row
    __device__ bool exists() const { return row >= 0; }
    __device__ bool is_chunk() const { return chunk >= 0; }
};

__device__ __forceinline__ Task chunk_task(const Tasks& tasks, i64 number) {
    Task task = {-1, 0, 0, number, 0};
    if (number >= tasks.chunk_start_or_null[tasks.num_rows]) return task;
    i64 low = 0, high = tasks.num_rows;  // last place whose chunk_start is <= number
    while (high - low > 1) {
        i64 middle = low + (high - low) / 2;
        if (tasks.chunk_start_or_null[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    task.row = tasks.order_or_null ? tasks.order_or_null[low] : low;
    task.first_chunk = tasks.chunk_start_or_null[low];
    task.begin = tasks.indptr[task.row] + (number - task.first_chunk) * chunk_edges;
    task.end = min(task.begin + chunk_edges, tasks.indptr[task.row + 1]);
    return task;
}

__device__ __forceinline__ Task find_task(const Tasks& tasks, i64 number) {
    if (number < tasks.max_chunks) return chunk_task(tasks, number);
    Task task = {-1, 0, 0, -1, 0};
    number -= tasks.max_chunks;
    if (number >= tasks.num_rows) return task;
    i64 row = tasks.order_or_null ? tasks.order_or_null[number] : number;
    task.begin = tasks.indptr[row];
    task.end = tasks.indptr[row + 1];
    if (tasks.max_chunks && task.end - task.begin > chunk_edges)
        task.end = task.begin;  // its chunks do the work
    else
        task.row = row;
    return task;
}

struct Lanes {
    int num_columns, size;  // column lanes, and all lanes of the group; powers of two, size <= 32
    int column, edge;       // this lane's place
    __device__ Lanes(i64 column_lanes, i64 group_lanes) : num_columns(int(column_lanes)), size(int(group_lanes)) {
        int lane = threadIdx.x & (size - 1);
        column = lane & (num_columns - 1);
        edge = int(divide_by_power(lane, num_columns));
    }
    __device__ int num_edges() const { return int(divide_by_power(size, num_columns)); }
    __device__ i64 group() const { return divide_by_power(global_thread(), size); }
};

// Adds term(p, column) over the positions of a task, for VEC columns from `column`. Edge lanes take turns and are combined
// in a fixed tree, so the bits depend on the launch shape alone. The whole warp calls it together.
template <int VEC, class Acc, class Term>
__device__ __forceinline__ void sum_positions(Acc (&sum)[VEC], const Term& term, const Task& task, const Lanes& lanes,
                                              i64 column, bool active) {
    for (int v = 0; v < VEC; ++v) sum[v] = 0;
    if (active) {
#pragma unroll 4
        for (i64 p = task.begin + lanes.edge; p < task.end; p += lanes.num_edges()) term.add(sum, p, column);
    }
    for (int offset = lanes.num_columns; offset < lanes.size; offset *= 2)
        for (int v = 0; v < VEC; ++v) sum[v] += __shfl_xor_sync(whole_warp, sum[v], offset);
}

// Adds the partial sums of a hub's chunks, in order. `partial` is [max_chunks, width].
template <int VEC, class Acc>
__device__ __forceinline__ void sum_chunks(Acc (&sum)[VEC], const Acc* partial, i64 first, i64 stop, i64 width, i64 column) {
    for (int v = 0; v < VEC; ++v) sum[v] = 0;
    for (i64 chunk = first; chunk < stop; ++chunk)
        for (int v = 0; v < VEC; ++v) sum[v] += partial[chunk * width + column + v];
}

// The chunk after the last one of the task's row.
__device__ __forceinline__ i64 stop_chunk(const Tasks& tasks, const Task& task) {
    i64 degree = tasks.indptr[task.row + 1] - tasks.indptr[task.row];
    return task.first_chunk + (degree + chunk_edges - 1) / chunk_edges;
}

}  // namespace core
