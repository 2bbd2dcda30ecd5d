// Neighbour sampling: all in-neighbours, draws with replacement, or Floyd's draws without, as core_kernels.random defines.
//
// A group of lanes draws for one seed. Floyd's algorithm takes t if it is new and i otherwise, one draw after another; the
// lanes compute their draws' hashes at once and then settle, draw by draw, whether t was taken: each lane compares t with
// the slots it has settled and the group votes. Nothing depends on the number of lanes or blocks.
//
// Source: R. Floyd in J. Bentley, "Programming Pearls: a sample of brilliance", CACM 1987.

#pragma once

#include "random.cuh"

namespace core {

// slots[0, fanout) get distinct numbers in [0, degree). Lane `lane` of `size` owns the slots j with j % size == lane.
__device__ __forceinline__ void draw_distinct(i64* slots, u64 row_state, i64 degree, i64 fanout, int lane, int size, u32 mask) {
    int first_lane = (threadIdx.x & 31) - lane;
    for (i64 base = 0; base < fanout; base += size) {
        i64 last = degree - fanout + base + lane;  // Floyd's i for this lane's draw
        i64 drawn = base + lane < fanout ? bounded(absorb(row_state, base + lane), last + 1) : -1;
        i64 settled = -1;
        int count = int(min(i64(size), fanout - base));
        for (int turn = 0; turn < count; ++turn) {
            i64 t = __shfl_sync(mask, drawn, first_lane + turn);
            bool seen = settled == t;
            for (i64 j = lane; j < base; j += size) seen |= slots[j] == t;
            bool taken = __any_sync(mask, seen);
            if (lane == turn) settled = taken ? last : t;
        }
        if (base + lane < fanout) slots[base + lane] = settled;
    }
}

template <class I>
__global__ void __launch_bounds__(block_threads, min_blocks)
    sample_neighbors(const i64* indptr, const I* indices, const i64* edge_ids_or_null, const i64* seeds, const i64* keys_or_null,
                     const i64* out_indptr, I* sources, i64* out_edge_ids, i64 num_seeds, i64 replace, i64 seed, i64 step,
                     i64 layer, i64 group_lanes) {
    int size = int(group_lanes), lane = threadIdx.x & (size - 1);
    i64 number = divide_by_power(global_thread(), size);
    if (number >= num_seeds) return;
    u32 mask = group_mask(size);
    i64 row = seeds[number], begin = indptr[row], degree = indptr[row + 1] - begin;
    i64 at = out_indptr[number], count = out_indptr[number + 1] - at;
    i64* slots = out_edge_ids + at;  // slots first, edge ids at the end
    u64 row_state = absorb(stream_key(seed, step, layer), keys_or_null ? keys_or_null[number] : row);
    if (!replace && count < degree) {
        draw_distinct(slots, row_state, degree, count, lane, size, mask);
    } else {
        for (i64 j = lane; j < count; j += size) slots[j] = replace ? bounded(absorb(row_state, j), degree) : j;
    }
    __syncwarp(mask);
    for (i64 j = lane; j < count; j += size) {
        i64 p = begin + slots[j];
        sources[at + j] = indices[p];
        out_edge_ids[at + j] = edge_ids_or_null ? edge_ids_or_null[p] : p;
    }
}

}  // namespace core
