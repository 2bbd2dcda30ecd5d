// What packing needs besides copying rows: owners of ids, the last writer of a row, and the runs of sorted keys.

#pragma once

#include "common.cuh"

namespace core {

// owner[i] = p with offsets[p] <= ids[i] < offsets[p + 1]; parts may be empty.
template <class I>
__global__ void __launch_bounds__(block_threads, min_blocks)
    find_owner(const I* ids, const i64* offsets, i32* owner, i64 num_ids, i64 num_parts) {
    i64 i = global_thread();
    if (i >= num_ids) return;
    i64 id = i64(ids[i]), low = 0, high = num_parts;
    while (high - low > 1) {
        i64 middle = low + (high - low) / 2;
        if (offsets[middle] <= id)
            low = middle;
        else
            high = middle;
    }
    owner[i] = i32(low);
}

// last[r] = the largest i with index[i] == r; `last` starts at -1.
template <class I>
__global__ void __launch_bounds__(block_threads, min_blocks) find_last(const I* index, i64* last, i64 num_index) {
    i64 i = global_thread();
    if (i < num_index) atomicMax(&last[index[i]], i);
}

// Runs of equal keys in sorted order: run `rank[i] - 1` starts at i and belongs to row keys[i]. The caller fills `starts`
// with num_keys and `row_ids` with -1 beforehand, so that runs that do not exist are empty.
template <class I>
__global__ void __launch_bounds__(block_threads, min_blocks)
    mark_runs(const I* keys, const i64* rank, i64* starts, i64* row_ids, i64 num_keys) {
    i64 i = global_thread();
    if (i >= num_keys || (i > 0 && rank[i] == rank[i - 1])) return;
    starts[rank[i] - 1] = i;
    row_ids[rank[i] - 1] = i64(keys[i]);
}

}  // namespace core
