// Types, conversions and wide loads that every kernel shares. Needs no CUDA header, so NVRTC compiles it anywhere.
//
// Conventions of all kernels: parameters are pointers or 64-bit scalars (`i64`, `double`), so no offset is ever computed
// in 32 bits; pointers named `..._or_null` may be null; blocks have `block_threads` threads in x.

#pragma once

namespace core {

typedef long long i64;
typedef unsigned long long u64;
typedef int i32;
typedef unsigned int u32;

constexpr int block_threads = 128;
constexpr int min_blocks = 4;  // on a multiprocessor: leaves 128 registers to a thread, so that nothing spills
constexpr u32 whole_warp = 0xffffffffu;

// ---- storage types --------------------------------------------------------------------------------------------------

struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

// The type in which values of T are added up.
template <class T>
struct AccumulatorOf {
    typedef float type;
};
template <>
struct AccumulatorOf<double> {
    typedef double type;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float widen(f16 x) {
#if defined(__CUDACC__)
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
#else
    return emulator::half_to_float(x.bits);
#endif
}

// Rounds to nearest, ties to even; declared by result type because functions do not overload on it.
template <class T>
struct Narrow;
template <>
struct Narrow<float> {
    static __device__ __forceinline__ float from(float x) { return x; }
};
template <>
struct Narrow<double> {
    static __device__ __forceinline__ double from(double x) { return x; }
};
template <>
struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 from(float x) {
        u32 bits = __float_as_uint(x);
        bf16 result;
        result.bits = x != x ? 0x7fff : (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        return result;
    }
};
template <>
struct Narrow<f16> {
    static __device__ __forceinline__ f16 from(float x) {
        f16 result;
#if defined(__CUDACC__)
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
        result.bits = emulator::float_to_half(x);
#endif
        return result;
    }
};
template <class T>
__device__ __forceinline__ T narrow(Accumulator<T> x) {
    return Narrow<T>::from(x);
}

template <class Acc>
__device__ __forceinline__ Acc infinity() {
    return Acc(__uint_as_float(0x7f800000u));
}
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

// ---- wide loads: N values of one row in one instruction; the launcher guarantees the alignment ---------------------------

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
    T value[N];
};

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* address) {
    return *reinterpret_cast<const Pack<T, N>*>(address);
}

template <int N, class T>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, N>& pack) {
    *reinterpret_cast<Pack<T, N>*>(address) = pack;
}

// ---- numbers of threads ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ i64 global_thread() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

// x / size and a / b without the 64-bit division routine: `size` is a power of two, a and b fit 32 bits.
__device__ __forceinline__ i64 divide_by_power(i64 x, int size) { return x >> (__ffs(size) - 1); }
__device__ __forceinline__ i64 divide_small(i64 a, i64 b) { return i64(u32(a) / u32(b)); }

// Mask of the lanes of this thread's group of `size` consecutive lanes; `size` is a power of two up to 32.
__device__ __forceinline__ u32 group_mask(int size) {
    int first = (threadIdx.x & 31) & ~(size - 1);
    return size == 32 ? whole_warp : ((1u << size) - 1) << first;
}

// Sum over groups of `size` lanes, in a fixed tree: every lane gets the same bits. All lanes of the group call it.
template <class Acc>
__device__ __forceinline__ Acc group_sum(Acc value, int size, u32 mask) {
    for (int offset = size / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(mask, value, offset);
    return value;
}

}  // namespace core
