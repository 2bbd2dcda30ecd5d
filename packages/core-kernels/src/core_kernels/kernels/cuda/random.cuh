// The stateless generator of core_kernels.random, bit for bit: a draw is a hash of (seed, step, layer, row, draw).

#pragma once

#include "common.cuh"

namespace core {

__device__ __forceinline__ u64 mix64(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

__device__ __forceinline__ u64 absorb(u64 state, i64 key) { return mix64((state ^ u64(key)) + 0x9E3779B97F4A7C15ull); }

// The state after the keys that are constant in one launch.
__device__ __forceinline__ u64 stream_key(i64 seed, i64 step, i64 layer) {
    return absorb(absorb(absorb(0, seed), step), layer);
}

// An integer in [0, bound) from the upper 32 bits; 1 <= bound < 2**32.
__device__ __forceinline__ i64 bounded(u64 bits, i64 bound) { return i64(((bits >> 32) * u64(bound)) >> 32); }

}  // namespace core
