// CUDA C++ on the CPU: what g++ needs to compile the kernels without PTX as they are.
//
// Included before the kernel's source by a compiler option. execution.hpp says how a block runs;
// this file spells the language and the functions of CUDA's device library that the kernels use.
#pragma once

#include "execution.hpp"

#define __device__
#define __host__
#define __global__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// The thread-local block of a library can be found and filled: that of ordinary statics cannot.
#define __shared__ static thread_local
#define CUFLASH_DYNAMIC_SHARED(T, name) \
    T* name = reinterpret_cast<T*>(cuda_on_host::dynamic_shared())

template <typename T>
struct alignas(2 * sizeof(T)) VectorOf2 {
    T x, y;
};
template <typename T>
struct alignas(16) VectorOf4 {
    T x, y, z, w;
};
using int2 = VectorOf2<int>;
using int4 = VectorOf4<int>;
using uint2 = VectorOf2<unsigned>;
using uint4 = VectorOf4<unsigned>;
using float2 = VectorOf2<float>;
using float4 = VectorOf4<float>;
using double2 = VectorOf2<double>;
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline double2 make_double2(double x, double y) {
    return {x, y};
}
inline int2 make_int2(int x, int y) {
    return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
    return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

// ---------------------------------------------------------------------------------- execution

#define threadIdx cuda_on_host::thread_index
#define blockIdx cuda_on_host::block_index
#define blockDim cuda_on_host::block_shape
#define gridDim cuda_on_host::grid_shape
constexpr int warpSize = 32;

inline void __syncthreads(int line = __builtin_LINE()) {
    cuda_on_host::block_barrier(line);
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    cuda_on_host::exchange(mask, 0, line);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     int line = __builtin_LINE()) {
    unsigned base = cuda_on_host::lane() & ~(width - 1);
    return cuda_on_host::shuffle(mask, value, base + (source & (width - 1)), line);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                         int line = __builtin_LINE()) {
    unsigned lane = cuda_on_host::lane(), source = lane ^ bits;
    // As the hardware: a lower segment may be read, a higher one gives the lane's own value.
    return cuda_on_host::shuffle(mask, value, source < (lane | (width - 1)) + 1 ? source : lane,
                                 line);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          int line = __builtin_LINE()) {
    unsigned lane = cuda_on_host::lane(), last = lane | (width - 1);
    return cuda_on_host::shuffle(mask, value, lane + delta <= last ? lane + delta : lane, line);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        int line = __builtin_LINE()) {
    unsigned lane = cuda_on_host::lane(), place = lane & (width - 1);
    return cuda_on_host::shuffle(mask, value, place >= delta ? lane - delta : lane, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    const unsigned long long* votes = cuda_on_host::exchange(mask, predicate != 0, line);
    unsigned ballot = 0, voters = mask & cuda_on_host::present_lanes();
    for (unsigned lane = 0; lane < 32; ++lane)
        if (voters & (1u << lane) && votes[lane]) ballot |= 1u << lane;
    return ballot;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, !predicate, line) == 0;
}
inline unsigned __activemask() {
    return cuda_on_host::present_lanes();
}

// ---------------------------------------------------------------------------------- integers

// The larger of each half, and whether it is a's.
inline unsigned __vibmax_u16x2(unsigned a, unsigned b, bool* high, bool* low) {
    *high = a >> 16 >= b >> 16;
    *low = (a & 0xffff) >= (b & 0xffff);
    return (*high ? a : b) & 0xffff0000 | (*low ? a : b) & 0xffff;
}

// ------------------------------------------------------------------------------------ memory

extern "C" void* memcpy(void* target, const void* source, size_t size) noexcept;

template <typename T>
inline T __ldg(const T* pointer) {
    return *pointer;
}
template <typename T>
inline T __ldcs(const T* pointer) {
    return *pointer;
}
template <typename T>
inline void __stcs(T* pointer, T value) {
    *pointer = value;
}
// Fibers are switched at barriers only: a plain read-modify-write is atomic.
template <typename T>
inline T atomicAdd(T* pointer, T value) {
    T before = *pointer;
    *pointer = before + value;
    return before;
}
template <typename T>
inline T atomicMax(T* pointer, T value) {
    T before = *pointer;
    if (value > before) *pointer = value;
    return before;
}
template <typename T>
inline T atomicExch(T* pointer, T value) {
    T before = *pointer;
    *pointer = value;
    return before;
}
template <typename T>
inline T atomicCAS(T* pointer, T expected, T value) {
    T before = *pointer;
    if (before == expected) *pointer = value;
    return before;
}

// -------------------------------------------------------------------------------- arithmetic

template <typename To, typename From>
inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To result;
    __builtin_memcpy(&result, &value, sizeof(To));
    return result;
}
inline float __int_as_float(int x) {
    return bits_as<float>(x);
}
inline int __float_as_int(float x) {
    return bits_as<int>(x);
}
inline float __uint_as_float(unsigned x) {
    return bits_as<float>(x);
}
inline unsigned __float_as_uint(float x) {
    return bits_as<unsigned>(x);
}
inline int __double2loint(double x) {
    long long bits;
    memcpy(&bits, &x, sizeof(bits));
    return int(bits);
}
inline int __double2hiint(double x) {
    long long bits;
    memcpy(&bits, &x, sizeof(bits));
    return int(bits >> 32);
}
inline double __hiloint2double(int high, int low) {
    const long long bits = (long long)(unsigned(high)) << 32 | unsigned(low);
    double x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
inline double __longlong_as_double(long long x) {
    return bits_as<double>(x);
}
inline long long __double_as_longlong(double x) {
    return bits_as<long long>(x);
}

inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __frcp_rn(float a) {
    return 1 / a;
}
inline float __fmaf_rn(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
inline double __dadd_rn(double a, double b) {
    return a + b;
}
inline double __dsub_rn(double a, double b) {
    return a - b;
}
inline double __dmul_rn(double a, double b) {
    return a * b;
}
inline double __ddiv_rn(double a, double b) {
    return a / b;
}
inline double __fma_rn(double a, double b, double c) {
    return __builtin_fma(a, b, c);
}

#define CUDA_MATH(name)                \
    inline float name##f(float x) {    \
        return __builtin_##name##f(x); \
    }                                  \
    inline double name(double x) {     \
        return __builtin_##name(x);    \
    }
CUDA_MATH(exp)
CUDA_MATH(exp2)
CUDA_MATH(log)
CUDA_MATH(log2)
CUDA_MATH(log1p)
CUDA_MATH(sqrt)
CUDA_MATH(tanh)
CUDA_MATH(erf)
CUDA_MATH(floor)
CUDA_MATH(ceil)
CUDA_MATH(fabs)
#undef CUDA_MATH
inline float rsqrtf(float x) {
    return 1 / __builtin_sqrtf(x);
}
inline double rsqrt(double x) {
    return 1 / __builtin_sqrt(x);
}
inline float fmaf(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}
inline double fma(double a, double b, double c) {
    return __builtin_fma(a, b, c);
}
inline float ldexpf(float x, int n) {
    return __builtin_ldexpf(x, n);
}
inline double ldexp(double x, int n) {
    return __builtin_ldexp(x, n);
}

// PTX: the other operand where one is NaN, and -0 < +0.
template <typename T>
inline T larger(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a > b || (a == b && __builtin_signbit(b)) ? a : b;
}
inline float fmaxf(float a, float b) {
    return larger(a, b);
}
inline double fmax(double a, double b) {
    return larger(a, b);
}
inline float fminf(float a, float b) {
    return -larger(-a, -b);
}
inline double fmin(double a, double b) {
    return -larger(-a, -b);
}

#define CUDA_INTEGER(T)       \
    inline T min(T a, T b) {  \
        return b < a ? b : a; \
    }                         \
    inline T max(T a, T b) {  \
        return a < b ? b : a; \
    }
CUDA_INTEGER(int)
CUDA_INTEGER(unsigned)
CUDA_INTEGER(long long)
CUDA_INTEGER(unsigned long long)
#undef CUDA_INTEGER
inline float min(float a, float b) {
    return fminf(a, b);
}
inline float max(float a, float b) {
    return fmaxf(a, b);
}
inline double min(double a, double b) {
    return fmin(a, b);
}
inline double max(double a, double b) {
    return fmax(a, b);
}
inline int abs(int x) {
    return x < 0 ? -x : x;
}
inline long long llabs(long long x) {
    return x < 0 ? -x : x;
}
inline bool isnan(float x) {
    return __builtin_isnan(x);
}
inline bool isnan(double x) {
    return __builtin_isnan(x);
}
inline bool isinf(float x) {
    return __builtin_isinf(x);
}
inline bool isinf(double x) {
    return __builtin_isinf(x);
}
inline bool isfinite(float x) {
    return __builtin_isfinite(x);
}
inline bool isfinite(double x) {
    return __builtin_isfinite(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return a * 1ull * b >> 32;
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __clz(int x) {
    return x ? __builtin_clz(x) : 32;
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
