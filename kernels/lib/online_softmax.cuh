// The online softmax: the monoid of (maximum, normalizer) pairs.
//
// A pair (m, l) stands for a set of scores: m is their maximum and l the sum of exp(x - m). `push`
// adds a score, `merge` unites two disjoint sets, and the empty set (-inf, 0) is the identity
// (Milakov and Gimelshein 2018). Whoever carries weighted sums of exp(x - m) beside the pair
// (attention's output) rescales them by the factor that `raise` returns.
//
// Three cases must not turn into NaN or lose one. A set of scores that are all -inf is (-inf, 0):
// exponents are taken relative to `reference(m)`, 0 there, so that -inf - -inf never arises. A NaN
// score makes l NaN, and m stays the largest of the others. A score of +inf makes m and l +inf.
#pragma once

#include "lib/numeric.cuh"

namespace cuflash {

// What exponents of a set with maximum m are relative to: m where it is finite, else 0.
template <typename A>
__device__ __forceinline__ A reference(A m) {
    return m == infinity<A>() || m == -infinity<A>() ? A(0) : m;
}

template <typename A>
struct OnlineSoftmax {
    A m, l;

    static __device__ __forceinline__ OnlineSoftmax identity() { return {-infinity<A>(), A(0)}; }

    // Reads a pair as `maximum` and `normalizer` below give it. A maximum of -inf is the empty set,
    // whatever comes with it.
    static __device__ __forceinline__ OnlineSoftmax from(A maximum, A normalizer) {
        if (maximum == infinity<A>()) return {maximum, maximum};
        return {maximum, maximum == -infinity<A>() ? A(0) : normalizer};
    }

    // Raises the maximum to at least `score`; returns exp(m_old - m_new), the factor of every sum
    // relative to m.
    __device__ __forceinline__ A raise(A score) {
        A raised = maximum_of(m, score);
        A factor = exponential(m - reference(raised));
        m = raised;
        l = multiply(l, factor);
        return factor;
    }

    __device__ __forceinline__ void push(A x) {
        raise(x);
        l = add(l, exponential(x - reference(m)));
    }

    // The normalizer as the sum of exp(x - raised); raised >= m.
    __device__ __forceinline__ A relative_to(A raised) const {
        return multiply(l, exponential(m - reference(raised)));
    }

    // Commutative bit for bit: both parts go through the same rounded operations.
    __device__ __forceinline__ OnlineSoftmax merge(const OnlineSoftmax& other) const {
        A united = maximum_of(m, other.m);
        return {united, add(relative_to(united), other.relative_to(united))};
    }

    // exp(x - m) / l is weight(x) * scale(): 0 for an empty set, NaN where a score is NaN or +inf.
    __device__ __forceinline__ A weight(A x) const { return quick_exponential(x - reference(m)); }
    __device__ __forceinline__ A scale() const {
        if (l == A(0)) return A(0);
        return m == infinity<A>() ? not_a_number<A>() : A(1) / l;
    }

    // log(exp(x - m) / l) is x - reference(m) - log_normalizer().
    __device__ __forceinline__ A log_normalizer() const {
        if (l == A(0)) return A(0);
        return m == infinity<A>() ? not_a_number<A>() : logarithm(l);
    }

    // m + log(l): -inf for an empty set, +inf or NaN where a score is.
    __device__ __forceinline__ A logsumexp() const {
        return l == A(0) ? -infinity<A>() : reference(m) + logarithm(l);
    }

    // The pair as arithmetic on whole arrays gives it: NaN is the maximum of a set that holds NaN,
    // and inf - inf the exponent of +inf.
    __device__ __forceinline__ A maximum() const { return is_nan(l) ? l : m; }
    __device__ __forceinline__ A normalizer() const {
        return m == infinity<A>() ? not_a_number<A>() : l;
    }

  private:
    static __device__ __forceinline__ A maximum_of(A a, A b) { return cuflash::maximum(a, b); }
};

}  // namespace cuflash
