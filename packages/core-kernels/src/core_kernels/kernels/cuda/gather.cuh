// Copies rows by index, in the widest units that addresses and row length allow: 16, 8, 4, 2 or 1 byte.
//
// A group of lanes copies one row; lane offsets advance by the group's size. Element types play no part.

#pragma once

#include "common.cuh"

namespace core {

template <int BYTES>
struct alignas(BYTES) Unit {
    unsigned char byte[BYTES];
};
template <>
struct alignas(16) Unit<16> {
    u64 word[2];
};
template <>
struct alignas(8) Unit<8> {
    u64 word;
};
template <>
struct alignas(4) Unit<4> {
    u32 word;
};
template <>
struct alignas(2) Unit<2> {
    unsigned short word;
};

template <int BYTES>
__device__ __forceinline__ void copy_row(char* out, const char* row, i64 num_units, int lane, int size) {
    const Unit<BYTES>* from = reinterpret_cast<const Unit<BYTES>*>(row);
    Unit<BYTES>* to = reinterpret_cast<Unit<BYTES>*>(out);
#pragma unroll 4
    for (i64 unit = lane; unit < num_units; unit += size) to[unit] = from[unit];
}

// out[i] = x[index[i]]
template <class I, int BYTES>
__global__ void __launch_bounds__(block_threads, min_blocks)
    gather_rows(const char* x, const I* index, char* out, i64 num_index, i64 num_units, i64 group_lanes) {
    int size = int(group_lanes), lane = threadIdx.x & (size - 1);
    i64 i = divide_by_power(global_thread(), size);
    if (i >= num_index) return;
    copy_row<BYTES>(out + i * num_units * BYTES, x + i64(index[i]) * num_units * BYTES, num_units, lane, size);
}

// out[i] = row `place` of the device tier where place = position[ids[i]] >= 0, row -1 - place of the host tier elsewhere.
template <class I, int BYTES>
__global__ void __launch_bounds__(block_threads, min_blocks)
    tiered_gather_rows(const i64* position, const I* ids, const char* device_rows, const char* host_rows, char* out, i64 num_ids,
                       i64 num_units, i64 group_lanes) {
    int size = int(group_lanes), lane = threadIdx.x & (size - 1);
    i64 i = divide_by_power(global_thread(), size);
    if (i >= num_ids) return;
    i64 place = position[ids[i]];
    const char* row = place >= 0 ? device_rows + place * num_units * BYTES : host_rows + (-1 - place) * num_units * BYTES;
    copy_row<BYTES>(out + i * num_units * BYTES, row, num_units, lane, size);
}

// out[index[i]] = rows[i] for the i that `winner` names: the last of those with one index.
template <class I, int BYTES>
__global__ void __launch_bounds__(block_threads, min_blocks)
    unpack_rows(const char* rows, const I* index, const i64* winner, char* out, i64 num_index, i64 num_units, i64 group_lanes) {
    int size = int(group_lanes), lane = threadIdx.x & (size - 1);
    i64 i = divide_by_power(global_thread(), size);
    if (i >= num_index || winner[index[i]] != i) return;
    copy_row<BYTES>(out + i64(index[i]) * num_units * BYTES, rows + i * num_units * BYTES, num_units, lane, size);
}

}  // namespace core
