// Rows of scores as matrix instructions leave them: a thread holds pairs of neighbours of two rows,
// 8 apart, in each 16 x 8 fragment; four lanes share a row.
#pragma once

#include "lib/numeric.cuh"
#include "lib/ptx_mma.cuh"

namespace cuflash {

constexpr float kLog2OfE = 1.44269504f;
constexpr float kLogOf2 = 0.693147181f;
// A row's weights may grow to 2^kSlack before its sums are made relative to a larger score: that
// seldom happens after the first keys, and the weights are as exact either way. Each row decides
// by its own scores alone.
constexpr float kSlack = 8;
// The reference of a row that has seen no key: below all scores.
constexpr float kNoReference = -3.4028234663852886e38f;
// References from here on are rounded to more than the exponents of weights can bear.
constexpr float kLarge = 1 << 18;

// The online softmax of one row in base 2. Scores come times 1 / unit, and less a shift, which
// comes times unit; each lane has the normalizer of its own keys.
struct FragmentRow {
    float reference;  // exponents are relative to it
    float l;

    // A sink is a logit before all keys that has no value; it counts in one lane. +inf, like NaN,
    // makes l NaN.
    __device__ __forceinline__ void begin(float sink, bool counts) {
        const bool present = sink != -infinity<float>();
        reference = present ? sink * kLog2OfE : kNoReference;
        l = present && counts ? 1 + (sink - sink) : 0;
    }

    // Whether the weight of a score would be too large.
    __device__ __forceinline__ bool is_passed_by(float score, float unit) const {
        return multiply_add(score, unit, -reference) > kSlack;
    }
    __device__ __forceinline__ bool is_large() const {
        return fabsf(reference) >= kLarge && reference != kNoReference;
    }

    // Makes room for a score. Returns the factor of sums relative to the reference before.
    __device__ __forceinline__ float raise(float score, float unit) {
        if (!is_passed_by(score, unit)) return 1;
        const float before = reference;
        reference = score * unit;
        const float factor = exp2_approximate(before - reference);
        l *= factor;
        return factor;
    }

    __device__ __forceinline__ float weight(float score, float unit, float shift = 0) const {
        return exp2_approximate(multiply_add(score, unit, shift - reference));
    }
    // The same where the reference is large: a product in full, less a rounded one, would not be 0
    // at the largest score.
    __device__ __forceinline__ float weight_of_large(float score, float unit, float shift) const {
        return exp2_approximate(add(multiply_add(score, unit, shift), -reference));
    }
};

// Reduces over the 4 lanes of a row; all of them get the result, of the same bits.
template <typename Combine>
__device__ __forceinline__ float reduce_quad(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, 1));
    return combine(x, __shfl_xor_sync(kFullWarp, x, 2));
}

// Word k of lane q of a quad becomes word q of lane k.
__device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    unsigned a = odd ? x[0] : x[1], b = odd ? x[2] : x[3];
    a = __shfl_xor_sync(kFullWarp, a, 1);
    b = __shfl_xor_sync(kFullWarp, b, 1);
    x[0] = odd ? a : x[0];
    x[1] = odd ? x[1] : a;
    x[2] = odd ? b : x[2];
    x[3] = odd ? x[3] : b;
    a = high ? x[0] : x[2];
    b = high ? x[1] : x[3];
    a = __shfl_xor_sync(kFullWarp, a, 2);
    b = __shfl_xor_sync(kFullWarp, b, 2);
    x[0] = high ? a : x[0];
    x[2] = high ? x[2] : a;
    x[1] = high ? b : x[1];
    x[3] = high ? x[3] : b;
}

}  // namespace cuflash
