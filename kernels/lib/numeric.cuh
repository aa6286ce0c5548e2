// Storage and accumulator types: conversions, exact arithmetic, vector access, shared memory.
//
// Arrays hold double, float, __half or __nv_bfloat16; arithmetic runs in double for double and in
// float for the rest. Only the conversions below touch the 16-bit types, and nothing here is PTX:
// the tests compile this header with a host compiler too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Declares `T* name`, the block's dynamic shared memory. The size is the launch's.
#ifndef CUFLASH_DYNAMIC_SHARED
#define CUFLASH_DYNAMIC_SHARED(T, name)                                \
    extern __shared__ __align__(128) unsigned char cuflash_dynamic_[]; \
    T* name = reinterpret_cast<T*>(cuflash_dynamic_)
#endif

namespace cuflash {

using int64 = long long;

// ------------------------------------------------------------------------------------ types

template <typename T>
struct AccumulatorOf {
    using type = float;
};
template <>
struct AccumulatorOf<double> {
    using type = double;
};
// The type in which sums over T are kept.
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

// A number as the launch gives it, in either type: conversions from double take long.
struct Real {
    double wide;
    float narrow;

    template <typename A>
    __device__ __forceinline__ A as() const {
        if constexpr (sizeof(A) == sizeof(double)) return wide;
        return narrow;
    }
};

__device__ __forceinline__ double widen(double x) {
    return x;
}
__device__ __forceinline__ float widen(float x) {
    return x;
}
__device__ __forceinline__ float widen(__half x) {
    return __half2float(x);
}
__device__ __forceinline__ float widen(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

template <typename T>
struct Narrow {
    static __device__ __forceinline__ T from(T x) { return x; }
};
template <>
struct Narrow<__half> {
    static __device__ __forceinline__ __half from(float x) { return __float2half_rn(x); }
};
template <>
struct Narrow<__nv_bfloat16> {
    static __device__ __forceinline__ __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); }
};
// Rounds an accumulator to T, ties to even.
template <typename T>
__device__ __forceinline__ T narrow(Accumulator<T> x) {
    return Narrow<T>::from(x);
}

// ------------------------------------------------------------------------------- arithmetic

template <typename A>
__device__ __forceinline__ A infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
    return __int_as_float(0x7f800000);
}
template <>
__device__ __forceinline__ double infinity<double>() {
    return __longlong_as_double(0x7ff0000000000000LL);
}
template <typename T>
__device__ __forceinline__ T lowest() {
    return narrow<T>(-infinity<Accumulator<T>>());
}
template <typename A>
__device__ __forceinline__ A not_a_number() {
    return infinity<A>() - infinity<A>();
}

__device__ __forceinline__ bool is_nan(float x) {
    return x != x;
}
__device__ __forceinline__ bool is_nan(double x) {
    return x != x;
}

__device__ __forceinline__ int64 clamp(int64 x, int64 low, int64 high) {
    return x < low ? low : x > high ? high : x;
}

// The larger operand; the other one where one is NaN.
__device__ __forceinline__ float maximum(float a, float b) {
    return fmaxf(a, b);
}
__device__ __forceinline__ double maximum(double a, double b) {
    return fmax(a, b);
}

// Accurate to 2 units in the last place, unlike __expf and ex2.approx of an unreduced argument.
__device__ __forceinline__ float exponential(float x) {
    return expf(x);
}
__device__ __forceinline__ double exponential(double x) {
    return exp(x);
}
// exp(x) with a relative error of (5 + 2.5 * |x|) * 2^-24, by two instructions where `exponential`
// takes ten: enough where x is a difference of scores, rounded as much already.
__device__ __forceinline__ float quick_exponential(float x) {
    return exp2f(__fmul_rn(x, 1.44269504f));
}
// 19 instructions of the float64 pipe without a branch, with a relative error of 2^-52: the
// remainder r of x by log 2 lies within log(2) / 2, where a polynomial interpolates
// (exp(r) - 1 - r) / r^2 at Chebyshev's points. Results below 2^-1022 are 0.
__device__ __forceinline__ double quick_exponential(double x) {
    x = x < -746.0 ? -746.0 : x;
    x = x > 710.0 ? 710.0 : x;
    // x / log 2, rounded to an integer by what is too large to have a fraction.
    const double shifted = __fma_rn(x, 1.4426950408889634, 6755399441055744.0);
    const double k = __dadd_rn(shifted, -6755399441055744.0);
    const int exponent = __double2loint(shifted);
    double r = __fma_rn(-k, 0.6931471805582987, x);
    r = __fma_rn(-k, 1.6465949582897082e-12, r);
    double y = 2.510038549551032e-08;
    y = __fma_rn(y, r, 2.7620088445409746e-07);
    y = __fma_rn(y, r, 2.7557268459997064e-06);
    y = __fma_rn(y, r, 2.4801521295954376e-05);
    y = __fma_rn(y, r, 0.00019841269863053618);
    y = __fma_rn(y, r, 0.0013888888917213717);
    y = __fma_rn(y, r, 0.008333333333330062);
    y = __fma_rn(y, r, 0.04166666666662413);
    y = __fma_rn(y, r, 0.16666666666666669);
    y = __fma_rn(y, r, 0.5000000000000001);
    y = __fma_rn(y, r, 1.0);
    y = __fma_rn(y, r, 1.0);
    const int biased = exponent < -1023 ? 0 : exponent + 1023;
    return y * __hiloint2double(biased << 20, 0);
}
// 2^x for x <= 1022 by 14 instructions of the float64 pipe, with a relative error of 1.1 * 2^-53:
// on both sides of an integer a polynomial interpolates (2^r - 1) / r at Chebyshev's points.
// Results below 2^-1022 are 0, and NaN stays NaN.
__device__ __forceinline__ double quick_exp2(double x) {
    // Rounded to an integer by what is too large to have a fraction.
    const double shifted = __dadd_rn(x, 6755399441055744.0);
    const double r = __dadd_rn(x, -__dadd_rn(shifted, -6755399441055744.0));
    double y = 4.4549605981865186e-10;
    y = __fma_rn(y, r, 7.072585949269223e-09);
    y = __fma_rn(y, r, 1.0178062445845774e-07);
    y = __fma_rn(y, r, 1.321544258792169e-06);
    y = __fma_rn(y, r, 1.525273382983612e-05);
    y = __fma_rn(y, r, 0.0001540353044173605);
    y = __fma_rn(y, r, 0.0013333558146416936);
    y = __fma_rn(y, r, 0.009618129107606888);
    y = __fma_rn(y, r, 0.0555041086648216);
    y = __fma_rn(y, r, 0.24022650695910097);
    y = __fma_rn(y, r, 0.6931471805599453);
    y = __fma_rn(y, r, 1.0);
    // The exponent by integers, which are a pipe of their own.
    const unsigned size = __double2hiint(x) & 0x7fffffff;
    const bool is_far = size > 0x408ff000;  // |x| > 1022
    const int far = size > 0x7ff00000 ? 0x7ff80000 : 0;
    const int near = int(unsigned(__double2hiint(y)) + (unsigned(__double2loint(shifted)) << 20));
    return __hiloint2double(is_far ? far : near, is_far ? 0 : __double2loint(y));
}
__device__ __forceinline__ float logarithm(float x) {
    return logf(x);
}
__device__ __forceinline__ double logarithm(double x) {
    return log(x);
}

// 1 / sqrt(x) to 2 units in the last place.
__device__ __forceinline__ float inverse_root(float x) {
    return rsqrtf(x);
}
__device__ __forceinline__ double inverse_root(double x) {
    return rsqrt(x);
}

// Rounded operations that the compiler never contracts. a*x + b*y written with operators may become
// fma(a, x, b*y), which differs from fma(b, y, a*x): a merge of two parts must not depend on their
// order.
__device__ __forceinline__ float add(float a, float b) {
    return __fadd_rn(a, b);
}
__device__ __forceinline__ double add(double a, double b) {
    return __dadd_rn(a, b);
}
__device__ __forceinline__ float multiply(float a, float b) {
    return __fmul_rn(a, b);
}
__device__ __forceinline__ double multiply(double a, double b) {
    return __dmul_rn(a, b);
}

// a * b + c, rounded once.
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
    return __fma_rn(a, b, c);
}

// A sum of many terms with the error of a few (Kahan 1965).
template <typename A>
struct CompensatedSum {
    A sum = 0, lost = 0;

    __device__ __forceinline__ void push(A term) {
        A corrected = add(term, -lost);
        A next = add(sum, corrected);
        // An infinite sum stays infinite: inf - inf must not enter the next term.
        bool infinite = next == infinity<A>() || next == -infinity<A>();
        lost = infinite ? A(0) : add(add(next, -sum), -corrected);
        sum = next;
    }
    __device__ __forceinline__ void scale(A factor) {
        sum = multiply(sum, factor);
        lost = multiply(lost, factor);
    }
};

// ------------------------------------------------------------------------------------ memory

// Elements of T in one 16-byte access.
template <typename T>
constexpr int kVector = 16 / int(sizeof(T));

// 16 bytes of elements, moved by one instruction.
template <typename T>
struct alignas(16) Vector {
    T element[kVector<T>];
};

// The same 16 bytes as another type. Whole words keep the compiler from moving 16-bit elements one
// by one.
template <typename To, typename From>
__device__ __forceinline__ To bytes_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// The accumulators of a chunk's elements.
template <typename T>
struct Wide {
    Accumulator<T> element[kVector<T>];

    Wide() = default;
    __device__ __forceinline__ explicit Wide(const Vector<T>& chunk) {
#pragma unroll
        for (int v = 0; v < kVector<T>; ++v) element[v] = widen(chunk.element[v]);
    }
};
// A bfloat16 is the upper half of a float: one instruction each, if the words stay whole.
template <>
__device__ __forceinline__ Wide<__nv_bfloat16>::Wide(const Vector<__nv_bfloat16>& chunk) {
    struct Words {
        unsigned word[4];
    };
    const Words words = bytes_as<Words>(chunk);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        element[2 * w] = __uint_as_float(words.word[w] << 16);
        element[2 * w + 1] = __uint_as_float(words.word[w] & 0xffff0000u);
    }
}

// The vector at `source`, or of `fill` unless `present`. Reads and writes of data that is used
// once: it is the first to leave the caches.
template <typename T>
__device__ __forceinline__ Vector<T> load_streaming(const T* source, bool present, T fill) {
    Vector<T> filled;
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v) filled.element[v] = fill;
    uint4 words = bytes_as<uint4>(filled);
    if (present) words = __ldcs(reinterpret_cast<const uint4*>(source));
    return bytes_as<Vector<T>>(words);
}
template <typename T>
__device__ __forceinline__ void store_streaming(T* target, const Vector<T>& value) {
    __stcs(reinterpret_cast<uint4*>(target), bytes_as<uint4>(value));
}

template <typename T>
__device__ __forceinline__ bool is_vector_aligned(const T* pointer) {
    return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
}

// ------------------------------------------------------------------------------------- warps

constexpr unsigned kFullWarp = 0xffffffffu;

// The number itself, of which the compiler knows nothing: it is computed here and once. What is
// cheap would be computed again and again in a loop, and what a rare path computes, before the loop
// where registers are few.
__device__ __forceinline__ unsigned here(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}
// The same of a value of whole words.
template <typename T>
__device__ __forceinline__ T words_here(const T& value) {
    struct Words {
        unsigned word[sizeof(T) / 4];
    };
    Words words = bytes_as<Words>(value);
#pragma unroll
    for (int w = 0; w < int(sizeof(T) / 4); ++w) words.word[w] = here(words.word[w]);
    return bytes_as<T>(words);
}
__device__ __forceinline__ int thread_here() {
    return int(here(threadIdx.x));
}

}  // namespace cuflash
