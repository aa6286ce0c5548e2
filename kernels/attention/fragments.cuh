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

// The online softmax of one row in base 2. Scores come times 1 / unit; each lane has the normalizer
// of its own keys.
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

    // Makes room for a score. Returns the factor of sums relative to the reference before.
    __device__ __forceinline__ float raise(float score, float unit) {
        if (!is_passed_by(score, unit)) return 1;
        const float before = reference;
        reference = score * unit;
        const float factor = exp2_approximate(before - reference);
        l *= factor;
        return factor;
    }

    __device__ __forceinline__ float weight(float score, float unit) const {
        return exp2_approximate(multiply_add(score, unit, -reference));
    }
};

// Reduces over the 4 lanes of a row; all of them get the result, of the same bits.
template <typename Combine>
__device__ __forceinline__ float reduce_quad(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, 1));
    return combine(x, __shfl_xor_sync(kFullWarp, x, 2));
}

}  // namespace cuflash
