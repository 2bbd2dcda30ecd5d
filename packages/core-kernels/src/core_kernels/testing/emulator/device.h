// The words of CUDA C++ that kernels use, spelled for g++. Included before a kernel source, which stays as it is.
//
// Covered: function and memory qualifiers, thread and block indices, block barriers, warp shuffles and votes, atomics,
// bit and rounding intrinsics, half-precision conversion. Shared memory is static: one block runs at a time.

#pragma once

#include "fibers.h"

#include <math.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

namespace emulator {
enum Kind { barrier = 1, warp_barrier, shuffle_lanes, vote };

template <class T>
inline uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8, "warp shuffles move at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T>
inline T read_lane(unsigned mask, T value, int source) {
    Meeting& meeting = meet_warp(mask, to_bits(value), shuffle_lanes);
    if (!(mask >> source & 1)) fail("a shuffle reads a lane outside its mask; lane", unsigned(source));
    T result;
    memcpy(&result, &meeting.result[source], sizeof result);
    return result;
}

template <class T, class Update>
inline T exchange(T* address, Update update) {
    T old = *address;
    *address = update(old);
    return old;
}
}  // namespace emulator

// ---- barriers and warp collectives ----------------------------------------------------------------------------------------

inline void __syncthreads() { emulator::meet_block(0, emulator::barrier); }
inline int __syncthreads_count(int predicate) { return emulator::meet_block(predicate != 0, emulator::barrier); }
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) > 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulator::meet_warp(mask, 0, emulator::warp_barrier); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    int lane = emulator::current % 32;
    return emulator::read_lane(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    int lane = emulator::current % 32, source = lane ^ lane_mask;
    return emulator::read_lane(mask, value, source / width > lane / width ? lane : source);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = emulator::current % 32, source = lane + int(delta);
    return emulator::read_lane(mask, value, source / width != lane / width ? lane : source);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = emulator::current % 32, source = lane - int(delta);
    return emulator::read_lane(mask, value, source < (lane & ~(width - 1)) ? lane : source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    emulator::Meeting& meeting = emulator::meet_warp(mask, predicate != 0, emulator::vote);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) votes |= unsigned(meeting.result[lane] & 1) << lane;
    return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// ---- atomics: one fiber runs at a time, so plain updates are atomic ----------------------------------------------------------

template <class T>
inline T atomicAdd(T* address, T value) {
    return emulator::exchange(address, [=](T old) { return T(old + value); });
}
template <class T>
inline T atomicMin(T* address, T value) {
    return emulator::exchange(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
inline T atomicMax(T* address, T value) {
    return emulator::exchange(address, [=](T old) { return old < value ? value : old; });
}
template <class T>
inline T atomicOr(T* address, T value) {
    return emulator::exchange(address, [=](T old) { return T(old | value); });
}
template <class T>
inline T atomicExch(T* address, T value) {
    return emulator::exchange(address, [=](T) { return value; });
}
template <class T>
inline T atomicCAS(T* address, T expected, T value) {
    return emulator::exchange(address, [=](T old) { return old == expected ? value : old; });
}

// ---- intrinsics ---------------------------------------------------------------------------------------------------------------

template <class T>
inline T __ldg(const T* address) {
    return *address;
}
template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline float __uint_as_float(unsigned x) {
    float value;
    memcpy(&value, &x, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float x) { return unsigned(emulator::to_bits(x)); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline void __trap() { emulator::fail("the kernel trapped", 0); }

// ---- half precision -------------------------------------------------------------------------------------------------------------

namespace emulator {

// IEEE binary16 to binary32, exact.
inline float half_to_float(unsigned short bits) {
    unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    float magnitude = exponent ? ldexpf(float(1024 + fraction), int(exponent) - 25) : ldexpf(float(fraction), -24);
    return sign ? -magnitude : magnitude;
}

// binary32 to IEEE binary16, rounded to nearest, ties to even.
inline unsigned short float_to_half(float value) {
    unsigned bits = __float_as_uint(value);
    unsigned short sign = bits >> 16 & 0x8000;
    float magnitude = fabsf(value);
    if (magnitude != magnitude) return sign | 0x7fff;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    int exponent = magnitude < 6.103515625e-05f ? -14 : ilogbf(magnitude);
    unsigned steps = unsigned(nearbyintf(ldexpf(magnitude, 10 - exponent)));  // in units of the last place
    return sign | (unsigned short)(exponent == -14 ? steps : (unsigned(exponent + 15) << 10) + steps - 1024);
}

}  // namespace emulator
