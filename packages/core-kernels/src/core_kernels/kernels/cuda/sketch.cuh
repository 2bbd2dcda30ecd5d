// Count sketch: every key has, in each table row, one column and one sign, both from the stateless generator.
//
// Insertion writes (cell, signed value) pairs; the launcher sorts them by cell and adds each cell's run in input order.
//
// Source: M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data streams", ICALP 2002.

#pragma once

#include "random.cuh"

namespace core {

struct Place {
    i64 cell;
    float sign;
};

__device__ __forceinline__ Place place_of(i64 seed, i64 row, i64 key, i64 num_columns) {
    u64 bits = absorb(absorb(stream_key(seed, 0, row), key), 0);
    return {row * num_columns + bounded(bits, num_columns), bits & 1 ? 1.0f : -1.0f};
}

// cells[r * n + i], signed_values[r * n + i] of key i in table row r
__global__ void __launch_bounds__(block_threads, min_blocks)
    sketch_places(const i64* keys, const float* values, i64* cells, float* signed_values, i64 num_keys, i64 num_rows,
                  i64 num_columns, i64 seed) {
    i64 i = global_thread();
    if (i >= num_keys) return;
    for (i64 row = 0; row < num_rows; ++row) {
        Place place = place_of(seed, row, keys[i], num_columns);
        cells[row * num_keys + i] = place.cell;
        signed_values[row * num_keys + i] = place.sign * values[i];
    }
}

// Adds in whatever order threads come.
__global__ void __launch_bounds__(block_threads, min_blocks)
    sketch_insert_atomic(float* table, const i64* keys, const float* values, i64 num_keys, i64 num_rows, i64 num_columns,
                         i64 seed) {
    i64 i = global_thread();
    if (i >= num_keys) return;
    for (i64 row = 0; row < num_rows; ++row) {
        Place place = place_of(seed, row, keys[i], num_columns);
        atomicAdd(&table[place.cell], place.sign * values[i]);
    }
}

__device__ __forceinline__ float read_place(const float* table, i64 seed, i64 row, i64 key, i64 num_columns) {
    Place place = place_of(seed, row, key, num_columns);
    return place.sign * table[place.cell];
}

// The estimate with `wanted` smaller ones among the rows' estimates of a key: found by counting, so any number of rows works.
__device__ __forceinline__ float ranked_estimate(const float* table, i64 seed, i64 key, i64 num_rows, i64 num_columns, i64 wanted) {
    for (i64 row = 0; row < num_rows; ++row) {
        float value = read_place(table, seed, row, key, num_columns);
        i64 smaller = 0, equal = 0;
        for (i64 other_row = 0; other_row < num_rows; ++other_row) {
            float other = read_place(table, seed, other_row, key, num_columns);
            smaller += other < value;
            equal += other == value;
        }
        if (smaller <= wanted && wanted < smaller + equal) return value;
    }
    return not_a_number();  // some estimate is not a number
}

__global__ void __launch_bounds__(block_threads, min_blocks)
    sketch_estimate(const float* table, const i64* keys, float* out, i64 num_keys, i64 num_rows, i64 num_columns, i64 seed) {
    i64 i = global_thread();
    if (i >= num_keys) return;
    float upper = ranked_estimate(table, seed, keys[i], num_rows, num_columns, num_rows >> 1);
    float lower = num_rows & 1 ? upper : ranked_estimate(table, seed, keys[i], num_rows, num_columns, (num_rows >> 1) - 1);
    out[i] = num_rows & 1 ? upper : __fmul_rn(__fadd_rn(lower, upper), 0.5f);
}

}  // namespace core
